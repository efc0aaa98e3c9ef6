"""The canary stays silent for a sampler that is right, and names one that is not."""

from __future__ import annotations

import math

import pytest
import torch

from rlvr_pl.callbacks.sampler_canary import SamplerCanary, StaleSamplerError, logprob_gaps, nucleus_mass
from rlvr_pl.data.pools import load_questions
from rlvr_pl.policy import load_policy
from rlvr_pl.sampling.base import Decoding, SampleRequest
from rlvr_pl.sampling.torch import TorchSampler
from rlvr_pl.types import Completion


def test_nucleus_mass_by_hand():
    p = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.8, 0.1, 0.1]])
    # at 0.7 the crossing token 0.3 is kept: 0.8; the last row's first token is enough
    torch.testing.assert_close(nucleus_mass(p, 0.7), torch.tensor([0.8, 0.8, 0.8]))
    torch.testing.assert_close(nucleus_mass(p, 1.0), torch.ones(3))


class Answers:
    """Samples of the embedded start, in FP32."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.policy = load_policy("embedded:start", dtype="float32")
        self.sampler = TorchSampler(dtype="float32")
        self.sampler.sync(self.policy)
        self.decoding = Decoding(0.8, 0.9, 40)
        prompts = [self.policy.prompt_ids(q) for q in load_questions("embedded:train")[:6]]
        self.requests = [SampleRequest(p, (i,)) for i, p in enumerate(prompts)]

    def draw(self) -> list[tuple[SampleRequest, Completion]]:
        return list(zip(self.requests, self.sampler.generate(self.requests, self.decoding)))


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers()


def test_a_right_sampler_agrees_to_rounding(answers):
    """FP32: each log-prob carries a few hundred roundings of 6e-8 through two layers and a softmax; 1e-4 is generous
    and still a hundredth of what a nucleus left unrenormalised would show."""
    assert max(logprob_gaps(answers.policy, answers.draw(), answers.decoding)) < 1e-4


def test_plain_log_probs_would_show_the_nucleus_mass(answers):
    """A sampler that reports log-probs of the full softmax is off by log of the kept mass: at most -log 0.9."""
    plain = Decoding(answers.decoding.temperature, 1.0, 40)
    gaps = logprob_gaps(answers.policy, answers.draw(), plain)
    assert 1e-3 < max(gaps) <= -math.log(0.9) + 1e-4


def test_a_stale_sampler_shows(answers):
    drawn = answers.draw()
    moved = answers.policy.copy_frozen()
    with torch.no_grad():
        for weight in moved.model.parameters():
            weight += 0.5 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    gaps = logprob_gaps(moved, drawn, answers.decoding)
    assert sum(gaps) / len(gaps) > 0.1


def test_no_log_probs_no_verdict(answers):
    request, completion = answers.draw()[0]
    silent = Completion(completion.token_ids, completion.stop_reason)
    assert logprob_gaps(answers.policy, [(request, silent)], answers.decoding) == []


def test_in_a_run_the_built_in_sampler_passes(run):
    done = run(SamplerCanary(), sampler=TorchSampler(), updates=3, max_new_tokens=40)
    assert done.module.updates_done == 3
    assert "generate" not in vars(done.module.sampler)
    assert done.trainer.callback_metrics["canary/gap"] < 0.1


def test_in_a_run_a_stale_sampler_is_named_before_the_step(run, capsys):
    """The scripted sampler reports -2 for every token whatever the policy says."""
    with pytest.raises(StaleSamplerError, match="stale weights or draws from another distribution"):
        run(SamplerCanary())
    done = run(SamplerCanary(action="warn", every_n_updates=5), updates=7, fresh=True)
    assert done.module.updates_done == 7
    assert capsys.readouterr().err.count("this is not a collapse") == 3  # updates 1, 2 and 5


@pytest.mark.parametrize("wrong", [{"tolerance": 0.0}, {"completions": 0}, {"every_n_updates": 0}, {"action": "shrug"}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplerCanary(**wrong)
