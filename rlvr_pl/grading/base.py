"""What a grader is: texts and golds in, verdicts out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar

from rlvr_pl.errors import UserError
from rlvr_pl.types import Grade, GradeStatus, Question


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
        """One `Grade` per request, in order. Runs, evaluations and searches call `ask`, which checks it."""

    def close(self) -> None:  # noqa: B027 (most graders hold nothing)
        """End worker processes, if any."""


def ask(grader: Grader, requests: Sequence[GradeRequest], *, require_box: bool) -> list[Grade]:
    """The grader's answer, checked: one `Grade` per request, with a `GradeStatus` and a reward that is a finite number
    or NaN. Whoever needs grades asks here, so that a user's class cannot bend a result unnoticed.

    Raises UserError that names the grader's class and what it returned instead.
    """
    grades: Any = grader.grade(requests, require_box=require_box)
    name = f"grader {type(grader).__name__}"
    if not isinstance(grades, (list, tuple)):
        raise UserError(f"{name}: expected a list of {len(requests)} grades, got {type(grades).__name__}")
    if len(grades) != len(requests):
        raise UserError(f"{name}: expected {len(requests)} grades, one per request, got {len(grades)}")
    return [_checked(name, row, grade) for row, grade in enumerate(grades)]


def _checked(name: str, row: int, grade: Any) -> Grade:
    if not isinstance(grade, Grade):
        raise UserError(f"{name}: expected a Grade for row {row}, got {_said(grade)}")
    if not isinstance(grade.status, GradeStatus):
        raise UserError(f"{name}: expected a GradeStatus as the status of row {row}, got {_said(grade.status)}")
    if not isinstance(grade.reward, Real) or math.isinf(grade.reward):
        raise UserError(
            f"{name}: expected a finite number or NaN as the reward of row {row}, got {_said(grade.reward)}"
        )
    return grade if type(grade.reward) is float else replace(grade, reward=float(grade.reward))


def _said(value: Any) -> str:
    """A value in one line, cut where it is long."""
    return " ".join(repr(value).split())[:80]
