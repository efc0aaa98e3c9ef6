"""When to validate: on the module's own update counter, before update 1 and every n updates."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class Validation(Callback):
    """Runs Lightning's validation loop every n updates.

    Lightning's own intervals count batches of an epoch and would be lost or repeated when a run resumes between an
    update and its validation; this one is part of the update, and so of its checkpoint.

    Args:
        every_n_updates: updates between greedy validations; null for none but the first and last.
        at_start: validate the start policy before update 1 (the base of every comparison).
    """

    def __init__(self, every_n_updates: int | None = 20, at_start: bool = True) -> None:
        if every_n_updates is not None and every_n_updates < 1:
            raise ValueError(
                f"every_n_updates={every_n_updates}: must be at least 1, or null for the first and last only"
            )
        self.every_n_updates = every_n_updates
        self.at_start = at_start

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # not on_train_start, where callbacks that record validations may still be getting ready
        if self.at_start and pl_module.updates_done == 0:
            self._run(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        update = pl_module.updates_done
        due = self.every_n_updates is not None and update % self.every_n_updates == 0
        if due or update >= trainer.num_training_batches:
            self._run(trainer)

    def _run(self, trainer: Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop.val_loop
        if not trainer.enable_validation:
            return
        first = trainer._logger_connector._first_loop_iter
        trainer.validating = True
        loop.run()
        trainer.training = True
        trainer._logger_connector._first_loop_iter = first
