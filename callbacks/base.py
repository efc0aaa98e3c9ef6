"""The two moments most callbacks of a run care about, with the types that they get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, Trainer

if TYPE_CHECKING:
    from rlvr_pl.module import RLVRModule
    from rlvr_pl.update import UpdateReport


class UpdateCallback(Callback):
    """A Lightning callback that is told of every update: override `begin` and `after_update`.

    Counts are `module.updates_done` and `report.number`, never `trainer.global_step`, which stands still when an update
    skips its step. A callback that writes a table cuts it back to `module.updates_done` in `begin`, so that a resumed
    run has no row twice, and keeps what it must remember in `state_dict` (plain numbers, strings, lists and dicts).

    >>> class Longest(UpdateCallback):
    ...     longest = 0
    ...
    ...     def after_update(self, trainer, module, report):
    ...         self.longest = max(self.longest, int(report.batch.lengths.max()))
    >>> Longest().longest
    0
    """

    def check(self, trainer: Trainer, begun: bool) -> None:
        """Called by ``rlvr-pl fit`` before anything is written: raise UserError if the run cannot be what this needs.

        The run's module is `trainer.lightning_module`.

        Args:
            begun: whether the run in this folder has done an update before, which is to be continued.
        """

    def begin(self, trainer: Trainer, module: RLVRModule) -> None:
        """Called once before the first update of this process, after a checkpoint has been restored."""

    def after_update(self, trainer: Trainer, module: RLVRModule, report: UpdateReport) -> None:
        """Called after every update, skipped steps included."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.begin(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.after_update(trainer, pl_module, outputs["update"])
