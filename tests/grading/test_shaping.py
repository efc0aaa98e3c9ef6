"""Rewards beside correctness."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from rlvr_pl.errors import UserError
from rlvr_pl.grading import ExactGrader, FormatReward, Grader, GradeRequest, SoftOverlong, WeightedSum
from rlvr_pl.types import Grade, GradeStatus, Question


class Constant(Grader):
    """The same reward for everything."""

    def __init__(self, reward: float) -> None:
        self.reward = reward
        self.closed = False

    def grade(self, requests: Sequence[GradeRequest], *, require_box: bool) -> list[Grade]:
        return [Grade(GradeStatus.WRONG, self.reward, seconds=0.25) for _ in requests]

    def close(self) -> None:
        self.closed = True


def request(response: str, length: int = 1, gold: str = "42") -> GradeRequest:
    return GradeRequest(response, Question("q", "?", gold), token_ids=(0,) * length)


def test_format_reward_is_for_a_closed_box_that_is_not_empty() -> None:
    texts = [r"\boxed{1}", r"\boxed{1", r"\boxed{}", "1"]
    grades = FormatReward().grade([request(t) for t in texts], require_box=False)
    assert [g.reward for g in grades] == [1.0, 0.0, 0.0, 0.0]
    assert [g.boxed for g in grades] == [True, False, True, False]


@pytest.mark.parametrize(
    ("length", "reward"),
    [
        # L_max 100, L_cache 40: no punishment to 60, then (60 - length) / 40, -1 from 100 on
        (1, 0.0),
        (60, 0.0),
        (61, -1 / 40),
        (70, -0.25),
        (80, -0.5),
        (100, -1.0),
        (101, -1.0),
        (1000, -1.0),
    ],
)
def test_soft_overlong_punishment(length: int, reward: float) -> None:
    grade = SoftOverlong(cap=100, buffer=40).grade([request("x", length)], require_box=True)[0]
    assert grade.reward == reward
    assert grade.status is (GradeStatus.CORRECT if reward == 0 else GradeStatus.WRONG)


def test_soft_overlong_needs_token_ids_and_a_buffer_within_the_cap() -> None:
    with pytest.raises(UserError, match="without token ids"):
        SoftOverlong().grade([request("x", 0)], require_box=True)
    assert SoftOverlong().grade([request("", 0)], require_box=True)[0].reward == 0.0
    for buffer in (0, 101):
        with pytest.raises(UserError, match=f"buffer {buffer} must be"):
            SoftOverlong(cap=100, buffer=buffer)


def test_weighted_sum() -> None:
    total = WeightedSum([ExactGrader(), FormatReward(), SoftOverlong(100, 40)], [1.0, 0.5, 2.0])
    texts = [request(r"\boxed{42}", 10), request(r"\boxed{41}", 70), request("42", 10)]
    grades = total.grade(texts, require_box=True)
    # 1 + 0.5 + 0;  0 + 0.5 - 2 * 0.25;  0 + 0 + 0
    assert [g.reward for g in grades] == [1.5, 0.0, 0.0]
    assert [g.status for g in grades] == [GradeStatus.CORRECT, GradeStatus.WRONG, GradeStatus.NO_ANSWER]
    assert grades[1].parts == ((1.0, 0.0), (0.5, 1.0), (2.0, -0.25))


def test_weighted_sum_leaves_out_what_cannot_be_scored() -> None:
    grades = WeightedSum([Constant(math.nan), Constant(0.5)]).grade([request("x")], require_box=True)
    assert (grades[0].reward, grades[0].seconds) == (0.5, 0.5)
    assert math.isnan(WeightedSum([Constant(math.nan)]).grade([request("x")], require_box=True)[0].reward)


def test_weighted_sum_closes_its_graders_and_wants_a_weight_for_each() -> None:
    parts = [Constant(1.0), Constant(2.0)]
    WeightedSum([*parts]).close()
    assert all(p.closed for p in parts)
    with pytest.raises(UserError, match="1 weights for 2 graders"):
        WeightedSum([*parts], [1.0])
    with pytest.raises(UserError, match="0 weights for 0 graders"):
        WeightedSum([])


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, math.inf], [1.0, math.nan]])
def test_weights_that_leave_nothing_to_sum_are_refused(weights: list[float]) -> None:
    with pytest.raises(UserError, match="need finite numbers, not all 0"):
        WeightedSum([ExactGrader(), FormatReward()], weights)
    assert WeightedSum([ExactGrader(), FormatReward()], [0.0, 1.0]).weights == [0.0, 1.0]
