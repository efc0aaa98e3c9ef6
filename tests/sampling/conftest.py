"""What an engine's completions are held to."""

from __future__ import annotations

import pytest
import torch

from rlvr_pl.sampling.base import Decoding, SampleRequest
from rlvr_pl.sampling.torch import TorchSampler

GREEDY = Decoding(0.0, 1.0, 40)


@pytest.fixture
def moved():
    """``moved(policy)``: one with other weights."""
    return moved_policy


@pytest.fixture
def agree():
    """``agree(sampler, policy, prompts)``: the sampler's greedy completions, held to transformers and to ours."""
    return agreed_completions


def moved_policy(policy, seed: int = 1, by: float = 0.3):
    """A policy with other weights: every tensor moved by `by` of its own spread."""
    other = policy.copy_frozen()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.model.parameters():
            weight += by * weight.std() * torch.randn(weight.shape, generator=generator)
    return other


def transformers_greedy(policy, prompt: tuple[int, ...], count: int) -> list[int]:
    """Greedy ids by transformers' own `generate`."""
    ids = torch.tensor([prompt])
    out = policy.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=policy.pad_id
    )
    return out[0, len(prompt) :].tolist()


def agreed_completions(sampler, policy, prompts) -> list[tuple[int, ...]]:
    """The sampler's greedy completions, after holding the ids to transformers and the log-probs to the torch sampler.

    All in FP32: log-probs of 0 to -10 carry a few hundred roundings of 6e-8, for which 1e-4 is generous.
    """
    requests = [SampleRequest(prompt) for prompt in prompts]
    found = sampler.generate(requests, GREEDY)
    builtin = TorchSampler(dtype="float32")
    builtin.sync(policy)
    for one, other in zip(found, builtin.generate(requests, GREEDY)):
        assert (one.token_ids, one.stop_reason) == (other.token_ids, other.stop_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    for prompt, completion in zip(prompts[:4], found):
        assert list(completion.token_ids) == transformers_greedy(policy, prompt, 40)
    return [completion.token_ids for completion in found]
