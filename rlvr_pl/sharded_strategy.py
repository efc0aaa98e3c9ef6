"""Lightning's strategy for sharded policies, as a run needs it: checkpoints that any number of ranks can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from rlvr_pl.errors import UserError
from rlvr_pl.model_weights import state_of
from rlvr_pl.policy import Policy
from rlvr_pl.shards import Shards, part_of, whole_of

Size = Literal["auto"] | int


class ShardedStrategy(ModelParallelStrategy):
    """`ModelParallelStrategy` whose ranks share the weights of one policy (FSDP2) and have different rollouts.

    `rlvr-pl fit` puts it in the place of Lightning's own. Checkpoints are single files, and the same as those of one
    process.

    Args:
        data_parallel_size: the ranks that share the weights: all of them.
        tensor_parallel_size: 1; matrix products are not divided.
        save_distributed_checkpoint: has no effect.
        process_group_backend: as in `ModelParallelStrategy`.
        timeout: as in `ModelParallelStrategy`.

    Raises UserError for a `tensor_parallel_size` above 1.
    """

    def __init__(
        self,
        data_parallel_size: Size = "auto",
        tensor_parallel_size: Size = "auto",
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        if tensor_parallel_size not in ("auto", 1):
            raise UserError(
                f"trainer.strategy: tensor_parallel_size is {tensor_parallel_size}: matrix products are not divided "
                "over devices, so it must be 1"
            )
        super().__init__(data_parallel_size, 1, False, process_group_backend, timeout)
        self.shards: Shards | None = None

    def check(self, policy: Policy) -> None:
        """UserError for a policy, or a number of ranks, with which this does not work."""
        ranks = self.num_nodes * self.num_processes
        if self._data_parallel_size not in ("auto", ranks):
            raise UserError(
                f"trainer.strategy: data_parallel_size is {self._data_parallel_size}, but the run has {ranks} devices; "
                "leave it out, or make them equal"
            )
        if policy.adapter is not None:
            raise UserError(
                "trainer.strategy: policy.peft trains an adapter, whose optimizer state is small, and sharding does "
                "not know its layers; choose ddp"
            )
        if policy.compiled:
            raise UserError("trainer.strategy: policy.compile does not go with sharding; leave it out, or choose ddp")

    def setup_environment(self) -> None:
        module = cast("Any", self.lightning_module)
        self.check(module.policy)
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def shard(self, module: Any) -> None:
        """Shard the policy's model, for `configure_model`: after the start policy was copied, before a checkpoint is
        restored and the optimizer made."""
        self.precision_plugin.convert_module(module)
        module.model.to(self.root_device)
        self.shards = Shards(module.model, self.device_mesh["data_parallel"])

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        assert self.shards is not None
        self.shards.gather()

    # ---- checkpoints: whole tensors, on rank 0 -----------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return state_of(cast("LightningModule", self.lightning_module))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = getattr(optimizer, "_optimizer", optimizer).state_dict()
        return {**state, "state": _each(state["state"], lambda _, tensor: whole_of(tensor))}

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        options = StateDictOptions(full_state_dict=True, strict=strict)
        module = cast("LightningModule", self.lightning_module)
        set_model_state_dict(module, dict(checkpoint["state_dict"]), options=options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            placed = partial(_placed, optimizer)
            optimizer.load_state_dict({**state, "state": _each(state["state"], placed)})


def _placed(optimizer: Optimizer, k: int, tensor: Tensor) -> Tensor:
    """This rank's part of a tensor of the state of parameter `k`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if tensor.ndim and tensor.shape != parameters[k].shape:
        raise UserError(
            f"optimizer {type(optimizer).__name__}: its state does not have the shape of the weights, so it cannot go "
            "on sharded; choose trainer.strategy ddp"
        )
    return part_of(tensor, parameters[k]) if tensor.ndim else tensor


def _each(state: Mapping[int, Mapping[str, Any]], change: Callable[[int, Tensor], Tensor]) -> dict[int, Any]:
    """An optimizer's state with every tensor changed; `change` is told whose it is."""
    return {
        k: {name: change(k, value) if isinstance(value, Tensor) else value for name, value in entries.items()}
        for k, entries in state.items()
    }
