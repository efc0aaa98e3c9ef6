"""Watches how far the policy has moved on fixed contexts: the paper's early sign of a collapse."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from lightning.pytorch import Trainer

from rlvr_pl.callbacks.base import UpdateCallback
from rlvr_pl.callbacks.drift import (
    Contexts,
    DriftMeter,
    StartCopy,
    StartStates,
    drift_row,
    is_context_file,
    make_contexts,
)
from rlvr_pl.data.pools import load_questions
from rlvr_pl.errors import UserError
from rlvr_pl.model_weights import cast_weights
from rlvr_pl.records import RunFolder
from rlvr_pl.sampling.base import SampleRequest, caps_of

if TYPE_CHECKING:
    from rlvr_pl.module import RLVRModule
    from rlvr_pl.policy import Policy
    from rlvr_pl.types import Question
    from rlvr_pl.update import UpdateReport

FILE = "drift_contexts.json"


class DriftMonitor(UpdateCallback):
    """Writes ``drift.csv``: `update`, `entropy`, `kl` (start || current), `nll` of the start's tokens, `tokens`.

    In the paper (section 4.3, Table 3) entropy on fixed contexts doubles by update 80 while accuracy is still flat; the
    run collapses at about 120. The contexts are generated once, before update 1, and stored with the run as
    ``drift_contexts.json``; a resumed run reads that file, and another arm can be given it as `contexts`.

    Args:
        contexts: question set that no arm trains on (``embedded:drift``, a file), answered greedily by the start
            policy; or a ``drift_contexts.json`` of another run with the same start.
        n: the first `n` questions of the set are used.
        every_n_updates: updates between measurements. Update 0 and the last are measured as well.
        start: where the start policy's side comes from: "states" keeps its hidden states and head, "copy" a frozen
            copy of the policy that is run again each time. The figures are the same.
    """

    def __init__(
        self,
        contexts: str = "embedded:drift",
        n: int = 64,
        every_n_updates: int = 10,
        start: Literal["states", "copy"] = "states",
    ) -> None:
        if n < 1 or every_n_updates < 1:
            raise ValueError(f"n={n}, every_n_updates={every_n_updates}: both must be at least 1")
        self.contexts = contexts
        self.n = n
        self.every_n_updates = every_n_updates
        self.start = start
        self.rows: list[dict[str, Any]] = []
        self._own_start: Policy | None = None
        self._meter: DriftMeter | None = None

    @property
    def entropy_ratio(self) -> float | None:
        """Latest entropy over the start's; None before the first measurement."""
        return self.rows[-1]["entropy"] / self.rows[0]["entropy"] if self.rows and self.rows[0]["entropy"] else None

    def check(self, trainer: Trainer, begun: bool) -> None:
        if begun and (RunFolder.of(trainer).path / FILE).exists():
            return  # it has contexts of its own
        module = cast("RLVRModule", trainer.lightning_module)
        given = self._given(module.policy)
        if not isinstance(given, Contexts):
            requests = [SampleRequest(module.policy.prompt_ids(question)) for question in given]
            caps_of(requests, module.eval_decoding, module.policy.max_context)

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        # a checkpoint may be restored after this: what the weights were at the start must be kept now
        resumed = (RunFolder.of(trainer).path / FILE).exists()
        if self.start == "copy":
            _ = pl_module.start_policy
        elif resumed:
            self._own_start = pl_module.policy.copy_frozen()

    def begin(self, trainer: Trainer, module: RLVRModule) -> None:
        folder = RunFolder.of(trainer)
        self._table = folder.table("drift.csv")
        if trainer.is_global_zero:
            self._table.truncate_after(self.rows[-1]["update"] if self.rows else -1)
            self._complete(folder)
        start = self._start_policy(module)
        if start is not module.policy:  # copied before the strategy moved and converted it
            cast_weights(start.model, module.policy.head.dtype)
            cast("Any", start.model).to(module.policy.head.device)
        contexts = self._contexts(folder, module, start)
        side = StartCopy if self.start == "copy" else StartStates
        self._meter = DriftMeter(contexts, start, side=side)
        self._own_start = None
        if not self.rows:
            self._measure(trainer, module)

    def after_update(self, trainer: Trainer, module: RLVRModule, report: UpdateReport) -> None:
        if report.number % self.every_n_updates and report.number < trainer.num_training_batches:
            return
        row = self._measure(trainer, module)
        module.log_dict({f"drift/{name}": row[name] for name in ("entropy", "kl", "nll")})

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """A run that a stop rule ends is measured where it ended."""
        if pl_module.stopped_by == "damage" and self.rows[-1]["update"] < pl_module.updates_done:
            self._measure(trainer, pl_module)

    def _measure(self, trainer: Trainer, module: RLVRModule) -> dict[str, Any]:
        assert self._meter is not None
        row = drift_row(self._meter, module.policy, update=module.updates_done)
        self.rows.append(row)
        if trainer.is_global_zero:
            self._table.append(row)
        return row

    def _complete(self, folder: RunFolder) -> None:
        """Write the table again where rows are missing that the checkpoint holds."""
        if [int(row["update"]) for row in self._table.rows()] == [row["update"] for row in self.rows]:
            return
        print(f"rlvr-pl: {self._table.path}: rows were missing; made again from the checkpoint", file=sys.stderr)
        self._table.path.unlink(missing_ok=True)
        self._table = folder.table("drift.csv")
        for row in self.rows:
            self._table.append(row)

    def _start_policy(self, module: RLVRModule) -> Policy:
        if self.start == "copy":
            return module.start_policy
        if self._own_start is not None:
            return self._own_start
        if module.updates_done:
            raise UserError(
                f"DriftMonitor: this run is at update {module.updates_done} and has no {FILE}; the start policy's "
                "contexts are made before update 1, so begin a new run to monitor drift"
            )
        return module.policy

    def _contexts(self, folder: RunFolder, module: RLVRModule, start: Policy) -> Contexts:
        stored = folder.path / FILE
        given = Contexts.load(stored, start.head.shape[0]) if stored.exists() else self._given(start)
        if isinstance(given, Contexts):
            contexts = given
        else:
            contexts = make_contexts(start, module.sampler, given, module.eval_decoding)
            module.sampler.sync(module.policy)
        if contexts.start_sha256 != start.sha256:
            print(
                f"rlvr-pl: the drift contexts were written by another start policy ({contexts.start_sha256[:12]}) than "
                f"this run's ({start.sha256[:12]}); entropy and KL are measured on them all the same",
                file=sys.stderr,
            )
        if not stored.exists() and module.trainer.is_global_zero:
            contexts.save(stored)
        return contexts

    def _given(self, start: Policy) -> Contexts | Sequence[Question]:
        """What `contexts` names. UserError when it cannot be read, or has too few questions."""
        if is_context_file(self.contexts):
            return Contexts.load(Path(self.contexts), start.head.shape[0])
        questions = load_questions(self.contexts)[: self.n]
        if len(questions) < self.n:
            raise UserError(f"DriftMonitor: {self.contexts} has {len(questions)} questions, fewer than n={self.n}")
        return questions

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = list(state_dict["rows"])
