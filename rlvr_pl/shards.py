"""A model whose weights are sharded over the ranks (FSDP2), and the three ways in which they lie through an update.

*Gathered*: whole on every rank. Everything but the gradient and the step finds the weights so: samplers, validation,
monitors, checkpoints, snapshots. No forward communicates then, so ranks need not be in step.
*Learning*: a block's weights are gathered when it runs, forward and backward, and freed after. Ranks work in step.
*Freed*: every rank has its shards alone, which the optimizer steps.

Gradients are those of whole weights and stay on their rank (FSDP2's no_sync) until they are summed once an update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from rlvr_pl.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


class Shards:
    """Shards a model in place: each block by itself, and the rest (embedding, last norm, head) together.

    Args:
        model: in the precision in which it is to compute; freed when this returns.
        mesh: the ranks, in one dimension.

    Raises UserError for a model without a list of blocks.
    """

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh) -> None:
        lists = [child for child in model.get_decoder().children() if isinstance(child, nn.ModuleList)]
        self._blocks = [cast("FSDPModule", fully_shard(block, mesh=mesh)) for blocks in lists for block in blocks]
        if not self._blocks:
            raise UserError(f"{type(model).__name__}: has no list of blocks to shard; choose trainer.strategy ddp")
        self._model: Any = fully_shard(model, mesh=mesh)
        self._model.set_requires_gradient_sync(False)
        self._model.set_reshard_after_backward(False, recurse=False)  # micro-batches share what is in no block
        self._whole: dict[nn.Parameter, nn.Parameter] | None = None

    def gather(self) -> None:
        """Make the weights whole on every rank, as they are now."""
        shards = list(self._model.parameters()) if self._whole is None else []
        for module in self._all():
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        if self._whole is None:
            self._whole = dict(zip(shards, self._model.parameters(), strict=True))
            with torch.no_grad():  # FSDP2 takes the first module that runs for the outermost
                self._model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self._model.device), use_cache=False)

    def learn(self) -> None:
        """Free the blocks; from here to `free` each is gathered when it runs."""
        self._model.reset_iter_state()  # forwards without a backward would be prefetched for
        for block in self._blocks:
            block.set_reshard_after_forward(True, recurse=False)
        self._model.unshard()

    def free(self) -> None:
        """Leave every rank its shards alone."""
        for module in self._all():
            module.reshard()

    def whole(self, shard: nn.Parameter) -> nn.Parameter:
        """The weight that a shard is of: it has the gradients, whether or not its values are there."""
        assert self._whole is not None
        return self._whole[shard]

    def _all(self) -> list[FSDPModule]:
        return [self._model, *self._blocks]


def shard_of_sum(mine: Tensor, like: DTensor) -> DTensor:
    """Sum a tensor over the ranks of `like`; each gets its shard, in the precision of `mine`."""
    partial = DTensor.from_local(mine, like.device_mesh, [Partial()], run_check=False)
    return partial.redistribute(placements=like.placements)


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a tensor that every rank has, where `like` is sharded."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def whole_of(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, in the host's memory of rank 0; the others get an empty one, and all must ask. Any
    other tensor is returned as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole = tensor.full_tensor()
    return whole.cpu() if tensor.device_mesh.get_rank() == 0 else whole.new_empty(0)


def here(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
