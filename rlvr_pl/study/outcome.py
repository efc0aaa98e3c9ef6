"""What the finished runs of a study came to, made from their records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rlvr_pl.analysis.items import load_panel
from rlvr_pl.analysis.run_records import RunRecords
from rlvr_pl.core.collapse import CollapseCriterion
from rlvr_pl.errors import UserError
from rlvr_pl.records import RunFolder


@dataclass(frozen=True)
class Outcome:
    """A finished run (or the evaluated start), read when asked.

    Args:
        arm, seed: which run; the start has the arm "start".
        folder: its run folder; None for the start.
        items: its last item records.
        criterion: the study's rule.
    """

    arm: str
    seed: int
    folder: Path | None
    items: Path
    criterion: CollapseCriterion

    @cached_property
    def records(self) -> RunRecords:
        assert self.folder is not None
        return RunRecords(self.folder)

    @cached_property
    def correct(self) -> np.ndarray:
        """[n] booleans, the outcome of each item of the panel."""
        return load_panel([self.items]).runs[0].correct

    @cached_property
    def verdict(self) -> dict[str, Any]:
        """The study's rule on the recorded truncation and validation."""
        own = self.records.criterion()
        if own is not None and own[1] != self.criterion.sha256:
            raise UserError(f"{self.folder}: ran under another rule (sha256 {own[1][:12]}) than its study's")
        rates = [sum(fact.truncated for fact in update) / len(update) for update in self.records.rollouts]
        return asdict(self.criterion.judge(rates, self.records.validation()))

    @cached_property
    def drift(self) -> list[dict[str, float]]:
        """Rows of ``drift.csv``; empty without a monitor."""
        return self.records.rows("drift.csv")

    def measure(self, name: str) -> float | int | None:
        """One of `rlvr_pl.study.expect.MEASURES`; None where it was not measured or there was no collapse."""
        if name == "first_update":
            return self.verdict["first_update"]
        if name == "final_correct":
            return int(self.correct.sum())
        return self.drift[-1][name] if self.drift else None


def item_files(folder: Path) -> dict[int, Path]:
    """The validation records of a run by update."""
    return {int(path.stem.split("-")[1]): path for path in sorted(RunFolder(folder).items.glob("val-*.jsonl"))}


def finished(folder: Path) -> bool:
    """Whether the run reached its end (or its stop rule)."""
    state = RunFolder(folder).read_json("run.json")
    return state is not None and state["state"] == "finished"


def outcome(arm: str, seed: int, folder: Path, criterion: CollapseCriterion) -> Outcome | None:
    """The outcome of a run; None while it is not finished. A run without validation is a UserError."""
    if not finished(folder):
        return None
    items = item_files(folder)
    if not items:
        raise UserError(f"{folder}: has no validation records (items/val-*.jsonl); a study needs a panel")
    return Outcome(arm, seed, folder, items[max(items)], criterion)


def summarize(runs: Mapping[str, Sequence[Outcome]]) -> dict[str, dict[str, dict[str, Any]]]:
    """{arm: {seed: {collapsed, first_update, final_correct, entropy}}} of the finished runs."""
    return {
        arm: {
            str(run.seed): {
                "collapsed": run.verdict["collapsed"],
                "first_update": run.verdict["first_update"],
                "final_correct": run.measure("final_correct"),
                "entropy": run.measure("entropy"),
            }
            for run in found
        }
        for arm, found in runs.items()
    }
