"""The collapse rule: the paper's verdicts, the boundaries, and what the hash covers."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_pl.core.collapse import CollapseCriterion, Verdict

# Table 4b and section 4.3: vLLM-greedy validation of the four seed-8 arms, and truncation in their 20-update windows.
SUPPLIED = {0: 149, 20: 150, 40: 167, 60: 156, 80: 153, 100: 147, 120: 140, 140: 94, 160: 44}
MASK = {0: 152, 40: 157, 80: 155, 120: 147, 160: 148}
SEQMEAN = {0: 151, 40: 141, 80: 147, 120: 153, 160: 162}
SEQMEAN_CLIP = {0: 164, 40: 143, 80: 159, 120: 160, 160: 151}


def windows(*rates: float, length: int = 20) -> list[float]:
    """A series whose 20-update windows have these mean rates, alternating around each by 0.05 to be a real mean."""
    return [rate + (0.05 if i % 2 else -0.05) for rate in rates for i in range(length)]


def test_paper_supplied_arm_collapses_in_updates_121_to_160():
    # truncation 0.06-0.11 in the six windows before, at least 0.5 in the seventh, 0.80 in the eighth
    series = windows(0.06, 0.07, 0.08, 0.09, 0.10, 0.11, 0.55, 0.80)
    verdict = CollapseCriterion.from_start(149).judge(series, SUPPLIED)
    assert verdict == Verdict(True, "truncation", 121, 160, 0.55)


def test_paper_supplied_arm_by_validation_alone():
    verdict = CollapseCriterion.from_start(149).judge([], SUPPLIED)
    assert verdict == Verdict(True, "validation", 140, 160, 94)  # 94 <= 111 at 140, 44 <= 111 at 160


@pytest.mark.parametrize(
    ("validation", "low", "high"),
    [(MASK, 0.13, 0.26), (SEQMEAN, 0.11, 0.20), (SEQMEAN_CLIP, 0.11, 0.28)],
    ids=["mask", "seqmean", "seqmean-clip0.1"],
)
def test_paper_stabilized_arms_do_not_collapse(validation, low, high):
    series = windows(*(low + (high - low) * i / 7 for i in range(8)))
    assert CollapseCriterion.from_start(149).judge(series, validation) == Verdict(False)


def test_floor_is_fixed_once_for_all_arms():
    assert CollapseCriterion.from_start(149).val_floor == 111  # 0.75 * 149 = 111.75
    assert CollapseCriterion.from_start(148).val_floor == 111  # 0.75 * 148 = 111 exactly
    assert CollapseCriterion.from_start(100, 0.29).val_floor == 29  # 28.999999999999996 in binary
    assert CollapseCriterion.from_start(149, 0.5, window=10, mode="rolling") == CollapseCriterion(
        10, 0.5, 74, "rolling"
    )


def test_validation_boundary():
    rule = CollapseCriterion.from_start(149)
    assert rule.judge([], {40: 112}) == Verdict(False)
    assert rule.judge([], {40: 111}) == Verdict(True, "validation", 40, 40, 111)
    assert rule.judge([], {0: 111}).collapsed  # a start at the floor is damage too
    assert CollapseCriterion().judge([], {40: 0}) == Verdict(False)  # no floor, no rule


def test_truncation_boundary_is_inclusive_and_exact():
    rule = CollapseCriterion()
    assert rule.judge([0.5] * 20, {}) == Verdict(True, "truncation", 1, 20, 0.5)
    # 10 * 1/32 + 10 * 31/32 = 10 of 20; one rollout of 640 fewer is 0.4984
    assert rule.judge([1 / 32] * 10 + [31 / 32] * 10, {}).collapsed
    assert not rule.judge([1 / 32] * 10 + [31 / 32] * 9 + [30 / 32], {}).collapsed


@given(st.lists(st.integers(0, 24), min_size=20, max_size=20))
def test_counts_decide_not_rounding(counts):
    """24 rollouts an update: the window is damaged exactly if at least half of its 480 rollouts were truncated."""
    assert CollapseCriterion().judge([c / 24 for c in counts], {}).collapsed == (2 * sum(counts) >= 480)


def test_short_last_window_is_not_judged():
    rule = CollapseCriterion()
    assert rule.judge([1.0] * 19, {}) == Verdict(False)
    assert rule.judge([0.0] * 20 + [1.0] * 19, {}) == Verdict(False)
    assert rule.judge([0.0] * 20 + [1.0] * 20, {}) == Verdict(True, "truncation", 21, 40, 1.0)
    assert rule.judge([], None) == Verdict(False)


def test_tumbling_and_rolling_windows():
    series = [0.0] * 10 + [1.0] * 10 + [0.4] * 20  # tumbling: 0.5, 0.4; rolling peaks at updates 11-30: 0.7
    tumbling = CollapseCriterion(truncation=0.6)
    assert tumbling.judge(series, {}) == Verdict(False)
    # the 20 updates that end with 20 + k hold 10 ones and k times 0.4 (k <= 10): (10 + 0.4 k) / 20 >= 0.6 from k = 5
    # on, updates 6-25; then the ones leave: 14-33 hold 7 + 13 * 0.4 = 12.2 (0.61), 15-34 hold 6 + 5.6 = 11.6 (0.58)
    rolling = CollapseCriterion(truncation=0.6, mode="rolling")
    assert rolling.judge(series, {}) == Verdict(True, "truncation", 6, 33, 0.6)
    assert list(CollapseCriterion(2).windows(5)) == [(1, 2), (3, 4)]
    assert list(CollapseCriterion(2, mode="rolling").windows(4)) == [(1, 2), (2, 3), (3, 4)]


def test_the_earlier_decision_names_the_rule():
    rule = CollapseCriterion(val_floor=100)
    late_truncation = [0.0] * 20 + [1.0] * 20
    assert rule.judge(late_truncation, {20: 90}).rule == "validation"
    assert rule.judge(late_truncation, {39: 90}).rule == "validation"  # decided at 39; the window only at 40
    assert rule.judge(late_truncation, {40: 90}).rule == "truncation"


def test_a_verdict_never_changes_its_start_as_the_run_goes_on():
    rule = CollapseCriterion(val_floor=100)
    series = windows(0.1, 0.6, 0.2, 0.7)
    seen = [rule.judge(series[:n], {k: v for k, v in {0: 140, 60: 90}.items() if k <= n}) for n in range(81)]
    assert [v.collapsed for v in seen] == [False] * 40 + [True] * 41
    assert {(v.rule, v.first_update, v.value) for v in seen[40:]} == {("truncation", 21, 0.6)}
    assert seen[40].last_update == 40 and seen[80].last_update == 80


def test_hash_covers_every_field_and_one_spelling_of_each():
    base = CollapseCriterion(val_floor=111)
    assert base.canonical == '{"mode":"tumbling","truncation":0.5,"val_floor":111,"window":20}'
    assert base.sha256 == hashlib.sha256(base.canonical.encode()).hexdigest()
    changed = [
        CollapseCriterion(21, val_floor=111),
        CollapseCriterion(truncation=0.51, val_floor=111),
        CollapseCriterion(val_floor=112),
        CollapseCriterion(),
        CollapseCriterion(val_floor=111, mode="rolling"),
    ]
    assert len({c.sha256 for c in [base, *changed]}) == 6
    assert CollapseCriterion(truncation=1).sha256 == CollapseCriterion(truncation=1.0).sha256
    assert CollapseCriterion(**json.loads(base.canonical)) == base


NAN = float("nan")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("window", x) for x in (0, 2.5, True)],
        *[("truncation", x) for x in (0, 1.1, NAN)],
        *[("val_floor", x) for x in (-1, 1.5)],
        ("mode", "sliding"),
    ],
)
def test_values_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        CollapseCriterion(**{field: value})


@pytest.mark.parametrize("rate", [-0.1, 1.01, float("nan")])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match="truncation of update 2"):
        CollapseCriterion().judge([0.1, rate], {})


def test_negative_update_is_refused():
    with pytest.raises(ValueError, match="update -1"):
        CollapseCriterion().judge([], {-1: 3})


def test_needs_no_torch():
    code = "import sys, rlvr_pl.core.collapse, rlvr_pl.core.rollout_class; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
