"""The further rules: each on hand-made windows at its boundary, and in real runs where it needs one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from rlvr_pl.callbacks.damage_stop import Window
from rlvr_pl.callbacks.drift_monitor import DriftMonitor
from rlvr_pl.callbacks.stop_rules import EntropyRatioStop, LoopShareStop, NonFiniteStop, SignedMassStop
from rlvr_pl.errors import UserError
from rlvr_pl.records import RunFolder

NAN = float("nan")


def window(**fields: Any) -> Window:
    model = torch.nn.Linear(2, 2)
    blank = {"first": 1, "update": 10, "truncation": [0.0] * 10, "validation": {}, "figures": None, "drift": ()}
    return Window(**{**blank, "policy": SimpleNamespace(model=model), **fields})


def test_entropy_ratio_boundary():
    rule = EntropyRatioStop(ratio=4.0)
    rows = [{"update": 0, "entropy": 0.25}, {"update": 10, "entropy": 0.99}]
    assert rule.damage(window(drift=rows)) is None
    rows.append({"update": 20, "entropy": 1.0})
    assert "entropy 1.000 at update 20" in str(rule.damage(window(drift=rows)))
    assert rule.damage(window()) is None


def test_loop_share_boundary():
    rule = LoopShareStop(share=0.1)
    assert rule.damage(window(figures={"loop": 0.0999})) is None
    assert "updates 1-10" in str(rule.damage(window(figures={"loop": 0.1})))
    assert rule.damage(window()) is None  # the window is not complete


def test_signed_mass_boundary():
    rule = SignedMassStop(ratio=2.0)
    assert rule.damage(window(figures={"m_ratio": 1.99})) is None
    assert rule.damage(window(figures={"m_ratio": None})) is None  # no positive mass at all
    assert "M-/M+ is 2.00" in str(rule.damage(window(figures={"m_ratio": 2.0})))


@pytest.mark.parametrize(
    ("loss", "norm", "entropy", "what"),
    [(NAN, 1.0, 1.0, "loss"), (0.0, float("inf"), 1.0, "gradient norm"), (0.0, 1.0, NAN, "drift entropy")],
)
def test_what_is_not_finite_is_named(loss, norm, entropy, what):
    report: Any = SimpleNamespace(loss=loss, grad_norm=norm)
    drift = [{"update": 0, "entropy": entropy, "kl": 0.0, "nll": 1.0}]
    assert str(NonFiniteStop().damage(window(report=report, drift=drift))).startswith(f"the {what}")


class Poison(Callback):
    """Puts a NaN into one weight at the end of an update."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if pl_module.updates_done == 2:
            with torch.no_grad():
                pl_module.policy.head[3, 1] = NAN


def test_a_weight_that_is_nan_stops_the_run(run):
    done = run(Poison(), NonFiniteStop(window=1))
    assert done.module.updates_done == 2
    verdict = done.folder.read_json("verdict-NonFiniteStop.json")
    assert "lm_head" in verdict["reason"] and verdict["last_good_snapshot"] == "snapshots/good-000001"


def test_a_loss_that_is_nan_leaves_a_verdict_before_the_run_fails(run, tmp_path):
    """Poisoned after the rule has looked: the next update meets the NaN in its own loss and refuses to step."""
    with pytest.raises(ArithmeticError):
        run(NonFiniteStop(window=1), Poison(), folder=tmp_path / "nan")
    verdict = RunFolder(tmp_path / "nan").read_json("verdict-NonFiniteStop.json")
    assert verdict["reason"].startswith("update 3: ") and verdict["last_good_snapshot"] == "snapshots/good-000001"


def test_entropy_ratio_needs_a_monitor(run):
    with pytest.raises(UserError, match="needs a DriftMonitor"):
        run(EntropyRatioStop())


def test_entropy_ratio_in_a_run(run):
    done = run(DriftMonitor(n=8, every_n_updates=2), EntropyRatioStop(ratio=1.0001, window=4))
    rows = done.folder.table("drift.csv").rows()
    verdict = done.folder.read_json("verdict-EntropyRatioStop.json")
    assert verdict["collapsed"] and done.module.updates_done == int(rows[-1]["update"]) < 12


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: EntropyRatioStop(ratio=1.0), "ratio"),
        (lambda: LoopShareStop(share=0.0), "share"),
        (lambda: SignedMassStop(ratio=0.0), "ratio"),
        (lambda: LoopShareStop(window=0), "window"),
    ],
)
def test_settings_out_of_range_are_refused(make, name):
    with pytest.raises(ValueError, match=name):
        make()
