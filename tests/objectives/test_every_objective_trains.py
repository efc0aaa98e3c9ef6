"""Every objective of `rlvr-pl objectives` trains the embedded default for three updates, through the command line."""

from __future__ import annotations

import csv
import json
import math

import pytest

from rlvr_pl.cli import main

SETTINGS = [
    "--policy.name=embedded:base",
    "--data.updates=3",
    "--data.validation=null",
    "--data.questions_per_update=2",
    "--model.group_size=4",
    "--model.max_new_tokens=48",
    "--optimizer=AdamW",
    "--optimizer.lr=1e-4",
]
FROM_STORED_SOLUTIONS = {"ExpertIterationSFT"}  # trained in tests/expert_iteration
VARIANTS = {
    "ForkCredit": [["--objective.source=branch"], ["--objective.credit=shuffled", "--objective.center=true"]],
    "ClippedGRPO": [["--objective.inner_epochs=2", "--objective.kl.coefficient=0.1"]],
}


def names() -> list[str]:
    from rlvr_pl.analysis.objectives import run

    class Arguments:
        json = True

    return [row["name"] for row in run(Arguments()).data["objectives"]]  # type: ignore[arg-type]


CASES = [
    (name, extra) for name in names() if name not in FROM_STORED_SOLUTIONS for extra in [[], *VARIANTS.get(name, [])]
]


@pytest.mark.parametrize(("name", "extra"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x) or "default")
def test_three_updates(tmp_path, monkeypatch, name, extra):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", *SETTINGS, "--run=r", f"--objective={name}", *extra]) == 0
    with (tmp_path / "r" / "metrics.csv").open() as f:
        rows = list(csv.DictReader(f))
    assert [row["update"] for row in rows] == ["1", "2", "3"]
    assert all(math.isfinite(float(row["loss"])) for row in rows)
    assert json.loads((tmp_path / "r" / "run.json").read_text())["state"] == "finished"
