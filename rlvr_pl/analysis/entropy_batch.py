"""What `rlvr-pl entropy-grad` measures: a fresh graded batch, fixed contexts, and token weights by direction."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from jsonargparse import ArgumentError, ArgumentParser
from torch import Tensor

from rlvr_pl.callbacks.drift import Contexts, is_context_file, make_contexts
from rlvr_pl.data.pools import load_questions
from rlvr_pl.data.schedule import QuestionSchedule
from rlvr_pl.errors import UserError
from rlvr_pl.grading import GradeRequest, named_grader
from rlvr_pl.objectives import Objective
from rlvr_pl.objectives.base import check_weights
from rlvr_pl.policy import Policy, load_policy
from rlvr_pl.sampling.base import Decoding, SampleRequest
from rlvr_pl.sampling.torch import TorchSampler
from rlvr_pl.types import Rollout, RolloutBatch, StopReason, build_batch
from rlvr_pl.update import measured

WEIGHTINGS = {"seq": "ORL", "mask": "ORLMask", "seqmean": "ORLSeqmean"}
"""The paper's three directions and the objectives that give them; ``--objective`` adds others."""

Tick = Callable[[int], None]
"""Told how much of a stage is done."""
Stage = Callable[[str, int], Tick]
"""Begins a stage of that name and size."""


@dataclass
class Setup:
    """What is measured: `batch` holds the rollouts that carry weight, `weights` their token weights by direction."""

    policy: Policy
    start: Policy
    contexts: RolloutBatch
    batch: RolloutBatch
    advantage: list[float]
    weights: dict[str, Tensor]


def set_up(args: argparse.Namespace, stage: Stage) -> Setup:
    """Load the policies, sample and grade the batch, let the start policy answer the contexts, and weigh.

    `args` are those of the command. Raises UserError where nothing can be measured.
    """

    named = [*WEIGHTINGS.items(), *((text, text) for text in args.objective)]
    objectives = {name: _objective(text) for name, text in named}
    policy = load_policy(args.checkpoint, device=args.device, untie_embeddings=args.untie_embeddings)
    start = policy if args.start is None else load_policy(args.start, device=args.device)
    batch = _sampled_batch(policy, args, stage)
    contexts = _contexts(start, args, stage)
    weights = {
        name: _token_weights(name, objective, batch, policy, start, args) for name, objective in objectives.items()
    }
    if not weights["seq"].any():
        raise UserError("every group is uniform, so that no rollout has an advantage: sample more or other questions")
    carry = torch.stack([w.ne(0).any(1) for w in weights.values()]).any(0).nonzero()[:, 0]
    advantage = objectives["seq"].advantage(batch)[carry].tolist()  # type: ignore[attr-defined]
    batch = batch.select(carry)
    width = batch.mask.shape[1]
    return Setup(policy, start, contexts, batch, advantage, {n: w[carry, :width].cpu() for n, w in weights.items()})


def _sampled_batch(policy: Policy, args: argparse.Namespace, stage: Stage) -> RolloutBatch:
    """The graded rollouts of the chosen questions."""
    pool = load_questions(args.questions)
    ordered = QuestionSchedule(pool, 1, order=args.order or [q.uid for q in pool]).questions
    chosen = ordered[args.question_offset : args.question_offset + args.n_questions]
    if len(chosen) < args.n_questions:
        last = args.question_offset + args.n_questions
        raise UserError(f"--question-offset and --n-questions reach {last}; the order has {len(ordered)} questions")
    decoding = Decoding(args.temperature, args.top_p, args.max_new_tokens or policy.default_max_new_tokens)
    asked = [q for q in chosen for _ in range(args.k)]
    keys = [("entropy-grad", args.seed, q.uid, i % args.k) for i, q in enumerate(asked)]
    sampler = TorchSampler()
    sampler.sync(policy)
    prompts = [policy.prompt_ids(q) for q in asked]
    requests = [SampleRequest(prompt, key) for prompt, key in zip(prompts, keys)]
    completions = sampler.generate(requests, decoding, stage("rollouts", len(asked)))
    texts = [policy.decode(c.token_ids) for c in completions]
    responses = [
        GradeRequest(text, q, policy.template.render(q), c.token_ids, c.stop_reason is StopReason.LENGTH)
        for text, q, c in zip(texts, asked, completions)
    ]
    grader = named_grader(args.grader)
    try:
        grades = grader.grade(responses, require_box=True)
    finally:
        grader.close()
    rollouts = [
        Rollout(q.uid, i % args.k, prompt, c, text, g)
        for i, (q, prompt, c, text, g) in enumerate(zip(asked, prompts, completions, texts, grades))
    ]
    return build_batch(rollouts, args.k, seed=args.seed, cap=decoding.max_new_tokens)


def _contexts(start: Policy, args: argparse.Namespace, stage: Stage) -> RolloutBatch:
    """The start policy's greedy responses to the context questions, or those of a stored file."""
    if is_context_file(args.contexts):
        return Contexts.load(Path(args.contexts), len(start.head)).batch()
    questions = load_questions(args.contexts)
    done = stage("contexts", len(questions))
    decoding = Decoding(max_new_tokens=args.max_new_tokens or start.default_max_new_tokens)
    contexts = make_contexts(start, TorchSampler(), questions, decoding)
    done(len(questions))
    return contexts.batch()


def _objective(text: str) -> Objective:
    """The objective that `--objective` names."""

    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Objective, "objective")
    try:
        settings = parser.parse_args([f"--objective={text}"])
        # jsonargparse 4.49 gave it a new name
        return getattr(parser, "instantiate", parser.instantiate_classes)(settings)["objective"]
    except (ArgumentError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"--objective {text}: {reason}; see `rlvr-pl objectives`") from None


def _token_weights(
    name: str, objective: Objective, batch: RolloutBatch, policy: Policy, start: Policy, args: argparse.Namespace
) -> Tensor:
    """[N, T] the objective's token weights on the complete batch, with what it needs computed beforehand."""
    needs, size = objective.needs, args.micro_batch_tokens
    if not objective.samples or objective.requests(batch):
        raise UserError(
            f"--objective {name}: needs stored solutions or fresh continuations, which are not sampled here"
        )
    with_entropy = "entropy" in needs
    if needs & {"old_logprobs", "entropy"}:
        old, entropy = measured(policy, batch, max_tokens=size, temperature=1.0, with_entropy=with_entropy)
        batch = batch.replace(old_logprobs=old, entropy=entropy)
    if "start_logprobs" in needs:
        batch = batch.replace(start_logprobs=measured(start, batch, max_tokens=size, temperature=1.0)[0])
    if "sampling_entropy" in needs:
        _, entropy = measured(policy, batch, max_tokens=size, temperature=args.temperature, with_entropy=True)
        batch = batch.replace(sampling_entropy=entropy)
    weights = objective.token_weights(batch.replace(extras=objective.prepare(batch)))
    check_weights(objective, weights, batch)
    return weights.double()
