"""What is done to all the weights of a model at once: cast, untied, listed, hashed."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights and leave the buffers. Rotary frequencies are a buffer: rounded to BF16 they turn far positions
    by whole radians, and the policy that trains would not be the one that its saved folder holds."""
    for weight in model.parameters():
        if weight.is_floating_point() and weight.dtype != dtype:
            weight.data = weight.data.to(dtype)


def untie(model: PreTrainedModel) -> None:
    """Make input embedding and output head independent parameters, equal at first; a saved folder stays untied."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight:  # type: ignore[union-attr]
        head.weight = nn.Parameter(embedding.weight.detach().clone())  # type: ignore[union-attr]
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """`model.state_dict()` without the hooks of its modules: those of a sharded model would leave this rank the shards
    alone."""
    state: dict[str, Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        module._save_to_state_dict(state, f"{name}." if name else "", keep_vars=False)
    return state


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over name, dtype, shape and bytes of every parameter, in the order of their names.

    The same before saving and after loading; tied parameters count once, under the name of the input embedding.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        # a copy: memory that numpy has seen cannot be freed, as that of sharded weights must be
        flat = parameter.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
        digest.update(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
    return digest.hexdigest()
