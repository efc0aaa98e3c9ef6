"""Samplers: prompts in, completions out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlvr_pl.errors import UserError

if TYPE_CHECKING:
    from rlvr_pl.sampling.base import Sampler

NAMES = ("torch", "vllm", "vllm-server")


def named_sampler(
    name: str, max_batch_tokens: int | None = None, servers: Sequence[str] = (), folder: str | None = None
) -> Sampler:
    """The sampler "torch", "vllm" or "vllm-server" with its default settings.

    Args:
        name: one of `NAMES`.
        max_batch_tokens: bounds the torch sampler's batches; vLLM schedules its own.
        servers: URLs of the servers, for "vllm-server" alone.
        folder: the folder through which they get their weights.

    Raises:
        UserError: vLLM is asked for and cannot run here, or servers and folder are not those of the name.
    """
    if name == "vllm-server":
        if not servers or folder is None:
            raise UserError("--sampler vllm-server: give --server URL, once for each, and --server-folder FOLDER")
        from rlvr_pl.sampling.vllm_server import VLLMServer

        return VLLMServer(list(servers), folder)
    if servers or folder is not None:
        raise UserError(f"--server and --server-folder go with --sampler vllm-server, not with {name}")
    if name == "vllm":
        from rlvr_pl.sampling.vllm import VLLMSampler

        return VLLMSampler()
    from rlvr_pl.sampling.torch import TorchSampler

    return TorchSampler() if max_batch_tokens is None else TorchSampler(max_batch_tokens=max_batch_tokens)
