"""Short real runs of the embedded default, in process."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SMALL = [
    "--policy.name=embedded:start",
    "--data.validation=null",
    "--data.updates=4",
    "--model.group_size=4",
    "--model.max_new_tokens=64",
    "--model.temperature=1.0",
    "--optimizer=AdamW",
    "--optimizer.lr=3e-4",
    "--checkpoint.every_n_updates=2",
    "--trainer.logger=false",
    "--objective=SignedReinforce",  # learns from every update, whatever the rewards
]
CLOCK = ("seconds/", "tokens_per_s")


@pytest.fixture
def small() -> list[str]:
    """The settings of `fit` and `undisturbed`."""
    return SMALL


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """``fit("--run=r", ...)`` in a fresh working folder; gives the exit status."""
    import torch

    from rlvr_pl.cli import main

    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    return lambda *words: main(["fit", *SMALL, *words])


@pytest.fixture
def outcome() -> Callable[[Path], dict[str, Any]]:
    """What a run ended with: final weights, records and ledger, clock readings aside."""

    def of(run: Path) -> dict[str, Any]:
        with (run / "metrics.csv").open() as f:
            metrics = [{k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in csv.DictReader(f)]
        cost = json.loads((run / "cost.json").read_text())
        cost.pop("wall_seconds")
        return {
            "weights": (run / "snapshots" / "final" / "model.safetensors").read_bytes(),
            "metrics": metrics,
            "cost": cost,
            **{name: (run / name).read_text() for name in ("windows.csv", "updates.csv")},
            **{p.name: p.read_text() for p in (run / "rollouts").glob("*.jsonl")},
        }

    return of


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of ``fit()`` with its own settings, which nothing disturbed."""
    from rlvr_pl.cli import main

    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main(["fit", *SMALL, f"--run={run}"]) == 0
    return run
