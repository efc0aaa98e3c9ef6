"""Equality of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rlvr_pl.grading.base import Grader, GradeRequest
from rlvr_pl.grading.extract import extract
from rlvr_pl.types import Grade, GradeStatus


class ExactGrader(Grader):
    """Correct when the extracted answer equals the gold, runs of white space counting as one space."""

    name: ClassVar[str] = "exact"

    def grade(self, requests: Sequence[GradeRequest], *, require_box: bool) -> list[Grade]:
        return [_grade(r, require_box) for r in requests]


def _grade(request: GradeRequest, require_box: bool) -> Grade:
    found = extract(request.response, require_box=require_box)
    if found.answer is None:
        return Grade(GradeStatus.NO_ANSWER, 0.0, None, found.boxed)
    equal = found.answer.split() == request.question.answer.split()
    status = GradeStatus.CORRECT if equal else GradeStatus.WRONG
    return Grade(status, float(equal), found.answer, found.boxed)
