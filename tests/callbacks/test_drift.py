"""Drift figures against a computation that holds every logit, and the contexts' life on disk."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlvr_pl.callbacks.drift import Contexts, DriftMeter, StartCopy, StartStates, is_context_file, make_contexts
from rlvr_pl.callbacks.drift_monitor import DriftMonitor
from rlvr_pl.cli import main
from rlvr_pl.data.pools import load_questions
from rlvr_pl.errors import UserError
from rlvr_pl.policy import Policy, load_policy
from rlvr_pl.sampling.base import Decoding
from rlvr_pl.sampling.torch import TorchSampler


@pytest.fixture(scope="module")
def policies() -> SimpleNamespace:
    """The start, and the same policy some way off, in FP32."""
    torch.set_num_threads(1)
    start = load_policy("embedded:start", dtype="float32")
    moved = start.copy_frozen()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in moved.model.parameters():
            weight += 0.2 * weight.std() * torch.randn(weight.shape, generator=generator)
    questions = load_questions("embedded:drift")[:12]
    contexts = make_contexts(start, TorchSampler(), questions, Decoding(max_new_tokens=40))
    return SimpleNamespace(start=start, moved=moved, contexts=contexts)


@torch.no_grad()
def naive(start: Policy, current: Policy, contexts: Contexts) -> dict[str, float]:
    """One context at a time, all logits, FP64 softmax of the FP32 logits."""
    sums = torch.zeros(3, dtype=torch.float64)
    for prompt, completion in zip(contexts.prompts, contexts.completions):
        ids = torch.tensor([prompt + completion])
        keep = slice(len(prompt) - 1, -1)
        p = torch.log_softmax(start.model(input_ids=ids).logits[0, keep].double(), -1)
        q = torch.log_softmax(current.model(input_ids=ids).logits[0, keep].double(), -1)
        picked = q.gather(1, torch.tensor(completion)[:, None])
        sums += torch.stack([-(q.exp() * q).sum(), (p.exp() * (p - q)).sum(), -picked.sum()])
    return dict(zip(("entropy", "kl", "nll"), (sums / contexts.tokens).tolist()))


@pytest.mark.parametrize("side", [StartStates, StartCopy])
@pytest.mark.parametrize(("max_tokens", "vocab_chunk"), [(16384, 8192), (150, 100)])
def test_equals_the_naive_computation(policies, side, max_tokens, vocab_chunk):
    """1e-5 relative: the hidden states of padded batches and of single rows differ by a few FP32 roundings (2**-24),
    which the layers and the softmax enlarge about a hundredfold at most."""
    meter = DriftMeter(policies.contexts, policies.start, side=side, max_tokens=max_tokens, vocab_chunk=vocab_chunk)
    expected = naive(policies.start, policies.moved, policies.contexts)
    found = meter.measure(policies.moved)
    assert expected["kl"] > 0.01  # far enough from the start for the comparison to mean something
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


def test_both_sides_give_the_same_numbers(policies):
    states, copy = (DriftMeter(policies.contexts, policies.start, side=s) for s in (StartStates, StartCopy))
    assert states.measure(policies.moved) == copy.measure(policies.moved)


def test_the_start_has_no_distance_from_itself(policies):
    figures = DriftMeter(policies.contexts, policies.start).measure(policies.start)
    assert figures["kl"] == 0.0
    assert 0 < figures["nll"] <= figures["entropy"] * 2  # its own greedy tokens


def test_kept_states_stay_those_of_the_start(policies):
    """The head is trained in place; what the meter keeps must not move with it."""
    moving = policies.start.copy_frozen()
    meter = DriftMeter(policies.contexts, moving, side=StartStates)
    with torch.no_grad():
        for weight, other in zip(moving.model.parameters(), policies.moved.model.parameters()):
            weight.copy_(other)
    assert meter.measure(moving) == DriftMeter(policies.contexts, policies.start).measure(policies.moved)


def test_contexts_on_disk(policies, tmp_path):
    path = tmp_path / "drift_contexts.json"
    policies.contexts.save(path)
    assert Contexts.load(path, policies.start.head.shape[0]) == policies.contexts
    assert is_context_file(str(path))
    assert not is_context_file("embedded:drift")
    other = tmp_path / "questions.json"
    other.write_text('[{"uid": "a", "problem": "1+1", "answer": "2"}]')
    assert not is_context_file(str(other))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("contexts"), "not a file of drift contexts"),
        (lambda d: d["contexts"][0].update(prompt_ids=["x"]), "not a file of drift contexts"),
        (lambda d: d["contexts"][0].update(prompt_ids=[]), "needs contexts with a prompt"),
        (lambda d: d["contexts"][0].update(completion_ids=[10**6]), "another tokenizer"),
        (lambda d: d.update(contexts=[]), "needs contexts"),
    ],
)
def test_bad_context_files_are_named(policies, tmp_path, change, message):
    path = tmp_path / "c.json"
    policies.contexts.save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=f"c.json: .*{message}"):
        Contexts.load(path, policies.start.head.shape[0])


def rows(done: Any) -> list[dict[str, str]]:
    return done.folder.table("drift.csv").rows()


def test_monitor_in_a_run(run, tmp_path):
    done = run(DriftMonitor(n=8, every_n_updates=5))
    found = rows(done)
    assert [int(row["update"]) for row in found] == [0, 5, 10, 12]
    assert float(found[0]["kl"]) == 0.0 and float(found[-1]["kl"]) > 0
    stored = done.folder.path / "drift_contexts.json"
    contexts = Contexts.load(stored, 10**6)
    assert len(contexts.uids) == 8 and int(found[0]["tokens"]) == contexts.tokens
    # another arm reads the same contexts, and starts from the same figures, whichever way it keeps the start
    arm = run(DriftMonitor(str(stored), every_n_updates=5, start="copy"), folder=tmp_path / "arm")
    assert rows(arm) == found
    assert (arm.folder.path / "drift_contexts.json").read_bytes() == stored.read_bytes()


@pytest.mark.parametrize("start", ["states", "copy"])
def test_a_killed_run_has_the_same_rows(run, tmp_path, start):
    whole = run(DriftMonitor(n=4, every_n_updates=3, start=start), folder=tmp_path / "whole")
    run(DriftMonitor(n=4, every_n_updates=3, start=start), kill_after=7)
    again = run(DriftMonitor(n=4, every_n_updates=3, start=start), resume=True)
    assert rows(again) == rows(whole) and len(rows(whole)) == 5


def test_a_monitor_that_comes_late_is_refused(run):
    run(kill_after=6)
    with pytest.raises(UserError, match=r"at update 4 and has no drift_contexts\.json"):
        run(DriftMonitor(n=4), resume=True)


def test_too_few_questions_are_refused(run):
    with pytest.raises(UserError, match="embedded:drift has 64 questions, fewer than n=65"):
        run(DriftMonitor(n=65))


def asked(count: int, times: int) -> str:
    """JSON lines of `count` questions whose problem says the same so many times."""
    problem = "How many tickets from 04:15 forward to 05:45 by 45min? " * times
    return "".join(json.dumps({"uid": str(i), "problem": problem, "answer": "1"}) + "\n" for i in range(count))


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("nope.jsonl", None, "nope.jsonl: cannot be read (No such file or directory)"),
        ("c.json", '{"record": "drift-contexts", "conte', "c.json:1: not JSON"),
        ("c.json", '{"record": "drift-contexts", "version": 1}', "c.json: not a file of drift contexts (KeyError"),
        ("few.jsonl", asked(1, 1), "DriftMonitor: few.jsonl has 1 questions, fewer than n=2"),
        # 11 tokens a repetition leave 17 of 512, and a completion may have 80
        (
            "long.jsonl",
            asked(2, 45),
            "a prompt of 495 tokens with max_new_tokens 80 exceeds the model's context of 512",
        ),
    ],
)
def test_contexts_that_cannot_be_used_are_told_before_anything_is_written(
    tmp_path, monkeypatch, capsys, name, text, told
):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / name).write_text(text)
    words = ["fit", "--policy.name=embedded:start", "--data.updates=1", "--data.validation=null", "--run=run"]
    words += ["--model.group_size=2", "--trainer.callbacks+=DriftMonitor", "--trainer.callbacks.n=2"]
    assert main([*words, f"--trainer.callbacks.contexts={name}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert not (tmp_path / "run").exists()


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="n=0"):
        DriftMonitor(n=0)
