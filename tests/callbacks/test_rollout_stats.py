"""Update and window tables inside real runs."""

from __future__ import annotations

import json
import statistics

import pytest

from rlvr_pl.callbacks.recorder import RolloutRecorder
from rlvr_pl.callbacks.rollout_stats import RolloutStats


def truncation(update: int) -> float:
    return 0.5 if update > 8 else 0.0


def test_tables_of_a_run(run, scripted):
    done = run(RolloutStats(window=5), sampler=scripted(truncation))
    updates, windows = done.folder.table("updates.csv").rows(), done.folder.table("windows.csv").rows()
    assert [int(row["update"]) for row in updates] == list(range(1, 13))
    spans = [(int(w["first_update"]), int(w["update"]), int(w["updates"])) for w in windows]
    assert spans == [(1, 5, 5), (6, 10, 5), (11, 12, 2)]  # the last window of an ended run is short, and says so
    assert [float(w["truncation"]) for w in windows] == [0.0, 0.2, 0.5]  # updates 9 and 10 of five; both of two
    assert [float(w["reward"]) for w in windows] == [0.5] * 3
    for window, span in zip(windows, (range(5), range(5, 10), range(10, 12))):
        rows = [updates[i] for i in span]
        assert float(window["m_minus"]) == pytest.approx(sum(float(r["m_minus"]) for r in rows))
        norms = [float(r["grad_norm_median"]) for r in rows]
        assert float(window["grad_norm_median"]) == pytest.approx(statistics.median(norms))


def test_surprise_sees_a_soup_of_ordinary_words(run, scripted):
    """Random words of the vocabulary are text like any other, but the start policy would hardly write one of them."""
    script = scripted(lambda update: 0.5)
    blind = run(RolloutStats(window=4), RolloutRecorder(), sampler=script, updates=4, fresh=True)
    assert float(blind.folder.table("windows.csv").rows()[0]["soup"]) == 0
    seeing = run(RolloutRecorder(), RolloutStats(window=4, max_surprise=3.0), sampler=script, updates=4, fresh=True)
    window = seeing.folder.table("windows.csv").rows()[0]
    assert window["soup"] == window["soup_by_surprise"] == window["truncation"] == "0.5"
    # the recorder tells the same story although it comes first
    rows = [json.loads(line) for line in (seeing.folder.rollouts / "000001-000100.jsonl").read_text().splitlines()]
    assert {(r["class"], r["detector"]) for r in rows} == {("eos", None), ("soup", "surprise")}


def test_what_the_policy_is_sure_of_is_no_soup(run, scripted):
    """Reported at -1 nat a token, the same words are the policy's own idea of text; the start is not asked."""
    done = run(RolloutStats(window=4, max_surprise=3.0), sampler=scripted(lambda update: 0.5, -1.0), updates=4)
    assert float(done.folder.table("windows.csv").rows()[0]["soup"]) == 0


@pytest.mark.parametrize("wrong", [{"window": 0}, {"max_surprise": 0.0}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RolloutStats(**wrong)
