"""Further stop rules, each one method over what `DamageStop` already keeps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import Trainer

from rlvr_pl.callbacks.damage_stop import DamageStop, Window
from rlvr_pl.core.collapse import CollapseCriterion
from rlvr_pl.errors import UserError

if TYPE_CHECKING:
    from rlvr_pl.module import RLVRModule

Action = Literal["stop", "warn"]


class EntropyRatioStop(DamageStop):
    """Stops when the entropy on fixed contexts reaches `ratio` times the start's. Needs a `DriftMonitor` in the run.

    In the paper the collapsing run passes 2 at update 80 and 5 at update 120; no stable run passes 2.6.

    Args:
        ratio: of the latest entropy to that of update 0.
        window: updates after which the policy is kept as good while no damage is found.
        action: "stop" or "warn".
    """

    def __init__(self, ratio: float = 4.0, window: int = 20, action: Action = "stop") -> None:
        if ratio <= 1:
            raise ValueError(f"ratio={ratio}: must be above 1")
        super().__init__(CollapseCriterion(window=window), action)
        self.ratio = ratio

    def check(self, trainer: Trainer, begun: bool) -> None:
        self._need_monitor(trainer)
        super().check(trainer, begun)

    def begin(self, trainer: Trainer, module: RLVRModule) -> None:
        self._need_monitor(trainer)
        super().begin(trainer, module)

    @staticmethod
    def _need_monitor(trainer: Trainer) -> None:
        if not any(hasattr(c, "entropy_ratio") for c in trainer.callbacks):  # type: ignore[attr-defined]
            raise UserError("EntropyRatioStop needs a DriftMonitor in the same run; add one to trainer.callbacks")

    def damage(self, window: Window) -> str | None:
        if not window.drift:
            return None
        first, last = window.drift[0]["entropy"], window.drift[-1]["entropy"]
        if last < self.ratio * first:
            return None
        update = window.drift[-1]["update"]
        return f"entropy {last:.3f} at update {update} (rule: {self.ratio:g} times the start's {first:.3f})"


class LoopShareStop(DamageStop):
    """Stops when at least `share` of a window's rollouts are repetition loops.

    Args:
        share: of all rollouts of the window (the paper's first loops, 14%, came 10 updates before the soup).
        window: updates in a window; windows tumble.
        action: "stop" or "warn".
    """

    def __init__(self, share: float = 0.1, window: int = 10, action: Action = "stop") -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share={share}: must be in (0, 1]")
        super().__init__(CollapseCriterion(window=window), action)
        self.share = share

    def damage(self, window: Window) -> str | None:
        loops = window.figures["loop"] if window.figures else None
        if loops is None or loops < self.share:
            return None
        return f"loops are {loops:.3f} of the rollouts of updates {window.first}-{window.update} (rule: {self.share:g})"


class SignedMassStop(DamageStop):
    """Stops when the objective's negative token mass reaches `ratio` times the positive one over a window.

    In the paper M-/M+ is 1.03 to 1.27 before the collapse and 2.1 to 5.8 in it.

    Args:
        ratio: of M- to M+.
        window: updates in a window; windows tumble.
        action: "stop" or "warn".
    """

    def __init__(self, ratio: float = 2.0, window: int = 20, action: Action = "stop") -> None:
        if ratio <= 0:
            raise ValueError(f"ratio={ratio}: must be above 0")
        super().__init__(CollapseCriterion(window=window), action)
        self.ratio = ratio

    def damage(self, window: Window) -> str | None:
        mass = window.figures["m_ratio"] if window.figures else None
        if mass is None or mass < self.ratio:
            return None
        return f"M-/M+ is {mass:.2f} over updates {window.first}-{window.update} (rule: {self.ratio:g})"


class NonFiniteStop(DamageStop):
    """Stops when a weight, a loss, a gradient norm or a drift figure is NaN or infinite.

    An update refuses to step on a loss or gradient that is not finite, and a sampler to draw from such logits: the run
    fails in one line that names its rollouts' file. This rule then writes its verdict as well.

    Args:
        window: updates after which the policy is kept as good while no damage is found.
        action: "stop" or "warn".
    """

    def __init__(self, window: int = 20, action: Action = "stop") -> None:
        super().__init__(CollapseCriterion(window=window), action)

    def damage(self, window: Window) -> str | None:
        figures: dict[str, float] = {}
        if window.report is not None:
            figures = {"loss": window.report.loss, "gradient norm": window.report.grad_norm}
        if window.drift:
            figures |= {f"drift {name}": window.drift[-1][name] for name in ("entropy", "kl", "nll")}
        for name, value in figures.items():
            if not math.isfinite(value):
                return f"the {name} at update {window.update} is {value}"
        for name, weight in window.policy.model.named_parameters():
            if not bool(torch.isfinite(weight).all()):
                return f"weight {name} holds values that are not finite after update {window.update}"
        return None

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if not isinstance(exception, ArithmeticError) or not trainer.is_global_zero:
            return
        self.fire(trainer, self.window(trainer, pl_module), str(exception))
