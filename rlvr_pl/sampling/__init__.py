"""Samplers: prompts in, completions out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlvr_pl.sampling.base import Sampler

NAMES = ("torch", "vllm")


def named_sampler(name: str, max_batch_tokens: int | None = None) -> Sampler:
    """The sampler "torch" or "vllm" with its default settings. `max_batch_tokens` bounds the torch sampler's batches;
    vLLM schedules its own. Raises UserError when vLLM is asked for and cannot run here."""
    if name == "vllm":
        from rlvr_pl.sampling.vllm import VLLMSampler

        return VLLMSampler()
    from rlvr_pl.sampling.torch import TorchSampler

    return TorchSampler() if max_batch_tokens is None else TorchSampler(max_batch_tokens=max_batch_tokens)
