"""The policy at chosen updates, as folders that other tools load."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch import Trainer

from rlvr_pl.callbacks.base import UpdateCallback
from rlvr_pl.records import RunFolder

if TYPE_CHECKING:
    from rlvr_pl.module import RLVRModule
    from rlvr_pl.update import UpdateReport

_NAME = re.compile(r"update-(\d{6,})")


class Snapshots(UpdateCallback):
    """Saves ``snapshots/update-000040`` and so on: Hugging Face folders with tokenizer, generation config and prompt
    template, which transformers and vLLM load. They hold no optimizer state; to continue a run, resume it.

    Args:
        every_n_updates: updates between snapshots (the paper's 40).
        keep: how many of the newest to keep; null keeps all.
    """

    def __init__(self, every_n_updates: int = 40, keep: int | None = None) -> None:
        if every_n_updates < 1 or (keep is not None and keep < 1):
            raise ValueError(f"every_n_updates={every_n_updates}, keep={keep}: must be at least 1 (keep may be null)")
        self.every_n_updates = every_n_updates
        self.keep = keep

    def after_update(self, trainer: Trainer, module: RLVRModule, report: UpdateReport) -> None:
        if report.number % self.every_n_updates or not trainer.is_global_zero:
            return
        folder = RunFolder.of(trainer).snapshots
        module.policy.save(folder / f"update-{report.number:06d}", overwrite=True)
        if self.keep is not None:
            for old in snapshots(folder)[: -self.keep]:
                shutil.rmtree(old)


def snapshots(folder: Path) -> list[Path]:
    """The snapshots in a run's ``snapshots`` folder, oldest first."""
    found = [(int(m[1]), path) for path in folder.glob("update-*") if (m := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]
