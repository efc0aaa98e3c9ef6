"""Settings that trade time for memory, schedules, profilers, and what is refused with the reason."""

from __future__ import annotations

import csv
from importlib.util import find_spec

import pytest
import torch

from rlvr_pl.cli import main
from rlvr_pl.objectives import GRPO
from rlvr_pl.policy import load_policy
from rlvr_pl.types import Completion, Grade, GradeStatus, Rollout, StopReason, build_batch
from rlvr_pl.update import update_once

WORDS = [
    "fit",
    "--run=r",
    "--policy.name=embedded:base",
    "--data.updates=4",
    "--data.validation=null",
    "--model.group_size=4",
    "--model.max_new_tokens=12",
]


def gradients(**settings):
    """Loss and gradients of one update on two fixed rollouts, and how often the first block ran forward."""
    policy = load_policy("embedded:start", dtype="float32", **settings)
    grades = [Grade(GradeStatus.CORRECT, 1.0), Grade(GradeStatus.WRONG, 0.0)]
    completions = [(7, 8, 9, 1), (9, 8, 1)]
    rows = [
        Rollout("q", i, (4, 5, 6), Completion(ids, StopReason.EOS), "", grade)
        for i, (ids, grade) in enumerate(zip(completions, grades))
    ]
    batch, objective, calls = build_batch(rows, 2, update=1), GRPO(), []
    policy.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    before = [p.detach().clone() for p in policy.model.parameters() if p.requires_grad]
    still = torch.optim.SGD([p for p in policy.model.parameters() if p.requires_grad], lr=1.0)
    done = update_once(policy, objective, batch, objective.token_weights(batch), still, max_grad_norm=None)
    after = [p for p in policy.model.parameters() if p.requires_grad]
    return done.loss, [b - a.detach() for a, b in zip(after, before)], len(calls)


def alike(a, b):
    # FP32 sums in another order: 1e-6 of the largest entry of each gradient
    return all(torch.allclose(x, y, rtol=0, atol=1e-5 * float(x.abs().max()) + 1e-8) for x, y in zip(a, b))


@pytest.mark.parametrize("peft", [None, {"r": 4, "init_lora_weights": False}])
def test_checkpointing_computes_blocks_twice_and_gives_the_same_gradient(peft):
    if peft is not None:
        pytest.importorskip("peft", reason="the package peft is not installed")
    torch.manual_seed(0)
    loss, plain, once = gradients(peft=peft)
    torch.manual_seed(0)
    again, saved, twice = gradients(peft=peft, gradient_checkpointing=True)
    assert (once, twice) == (1, 2)
    assert loss == again and alike(plain, saved)


def test_attention_implementations_agree():
    loss, plain, _ = gradients()
    other, eager, _ = gradients(attn_implementation="eager")
    assert loss == pytest.approx(other, rel=1e-5) and alike(plain, eager)


@pytest.mark.slow
def test_a_compiled_policy_has_the_same_gradient():
    loss, plain, _ = gradients()
    again, compiled, _ = gradients(compile=True)
    assert loss == pytest.approx(again, rel=1e-5) and alike(plain, compiled)


def test_a_checkpointed_run_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*WORDS, "--policy.gradient_checkpointing=true"]) == 0


def rates(run):
    return [float(row["lr"]) for row in csv.DictReader((run / "metrics.csv").open())]


def test_a_warm_up_of_torchs_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rate = ["--optimizer=AdamW", "--optimizer.lr=1e-3"]
    warm = ["--lr_scheduler=LinearLR", "--lr_scheduler.start_factor=0.25", "--lr_scheduler.total_iters=3"]
    assert main([*WORDS, *rate, *warm]) == 0
    # a quarter of the rate, then a third of the way to all of it with every update
    assert rates(tmp_path / "r") == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3])


REFUSED = {
    "--trainer.callbacks+=StochasticWeightAveraging": "it averages over epochs",
    "--trainer.callbacks+=EMAWeightAveraging": "swaps weights behind the sampler",
    "--trainer.callbacks+=ModelCheckpoint": "checkpoint.every_n_updates",
    "--trainer.accumulate_grad_batches=2": "data.questions_per_update",
    "--lr_scheduler=ReduceLROnPlateau": "waits for a figure",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_work_is_refused_with_the_reason(tmp_path, monkeypatch, capsys, word):
    monkeypatch.chdir(tmp_path)
    needs = {
        "--trainer.callbacks+=StochasticWeightAveraging": ["--trainer.callbacks.swa_lrs=1e-4"],
        "--lr_scheduler=ReduceLROnPlateau": ["--lr_scheduler.monitor=reward"],
    }
    assert main([*WORDS, word, *needs.get(word, [])]) == 2
    err = capsys.readouterr().err
    assert REFUSED[word] in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_profilers_see_the_stages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profiler = ["--trainer.profiler=SimpleProfiler", "--trainer.profiler.filename=profile"]
    assert main([*WORDS, *profiler, "--trainer.profiler.dirpath=."]) == 0
    (path,) = tmp_path.glob("*profile*.txt")
    text = path.read_text()
    assert all(f"rlvr.{stage}" in text for stage in ("sample", "grade", "weigh", "learn"))


def test_lightnings_monitor_of_rates_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*WORDS, "--trainer.callbacks+=LearningRateMonitor"]) == 0


def test_flash_attention_without_its_package_is_one_line(tmp_path, monkeypatch, capsys):
    if find_spec("flash_attn") is not None:
        pytest.skip("flash_attn is installed")
    monkeypatch.chdir(tmp_path)
    assert main([*WORDS, "--policy.attn_implementation=flash_attention_2"]) == 2
    err = capsys.readouterr().err
    assert "flash" in err.lower() and err.count("\n") == 1
