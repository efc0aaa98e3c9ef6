"""Every training rollout of a run, one compact JSON line each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer

from rlvr_pl.callbacks.base import UpdateCallback
from rlvr_pl.callbacks.facts import facts
from rlvr_pl.records import JsonlFile, RunFolder

if TYPE_CHECKING:
    from rlvr_pl.module import RLVRModule
    from rlvr_pl.update import UpdateReport

UPDATES_PER_FILE = 100


class RolloutRecorder(UpdateCallback):
    """Writes ``rollouts/000001-000100.jsonl`` and so on, a hundred updates a file.

    A row holds ``update``, ``group``, ``uid``, ``sample``, ``reward`` (null: not scorable), ``status``, ``answer``,
    ``boxed``, ``length`` (tokens), ``stop_reason``, ``class``, ``detector`` (of a loop or soup), ``m_plus`` and
    ``m_minus`` (sums of the rollout's positive and negative token weights), and ``text`` if asked for. An update's rows
    are one write; a resumed run drops the rows its checkpoint does not know, and sets a torn last line aside.

    Args:
        texts: also keep the decoded completions.
    """

    def __init__(self, texts: bool = False) -> None:
        self.texts = texts

    def begin(self, trainer: Trainer, module: RLVRModule) -> None:
        if not trainer.is_global_zero:
            return
        for path in sorted(RunFolder.of(trainer).rollouts.glob("*-*.jsonl")):
            if int(path.stem.split("-")[0]) > module.updates_done:
                path.unlink()
            elif int(path.stem.split("-")[1]) > module.updates_done:
                JsonlFile(path).truncate_after(module.updates_done)

    def after_update(self, trainer: Trainer, module: RLVRModule, report: UpdateReport) -> None:
        if not trainer.is_global_zero:
            return
        rows = []
        for rollout, fact in zip(report.rollouts, facts(trainer, module, report)):
            row: dict[str, Any] = {
                "update": report.number,
                "group": fact.group,
                "uid": rollout.uid,
                "sample": rollout.sample,
                "reward": fact.reward if math.isfinite(fact.reward) else None,
                "status": rollout.grade.status.value,
                "answer": rollout.grade.answer,
                "boxed": rollout.grade.boxed,
                "length": fact.length,
                "stop_reason": rollout.completion.stop_reason.value,
                "class": fact.rollout_class,
                "detector": fact.detector,
                "m_plus": fact.m_plus,
                "m_minus": fact.m_minus,
            }
            if rollout.grade.parts:
                row["parts"] = [[weight, r if math.isfinite(r) else None] for weight, r in rollout.grade.parts]
            rows.append({**row, "text": rollout.text} if self.texts else row)
        JsonlFile(rollout_file(RunFolder.of(trainer), report.number)).append(rows)


def rollout_file(folder: RunFolder, update: int) -> Path:
    """Where the rollouts of an update are recorded."""
    first = (update - 1) // UPDATES_PER_FILE * UPDATES_PER_FILE + 1
    return folder.rollouts / f"{first:06d}-{first + UPDATES_PER_FILE - 1:06d}.jsonl"
