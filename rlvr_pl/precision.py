"""The package's one precision plugin: BF16 weights, with or without FP32 masters."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from rlvr_pl.model_weights import cast_weights
from rlvr_pl.shards import part_of, whole_of

LARGE = 100_000_000
"""Weights from which on the paper's figures are taken to hold; tiny policies need larger rates."""
MASTER_RATE = 3e-6
"""The largest rate at which the paper's 0.6B policy stays stable with FP32 masters."""


class BF16Precision(Precision):
    """BF16 compute weights.

    Args:
        master_weights: False is the supplied recipe: weights, gradients and optimizer state are BF16, and an update
            smaller than about |w|/256 rounds away. True keeps an FP32 master of every trainable weight: gradients are
            accumulated and the optimizer runs in FP32, and the masters are rounded into the BF16 compute weights after
            every step. With masters a learning rate tuned for BF16 is usually 3-10 times too large (paper, section
            4.5); a large policy that starts at such a rate gets a warning.

    Example:
        >>> import torch
        >>> layer = BF16Precision(master_weights=True).convert_module(torch.nn.Linear(2, 2))
        >>> layer.weight.dtype
        torch.bfloat16
    """

    precision: Any = "bf16-true"

    def __init__(self, master_weights: bool = False) -> None:
        self.master_weights = master_weights
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # (compute weight, its master)
        self._restored: list[Tensor] | None = None

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        cast_weights(module, torch.bfloat16)
        return module

    @override
    @contextmanager
    def module_init_context(self) -> Generator[None, None, None]:
        yield

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Keep what is trained in the optimizers' parameter groups, and swap in FP32 masters of it."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p.requires_grad]
        if not self.master_weights:
            _warn_of_adapter(model)
        else:
            self._pairs = []
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["params"] = [self._master_of(p) for p in group["params"]]
                    _warn_of_rate(group)
        return model, optimizers, lr_schedulers

    def _master_of(self, weight: nn.Parameter) -> nn.Parameter:
        master = nn.Parameter(weight.detach().float().clone(), requires_grad=weight.requires_grad)
        self._pairs.append((weight, master))
        return master

    def trained_parameters(self, optimizer: Optimizer) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Pairs (weight that the forward uses, parameter that the optimizer steps); the same object without masters."""
        if self.master_weights:
            return self._pairs
        return [(p, p) for group in optimizer.param_groups for p in group["params"]]

    @override
    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        self.round_masters()
        return result

    def round_masters(self) -> None:
        """Round the masters into the compute weights."""
        if self._pairs:
            with torch.no_grad():
                for weight, master in self._pairs:
                    weight.copy_(master)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"master_weights": self.master_weights, "masters": [whole_of(m.detach()) for _, m in self._pairs]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["master_weights"] != self.master_weights:
            raise ValueError("the checkpoint was written with another setting of precision.master_weights")
        with torch.no_grad():
            for (_, master), saved in zip(self._pairs, state_dict["masters"], strict=True):
                master.copy_(part_of(saved, master))
        self.round_masters()


@rank_zero_only
def _warn_of_adapter(model: nn.Module) -> None:
    if getattr(getattr(model, "policy", None), "adapter", None) is not None:
        print(
            "rlvr-pl: an adapter in BF16 alone: steps smaller than about |w|/256 round away, and most of an adapter's "
            "are; set precision.master_weights true (masters of the adapter alone take little memory)",
            file=sys.stderr,
        )


@rank_zero_only
def _warn_of_rate(group: dict[str, Any]) -> None:
    rate = float(group.get("initial_lr", group["lr"]))
    if rate > MASTER_RATE and sum(p.numel() for p in group["params"]) >= LARGE:
        print(
            f"rlvr-pl: FP32 masters at a learning rate of {rate:g}: with masters a rate tuned for BF16 weights (1e-5) "
            "collapses, and one 3-10 times lower (1e-6 to 3e-6) does as well as BF16 at its own (paper, section 4.5)",
            file=sys.stderr,
        )
