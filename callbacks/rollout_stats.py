"""What the rollouts of a run look like, per update and per window: the paper's section 4.3 as two tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch import Trainer

from rlvr_pl.callbacks.base import UpdateCallback
from rlvr_pl.callbacks.facts import facts, step_facts
from rlvr_pl.core.windows import Figure, StepFacts, figures, tally
from rlvr_pl.records import RunFolder
from rlvr_pl.update import measured

if TYPE_CHECKING:
    from rlvr_pl.module import RLVRModule
    from rlvr_pl.update import UpdateReport

# of each window, as ``window/*``; the module itself logs every update's reward, truncation, lengths and mass
LOGGED = (
    *("reward", "truncation", "loop", "soup", "length_correct", "length_wrong"),
    *("m_ratio", "plain_m_ratio", "sequence_ratio"),
)


class RolloutStats(UpdateCallback):
    """Writes ``updates.csv`` (a row an update) and ``windows.csv`` (a row a window; `update` is its last update).

    The columns are explained at `rlvr_pl.core.windows.figures`. Windows tumble: 1-10, 11-20, ... The last window of a
    run that has ended may be short; its `updates` column says so.

    Args:
        window: updates in a window.
        max_surprise: also call a truncated rollout soup when the start policy's mean surprise at it exceeds this many
            nats a token (a frozen copy of the start policy is kept, and reads the truncated rollouts that the policy
            itself was not sure of). It sees soups of ordinary words, which text rules cannot. Null: text rules alone.
    """

    def __init__(self, window: int = 10, max_surprise: float | None = None) -> None:
        if window < 1:
            raise ValueError(f"window={window}: must be at least 1")
        if max_surprise is not None and max_surprise <= 0:
            raise ValueError(f"max_surprise={max_surprise}: must be above 0 nats a token, or null")
        self.window = window
        self.max_surprise = max_surprise
        self._open: list[dict[str, Any]] = []  # tallies and steps of the window that is not full yet

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if self.max_surprise is not None:
            self._start = pl_module.start_policy  # must be copied before a checkpoint is restored

    def begin(self, trainer: Trainer, module: RLVRModule) -> None:
        if self.max_surprise is not None:
            cast("Any", self._start.model).to(module.device)
        folder = RunFolder.of(trainer)
        self._updates, self._windows = folder.table("updates.csv"), folder.table("windows.csv")
        if trainer.is_global_zero:
            self._updates.truncate_after(module.updates_done)
            self._windows.truncate_after(module.updates_done - len(self._open))

    def after_update(self, trainer: Trainer, module: RLVRModule, report: UpdateReport) -> None:
        sums, step = tally(facts(trainer, module, report)), step_facts(report)
        row = figures([sums], [step])
        self._open.append({"sums": sums, "step": [step.grad_norm, step.clipped, step.changed_share]})
        if trainer.is_global_zero:
            self._updates.append({"update": report.number, **row})
        if report.number % self.window == 0 or report.number >= trainer.num_training_batches:
            row = self._close_window(trainer, report.number)
            module.log_dict({f"window/{k}": v for k in LOGGED if (v := row[k]) is not None})

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """A stop rule ends the last window; a run that was merely interrupted will go on with it."""
        if pl_module.stopped_by == "damage" and self._open:
            self._close_window(trainer, pl_module.updates_done)

    def surprises(self, module: RLVRModule, report: UpdateReport, rows: Sequence[int]) -> list[float]:
        """Mean ``-log pi_start`` of the completions of these rows, nats a token at temperature 1."""
        part = report.batch.select(rows)
        logprobs, _ = measured(self._start, part, max_tokens=module.micro_batch_tokens, temperature=1.0)
        return (-(logprobs.double() * part.mask).sum(1) / part.lengths.clamp(min=1)).tolist()

    def _close_window(self, trainer: Trainer, last: int) -> dict[str, Figure]:
        steps = [StepFacts(*entry["step"]) for entry in self._open]
        row = figures([entry["sums"] for entry in self._open], steps)
        if trainer.is_global_zero:
            count = len(self._open)
            self._windows.append({"update": last, "first_update": last - count + 1, "updates": count, **row})
        self._open = []
        return row

    def state_dict(self) -> dict[str, Any]:
        return {"open": self._open}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._open = list(state_dict["open"])
