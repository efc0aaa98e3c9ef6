"""What a grader is: texts and golds in, verdicts out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rlvr_pl.types import Grade, Question


@dataclass(frozen=True, slots=True)
class GradeRequest:
    """One answer to grade: the response and the question with its gold; ids and truncation are for user functions.

    >>> GradeRequest("it is 2", Question("q", "1+1?", "2")).truncated
    False
    """

    response: str
    question: Question
    prompt: str = ""
    token_ids: tuple[int, ...] = field(default=())
    truncated: bool = False


class Grader(ABC):
    """Grades responses.

    Args of `grade`: `require_box=True` is the training rule (no box, no reward); False is the evaluation rule of the
    paper, which falls back to the last number, then to the whole text.

    >>> from rlvr_pl.types import Grade, GradeStatus
    >>> class Contains(Grader):
    ...     def grade(self, requests, *, require_box):
    ...         found = [r.question.answer in r.response for r in requests]
    ...         return [Grade(GradeStatus.CORRECT if f else GradeStatus.WRONG, float(f)) for f in found]
    >>> Contains().grade([GradeRequest("it is 2", Question("q", "1+1?", "2"))], require_box=False)[0].reward
    1.0
    """

    name: ClassVar[str] = ""

    @property
    def described(self) -> str:
        """What records say of this grader; the name of its class where one class is one rule."""
        return self.name or type(self).__name__

    @abstractmethod
    def grade(self, requests: Sequence[GradeRequest], *, require_box: bool) -> list[Grade]:
        """One `Grade` per request, in order."""

    def close(self) -> None:  # noqa: B027 (most graders hold nothing)
        """End worker processes, if any."""
