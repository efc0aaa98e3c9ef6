"""Expectations are judged by figures of finished runs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from rlvr_pl.study.expect import read_expectation


def run(first=None, correct=(), **measures):
    verdict = {"collapsed": first is not None, "first_update": first}
    return SimpleNamespace(
        verdict=verdict,
        correct=np.array(correct, dtype=bool),
        measure=lambda name: first if name == "first_update" else measures.get(name),
    )


def judge(row, runs, seeds=2):
    arms = [arm for arm in runs if arm != "start"]
    return read_expectation(row, arms, "test").judge(runs, seeds)


@pytest.mark.parametrize(("firsts", "yes", "no"), [((21, 41), True, False), ((None, 41), False, False)])
def test_collapse_is_of_every_seed(firsts, yes, no):
    runs = {"a": [run(f) for f in firsts]}
    assert judge({"arm": "a", "collapsed": True}, runs).held is yes
    assert judge({"arm": "a", "collapsed": False}, runs).held is no
    assert judge({"arm": "a", "collapsed": False}, {"a": [run(), run()]}).held is True


def test_an_order_is_strict_and_holds_in_every_seed():
    runs = {"a": [run(entropy=0.1), run(entropy=0.2)], "b": [run(entropy=0.3), run(entropy=0.3)]}
    row = {"order": ["a", "b"], "by": "entropy"}
    assert judge(row, runs).held is True
    runs["a"][1] = run(entropy=0.3)
    found = judge(row, runs)
    assert found.held is False and found.detail.startswith("1 of 2 seeds")
    runs["a"][1] = run()  # not measured
    assert judge(row, runs).held is False


def test_a_run_that_never_collapsed_comes_last_in_the_order_of_collapses():
    runs = {"a": [run(101)], "b": [run()], "c": [run()]}
    assert judge({"order": ["a", "b"], "by": "first_update"}, runs, 1).held is True
    assert judge({"order": ["b", "c"], "by": "first_update"}, runs, 1).held is False


def test_a_difference_is_judged_by_its_interval():
    # 30 of 100 items gained, none lost: the interval lies far above zero; with itself it is zero
    start = [1] * 40 + [0] * 60
    better = [1] * 70 + [0] * 30
    runs = {"start": [run(correct=start)], "a": [run(correct=better)] * 2, "b": [run(correct=start)] * 2}
    gain = {"arm": "a", "against": "start", "gain": True}
    assert judge(gain, runs).held is True
    assert judge(gain, runs).detail.startswith("+30.0 pp [")
    assert judge({**gain, "gain": False}, runs).held is False
    assert judge({"arm": "b", "against": "a", "loss": True}, runs).held is True
    assert judge({"arm": "b", "against": "start", "loss": False}, runs).held is True
    assert judge({"arm": "b", "against": "start", "gain": False}, runs).held is True


def test_it_stays_open_while_runs_are_missing():
    found = judge({"order": ["a", "b"], "by": "kl"}, {"a": [run(kl=1), run(kl=1)], "b": [run(kl=2)]})
    assert found.held is None and found.detail == "not finished: b"


def test_expectations_speak():
    said = {
        "a collapses": {"arm": "a", "collapsed": True},
        "a does not collapse": {"arm": "a", "collapsed": False},
        "first update of the collapse: a < b": {"order": ["a", "b"], "by": "first_update"},
        "a shows no gain over start": {"arm": "a", "against": "start", "gain": False},
        "a loses against b": {"arm": "a", "against": "b", "loss": True},
    }
    for words, row in said.items():
        assert str(read_expectation(row, ["a", "b"], "test")) == words
