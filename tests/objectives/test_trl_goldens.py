"""Losses and their gradients against TRL's own numbers (`--goldens PATH`, by default a copy in tests/golden).

TRL scores each micro-batch by itself; here an update is one batch. Where that matters (the token count of "bnpo", the
entropy quantile and the entropy bonus) each of TRL's micro-batches is given as a batch of its own.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rlvr_pl.core.advantage import decoupled_advantage, group_advantage
from rlvr_pl.core.logprobs import chunked_logprobs
from rlvr_pl.objectives import (
    BNPO,
    CISPO,
    DAPO,
    LUSPO,
    SAPO,
    VESPO,
    ClippedGRPO,
    EntropyBonus,
    KLPenalty,
    MismatchCorrection,
    OffPolicyMask,
)
from rlvr_pl.types import RolloutBatch, Totals

# Both sides are FP64 sums of at most some hundred terms of size up to about 10: rounding is below 1e-12, and 1e-9 is
# the accuracy that the goldens claim.
TOLERANCE = 1e-9
# TRL holds reward weights and sums in float32: 1e-6 for advantages of several rewards.
WEIGHTED_TOLERANCE = 1e-6

SCALES = {"group": "std", "batch": "batch-std", "none": "none"}
DEFAULTS: dict[str, Any] = {
    "loss_type": "dapo",
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "num_iterations": 1,
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "mask_truncated_completions": False,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_clip_max": 3.0,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "max_completion_length": 512,
    "gradient_accumulation_steps": 1,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}


@dataclass(frozen=True)
class Case:
    """One loss variant of one batch of the golden file."""

    data: dict[str, Any]
    variant: dict[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        return {**DEFAULTS, **self.variant["config"]}

    @property
    def name(self) -> str:
        # The file's JSON order is stable, so that a name is the same in every run.
        return self.data["name"] + ":" + ",".join(f"{k}={v}" for k, v in self.variant["config"].items())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    golden = json.loads(metafunc.config.getoption("--goldens").read_text())
    if "case" in metafunc.fixturenames:
        cases = [Case(data, variant) for data in golden["loss_cases"] for variant in data["variants"]]
        metafunc.parametrize("case", cases, ids=[case.name for case in cases])
    if "selected" in metafunc.fixturenames:
        cases = golden["logprob_cases"]
        metafunc.parametrize("selected", cases, ids=[f"T={c['temperature']}-{i}" for i, c in enumerate(cases)])
    if "advantages" in metafunc.fixturenames:
        cases = golden["advantage_cases"]
        names = [f"{c['name']}-{c['scale_rewards']}-{c['multi_objective_aggregation']}" for c in cases]
        metafunc.parametrize("advantages", cases, ids=names)


def test_loss_and_gradient_equal_trl(case: Case, make_batch, pad) -> None:
    unknown = set(case.config) - set(DEFAULTS)
    if unknown:
        pytest.skip(f"{case.name}: {', '.join(sorted(unknown))} is not implemented")
    logprobs = pad(case.data["logps"]).requires_grad_()
    entropy = pad(case.data["entropies"]).requires_grad_()
    loss = _loss(case, _batch(case, make_batch, pad, entropy), logprobs)
    assert loss.item() == pytest.approx(case.variant["loss"], abs=TOLERANCE, rel=0)
    gradient, entropy_gradient = torch.autograd.grad(loss, [logprobs, entropy], allow_unused=True)
    _assert_rows(gradient, case.variant["grad_logps"])
    if "grad_entropies" in case.variant:
        _assert_rows(entropy_gradient, case.variant["grad_entropies"])


def test_advantage_equals_trl(advantages: dict[str, Any]) -> None:
    if advantages["multi_objective_aggregation"] == "normalize_then_sum":
        rows = [r if isinstance(r, list) else [r] for r in advantages["rewards"]]
        rewards = torch.tensor([[float("nan") if r is None else r for r in row] for row in rows], dtype=torch.float64)
        weights = torch.tensor(advantages["reward_weights"] or [1.0], dtype=torch.float64)
        ours = decoupled_advantage(rewards, weights, advantages["group"])
    else:
        sums = [_weighted(r, advantages["reward_weights"]) for r in advantages["rewards"]]
        ours = group_advantage(sums, advantages["group"], scale=SCALES[advantages["scale_rewards"]])
    tolerance = WEIGHTED_TOLERANCE if advantages["reward_weights"] else TOLERANCE
    assert ours.tolist() == pytest.approx(advantages["advantages"], abs=tolerance, rel=0)


def test_log_probs_and_entropies_equal_trl(selected: dict[str, Any]) -> None:
    """In FP32, where logits of size 10 have an error of about 1e-6: the 1e-5 that the goldens claim."""
    hidden, head = (torch.tensor(selected[name]).requires_grad_() for name in ("hidden", "weight"))
    targets, upstream = torch.tensor(selected["targets"]), torch.tensor(selected["upstream"])
    found, entropy = chunked_logprobs(
        hidden, head, targets, temperature=selected["temperature"], vocab_chunk=16, with_entropy=True
    )
    gradients = torch.autograd.grad((upstream * found).sum() + 0.3 * entropy.sum(), [hidden, head])
    expected = ("log_probs", "entropy", "grad_hidden", "grad_weight")
    for ours, name in zip((found, entropy, *gradients), expected, strict=True):
        torch.testing.assert_close(ours, torch.tensor(selected[name]), rtol=0, atol=1e-5)


def _weighted(reward: float | list[float | None] | None, weights: list[float] | None) -> float:
    """TRL's sum over reward functions: None counts as absent, NaN if all are."""
    parts = reward if isinstance(reward, list) else [reward]
    present = [(r, w) for r, w in zip(parts, weights or [1.0] * len(parts)) if r is not None]
    return sum(r * w for r, w in present) if present else float("nan")


