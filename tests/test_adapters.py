"""Adapters of the real peft: what is trained, what samples, what the start is, what is saved."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from rlvr_pl.cli import main
from rlvr_pl.data.pools import load_questions
from rlvr_pl.errors import UserError
from rlvr_pl.policy import load_policy
from rlvr_pl.sampling.base import Decoding, SampleRequest
from rlvr_pl.sampling.decoder import ForwardDecoder
from rlvr_pl.sampling.fused import FusedDecoder
from rlvr_pl.sampling.torch import TorchSampler

peft = pytest.importorskip("peft", reason="the package peft is not installed")

QUESTIONS = load_questions("embedded:val350")[:50]
KINDS = {
    "lora": {"r": 4},
    "dora": {"r": 4, "use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "loha": {"peft_type": "LOHA", "r": 4},
}


def moved(settings: dict, **how):
    """The embedded start with an adapter whose weights are no longer those that change nothing."""
    torch.manual_seed(0)
    policy = load_policy("embedded:start", peft=settings, **how)
    for name, weight in policy.model.named_parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.05)
            assert "base_layer" not in name
    return policy


def answers(policy, **how):
    sampler = TorchSampler(**how)
    sampler.sync(policy)
    requests = [SampleRequest(policy.prompt_ids(q)) for q in QUESTIONS]
    return [c.token_ids for c in sampler.generate(requests, Decoding(0.0, 1.0, 80))], sampler._decoder


def states(policy):
    ids = torch.tensor([policy.prompt_ids(QUESTIONS[0])])
    with torch.no_grad():
        return policy.hidden_states(ids, torch.ones_like(ids))


def test_a_fresh_adapter_changes_nothing_and_is_all_that_is_trained():
    plain, adapted = load_policy("embedded:start"), load_policy("embedded:start", peft={"r": 4})
    assert torch.equal(states(plain), states(adapted))
    assert adapted.sha256 == plain.sha256
    trained = [name for name, weight in adapted.model.named_parameters() if weight.requires_grad]
    assert trained and all("lora_" in name for name in trained)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sampler_draws_from_the_adapted_weights(kind):
    """The fused decoder with merged weights and transformers' own forward, both in FP32, agree."""
    policy = moved(KINDS[kind], dtype="float32")
    tokens, decoder = answers(policy)
    assert type(decoder) is FusedDecoder
    forward = ForwardDecoder(policy.model)
    prompt = policy.prompt_ids(QUESTIONS[0])
    with torch.inference_mode():
        slow = forward.start([prompt], [0], 1, 1.0).logits
        fast = decoder.start([prompt], [0], 1, 1.0).logits
    assert torch.allclose(slow, fast, atol=1e-4)
    assert tokens != answers(load_policy("embedded:start", dtype="float32"))[0]


def test_the_start_policy_is_the_same_model_with_the_adapter_off():
    policy, plain = moved(KINDS["lora"]), load_policy("embedded:start")
    live, start = answers(policy)[0], policy.copy_frozen()
    assert start.model is policy.model
    assert torch.equal(states(start), states(plain))
    assert answers(start)[0] == answers(plain)[0]
    assert not torch.equal(states(policy), states(plain))  # and it is on again
    assert answers(policy)[0] == live
    assert all(w.requires_grad for n, w in policy.model.named_parameters() if "lora_" in n)


@pytest.mark.parametrize("snapshots", ["merged", "adapter"])
def test_a_snapshot_answers_as_the_live_policy(tmp_path, snapshots):
    policy = dataclasses.replace(moved(KINDS["lora"]), snapshots=snapshots)
    policy.save(tmp_path / "s")
    assert (tmp_path / "s" / "adapter_config.json").exists() == (snapshots == "adapter")
    again = load_policy(tmp_path / "s")
    assert again.adapter is None
    assert again.eos_ids == policy.eos_ids
    assert again.template.spec() == policy.template.spec()
    assert answers(again)[0] == answers(policy)[0]


