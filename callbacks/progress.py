"""One line on how a run is doing: reward, truncation, entropy against the start, tokens a second, time left."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from rlvr_pl.callbacks.facts import drift_rows

if TYPE_CHECKING:
    from rlvr_pl.update import UpdateReport

SMOOTHING = 0.9  # of the figures on the line: an average over about the last ten updates


class RunProgress(ProgressBar):
    """A live line on a terminal; elsewhere (a log file, a job) one printed line every few updates. Both on stderr.

    Args:
        every_n_updates: updates between printed lines where there is no terminal.
    """

    def __init__(self, every_n_updates: int = 10) -> None:
        super().__init__()
        if every_n_updates < 1:
            raise ValueError(f"every_n_updates={every_n_updates}: must be at least 1")
        self.every_n_updates = every_n_updates
        self._console = Console(file=sys.stderr)
        self._live: Progress | None = None
        self._enabled = True
        self._smooth: dict[str, float] = {}
        self._latest = "sampling"

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._first, self._began = pl_module.updates_done, time.monotonic()
        total = int(trainer.num_training_batches)
        if self._enabled and trainer.is_global_zero and self._console.is_terminal:
            self._live = Progress(
                TextColumn("update"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"),
                console=self._console, transient=False,
            )  # fmt: skip
            self._live.start()
            self._task = self._live.add_task(self._latest, total=total, completed=self._first)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        report: UpdateReport = outputs["update"]
        total = int(trainer.num_training_batches)
        self._latest = line = self.line(trainer, report, total)
        if self._live is not None:
            self._live.update(self._task, completed=report.number, description=line)
        elif self._enabled and trainer.is_global_zero:
            first_or_last = report.number in (self._first + 1, total)
            if first_or_last or report.number % self.every_n_updates == 0:
                print(f"update {report.number}/{total}  {line}", file=sys.stderr, flush=True)

    def line(self, trainer: Trainer, report: UpdateReport, total: int) -> str:
        """Smoothed reward, truncation and tokens a second; the latest entropy ratio; time left."""
        for name in ("reward", "truncation", "tokens_per_s"):
            value = float(report.metrics[name])
            old = self._smooth.get(name, value)
            self._smooth[name] = old if math.isnan(value) else SMOOTHING * old + (1 - SMOOTHING) * value
        parts = [f"reward {self._smooth['reward']:.3f}", f"truncated {self._smooth['truncation']:.0%}"]
        rows = drift_rows(trainer)
        if rows and rows[0]["entropy"]:
            parts.append(f"entropy x{rows[-1]['entropy'] / rows[0]['entropy']:.2f}")
        spent = time.monotonic() - self._began
        left = spent / max(1, report.number - self._first) * (total - report.number)
        return "  ".join([*parts, f"{self._smooth['tokens_per_s']:.0f} tokens/s", f"{_clock(left)} left"])

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self._live is not None:
            self._live.update(self._task, description="validating")

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self._live is not None:
            self._live.update(self._task, description=self._latest)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
