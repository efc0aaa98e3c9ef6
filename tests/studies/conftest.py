"""Study files, and run folders with made-up records, so that no test has to train."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlvr_pl.core.collapse import CollapseCriterion

N = 40
START = [1] * 24 + [0] * 16
"""The start answers 24 of 40 questions; three quarters of that are the floor of 18."""
RULE = CollapseCriterion.from_start(24, window=2)

STUDY = """\
start: embedded:start
seeds: [1, 2]
order: {train: embedded:train, questions_per_update: 2, updates: 4}
panel: embedded:drift
config:
  model: {group_size: 4, max_new_tokens: 24}
  validation: {every_n_updates: 2}
arms:
  supplied: {}
  mask: {objective: {init_args: {mask_truncated: true}}}
criterion: {window: 2}
expectations:
  - {arm: supplied, collapsed: true}
  - {arm: mask, collapsed: false}
  - {order: [mask, supplied], by: entropy}
  - {arm: mask, against: supplied, gain: true}
  - {arm: mask, against: start, gain: true}
"""


@pytest.fixture(autouse=True)
def in_a_fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def study_file(tmp_path: Path) -> Callable[..., Path]:
    """``study_file(old=new, ...)``: the study above with texts replaced."""

    def write(**changes: str) -> Path:
        text = STUDY
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "small.yaml"
        path.write_text(text)
        return path

    return write


@pytest.fixture(name="write_items")
def item_writer() -> Callable[[Path, Sequence[int]], None]:
    """``write_items(path, outcomes)``: an item file."""
    return write_items


def write_items(path: Path, correct: Sequence[int]) -> None:
    head = {"record": "items", "version": 1, "engine": "torch", "batch_size": 64, "checkpoint_sha256": "a" * 64}
    rows = [
        {"uid": f"q{i}", "subject": "s", "level": 1 + i % 5, "correct": c, "answer": "1", "length": 9}
        for i, c in enumerate(correct)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in [head, *rows]))


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, rows[0] if rows else ["update"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture(scope="session")
def write_run() -> Callable[..., Path]:
    """``write_run(path, cut=[...], correct={update: outcomes}, entropy=[...])``: a finished run of 2 groups of 4.

    `cut` is how many of the 8 rollouts of each update hit the cap; `entropy` has the start's and one value an update.
    """

    def write(
        path: Path,
        cut: Sequence[int],
        correct: dict[int, Sequence[int]],
        entropy: Sequence[float],
        *,
        seed: int = 1,
        state: str = "finished",
        rule: CollapseCriterion | None = RULE,
        text: str = "so it is \\boxed{1}",
    ) -> Path:
        rollouts = [
            {
                "update": u,
                "group": i // 4,
                "uid": f"t{i // 4}",
                "sample": i % 4,
                "reward": float(i % 4 == 0),
                "status": "correct" if i % 4 == 0 else "wrong",
                "answer": "1",
                "boxed": True,
                "length": 24 if i >= 8 - k else 10,
                "stop_reason": "length" if i >= 8 - k else "eos",
                "class": "truncated" if i >= 8 - k else "eos",
                "detector": None,
                "m_plus": 0.3 if i % 4 == 0 else 0.0,
                "m_minus": 0.0 if i % 4 == 0 else 0.15,
                "text": text,
            }
            for u, k in enumerate(cut, 1)
            for i in range(8)
        ]
        (path / "rollouts").mkdir(parents=True)
        (path / "rollouts" / "000001-000100.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rollouts))
        for update, outcomes in correct.items():
            write_items(path / "items" / f"val-{update:06d}.jsonl", outcomes)
        updates = len(cut)
        write_table(
            path / "metrics.csv",
            [{"update": u, "grad_norm": 10.0 + u, "clipped": 1.0, "changed_share": 0.1} for u in range(1, updates + 1)],
        )
        write_table(
            path / "validation.csv", [{"update": u, "n": len(c), "correct": float(sum(c))} for u, c in correct.items()]
        )
        write_table(
            path / "drift.csv",
            [{"update": u, "entropy": h, "kl": 0.01 * u, "nll": 0.2, "tokens": 100} for u, h in enumerate(entropy)],
        )
        run = {
            "state": state,
            "updates": updates,
            "planned_updates": updates,
            "objective": "GRPO",
            "start": "embedded:start",
            "start_sha256": "a" * 64,
            "order_sha256": "b" * 64,
            "seed": seed,
            "engine": "torch",
            "deterministic": True,
            "command": ["rlvr-pl", "fit", "--run", str(path)],
            "versions": {"python": "3.11", "torch": "2"},
            "threads": 1,
        }
        costs = {"sampled_tokens": 1000, "prefill_tokens": 50, "graded": 8 * updates, "trained_tokens": 900}
        cost = {"updates": updates, **costs, "optimizer_steps": updates, "wall_seconds": 3.0}
        files = {"run.json": run, "cost.json": cost}
        if rule is not None:
            files["criterion.json"] = {"criterion": json.loads(rule.canonical), "sha256": rule.sha256}
        for name, content in files.items():
            (path / name).write_text(json.dumps(content))
        (path / "config.yaml").write_text("seed: 1\ndata: {init_args: {train: embedded:train}}\n")
        return path

    return write


@pytest.fixture(scope="session")
def write_recorded(write_run: Callable[..., Path]) -> Callable[[Path], Any]:
    """``write_recorded(path)``: the study above in `path` / study with all four runs: `supplied` collapses in updates
    3-4, `mask` does not."""
    from rlvr_pl.study.folder import StudyFolder
    from rlvr_pl.study.plan import read_study
    from rlvr_pl.study.resolve import Plan

    def write(path: Path) -> StudyFolder:
        (path / "small.yaml").write_text(STUDY)
        folder = StudyFolder(path / "study")
        write_items(folder.start_items, START)
        plan = Plan({}, {"supplied": {}, "mask": {"objective.mask_truncated": [False, True]}}, "b" * 64, 4, 32, 24, N)
        start = {"checkpoint_sha256": "a" * 64, "correct": sum(START), "n": N}
        folder.freeze(read_study(path / "small.yaml"), plan, start)
        low = [0] * 12 + [1] * 8 + [0] * 20
        for seed in (1, 2):
            collapsing = {0: START, 2: START, 4: low}
            write_run(folder.run("supplied", seed), [1, 0, 4, 6], collapsing, [0.5, 0.6, 0.8, 1.2, 2.0], seed=seed)
            stable = {0: START, 2: [*START[:-1], 1], 4: START[::-1]}
            write_run(folder.run("mask", seed), [1, 2, 1, 0], stable, [0.5, 0.5, 0.4, 0.4, 0.3 + seed / 100], seed=seed)
        return folder

    return write


@pytest.fixture
def recorded(tmp_path: Path, write_recorded: Callable[[Path], Any]) -> Any:
    """The folder of that study."""
    return write_recorded(tmp_path)