def test_an_adapter_folder_is_one_for_peft_and_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    policy = dataclasses.replace(moved(KINDS["lora"], dtype="float32"), snapshots="adapter")
    policy.save(tmp_path / "s")
    ids = torch.tensor([policy.prompt_ids(QUESTIONS[0])])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "s", dtype=torch.float32)
    with torch.no_grad():
        assert torch.allclose(theirs(ids).logits, states(policy) @ policy.head.T, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 4}, "LoraConfig has no field rank"),
        ({"lora_dropout": 0.1}, "lora_dropout is 0.1: it must be 0"),
        ({"lora_alpha": "x"}, "policy.peft.lora_alpha is 'x': it must be a number; LoraConfig's own is 8"),
        ({"peft_type": "NOPE"}, "no peft_type 'NOPE'"),
        ({"peft_type": "PREFIX_TUNING"}, "virtual tokens"),
        ({"target_modules": ["nowhere"]}, "nowhere"),
        ({"target_modules": ["lm_head"]}, "output head"),
        ({"modules_to_save": ["lm_head"]}, "output head"),
    ],
)
def test_what_cannot_be_trained_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        load_policy("embedded:start", untie_embeddings=True, peft=settings)


WORDS = [
    "fit",
    "--policy.name=embedded:base",
    '--policy.peft={"r": 4}',
    "--data.updates=4",
    "--data.validation=embedded:drift",
    "--validation.every_n_updates=2",
    "--checkpoint.every_n_updates=1",
    "--model.group_size=4",
    "--model.max_new_tokens=24",
    "--optimizer=AdamW",
    "--optimizer.lr=1e-2",
    "--objective=GRPO",
    "--objective.kl.coefficient=0.05",
    "--trainer.callbacks+=DriftMonitor",
    "--trainer.callbacks.every_n_updates=2",
]


@pytest.mark.parametrize("master", ["false", "true"])
def test_an_adapter_run_resumes_bit_identically(tmp_path, monkeypatch, capsys, master):
    from rlvr_pl.module import RLVRModule

    monkeypatch.chdir(tmp_path)
    words = [*WORDS, f"--precision.master_weights={master}"]
    assert main([*words, "--run=whole"]) == 0
    assert ("an adapter in BF16 alone" in capsys.readouterr().err) == (master == "false")
    step = RLVRModule.training_step

    def breaks(self, batch, batch_idx):
        if self.updates_done == 2:
            raise RuntimeError("crash")
        return step(self, batch, batch_idx)

    monkeypatch.setattr(RLVRModule, "training_step", breaks)
    with pytest.raises(RuntimeError, match="crash"):
        main([*words, "--run=broken"])
    monkeypatch.setattr(RLVRModule, "training_step", step)
    assert main([*words, "--run=broken"]) == 0
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for name in ("snapshots/final/model.safetensors", "drift.csv", "validation.csv", "windows.csv"):
        assert (whole / name).read_bytes() == (broken / name).read_bytes(), name
    checkpoint = torch.load(next((whole / "checkpoints").glob("*4.ckpt")), weights_only=True)
    assert all("lora_" in name for name in checkpoint["state_dict"])  # what does not move is not stored
    drift = [float(x) for x in (whole / "drift.csv").read_text().split("\n")[1].split(",")]
    header = (whole / "drift.csv").read_text().split("\n")[0].split(",")
    assert drift[header.index("kl")] == 0.0
    assert json.loads((whole / "run.json").read_text())["state"] == "finished"


@pytest.mark.slow
def test_an_adapter_learns_the_embedded_task_and_its_snapshot_answers_as_it_did(tmp_path, monkeypatch):
    """A full run ends at 215 to 219 of 350 and this one at 209 to 220 (three seeds each); the start has 48."""
    from rlvr_pl.configs import find_config

    monkeypatch.chdir(tmp_path)
    words = ["--config", str(find_config("quickstart.yaml")), "--run=r", "--seed=1", "--optimizer.lr=8e-4"]
    lora = ['--policy.peft={"r": 8, "lora_alpha": 8}', "--precision.master_weights=true"]
    assert main(["fit", *words, *lora]) == 0
    live = (tmp_path / "r" / "items" / "val-000060.jsonl").read_text().splitlines()[1:]
    assert sum(json.loads(row)["correct"] for row in live) > 150
    policy = ["evaluate", "r/snapshots/final", "--questions", "embedded:val350"]
    assert main([*policy, "--out", "items.jsonl", "--json"]) == 0
    assert (tmp_path / "items.jsonl").read_text().splitlines()[1:] == live
