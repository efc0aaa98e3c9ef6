"""The torch sampler: what it draws, when it stops, what it refuses, and that the batch does not matter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rlvr_pl.errors import UserError
from rlvr_pl.policy import Policy
from rlvr_pl.sampling import torch as module
from rlvr_pl.sampling.base import Decoding, NonFiniteLogits, SampleRequest
from rlvr_pl.sampling.torch import TorchSampler
from rlvr_pl.types import Completion, StopReason

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make_policy(eos_ids: tuple[int, ...] = (1,), kind: str = "qwen3", sharpen: float = 6.0) -> Policy:
    """A random policy whose next-token distributions are neither flat nor decided."""
    torch.manual_seed(3)
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=False))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(sharpen)
    return cast(Policy, SimpleNamespace(model=model.eval(), eos_ids=eos_ids, max_context=64))


def requests(groups: int = 4, size: int = 3, **fields: Any) -> list[SampleRequest]:
    """`size` requests for each of prompts of different lengths."""
    prompts = [tuple(2 + (7 * g + i) % 38 for i in range(1 + 3 * g)) for g in range(groups)]
    return [SampleRequest(p, ("test", g, i), **fields) for g, p in enumerate(prompts) for i in range(size)]


def synced(policy: Policy, **arguments: Any) -> TorchSampler:
    sampler = TorchSampler(**arguments)
    sampler.sync(policy)
    return sampler


def sampled_distribution(policy: Policy, request: SampleRequest, completion: Completion, decoding: Decoding) -> Tensor:
    """[t, V]: full softmax at T, cut to the nucleus and renormalised, by one forward over the whole text."""
    ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        logits = policy.model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1].double()
    if decoding.temperature == 0:
        return logits.softmax(-1)
    probs, index = (logits / decoding.temperature).softmax(-1).sort(descending=True)
    keep = probs.cumsum(1) - probs < decoding.top_p
    kept = torch.zeros_like(probs).scatter(1, index, probs * keep)
    return kept / kept.sum(1, keepdim=True)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("decoding", [Decoding(0.8, 0.9, 20), Decoding(1.3, 1.0, 20), Decoding(0.0, 1.0, 20)])
def test_logprobs_are_of_the_distribution_sampled_from(
    kind: str, fused: bool, decoding: Decoding, monkeypatch: pytest.MonkeyPatch
):
    if not fused:
        monkeypatch.setattr(module, "fusable", lambda model: False)
    policy = make_policy(kind=kind)
    for request, completion in zip(requests(), synced(policy).generate(requests(), decoding)):
        wanted = sampled_distribution(policy, request, completion, decoding)
        wanted = wanted.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0].log()
        assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
        # FP32 logits of magnitude 10 and their differences: 1e-5 covers their rounding
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), wanted, rtol=0, atol=2e-5)


def test_both_decoders_draw_the_same(monkeypatch: pytest.MonkeyPatch):
    policy, decoding = make_policy(), Decoding(0.8, 0.9, 16)
    fused = synced(policy).generate(requests(), decoding)
    monkeypatch.setattr(module, "fusable", lambda model: False)
    plain = synced(policy).generate(requests(), decoding)
    assert [c.token_ids for c in fused] == [c.token_ids for c in plain]


def test_greedy_is_the_argmax_of_the_whole_text():
    policy, decoding = make_policy(), Decoding(0.8, 0.9, 12).greedy()
    for request, completion in zip(requests(), synced(policy).generate(requests(), decoding)):
        argmax = sampled_distribution(policy, request, completion, decoding).argmax(1)
        assert completion.token_ids == tuple(argmax.tolist())


@pytest.mark.parametrize("budget", [1, 40, 100, 10_000])
def test_a_rollout_does_not_depend_on_its_batch(budget: int):
    policy, decoding = make_policy(), Decoding(0.8, 0.9, 16)
    expected = synced(policy).generate(requests(), decoding)
    assert len({c.token_ids for c in expected}) > 8  # the draws do differ
    found = synced(policy, max_batch_tokens=budget).generate(list(reversed(requests())), decoding)
    assert [c.token_ids for c in reversed(found)] == [c.token_ids for c in expected]


def test_the_key_names_the_draw():
    sampler, decoding = synced(make_policy()), Decoding(0.8, 0.9, 16)
    prompt = (5, 6, 7)
    workers = [
        sampler.generate([SampleRequest(prompt, (42, worker, i)) for i in range(4)], decoding) for worker in (0, 1)
    ]
    again = sampler.generate([SampleRequest(prompt, (42, 0, i)) for i in range(4)], decoding)
    assert workers[0] == again
    assert len({c.token_ids for c in workers[0] + workers[1]}) == 8


def test_a_shorter_cap_cuts_the_same_rollout():
    sampler = synced(make_policy(eos_ids=()))
    long = sampler.generate(requests(), Decoding(0.8, 0.9, 20))
    short = sampler.generate(requests(max_new_tokens=7), Decoding(0.8, 0.9, 20))
    assert [c.token_ids for c in short] == [c.token_ids[:7] for c in long]


def test_every_eos_id_ends_a_completion_and_belongs_to_it():
    decoding = Decoding(1.0, 1.0, 20)
    free = synced(make_policy(eos_ids=())).generate(requests(), decoding)
    assert all(c.stop_reason is StopReason.LENGTH and len(c.token_ids) == 20 for c in free)
    eos_ids = (free[0].token_ids[3], free[1].token_ids[5])
    ended = synced(make_policy(eos_ids=eos_ids)).generate(requests(), decoding)
    for whole, cut in zip(free, ended):
        at = next((i for i, token in enumerate(whole.token_ids) if token in eos_ids), None)
        assert cut.token_ids == whole.token_ids[: 20 if at is None else at + 1]
        assert cut.stop_reason is (StopReason.LENGTH if at is None else StopReason.EOS)
    assert {c.stop_reason for c in ended} == {StopReason.EOS, StopReason.LENGTH}


def test_eos_on_the_last_allowed_token_is_eos():
    free = synced(make_policy(eos_ids=())).generate(requests(1, 1), Decoding(0.8, 0.9, 5))[0]
    eos = free.token_ids[-1]
    cap = free.token_ids.index(eos) + 1
    ended = synced(make_policy(eos_ids=(eos,))).generate(requests(1, 1), Decoding(0.8, 0.9, cap))[0]
    assert (ended.token_ids, ended.stop_reason) == (free.token_ids[:cap], StopReason.EOS)


def test_eos_ids_inside_a_prompt_mean_nothing():
    # the prompt holds the EOS id and the id that padding uses; it is longer than its neighbour's, which is padded
    policy, decoding = make_policy(eos_ids=(0, 1)), Decoding(0.0, 1.0, 8)
    wanted = [SampleRequest((5, 0, 6, 1, 7), (0,)), SampleRequest((0,), (1,))]
    for request, completion in zip(wanted, synced(policy).generate(wanted, decoding)):
        argmax = sampled_distribution(policy, request, completion, decoding).argmax(1)
        assert completion.token_ids == tuple(argmax.tolist())


def test_each_request_has_its_own_cap():
    caps = [1, 5, 3, None, 50]
    wanted = [SampleRequest((4, 5, 6), ("cap", i), cap) for i, cap in enumerate(caps)]
    found = synced(make_policy(eos_ids=())).generate(wanted, Decoding(0.8, 0.9, 9))
    assert [len(c.token_ids) for c in found] == [1, 5, 3, 9, 9]


def test_batches_keep_to_the_budget_and_share_prompts(monkeypatch: pytest.MonkeyPatch):
    sampler = synced(make_policy(), max_batch_tokens=60)
    started: list[tuple[int, int]] = []
    decoder: Any = sampler._decoder
    start = decoder.start

    def spy(prompts: Any, rows: Any, room: int, scale: float) -> Any:
        assert len(set(prompts)) == len(prompts)
        started.append((len(rows), max(map(len, prompts)) + room))
        return start(prompts, rows, room, scale)

    monkeypatch.setattr(decoder, "start", spy)
    sampler.generate(requests(), Decoding(0.8, 0.9, 8))
    # three requests each of 1, 4, 7 and 10 tokens: 3 + 2 rows of 4 + 8 columns, 1 + 3 of 7 + 8, 3 of 10 + 8
    assert started == [(5, 12), (4, 15), (3, 18)]


def test_progress_counts_up_to_all():
    told: list[int] = []
    synced(make_policy(), max_batch_tokens=60).generate(requests(), Decoding(0.8, 0.9, 8), told.append)
    assert told == list(range(1, 13))


def test_nothing_asked_nothing_drawn():
    assert synced(make_policy()).generate([], Decoding()) == []


def test_sync_takes_over_the_weights_and_nothing_is_cached_before_it():
    policy, decoding = make_policy(), Decoding(0.8, 0.9, 10)
    sampler = synced(policy)
    before = sampler.generate(requests(), decoding)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)))
    sampler.sync(policy)
    after = sampler.generate(requests(), decoding)
    assert [c.token_ids for c in after] != [c.token_ids for c in before]
    for request, completion in zip(requests(), after):
        wanted = sampled_distribution(policy, request, completion, decoding)
        wanted = wanted.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0].log()
        assert completion.logprobs is not None
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), wanted, rtol=0, atol=2e-5)


def test_another_policy_or_dtype_is_taken_up():
    sampler, decoding = synced(make_policy()), Decoding(0.8, 0.9, 6)
    other = make_policy(kind="llama")
    sampler.sync(other)
    assert sampler.generate(requests(), decoding) == synced(other).generate(requests(), decoding)
    other.model.to(torch.bfloat16)
    sampler.sync(other)
    assert sampler.generate(requests(), decoding) == synced(other).generate(requests(), decoding)


def test_the_model_is_left_as_it_was():
    policy = make_policy()
    policy.model.train()
    weights = {name: value.clone() for name, value in policy.model.state_dict().items()}
    synced(policy).generate(requests(), Decoding(0.8, 0.9, 6))
    assert policy.model.training
    assert all(torch.equal(value, weights[name]) for name, value in policy.model.state_dict().items())
    out = policy.model(input_ids=torch.tensor([[3, 4]])).logits.sum()
    out.backward()  # no weight has become an inference tensor


@pytest.mark.parametrize("fused", [True, False])
def test_non_finite_logits_name_the_request(fused: bool, monkeypatch: pytest.MonkeyPatch):
    if not fused:
        monkeypatch.setattr(module, "fusable", lambda model: False)
    policy = make_policy(eos_ids=())
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[33] = torch.nan
    wanted = [SampleRequest((4, 5), ("a",)), SampleRequest((4, 33), ("b",)), SampleRequest((4, 6), ("c",))]
    sampler = synced(policy)
    for decoding in (Decoding(0.8, 0.9, 4), Decoding(0.8, 1.0, 4), Decoding(0.0, 1.0, 4)):
        with pytest.raises(NonFiniteLogits, match="request 1") as caught:
            sampler.generate(wanted, decoding)
        assert (caught.value.request, caught.value.token_ids) == (1, ())
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[33] = 0
    sampler.sync(policy)
    assert len(sampler.generate(wanted, Decoding(0.8, 0.9, 4))) == 3  # and it works again


def test_a_prompt_must_fit_with_its_cap():
    sampler = synced(make_policy(eos_ids=()))
    fits = SampleRequest(tuple(range(2, 38)), ())  # 36 tokens; 36 + 28 = 64 is the whole context
    assert len(sampler.generate([fits], Decoding(0.8, 0.9, 28))[0].token_ids) == 28
    with pytest.raises(UserError, match=r"prompt of 36 tokens.*29.*context of 64.*28"):
        sampler.generate([fits], Decoding(0.8, 0.9, 29))
    with pytest.raises(UserError, match=r"prompt of 70 tokens.*context of 64"):
        sampler.generate([SampleRequest((3,) * 70, ())], Decoding(0.8, 0.9, 1))


@pytest.mark.parametrize(
    "decoding",
    [Decoding(-0.1, 0.9, 4), Decoding(float("nan"), 0.9, 4), Decoding(0.8, 0.0, 4), Decoding(0.8, 1.1, 4)],
)
def test_senseless_decoding_is_refused(decoding: Decoding):
    with pytest.raises(UserError, match=r"temperature|top_p"):
        synced(make_policy()).generate(requests(), decoding)


def test_senseless_requests_are_refused():
    sampler = synced(make_policy())
    with pytest.raises(UserError, match="empty prompt"):
        sampler.generate([SampleRequest((), ())], Decoding())
    for decoding, cap in ((Decoding(0.8, 0.9, 0), None), (Decoding(0.8, 0.9, 4), 0)):
        with pytest.raises(UserError, match="max_new_tokens"):
            sampler.generate([SampleRequest((3,), (), cap)], decoding)


def test_senseless_settings_are_refused():
    with pytest.raises(UserError, match="dtype"):
        TorchSampler(dtype=cast(Any, "float8"))
    with pytest.raises(UserError, match="max_batch_tokens"):
        TorchSampler(max_batch_tokens=0)


def test_small_models_run_in_float32_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    policy = make_policy()
    policy.model.to(torch.bfloat16)
    assert synced(policy)._built_for[2] is torch.float32
    assert synced(policy, dtype="bfloat16")._built_for[2] is torch.bfloat16
    monkeypatch.setattr(TorchSampler, "SMALL", 1)
    assert synced(policy)._built_for[2] is torch.bfloat16
    policy.model.to(torch.float64)
    assert synced(policy)._built_for[2] is torch.float32