def _batch(case: Case, make_batch, pad, entropy: torch.Tensor) -> RolloutBatch:
    data, config = case.data, case.config
    rewards = [_weighted(r, data.get("reward_weights")) for r in data["rewards"]]
    endings = (data["eos_id"], data["pad_id"])
    truncated = [i for i, ids in enumerate(data["completion_ids"]) if ids[-1] not in endings]
    batch = make_batch(data["completion_ids"], rewards, data["group"], truncated, cap=config["max_completion_length"])
    if data.get("tool_mask"):
        mask = batch.mask & (pad(data["tool_mask"]).nan_to_num() > 0)
        totals = Totals(len(batch), int(mask.sum()), int(mask[batch.truncated].sum()))
        batch = batch.replace(mask=mask, totals=totals)
    off_policy = config["num_iterations"] > 1 or _corrected(config)
    return batch.replace(
        old_logprobs=pad(data["old_logps"] if off_policy else data["logps"]),
        start_logprobs=pad(data["ref_logps"]),
        sampling_logprobs=pad(data["sampling_logps"]),
        entropy=entropy,
    )


def _corrected(config: dict[str, Any]) -> bool:
    return config["use_vllm"] and config["vllm_importance_sampling_correction"]


def _objective(config: dict[str, Any]) -> ClippedGRPO | CISPO | SAPO | VESPO:
    low, high = config["epsilon"], config["epsilon_high"] or config["epsilon"]
    shared: dict[str, Any] = {
        "scale": SCALES[config["scale_rewards"]],
        "level": config["importance_sampling_level"],
        "mask_truncated": config["mask_truncated_completions"],
        "entropy_top": config["top_entropy_quantile"],
        "inner_epochs": config["num_iterations"],
    }
    if config["beta"]:
        shared["kl"] = KLPenalty(config["beta"], "k3", config["use_bias_correction_kl"])
    if config["entropy_coef"]:
        shared["entropy_bonus"] = EntropyBonus(config["entropy_coef"])
    if config["off_policy_mask_threshold"] is not None:
        behaviour = "sampler" if config["use_vllm"] else "old"
        shared["off_policy_mask"] = OffPolicyMask(config["off_policy_mask_threshold"], behaviour)
    if _corrected(config):
        level, mode = config["vllm_importance_sampling_mode"].split("_")
        low_rho, high_rho = (config[f"vllm_importance_sampling_clip_{end}"] for end in ("min", "max"))
        shared["correction"] = MismatchCorrection(level, mode, low_rho, high_rho)
    clip = {"clip_low": low, "clip_high": high, "delta": config["delta"]}
    kind = config["loss_type"]
    if kind == "grpo":
        return ClippedGRPO(**clip, **shared)
    if kind == "dr_grpo":
        return ClippedGRPO(aggregation="constant", constant=config["max_completion_length"], **clip, **shared)
    if kind == "bnpo":
        return BNPO(**clip, **shared)
    if kind == "dapo":
        return DAPO(overlong_buffer=0.0, **clip, **shared)
    if kind == "luspo":
        return LUSPO(**clip, **shared)
    if kind == "cispo":
        return CISPO(cap=high, **shared)
    if kind == "sapo":
        taus = config["sapo_temperature_pos"], config["sapo_temperature_neg"]
        return SAPO(tau_positive=taus[0], tau_negative=taus[1], **shared)
    if kind == "vespo":
        kernel = {
            "k_positive": config["vespo_k_pos"],
            "lam_positive": config["vespo_lambda_pos"],
            "k_negative": config["vespo_k_neg"],
            "lam_negative": config["vespo_lambda_neg"],
        }
        return VESPO(**kernel, **shared)
    pytest.skip(f"loss_type={kind} is not implemented")


def _loss(case: Case, batch: RolloutBatch, logprobs: torch.Tensor) -> torch.Tensor:
    """The loss of TRL's micro-batches, each given as a batch, with the advantages of all rollouts together."""
    config = case.config
    objective = _objective({**config, "entropy_coef": 0.0})
    advantage = objective.advantage(batch)
    steps = config["gradient_accumulation_steps"]
    # These are averaged over the micro-batches; the others divide by the tokens of all of them.
    averaged = config["loss_type"] not in ("dapo", "cispo", "vespo")
    total = torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(len(batch)).chunk(steps):
        part = _rows(batch, rows)
        own = part.replace(totals=Totals(len(rows), int(part.mask.sum()), int(part.mask[part.truncated].sum())))
        objective.advantage = lambda _, rows=rows: advantage[rows]
        scored = own if averaged else part
        policy = objective.loss(logprobs[rows], objective.token_weights(scored), scored)
        total = total + (policy / steps if averaged else policy)
        if config["entropy_coef"]:
            bonus = _objective({**config, "beta": 0.0})
            own = own.replace(extras=bonus.prepare(own))
            total = total + bonus.penalties(logprobs[rows], own) / steps
    return total


def _rows(batch: RolloutBatch, rows: torch.Tensor) -> RolloutBatch:
    """`RolloutBatch.select` without trimming, for TRL's tool masks leave holes in rows."""
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    names = {name: tuple(fields[name][i] for i in rows) for name in ("uids", "samples", "prompt_ids")}
    return batch.replace(**names, **{name: x[rows] for name, x in fields.items() if isinstance(x, torch.Tensor)})


def _assert_rows(ours: torch.Tensor | None, rows: list[list[float]]) -> None:
    for i, row in enumerate(rows):
        found = [0.0] * len(row) if ours is None else ours[i, : len(row)].tolist()
        assert found == pytest.approx(row, abs=TOLERANCE, rel=0), f"row {i}"
