"""Rewards beside correctness, and their weighted sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from rlvr_pl.errors import UserError
from rlvr_pl.grading.base import Grader, GradeRequest, ask
from rlvr_pl.grading.extract import last_boxed
from rlvr_pl.types import Grade, GradeStatus


class WeightedSum(Grader):
    """``sum_k weights[k] * reward_k``. The first grader gives status, answer and box.

    A grader that cannot score an answer (NaN) is left out of that answer's sum, as in TRL; the sum is NaN when none
    can.

    Args:
        graders: the graders, most important first.
        weights: one finite number a grader, not all 0; all ones when not given.
    """

    name: ClassVar[str] = "weighted-sum"

    def __init__(self, graders: list[Grader], weights: list[float] | None = None) -> None:
        self.graders = graders
        self.weights = [1.0] * len(graders) if weights is None else weights
        if not graders or len(self.weights) != len(graders):
            raise UserError(f"WeightedSum: {len(self.weights)} weights for {len(graders)} graders; give one for each")
        if not any(self.weights) or not all(map(math.isfinite, self.weights)):
            raise UserError(f"WeightedSum: weights {self.weights}: need finite numbers, not all 0")

    @property
    def described(self) -> str:
        parts = (f"{weight:g} {grader.described}" for weight, grader in zip(self.weights, self.graders))
        return f"{self.name}({', '.join(parts)})"

    def grade(self, requests: Sequence[GradeRequest], *, require_box: bool) -> list[Grade]:
        columns = [ask(grader, requests, require_box=require_box) for grader in self.graders]
        return [self._sum(row) for row in zip(*columns)]

    def close(self) -> None:
        for grader in self.graders:
            grader.close()

    def _sum(self, grades: tuple[Grade, ...]) -> Grade:
        parts = tuple((weight, grade.reward) for weight, grade in zip(self.weights, grades))
        terms = [weight * reward for weight, reward in parts if not math.isnan(reward)]
        seconds = sum(g.seconds for g in grades)
        return replace(grades[0], reward=sum(terms) if terms else math.nan, seconds=seconds, parts=parts)


class FormatReward(Grader):
    r"""1.0 when the response holds a closed ``\boxed{}`` that is not empty, else 0.0."""

    name: ClassVar[str] = "format"

    def grade(self, requests: Sequence[GradeRequest], *, require_box: bool) -> list[Grade]:
        answers = [last_boxed(r.response) for r in requests]
        return [
            Grade(GradeStatus.CORRECT, 1.0, a, True) if a else Grade(GradeStatus.NO_ANSWER, 0.0, None, a is not None)
            for a in answers
        ]


class SoftOverlong(Grader):
    r"""The soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13), from 0 down to -1.

    0 up to ``cap - buffer`` tokens, ``(cap - buffer - length) / buffer`` from there to ``cap``, -1 beyond. To be added
    to the reward for correctness in a `WeightedSum`. The status is `correct` where there is no punishment.

    Args:
        cap: L_max, tokens; usually the sampler's ``max_new_tokens``.
        buffer: L_cache, tokens before the cap in which the punishment grows.
    """

    name: ClassVar[str] = "soft-overlong"

    def __init__(self, cap: int = 1024, buffer: int = 256) -> None:
        if not 0 < buffer <= cap:
            raise UserError(f"SoftOverlong: buffer {buffer} must be at least 1 and at most the cap {cap}")
        self.cap = cap
        self.buffer = buffer

    def grade(self, requests: Sequence[GradeRequest], *, require_box: bool) -> list[Grade]:
        return [self._grade(r) for r in requests]

    def _grade(self, request: GradeRequest) -> Grade:
        length = len(request.token_ids)
        if request.response and not length:
            raise UserError("SoftOverlong: counts tokens, and this response came without token ids")
        reward = max(-1.0, min(0.0, (self.cap - self.buffer - length) / self.buffer))
        return Grade(GradeStatus.CORRECT if reward == 0 else GradeStatus.WRONG, reward)
