"""Our update beside the supplied recipe's own code: same weights, same rollouts, same loss and gradient."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3ForCausalLM

from rlvr_pl.analysis.import_supplied import _config, _hugging_face_name
from rlvr_pl.objectives import GRPO
from rlvr_pl.policy import Policy
from rlvr_pl.types import Completion, Grade, GradeStatus, Rollout, StopReason, build_batch
from rlvr_pl.update import GradientSum, accumulate_gradient

ch06 = pytest.importorskip("reasoning_from_scratch.ch06", reason="the extra 'supplied' is not installed")

CONFIG = {
    "vocab_size": 61,
    "context_length": 128,
    "emb_dim": 32,
    "n_heads": 4,
    "n_layers": 2,
    "hidden_dim": 48,
    "head_dim": 8,
    "qk_norm": True,
    "n_kv_groups": 2,
    "rope_base": 1_000_000.0,
    "dtype": torch.float32,
}
EOS = 1


def supplied_model():
    from reasoning_from_scratch.qwen3 import Qwen3Model

    torch.manual_seed(5)
    return Qwen3Model(CONFIG).eval()


def policy_of(model, path) -> Policy:
    state = {_hugging_face_name(k): v.detach().clone() for k, v in model.state_dict().items() if _hugging_face_name(k)}
    ours = Qwen3ForCausalLM(_config(state, None, path)).eval()
    ours.load_state_dict(state)
    return Policy(ours, None, None, (EOS,), 0, 128, 12, "supplied", "none")


def test_supplied_loss_and_gradient(monkeypatch, tmp_path):
    """Both sides are FP32; sums of about 1e3 products of order 1 round to 1e3 * 6e-8 = 6e-5 at worst and 2e-6 as a
    random walk; 1e-5 of the gradient's norm is the bar."""
    theirs = supplied_model()
    policy = policy_of(theirs, tmp_path)
    drawn: list[tuple[list[int], int]] = []
    sample = ch06.sample_response

    def recorded(**words):
        ids, prompt, text = sample(**words)
        drawn.append((ids.tolist(), prompt))
        return ids, prompt, text

    tokenizer = SimpleNamespace(
        eos_token_id=EOS,
        encode=lambda text: [2 + ord(c) % 59 for c in text][:20],
        decode=lambda ids: " ".join(map(str, ids if isinstance(ids, list) else ids.tolist())),
    )
    monkeypatch.setattr(ch06, "sample_response", recorded)
    monkeypatch.setattr(ch06, "reward_rlvr", lambda text, answer: float(sum(map(int, text.split())) % 2))
    torch.manual_seed(0)
    out = ch06.compute_grpo_loss(
        theirs, tokenizer, {"problem": "3+4", "answer": "7"}, "cpu", num_rollouts=6, max_new_tokens=12
    )
    out["loss_tensor"].backward()
    rewards = [s["reward"] for s in out["samples"]]
    assert len(set(rewards)) == 2, "the seed must give a mixed group, or the gradient is zero"

    rollouts = [
        Rollout(
            uid="q",
            sample=i,
            prompt_ids=tuple(ids[:prompt]),
            completion=Completion(tuple(ids[prompt:]), StopReason.EOS if ids[-1] == EOS else StopReason.LENGTH),
            text="",
            grade=Grade(GradeStatus.WRONG, reward),
        )
        for i, ((ids, prompt), reward) in enumerate(zip(drawn, rewards))
    ]
    batch = build_batch(rollouts, 6)
    total = GradientSum([(p, p) for p in policy.model.parameters()])
    loss, _ = accumulate_gradient(policy, GRPO(), batch, GRPO().token_weights(batch), total, max_tokens=10**6)
    total.deliver()
    assert loss == pytest.approx(float(out["loss_tensor"]), abs=1e-5 * abs(float(out["loss_tensor"])) + 1e-5)
    ours = dict(policy.model.named_parameters())
    norm = torch.cat([p.grad.flatten() for p in theirs.parameters()]).norm()
    for name, parameter in theirs.named_parameters():
        gap = (ours[_hugging_face_name(name)].grad - parameter.grad).norm()
        assert gap <= 1e-5 * norm, name
