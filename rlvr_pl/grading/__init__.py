"""Graders: an answer is extracted from a response and compared with the gold.

Nothing here imports sympy, math-verify or torch; algebra happens in worker processes.
"""

from __future__ import annotations

import functools

from rlvr_pl.errors import UserError
from rlvr_pl.grading.base import Grader, GradeRequest
from rlvr_pl.grading.exact import ExactGrader
from rlvr_pl.grading.function import FunctionGrader
from rlvr_pl.grading.math_grader import MathGrader
from rlvr_pl.grading.reasoning_gym import ReasoningGymGrader
from rlvr_pl.grading.shaping import FormatReward, SoftOverlong, WeightedSum
from rlvr_pl.grading.supplied import SuppliedGrader
from rlvr_pl.types import Grade, Question

__all__ = [
    "ExactGrader",
    "FormatReward",
    "FunctionGrader",
    "GradeRequest",
    "Grader",
    "MathGrader",
    "ReasoningGymGrader",
    "SoftOverlong",
    "SuppliedGrader",
    "WeightedSum",
    "grade",
    "named_grader",
]

_NAMED: dict[str, type[Grader]] = {"math": MathGrader, "exact": ExactGrader, "supplied": SuppliedGrader}


def grade(response: str, gold: str, *, grader: str = "math", require_box: bool = False) -> Grade:
    r"""Grade one response against its gold.

    `require_box=True` is the training rule (no box, no reward). Otherwise, without a box, the last number is graded,
    or else the full text. `grader` is a name that `named_grader` knows.

    >>> grade(r"so x is \boxed{1/2}", r"\frac{1}{2}").status.value
    'correct'
    """
    request = GradeRequest(response, Question("", "", gold))
    return named_grader(grader).grade([request], require_box=require_box)[0]


@functools.lru_cache(maxsize=16)
def named_grader(name: str) -> Grader:
    """The grader "math", "exact" or "supplied" with its default settings, or a reward function by its path (with a
    colon, see `FunctionGrader`). One instance for the process. Raises UserError when nothing has that name."""
    if ":" in name:
        return FunctionGrader(name)
    if name not in _NAMED:
        raise UserError(f"no grader {name!r}: choose {', '.join(sorted(_NAMED))}, or package.module:function")
    return _NAMED[name]()
