"""The scorers of the package reasoning-gym as a grader."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

from rlvr_pl.errors import UserError
from rlvr_pl.grading.base import Grader, GradeRequest
from rlvr_pl.grading.extract import last_boxed
from rlvr_pl.types import Grade, GradeStatus

_TAG = re.compile(r"<answer>\s?(.*?)\s?</answer>", re.DOTALL)


class ReasoningGymGrader(Grader):
    r"""Scores the answers to questions of `ReasoningGym` data: the task's own scorer, 0 to 1, partial credit included.

    The answer is what stands last in ``<answer>...</answer>``, else in ``\boxed{}``; without either it is the whole
    text, or nothing where a box is required.

    Args:
        correct_at: the status is `correct` from this score on, `wrong` below.
    """

    name: ClassVar[str] = "reasoning-gym"

    def __init__(self, correct_at: float = 1.0) -> None:
        self.correct_at = correct_at

    def grade(self, requests: Sequence[GradeRequest], *, require_box: bool) -> list[Grade]:
        return [self._grade(request, require_box) for request in requests]

    def _grade(self, request: GradeRequest, require_box: bool) -> Grade:
        entry = request.question.columns.get("reasoning_gym")
        if entry is None:
            raise UserError(f"ReasoningGymGrader: question {request.question.uid} is none of ReasoningGym's")
        tags = _TAG.findall(request.response)
        marked = tags[-1].strip() if tags else last_boxed(request.response)
        answer = marked if marked is not None or require_box else request.response.strip()
        if not answer:
            return Grade(GradeStatus.NO_ANSWER, 0.0, None, marked is not None)
        score = float(_scorer(entry["metadata"]["source_dataset"])(answer, entry))
        status = GradeStatus.CORRECT if score >= self.correct_at else GradeStatus.WRONG
        return Grade(status, score, answer, marked is not None)


@functools.lru_cache(maxsize=256)
def _scorer(task: str) -> Callable[[str, Any], float]:
    try:
        from reasoning_gym import get_score_answer_fn
    except ImportError:
        raise UserError("ReasoningGymGrader: needs the package reasoning-gym") from None
    return cast("Callable[[str, Any], float]", get_score_answer_fn(task))
