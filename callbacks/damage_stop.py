"""Ends a run by a rule that was written down, with its hash, before the first update."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import Trainer

from rlvr_pl.callbacks.base import UpdateCallback
from rlvr_pl.callbacks.facts import drift_rows, facts
from rlvr_pl.core.collapse import CollapseCriterion, Verdict
from rlvr_pl.core.windows import Figure, figures, tally
from rlvr_pl.errors import UserError
from rlvr_pl.records import RunFolder, canonical_json

if TYPE_CHECKING:
    from rlvr_pl.module import RLVRModule
    from rlvr_pl.policy import Policy
    from rlvr_pl.update import UpdateReport

TRUNCATION_ALONE = CollapseCriterion()
FIXED = "a rule is fixed before update 1, so begin a new run with --run NEW, from the same weights with --start"


@dataclass(frozen=True)
class Window:
    """What a rule may look at.

    Attributes:
        first, update: first update of the current window, and the update that was just done.
        truncation: truncation rate of every update so far, 1 to `update`.
        validation: correct answers of every validation so far, by update.
        figures: statistics of the window (see `rlvr_pl.core.windows.figures`) if `update` completes it, else None.
        drift: rows of the run's `DriftMonitor` so far, oldest first; empty without one.
        policy: the policy as it is now.
        report: the update itself; None right after a validation.
    """

    first: int
    update: int
    truncation: Sequence[float]
    validation: Mapping[int, int]
    figures: Mapping[str, Figure] | None
    drift: Sequence[Mapping[str, float]]
    policy: Policy
    report: UpdateReport | None = None


class DamageStop(UpdateCallback):
    """Stops every rank at the update at which the criterion is met, and says so in ``verdict.json``.

    ``criterion.json`` holds the rule's canonical JSON and its SHA-256 before update 1; a run that has done an update
    cannot be continued under another rule. At the end of each window without damage the policy is kept as
    ``snapshots/good-NNNNNN`` (a Hugging Face folder); of these the newest from before the damage survives a stop. A
    stopped run ends normally, status 0.

    To write another rule, override `damage`. Its public attributes, as they are before update 1, are part of the rule
    and of its hash (so they are plain data), and its files are named after the class: ``criterion-MyStop.json``,
    ``verdict-MyStop.json``.

    Args:
        criterion: what counts as a collapse.
        action: "stop", or "warn" to go on after saying so.
    """

    _frozen: str | None = None  # canonical JSON of the rule, once a run begins
    _file_of_rule = "the checkpoint"

    def __init__(
        self, criterion: CollapseCriterion = TRUNCATION_ALONE, action: Literal["stop", "warn"] = "stop"
    ) -> None:
        if action not in ("stop", "warn"):
            raise ValueError(f"action={action!r}: must be stop or warn")
        self.criterion = criterion
        self.action = action
        self._truncation: list[float] = []
        self._open: list[dict[str, float]] = []
        self._verdict: dict[str, Any] | None = None

    def damage(self, window: Window) -> str | None:
        """One line that says what is damaged, or None. Called after every update and after every validation."""
        verdict = self.criterion.judge(window.truncation, window.validation)
        if verdict.rule == "validation":
            return f"{verdict.value:.0f} correct in validation (floor {self.criterion.val_floor}) {_updates(verdict)}"
        if verdict.rule == "truncation":
            rule = f"at least {self.criterion.truncation:g} of a {self.criterion.window}-update window"
            return f"truncation {verdict.value:.3f} (rule: {rule}) {_updates(verdict)}"
        return None

    # ---- the frozen rule -------------------------------------------------------------------------------------------

    @property
    def rule(self) -> dict[str, Any]:
        """The rule as plain data: the criterion's fields; for other rules the class and its public attributes. In a run
        it is what it was at the start, whatever the attributes have become."""
        if self._frozen is not None:
            return json.loads(self._frozen)
        if type(self) is DamageStop:
            return asdict(self.criterion)
        hidden = {"action", "log", "log_dict"}  # the last two are attached by Lightning
        public = {k: v for k, v in vars(self).items() if not k.startswith("_") and k not in hidden}
        return {"class": type(self).__name__, **{k: self._plain(k, v) for k, v in public.items()}}

    def _plain(self, name: str, value: Any) -> Any:
        """An attribute as plain data; UserError if it is none."""
        try:
            plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
            canonical_json(plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"{type(self).__name__}.{name} is a {type(value).__name__} and cannot be written down as part of the "
                f"rule ({error}); make it plain data, or begin its name with an underscore"
            ) from None
        return plain

    @property
    def sha256(self) -> str:
        """SHA-256 of the canonical JSON of `rule`."""
        return hashlib.sha256(canonical_json(self.rule).encode()).hexdigest()

    def _freeze(self) -> None:
        """Take the rule's description: before update 1, and before a checkpoint gives back what a rule has counted."""
        if self._frozen is None:
            _ = self._verdict  # an AttributeError here is a constructor that did not call this class's
            self._frozen = canonical_json(self.rule)

    def _file(self, stem: str) -> str:
        return f"{stem}.json" if type(self) is DamageStop else f"{stem}-{type(self).__name__}.json"

    def _check_frozen(self, stored: str, where: str) -> None:
        if stored != self.sha256:
            raise UserError(
                f"{where}: this run began under another rule (sha256 {stored[:12]}, now {self.sha256[:12]}); {FIXED}"
            )

    def check(self, trainer: Trainer, begun: bool) -> None:
        self._freeze()
        if begun:
            self._check_stored(RunFolder.of(trainer))

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self._freeze()
        self._file_of_rule = str(RunFolder.of(trainer).path / self._file("criterion"))

    def _check_stored(self, folder: RunFolder) -> bool:
        """Whether the folder has a rule of this name; UserError when it is another one."""
        stored = folder.read_json(self._file("criterion"))
        if stored is not None:
            self._check_frozen(str(stored.get("sha256")), str(folder.path / self._file("criterion")))
        return stored is not None

    def begin(self, trainer: Trainer, module: RLVRModule) -> None:
        folder = RunFolder.of(trainer)
        self._freeze()
        if module.updates_done and not self._check_stored(folder):
            name = type(self).__name__
            raise UserError(f"{name}: this run is at update {module.updates_done} and began without it; {FIXED}")
        if trainer.is_global_zero:
            if not module.updates_done:
                content = {"criterion": self.rule, "canonical": self._frozen, "sha256": self.sha256}
                folder.write_json(self._file("criterion"), content)
            if self._verdict is None and module.updates_done < trainer.num_training_batches:
                (folder.path / self._file("verdict")).unlink(missing_ok=True)
            self._drop_good(folder, lambda number: number > module.updates_done)
        if self._verdict is not None and self.action == "stop":
            self._stop(trainer, module)

    # ---- judging ---------------------------------------------------------------------------------------------------

    def after_update(self, trainer: Trainer, module: RLVRModule, report: UpdateReport) -> None:
        self._truncation.append(float(report.batch.truncated.double().mean()))
        if type(self).damage is not DamageStop.damage:  # the criterion alone needs no statistics
            self._open.append(tally(facts(trainer, module, report)))
        full = report.number % self.criterion.window == 0
        completed = figures(self._open) if full and self._open else None
        self._judge(trainer, module, self.window(trainer, module, report, completed))
        if full:
            self._open = []
            if self.action == "stop" and self._verdict is None and trainer.is_global_zero:
                self._keep_good(RunFolder.of(trainer), module.policy, report.number)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if len(self._truncation) == pl_module.updates_done:  # otherwise the update itself is still to be judged
            self._judge(trainer, pl_module, self.window(trainer, pl_module))

    def window(
        self,
        trainer: Trainer,
        module: RLVRModule,
        report: UpdateReport | None = None,
        completed: Mapping[str, Figure] | None = None,
    ) -> Window:
        """What `damage` is shown now."""
        size = self.criterion.window
        return Window(
            first=max(0, module.updates_done - 1) // size * size + 1,
            update=module.updates_done,
            truncation=self._truncation,
            validation=module.validation,
            figures=completed,
            drift=drift_rows(trainer),
            policy=module.policy,
            report=report,
        )

    def _judge(self, trainer: Trainer, module: RLVRModule, window: Window) -> None:
        if self._verdict is not None and self.action == "stop":
            return
        reason = trainer.strategy.broadcast(self._reason(window) if trainer.is_global_zero else None)
        if isinstance(reason, UserError):
            raise reason
        if reason is not None and (self._verdict is None or self._verdict["reason"] != reason):
            self.fire(trainer, window, reason)
            if self.action == "stop":
                self._stop(trainer, module)
        elif self._verdict is None and window.update >= trainer.num_training_batches:
            self._write(trainer, {"collapsed": False, "rule": None, "judged_updates": window.update})

    def _reason(self, window: Window) -> str | UserError | None:
        """What `damage` says; a UserError, for all ranks to raise, if that is no reason."""
        reason: Any = self.damage(window)
        if reason is None or isinstance(reason, str):
            return reason
        found = repr(reason) if len(repr(reason)) <= 80 else f"a {type(reason).__name__}"
        return UserError(f"{type(self).__name__}.damage returned {found}; it must return one line of text, or None")

    def fire(self, trainer: Trainer, window: Window, reason: str) -> None:
        """Write the verdict and say so."""
        self._verdict = {"collapsed": True, "reason": reason}
        if not trainer.is_global_zero:
            return
        folder = RunFolder.of(trainer)
        found = {"rule": type(self).__name__, "first_update": window.first, "last_update": window.update, "value": None}
        if type(self) is DamageStop:
            verdict = asdict(self.criterion.judge(window.truncation, window.validation))
            found = {name: verdict[name] for name in found}
        good = self._last_good(folder, found["first_update"]) if self.action == "stop" else None
        self._verdict |= {**found, "judged_updates": window.update, "last_good_snapshot": good}
        self._write(trainer, self._verdict)
        if self.action == "warn":
            print(f"rlvr-pl: damage at update {window.update}, going on: {reason}", file=sys.stderr)
            return
        kept = f"the last good policy is {folder.path / good}" if good else "the last good policy is the start"
        see = folder.path / self._file("verdict")
        print(f"rlvr-pl: stopped after update {window.update}: {reason}; {kept}; see {see}", file=sys.stderr)

    def _stop(self, trainer: Trainer, module: RLVRModule) -> None:
        trainer.should_stop = True
        module.stopped_by = "damage"

    def _write(self, trainer: Trainer, verdict: dict[str, Any]) -> None:
        if trainer.is_global_zero:
            content = {**verdict, "action": self.action, "criterion": self.rule, "sha256": self.sha256}
            RunFolder.of(trainer).write_json(self._file("verdict"), content)

    # ---- the last good policy --------------------------------------------------------------------------------------

    def _keep_good(self, folder: RunFolder, policy: Policy, update: int) -> None:
        """Keep this policy and the one before: a validation may yet find this one damaged, and a rolling window reaches
        back over it."""
        policy.save(folder.snapshots / f"good-{update:06d}", overwrite=True)
        self._drop_good(folder, lambda number: number < update - self.criterion.window)

    def _last_good(self, folder: RunFolder, first_damaged: int) -> str | None:
        """Drop all but the newest snapshot from before the damage, and name it."""
        numbers = [_number(path) for path in folder.snapshots.glob("good-*")]
        best = max((n for n in numbers if n < first_damaged), default=None)
        self._drop_good(folder, lambda number: number != best)
        return None if best is None else f"snapshots/good-{best:06d}"

    @staticmethod
    def _drop_good(folder: RunFolder, unwanted: Callable[[int], bool]) -> None:
        for path in folder.snapshots.glob("good-*"):
            if unwanted(_number(path)):
                shutil.rmtree(path, ignore_errors=True)

    def state_dict(self) -> dict[str, Any]:
        return {
            "sha256": self.sha256,
            "truncation": self._truncation,
            "open": self._open,
            "verdict": self._verdict,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._check_frozen(state_dict["sha256"], self._file_of_rule)
        self._truncation = list(state_dict["truncation"])
        self._open = list(state_dict["open"])
        self._verdict = state_dict["verdict"]


def _number(path: Path) -> int:
    return int(path.name.split("-")[1])


def _updates(verdict: Verdict) -> str:
    if verdict.first_update == verdict.last_update:
        return f"at update {verdict.first_update}"
    return f"in updates {verdict.first_update}-{verdict.last_update}"
