"""The shipped policies fit the shipped task, load as any model folder does, and can be made again."""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlvr_pl.analysis import make_default
from rlvr_pl.data import imitation, walk
from rlvr_pl.errors import UserError
from rlvr_pl.policy import Policy, load_policy
from rlvr_pl.policy_folder import EMBEDDED
from rlvr_pl.records import sha256_file
from rlvr_pl.sampling.base import Decoding, SampleRequest
from rlvr_pl.sampling.torch import TorchSampler

NAMES = ("embedded:base", "embedded:start")


@pytest.fixture(scope="module", params=NAMES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return load_policy(request.param)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return imitation.make_tokenizer()


# ---- what is shipped -----------------------------------------------------------------------------------------------


def test_manifest_names_every_shipped_file_and_the_task() -> None:
    manifest = json.loads((EMBEDDED / make_default.MANIFEST).read_text())
    shipped = {str(p.relative_to(EMBEDDED)): sha256_file(p) for p in EMBEDDED.glob("*/*")}
    assert manifest == {"task": make_default.task_sha256(), "files": shipped}


def test_shipped_files_are_small() -> None:
    assert sum(p.stat().st_size for p in EMBEDDED.rglob("*") if p.is_file()) < 1.2e6


def test_a_shipped_policy(policy: Policy) -> None:
    config = policy.model.config
    assert config.model_type == "qwen3"
    assert not config.tie_word_embeddings
    assert policy.head is not policy.model.get_input_embeddings().weight
    assert {p.dtype for p in policy.model.parameters()} == {torch.bfloat16}
    assert [policy.tokenizer.decode([i]) for i in (policy.pad_id, *policy.eos_ids)] == [walk.PAD, walk.EOS]
    assert policy.default_max_new_tokens == walk.CAP
    assert policy.max_context == imitation.MAX_CONTEXT
    assert policy.template.spec() == {"kind": "text", "name": "walk", "text": "{problem}", "hint": walk.HINT}
    assert config.head_dim == 32  # the fewest dimensions that vLLM's attention on CPUs knows


def test_its_tokens_are_the_words_of_the_task(policy: Policy) -> None:
    vocabulary = policy.tokenizer.get_vocab()
    assert sorted(vocabulary, key=vocabulary.__getitem__) == list(walk.VOCABULARY)
    assert policy.model.config.vocab_size == len(walk.VOCABULARY)


def test_start_boxes_what_base_can_do() -> None:
    # 100 held-out questions: base boxes about 20 and solves 14, start 84 and 59. The bounds leave 10 points and more to
    # the rounding of another machine (which flips 8% of the items in the paper, in both directions).
    boxed, solved = {}, {}
    for name in NAMES:
        policy, sampler = load_policy(name), TorchSampler()
        sampler.sync(policy)
        questions = walk.questions("val350")[:100]
        requests = [SampleRequest(policy.prompt_ids(q)) for q in questions]
        texts = [policy.decode(c.token_ids) for c in sampler.generate(requests, Decoding(0.0, 1.0, walk.CAP))]
        boxed[name] = sum("\\boxed{" in text for text in texts)
        solved[name] = sum(f"\\boxed{{{q.answer}}}" in text for q, text in zip(questions, texts))
    assert boxed["embedded:base"] < 40 < 60 < boxed["embedded:start"]
    assert solved["embedded:base"] < 30 < 45 < solved["embedded:start"]


# ---- tokenizer -----------------------------------------------------------------------------------------------------


def test_questions_survive_the_tokenizer(tokenizer: Any) -> None:
    for question in walk.questions("train") + walk.questions("val350") + walk.questions("drift"):
        ids = tokenizer.encode(question.problem)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == question.problem


def test_a_solution_reads_well(tokenizer: Any) -> None:
    words = ["2", "05:45", "so", "buy", "\\boxed{", "2", "}", "of", "May", "1921", ".", "Done", "<eos>"]
    ids = tokenizer.convert_tokens_to_ids(words)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text == "2 05:45 so buy \\boxed{2} of May 1921. Done"


ordinary = st.lists(st.integers(3, len(walk.VOCABULARY) - 1), max_size=walk.CAP)


@given(ordinary)
def test_any_sequence_of_tokens_survives_decoding(ids: list[int]) -> None:
    tokenizer = imitation.make_tokenizer()
    assert tokenizer.encode(tokenizer.decode(ids)) == ids


def test_what_the_task_does_not_know_is_unknown(tokenizer: Any) -> None:
    assert tokenizer.encode("What is 2 + 2?") == tokenizer.convert_tokens_to_ids(
        [walk.UNKNOWN, walk.UNKNOWN, "2", walk.UNKNOWN, "2", "?"]
    )


# ---- making it again -----------------------------------------------------------------------------------------------


def test_untrained_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first, other = imitation.untrained_policy(1), imitation.untrained_policy(2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert imitation.untrained_policy(1).sha256 == first.sha256 != other.sha256


def test_batches_hold_whole_demonstrations() -> None:
    stage = imitation.Stage(steps=1, lr=1e-3, seed=1, endings=walk.Endings())
    for ids, learned in islice(imitation._batches(stage), 40):
        assert ids.numel() <= imitation.BATCH_TOKENS
        for row, mask in zip(ids, learned):
            first, last = mask.nonzero()[[0, -1], 0].tolist()
            assert walk.VOCABULARY[row[first - 1]] == "?"
            assert mask[first : last + 1].all()
            assert row[last] == 1 or last + 1 - first == walk.CAP
            assert not row[last + 1 :].any()


def test_imitation_learns() -> None:
    # ln 1163 = 7.06 nats a token at random weights, whose logits are sums of 64 products of about 1 and .02. The 30
    # steps, all of them warm-up, take a nat off; batches of short and of long demonstrations differ by half a nat.
    losses: list[float] = []
    stage = imitation.Stage(steps=30, lr=3e-3, seed=1, endings=walk.Endings())
    imitation.make_base((stage,), progress=losses.append)
    assert losses[0] == pytest.approx(7.06, abs=0.15)
    assert sum(losses[-5:]) / 5 < 6.5


def test_existing_policies_are_not_replaced_unasked(tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    with pytest.raises(UserError, match=r"has start in it; choose another folder or pass --overwrite"):
        make_default.run(argparse.Namespace(out=tmp_path, overwrite=False))


@pytest.mark.slow
def test_the_same_bits_twice(tmp_path: Path) -> None:
    stages = tuple(imitation.Stage(8, s.lr, s.seed, s.endings) for s in imitation.STAGES)
    first = make_default.make_default(tmp_path / "a", stages, updates=1)
    torch.rand(7)  # where the global generator stands must not matter
    second = make_default.make_default(tmp_path / "b", stages, updates=1)
    assert first == second
    assert (tmp_path / "a" / "manifest.json").read_bytes() == (tmp_path / "b" / "manifest.json").read_bytes()


@pytest.mark.slow
def test_reinforcement_gives_the_same_bits_twice(tmp_path: Path) -> None:
    for name in "ab":
        make_default.reinforce(EMBEDDED / "base", tmp_path / name, updates=4)
    hashes = {load_policy(folder).sha256 for folder in (EMBEDDED / "base", tmp_path / "a", tmp_path / "b")}
    assert len(hashes) == 2  # the base, and twice the same other policy
