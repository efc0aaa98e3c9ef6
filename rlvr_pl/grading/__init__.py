"""Graders: an answer is extracted from a response and compared with the gold.

Nothing here imports sympy, math-verify or torch; algebra happens in worker processes.
"""

from __future__ import annotations

import functools

from rlvr_pl.errors import UserError
from rlvr_pl.grading.base import Grader, GradeRequest
from rlvr_pl.grading.exact import ExactGrader
from rlvr_pl.grading.math_grader import MathGrader
from rlvr_pl.types import Grade, Question

__all__ = ["ExactGrader", "GradeRequest", "Grader", "MathGrader", "grade", "named_grader"]

_NAMED: dict[str, type[Grader]] = {"math": MathGrader, "exact": ExactGrader}


def grade(response: str, gold: str, *, grader: str = "math", require_box: bool = False) -> Grade:
    """Grade one response against its gold.

    `require_box=True` is the training rule (no box, no reward). Otherwise, without a box, the last number is graded,
    or else the full text. Raises UserError when no grader has that name.

    >>> grade(r"so x is \\boxed{1/2}", r"\\frac{1}{2}").status.value
    'correct'
    """
    request = GradeRequest(response, Question("", "", gold))
    return named_grader(grader).grade([request], require_box=require_box)[0]


@functools.cache
def named_grader(name: str) -> Grader:
    """The grader "math", "exact" or "supplied" with its default settings, one for the whole process."""
    if name not in _NAMED:
        raise UserError(f"--grader {name}: no such grader; choose one of {', '.join(sorted(_NAMED))}")
    return _NAMED[name]()
