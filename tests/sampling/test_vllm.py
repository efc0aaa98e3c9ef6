"""`VLLMSampler` beside transformers, the torch sampler and the trainer, on a CPU. One engine serves most tests."""

from __future__ import annotations

import copy
import csv
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlvr_pl.callbacks.sampler_canary import StaleSamplerError, logprob_gaps
from rlvr_pl.cli import main
from rlvr_pl.data.pools import load_questions
from rlvr_pl.errors import RunFailure, UserError
from rlvr_pl.policy import load_policy
from rlvr_pl.sampling import vllm as ours
from rlvr_pl.sampling.base import Decoding, SampleRequest
from rlvr_pl.types import StopReason

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` has an environment with it")

GREEDY = Decoding(0.0, 1.0, 40)
SAMPLED = Decoding(0.8, 0.9, 40)


def policy_like(start: str = "embedded:start", **kwargs):
    return load_policy(start, dtype="float32", **kwargs)


class Engine:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.policy = policy_like()
        torch.manual_seed(5), np.random.seed(5), random.seed(5)
        self.sampler = ours.VLLMSampler()
        self.sampler.sync(self.policy)
        self.draws = float(torch.rand(1)), float(np.random.rand()), random.random()
        self.prompts = [self.policy.prompt_ids(q) for q in load_questions("embedded:val350")[:12]]

    def requests(self, *key: int | str) -> list[SampleRequest]:
        return [SampleRequest(p, (*key, i)) for i, p in enumerate(self.prompts)]


@pytest.fixture(scope="module")
def engine():
    made = Engine()
    yield made
    made.sampler.close()
    assert not torch.distributed.is_initialized()


@pytest.fixture
def at_start(engine):
    """The engine, holding the weights of the start."""
    engine.sampler.sync(engine.policy)
    return engine


def test_the_trainers_threads_and_seeds_are_left_alone(engine):
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    assert engine.draws == (float(torch.rand(1)), float(np.random.rand()), random.random())
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)  # vLLM replaces it by a function that does nothing
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


def test_greedy_parity_with_transformers_and_the_torch_sampler(at_start, agree):
    agree(at_start.sampler, at_start.policy, at_start.prompts)


def test_sampling_log_probs_are_those_of_the_nucleus(at_start):
    requests = at_start.requests("draw")
    found = at_start.sampler.generate(requests, SAMPLED)
    assert max(logprob_gaps(at_start.policy, list(zip(requests, found)), SAMPLED)) < 1e-4
    plain = replace(SAMPLED, top_p=1.0)  # what a sampler that reported the full softmax would be held to
    assert max(logprob_gaps(at_start.policy, list(zip(requests, found)), plain)) > 1e-3


def test_a_key_names_the_draws(at_start):
    first = at_start.sampler.generate(at_start.requests("a"), SAMPLED)
    assert first == at_start.sampler.generate(at_start.requests("a"), SAMPLED)
    assert first != at_start.sampler.generate(at_start.requests("b"), SAMPLED)
    same = [SampleRequest(at_start.prompts[0], ("c", i)) for i in range(8)]
    assert len({c.token_ids for c in at_start.sampler.generate(same, SAMPLED)}) > 1


def test_caps_and_stop_reasons(at_start):
    requests = [replace(r, max_new_tokens=3 + i) for i, r in enumerate(at_start.requests())]
    found = at_start.sampler.generate(requests, GREEDY)
    for completion, request in zip(found, requests):
        ended = completion.token_ids[-1] in at_start.policy.eos_ids
        assert completion.stop_reason is (StopReason.EOS if ended else StopReason.LENGTH)
        assert ended or len(completion.token_ids) == request.max_new_tokens
    assert {c.stop_reason for c in at_start.sampler.generate(at_start.requests(), GREEDY)} == set(StopReason)
    with pytest.raises(UserError, match="exceeds the model's context of 512"):
        at_start.sampler.generate([SampleRequest((5,) * 500)], GREEDY)


def test_a_push_arrives(at_start, agree, moved):
    before = agree(at_start.sampler, at_start.policy, at_start.prompts)
    other = moved(at_start.policy)
    at_start.sampler.sync(other)
    after = agree(at_start.sampler, other, at_start.prompts)
    assert sum(a != b for a, b in zip(before, after)) > 6


def test_a_long_prompt_keeps_nothing_of_the_old_weights(at_start, agree, moved):
    """vLLM keeps keys and values of whole blocks of 128 tokens; a push must forget them."""
    long = (sum(at_start.prompts, ()) * 3)[:300]
    agree(at_start.sampler, at_start.policy, [long])
    for seed in (2, 3):
        other = moved(at_start.policy, seed)
        at_start.sampler.sync(other)
        agree(at_start.sampler, other, [long])


def test_a_name_that_is_missing_from_a_push_is_an_error(at_start):
    """vLLM itself says nothing and keeps the old values."""
    fewer = copy.deepcopy(at_start.policy.model)
    del fewer.model.layers[1].mlp.down_proj.weight
    fake = replace(at_start.policy, model=fewer)
    with pytest.raises(RunFailure, match=r"other weights .*model\.layers\.1\.mlp\.down_proj\.weight"):
        at_start.sampler.sync(fake)


@pytest.mark.parametrize("workers", [1, 2])
def test_tied_embeddings(tmp_path, agree, moved, workers):
    """The head of a tied policy has no parameter of its own; its pushes must move embedding and head. Two workers are
    processes of their own, and get the weights by way of shared memory."""
    policy = policy_like()
    policy.model.config.tie_word_embeddings = True
    policy.model.tie_weights()
    policy.save(tmp_path / "tied")
    policy = policy_like(tmp_path / "tied")
    assert policy.head is policy.model.get_input_embeddings().weight
    sampler = ours.VLLMSampler(tensor_parallel_size=workers, max_num_seqs=8)
    try:
        for other in (policy, moved(policy, 4)):
            sampler.sync(other)
            agree(sampler, other, [other.prompt_ids(q) for q in load_questions("embedded:val350")[:3]])
    finally:
        sampler.close()


def test_an_adapter_is_pushed_merged_and_its_start_without_it(agree):
    pytest.importorskip("peft")
    policy = policy_like(peft={"r": 4, "target_modules": "all-linear"})
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                weight += 0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    prompts = [policy.prompt_ids(q) for q in load_questions("embedded:val350")[:6]]
    sampler = ours.VLLMSampler(max_num_seqs=8)
    try:
        sampler.sync(policy)
        adapted = agree(sampler, policy, prompts)
        sampler.sync(policy.copy_frozen())
        bare = [c.token_ids for c in sampler.generate([SampleRequest(p) for p in prompts], GREEDY)]
        sampler.sync(policy_like())  # the same names, and so no other engine
        assert bare == agree(sampler, policy_like(), prompts) != adapted
    finally:
        sampler.close()


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as f:
        return list(csv.DictReader(f))


ENDING = """
from lightning.pytorch import Callback

class EndAtTwenty(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        trainer.should_stop = module.updates_done == 20
"""


def test_forty_updates_learn_and_the_canary_stays_silent(here):
    """The quickstart's policy and settings, in two halves. A push that failed would leave the rewards where they were,
    and the canary reads tokens of every update again: in BF16 a few hundredths of a nat a token are rounding."""
    (here / "ending.py").write_text(ENDING)
    words = ["--config", "quickstart", "--data.updates=40", "--validation.every_n_updates=null"]
    words += ["--trainer.callbacks+=ending.EndAtTwenty", "--checkpoint.every_n_updates=10", "--run=r"]
    assert main(["fit", *_config(words), "--sampler", "VLLM"]) == 0
    run = here / "r"
    assert json.loads((run / "run.json").read_text())["updates"] == 20
    assert main(["fit", "--resume=r"]) == 0
    told = rows(run / "metrics.csv")
    assert [int(row["update"]) for row in told] == list(range(1, 41))
    rewards = [float(row["reward"]) for row in told]
    assert sum(rewards[-20:]) > 1.3 * sum(rewards[:20])
    assert max(float(row["canary/gap"]) for row in told) < 0.05
    state = json.loads((run / "run.json").read_text())
    assert state["engine"] == f"vllm-{ours.installed()}" and state["deterministic"] is False
    right = [float(row["correct"]) for row in rows(run / "validation.csv")]
    assert right[-1] > right[0] + 50


def test_a_skipped_push_ends_the_run(here, monkeypatch, capsys):
    """At a rate that moves the policy within a few updates, a sampler that is built once and never told is caught."""
    monkeypatch.setattr(ours.VLLMSampler, "_push", lambda self, policy: None)
    words = ["--data.updates=20", "--data.validation=null", "--optimizer.init_args.lr=3e-3"]
    assert main(["fit", *_config(["--config", "quickstart", *words]), "--sampler", "VLLM", "--run=r"]) == 1
    assert "the sampler holds stale weights" in capsys.readouterr().err
    assert 1 <= len(rows(here / "r" / "metrics.csv")) < 20
    assert issubclass(StaleSamplerError, RunFailure)


@pytest.mark.parametrize("strategy", ["ddp", "ModelParallelStrategy"])
def test_two_ranks_have_an_engine_each(here, strategy):
    (here / "command.py").write_text("import sys; from rlvr_pl.cli import entry; entry()\n")
    words = ["--data.updates=3", "--data.questions_per_update=2", "--data.validation=null", "--run=r"]
    two = ["--trainer.accelerator=cpu", "--trainer.devices=2", f"--trainer.strategy={strategy}", "--sampler=VLLM"]
    command = [sys.executable, "command.py", "fit", *_config(["--config", "quickstart", *words, *two])]
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env={**os.environ, **path}, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = rows(here / "r" / "metrics.csv")
    assert len(told) == 3 and max(float(row["canary/gap"]) for row in told) < 0.05
    lines = (here / "r" / "rollouts" / "000001-000100.jsonl").read_text().splitlines()
    assert len(lines) == 3 * 2 * 8


def test_evaluate_search_and_rationalize_name_the_engine(here, capsys):
    name = f"vllm-{ours.installed()}"
    common = ["--sampler", "vllm", "--json"]
    assert main(["evaluate", "embedded:start", "--limit", "24", "--out", "vllm.jsonl", *common]) == 0
    assert json.loads(capsys.readouterr().out)["engine"] == name
    assert main(["evaluate", "embedded:start", "--limit", "24", "--out", "torch.jsonl"]) == 0
    assert main(["compare", "torch.jsonl", "vllm.jsonl"]) == 2
    assert f"has engine '{name}' but torch.jsonl has 'torch'" in capsys.readouterr().err
    assert main(["compare", "torch.jsonl", "vllm.jsonl", "--allow-mixed", "--json"]) == 0
    search = ["search", "--checkpoint", "embedded:base", "--n-questions", "6", "--k", "2", "--out", "s.jsonl"]
    assert main([*search, *common]) == 0
    assert main([*search, "--json"]) == 2
    assert f'engine was "{name}", now "torch"' in capsys.readouterr().err
    hinted = ["rationalize", "s.jsonl", "--checkpoint", "embedded:base", "--rationales", "1", "--out", "b.jsonl"]
    assert main([*hinted, *common]) == 0
    for file in ("vllm.jsonl", "s.jsonl", "b.jsonl"):
        with (here / file).open() as f:
            assert json.loads(f.readline())["engine"] == name


def _config(words: list[str]) -> list[str]:
    from rlvr_pl.configs import find_config

    return [str(find_config("quickstart.yaml")) if word == "quickstart" else word for word in words]
