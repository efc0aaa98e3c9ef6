"""Stop rules inside real runs whose truncation and validation are written beforehand."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlvr_pl.callbacks.damage_stop import DamageStop, Window
from rlvr_pl.core.collapse import CollapseCriterion
from rlvr_pl.errors import UserError
from rlvr_pl.policy import load_policy


def collapse_from(update: int):
    """Every rollout of `update` and later hits the cap."""
    return lambda now: 1.0 if now >= update else 0.0


def test_stops_at_the_end_of_the_damaged_window(run, scripted, capsys):
    criterion = CollapseCriterion(window=4)
    done = run(DamageStop(criterion), sampler=scripted(collapse_from(5)))
    assert done.module.updates_done == 8 and done.module.stopped_by == "damage"
    verdict = done.folder.read_json("verdict.json")
    assert verdict["collapsed"] and verdict["rule"] == "truncation"
    assert (verdict["first_update"], verdict["last_update"], verdict["value"]) == (5, 8, 1.0)
    assert verdict["sha256"] == criterion.sha256
    assert verdict["last_good_snapshot"] == "snapshots/good-000004"
    assert [p.name for p in done.folder.snapshots.glob("good-*")] == ["good-000004"]
    assert load_policy(str(done.folder.snapshots / "good-000004")).eos_ids
    said = capsys.readouterr().err
    assert "stopped after update 8: truncation 1.000" in said and "updates 5-8" in said and "good-000004" in said
    # the checkpoint of the last update is there, so nothing of the run is lost
    assert (done.folder.checkpoints / "update-000008.ckpt").exists()


def test_stops_at_a_validation_at_the_floor(run, grader):
    """Validation before update 1 and after 3, 6, ...: 20, 12, 11 correct against a floor of 11."""
    script = {0: 20, 1: 12, 2: 11}
    done = run(
        DamageStop(CollapseCriterion(window=4, val_floor=11)),
        grader=grader(lambda call: script[call]),
        validate_every=3,
    )
    assert done.module.updates_done == 6
    verdict = done.folder.read_json("verdict.json")
    assert (verdict["rule"], verdict["first_update"], verdict["last_update"]) == ("validation", 6, 6)
    assert verdict["value"] == 11
    assert verdict["last_good_snapshot"] == "snapshots/good-000004"


def test_a_start_below_the_floor_stops_before_update_1(run, grader):
    done = run(DamageStop(CollapseCriterion(val_floor=11)), grader=grader(lambda call: 11))
    assert done.module.updates_done == 0 and done.module.stopped_by == "damage"
    verdict = done.folder.read_json("verdict.json")
    assert (verdict["first_update"], verdict["last_good_snapshot"]) == (0, None)


def test_a_clean_run_goes_on_to_its_end(run, scripted, grader):
    """A rate below the threshold and one item above the floor are no damage, nor is a short last window of cut-offs."""
    done = run(
        DamageStop(CollapseCriterion(window=5, truncation=0.51, val_floor=11)),
        sampler=scripted(lambda update: 1.0 if update > 10 else 0.5),
        grader=grader(lambda call: 12),
        validate_every=3,
    )
    assert done.module.updates_done == 12 and done.module.stopped_by is None
    verdict = done.folder.read_json("verdict.json")
    assert not verdict["collapsed"] and verdict["rule"] is None and verdict["judged_updates"] == 12
    assert sorted(p.name for p in done.folder.snapshots.glob("good-*")) == ["good-000005", "good-000010"]


def test_warn_goes_on_and_keeps_count(run, scripted, capsys):
    done = run(DamageStop(CollapseCriterion(window=4), action="warn"), sampler=scripted(collapse_from(5)))
    assert done.module.updates_done == 12 and done.module.stopped_by is None
    verdict = done.folder.read_json("verdict.json")
    assert (verdict["first_update"], verdict["last_update"], verdict["action"]) == (5, 12, "warn")
    assert capsys.readouterr().err.count("going on") == 2  # at updates 8 and 12
    assert not list(done.folder.snapshots.glob("good-*"))


def test_the_criterion_is_on_disk_before_update_1(run):
    """The run is killed in its first update: its rule is known all the same."""
    criterion = CollapseCriterion(val_floor=3)
    done = run(DamageStop(criterion), kill_after=1)
    assert done.killed
    stored = done.folder.read_json("criterion.json")
    assert stored["sha256"] == criterion.sha256 == hashlib.sha256(stored["canonical"].encode()).hexdigest()
    assert CollapseCriterion(**stored["criterion"]) == criterion


def test_a_changed_rule_is_refused_on_resume(run):
    run(DamageStop(CollapseCriterion(window=4)), kill_after=6)
    with pytest.raises(UserError, match=r"criterion\.json.*begin a new run with --run NEW"):
        run(DamageStop(CollapseCriterion(window=5)), resume=True)
    again = run(DamageStop(CollapseCriterion(window=4)), resume=True)
    assert again.module.updates_done == 12


def test_a_rule_that_comes_late_is_refused(run):
    run(kill_after=6)
    with pytest.raises(UserError, match="is at update 4 and began without it"):
        run(DamageStop(), resume=True)


@pytest.mark.parametrize("kill", [3, 6, 8])
def test_a_killed_run_comes_to_the_same_verdict(run, scripted, tmp_path, kill):
    """Killed before any checkpoint, between two, and after the verdict but before its checkpoint."""
    whole = run(DamageStop(CollapseCriterion(window=4)), sampler=scripted(collapse_from(5)), folder=tmp_path / "whole")
    run(DamageStop(CollapseCriterion(window=4)), sampler=scripted(collapse_from(5)), kill_after=kill)
    again = run(DamageStop(CollapseCriterion(window=4)), sampler=scripted(collapse_from(5)), resume=True)
    assert again.module.updates_done == whole.module.updates_done == 8
    assert again.folder.read_json("verdict.json") == whole.folder.read_json("verdict.json")
    assert sorted(p.name for p in again.folder.snapshots.iterdir()) == ["good-000004"]


def test_a_run_stopped_and_checkpointed_stays_stopped(run, scripted):
    first = run(DamageStop(CollapseCriterion(window=4)), sampler=scripted(collapse_from(5)))
    again = run(DamageStop(CollapseCriterion(window=4)), sampler=scripted(collapse_from(5)), resume=True)
    assert again.module.updates_done == 8 and again.module.stopped_by == "damage"
    assert again.folder.read_json("verdict.json") == first.folder.read_json("verdict.json")


def test_other_ranks_follow_the_first(tmp_path):
    """A rank that sees no damage itself (and writes nothing) stops at the update at which rank 0 says so."""
    said: list[str | None] = [None, "damage seen by rank 0"]
    trainer: Any = SimpleNamespace(
        is_global_zero=False,
        should_stop=False,
        callbacks=[],
        num_training_batches=9,
        default_root_dir=tmp_path,
        strategy=SimpleNamespace(broadcast=lambda mine: said[rule_calls()]),
    )
    module: Any = SimpleNamespace(updates_done=0, validation={}, stopped_by=None, policy=None)
    rule = DamageStop()
    rule_calls = lambda: len(rule._truncation) - 1  # noqa: E731
    for number in (1, 2):
        module.updates_done = number
        batch = SimpleNamespace(truncated=torch.zeros(4, dtype=torch.bool))
        report: Any = SimpleNamespace(number=number, batch=batch)
        rule.after_update(trainer, module, report)
        assert (trainer.should_stop, module.stopped_by) == ((False, None), (True, "damage"))[number - 1]
    assert not list(tmp_path.iterdir())


class RewardFloor(DamageStop):
    """A user's rule: the window's mean reward must not fall to `floor`."""

    def __init__(self, floor: float, window: int = 4) -> None:
        super().__init__(CollapseCriterion(window=window))
        self.floor = floor

    def damage(self, window: Window) -> str | None:
        reward = window.figures and window.figures["reward"]
        return f"reward {reward}" if reward is not None and reward <= self.floor else None


def test_a_rule_of_ones_own_is_one_method(run):
    done = run(RewardFloor(0.5), DamageStop(CollapseCriterion(window=4)))
    assert done.module.updates_done == 4
    verdict = done.folder.read_json("verdict-RewardFloor.json")
    assert (verdict["rule"], verdict["first_update"], verdict["last_update"]) == ("RewardFloor", 1, 4)
    assert verdict["reason"] == "reward 0.5"
    assert verdict["criterion"]["floor"] == 0.5 and verdict["criterion"]["class"] == "RewardFloor"
    assert done.folder.read_json("criterion-RewardFloor.json")["sha256"] == RewardFloor(0.5).sha256
    assert RewardFloor(0.5).sha256 != RewardFloor(0.4).sha256
    assert not done.folder.read_json("criterion.json")["criterion"].get("class")


def test_an_action_that_is_none_is_refused():
    with pytest.raises(ValueError, match="action"):
        DamageStop(action="ignore")  # type: ignore[arg-type]
