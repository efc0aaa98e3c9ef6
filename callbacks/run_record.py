"""The figures of a run on disk: ``metrics.csv`` (a row an update), ``validation.csv``, ``cost.json``."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from rlvr_pl.records import RunFolder


class RunRecord(Callback):
    """Writes every logged figure of every update, each update exactly once however often the run is resumed.

    ``seconds/*``, ``tokens_per_s`` and the ledger's ``wall_seconds`` are clock readings; all other columns are
    reproduced bit for bit by a resumed run.
    """

    def __init__(self) -> None:
        self._wall = 0.0
        self._since = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = RunFolder.of(trainer)
        self._metrics = folder.table("metrics.csv")
        self._validation = folder.table("validation.csv")
        self._since = time.monotonic()
        if trainer.is_global_zero:
            self._metrics.truncate_after(pl_module.updates_done)
            self._validation.truncate_after(pl_module.updates_done)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero:
            return
        report = outputs["update"]
        now = time.monotonic()
        self._wall, self._since = self._wall + now - self._since, now
        self._metrics.append({"update": report.number, **report.metrics})
        cost = {"updates": report.number, **pl_module.cost, "wall_seconds": round(self._wall, 3)}
        RunFolder.of(trainer).write_json("cost.json", cost)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            prefix = "val/"
            figures = {k[len(prefix) :]: float(v) for k, v in trainer.callback_metrics.items() if k.startswith(prefix)}
            self._validation.append({"update": pl_module.updates_done, **figures})

    def state_dict(self) -> dict[str, Any]:
        return {"wall": self._wall}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._wall = state_dict["wall"]
