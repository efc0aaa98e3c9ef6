"""An explorer on the embedded default, and one whose completions a test writes itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from rlvr_pl.data.pools import load_questions
from rlvr_pl.expert_iteration.explorer import Explorer
from rlvr_pl.grading import MathGrader
from rlvr_pl.policy import Policy, load_policy
from rlvr_pl.sampling.base import Decoding, Sampler, SampleRequest
from rlvr_pl.sampling.torch import TorchSampler
from rlvr_pl.types import Completion, Question, StopReason

Script = Callable[[SampleRequest], str]


class Scripted(Sampler):
    """Returns what the script says for a request, word by word; a text that ends in "<eos>" has ended."""

    engine = "scripted"

    def __init__(self, policy: Policy, script: Script) -> None:
        self.policy, self.script = policy, script

    def sync(self, policy: Policy) -> None:
        pass

    def generate(self, requests: Sequence[SampleRequest], decoding: Decoding, progress=None) -> list[Completion]:
        found = []
        for request in requests:
            ids = self.policy.encode(self.script(request))
            ended = ids[-1:] == (self.policy.eos_ids[0],)
            found.append(Completion(ids, StopReason.EOS if ended else StopReason.LENGTH))
        return found


@pytest.fixture(scope="session")
def policy() -> Policy:
    torch.set_num_threads(1)
    return load_policy("embedded:start")


@pytest.fixture(scope="session")
def grader():
    grader = MathGrader()
    yield grader
    grader.close()


@pytest.fixture(scope="session")
def explorer(policy, grader) -> Explorer:
    """The embedded default with batches of a few questions, so that small searches have several parts."""
    sampler = TorchSampler(max_batch_tokens=2000)
    sampler.sync(policy)
    return Explorer(policy, sampler, grader, Decoding(0.8, 0.9, 80), seed=1, batch_tokens=2000)


@pytest.fixture
def scripted(policy, grader):
    """``scripted(script)``: an explorer whose completions are the script's."""
    return lambda script: Explorer(policy, Scripted(policy, script), grader, Decoding(0.8, 0.9, 80), 1, 2000)


@pytest.fixture(scope="session")
def questions() -> list[Question]:
    return load_questions("embedded:train")[:40]
