"""First-order effect of rollouts and objectives on the entropy of fixed contexts (paper section 4.4, Table 5).

H is the mean next-token entropy on the start policy's greedy responses to --contexts. A fresh batch of questions is
sampled; every rollout's slope s_i = <grad H, grad log p(o_i)> says how H changes as it is made likelier, and each
loss's dH/d(eta) = sum w_i A_i s_i how H changes along it. Gradients are FP32, steps are taken in the policy's own dtype
on copies of its weights. What it shows is local to one parameter point.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr_pl.analysis.command import Result, Table, add_output_arguments, jsonable, progress_console
from rlvr_pl.core.entropy_gradient import CLASSES, class_rates, cosine, effect, rollout_classes
from rlvr_pl.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.objectives import Objective
    from rlvr_pl.policy import Policy
    from rlvr_pl.sampling.base import Decoding
    from rlvr_pl.types import Question, RolloutBatch

    Tick = Callable[[int], None]

EPILOG = """\
JSON keys: checkpoint, checkpoint_sha256, start, contexts, context_tokens, entropy (H), grad_norm (of H),
questions, question_offset, k, seed, sampled_rollouts, mixed_groups, mixed_rollouts, classes {positive,
negative_eos, negative_truncated: {rollouts, mean_tokens, mass, rate (nats per unit step and token), relative
(to positive), ci_low, ci_high}}, directions {seq, mask, seqmean and each --objective: {slope (dH/d eta),
ci_low, ci_high, by_class, cosine, norm, m_plus, m_minus, sign_step, adamw, adamw_clip (change of H; null
without --adamw)}}, random_sign_step, eta, method, weights_restored. The file of --out holds the same and
"rollouts": one record a measured rollout. With --summarize: checkpoints: [{checkpoint, checkpoint_sha256,
classes (pooled), batches: [the above without rollouts, with file]}].

example: rlvr-pl entropy-grad --checkpoint embedded:start --questions embedded:train --contexts embedded:drift \\
             --question-offset 5000 --out batch1.json
         rlvr-pl entropy-grad --checkpoint embedded:start --questions embedded:train --contexts embedded:drift \\
             --question-offset 5064 --seed 1 --out batch2.json
         rlvr-pl entropy-grad --summarize batch1.json batch2.json"""

WEIGHTINGS = {"seq": "ORL", "mask": "ORLMask", "seqmean": "ORLSeqmean"}
_RECORD = "entropy-grad"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--summarize", nargs="+", metavar="FILE", help="pool the batches of earlier --out files; nothing is measured")
    add("--checkpoint", default="embedded:start", help="policy to measure at (default: %(default)s)")
    add("--start", help="policy whose greedy responses are the contexts (default: the checkpoint)")
    add("--contexts", default="embedded:drift", help="questions of the fixed contexts (default: %(default)s)")
    add("--questions", default="embedded:train", help="pool of the questions to sample (default: %(default)s)")
    add("--order", metavar="FILE", help="JSON list of uids that orders the pool")
    add("--question-offset", type=int, default=0, help="questions of the order to pass over (default: 0)")
    add("--n-questions", type=int, default=64, help="questions to sample (default: %(default)s)")
    add("--k", type=int, default=8, help="rollouts a question (default: %(default)s)")
    add("--seed", type=int, default=0, help="names the samples and the random sign vector (default: 0)")
    add("--temperature", type=float, default=0.8, help="sampling temperature (default: %(default)s)")
    add("--top-p", type=float, default=0.9, help="nucleus mass (default: %(default)s)")
    add("--max-new-tokens", type=int, help="cap on a completion (default: the checkpoint's own)")
    add("--grader", default="math", choices=["math", "exact", "supplied"])
    add(
        "--objective",
        action="append",
        default=[],
        metavar="NAME",
        help="also measure this objective's token weights: a name, a class path, or JSON with class_path and init_args;"
        " may be repeated",
    )
    add("--eta", type=float, default=1e-5, help="size of the realised steps (default: %(default)s)")
    add("--adamw", action="store_true", help="also take AdamW's real first step, clipped to norm 1 and not")
    add(
        "--method",
        choices=["forward", "backward"],
        default="forward",
        help="slopes by one forward-mode pass, or by one backward a rollout (the reference; default: %(default)s)",
    )
    add("--micro-batch-tokens", type=int, default=16384, help="padded tokens computed at once (default: %(default)s)")
    add("--device", default="cpu", help="where to compute (default: %(default)s)")
    add("--untie-embeddings", action="store_true", help="load the head as its own parameter")
    add("--out", dest="file", type=Path, metavar="FILE", help="write everything, rollouts included, to FILE (JSON)")
    add("--overwrite", action="store_true", help="allow --out to replace an existing file")
    parser.epilog = EPILOG
    add_output_arguments(parser, table=False)


def run(args: argparse.Namespace) -> Result:
    if args.summarize:
        return _summary(args.summarize)
    _check(args)
    with _progress() as stage:
        data, rollouts = _measure(args, stage)
    if args.file is not None:
        from rlvr_pl.records import atomic_write_text

        content = {"record": _RECORD, "version": 1, **data, "rollouts": rollouts}
        atomic_write_text(args.file, json.dumps(jsonable(content), allow_nan=False) + "\n")
    note = "First order, at one parameter point, on one batch: pool batches with --summarize."
    return Result(data, [_class_table(data["checkpoint"], data["classes"]), *_direction_tables([data])], [note])


# ---- one batch -----------------------------------------------------------------------------------------------------


@dataclass
class Setup:
    """What is measured: `batch` holds the rollouts that carry weight, `weights` their token weights by direction."""

    policy: Policy
    start: Policy
    contexts: RolloutBatch
    batch: RolloutBatch
    advantage: list[float]
    weights: dict[str, Tensor]


def _measure(args: argparse.Namespace, stage: Callable[[str, int], Tick]) -> tuple[dict[str, Any], list[dict]]:
    """The figures of one batch, and a record of each of its measured rollouts."""
    from rlvr_pl.analysis import entropy_probe as probe

    setup = _set_up(args, stage)
    batch, truncated, tokens = setup.batch, setup.batch.truncated.tolist(), args.micro_batch_tokens
    wide = probe.widened(setup.policy)
    h, gradient = probe.entropy_gradient(wide, setup.contexts, tokens)
    tick = stage(f"slopes ({args.method})", len(batch))
    if args.method == "forward":
        per_token = probe.slopes_forward(wide, batch, gradient, tokens, tick)
        slopes, *parts = [(w * per_token).sum(1).tolist() for w in (batch.mask, *setup.weights.values())]
    else:
        weightings = [batch.mask.double(), *setup.weights.values()]
        slopes, *parts = probe.slopes_backward(wide, batch, gradient, weightings, tick).tolist()
    grad_norm = probe.norm(gradient)
    del gradient
    steps = probe.RealisedSteps(setup.policy, wide, setup.contexts, tokens)
    tick = stage("directions and steps", len(setup.weights))
    directions = {}
    for name, part in zip(setup.weights, parts):
        found = effect(batch.uids, part, setup.advantage, truncated)
        directions[name] = {
            **asdict(found),
            **_direction(wide, steps, batch, setup.weights[name], found, grad_norm, args),
        }
        tick(len(directions))
    random_step = steps.random_sign(args.eta, args.seed)
    if setup.policy.weights_sha256() != setup.policy.sha256:
        raise RuntimeError("the measurement changed the policy's weights")
    mixed = {uid for uid, a in zip(batch.uids, setup.advantage) if a}
    rates = class_rates(batch.uids, setup.advantage, batch.lengths.tolist(), truncated, slopes)
    data = {
        "checkpoint": setup.policy.name,
        "checkpoint_sha256": setup.policy.sha256,
        "start": setup.start.name,
        "contexts": args.contexts,
        "context_tokens": int(setup.contexts.mask.sum()),
        "entropy": h,
        "grad_norm": grad_norm,
        "questions": args.n_questions,
        "question_offset": args.question_offset,
        "k": args.k,
        "seed": args.seed,
        "sampled_rollouts": args.n_questions * args.k,
        "mixed_groups": len(mixed),
        "mixed_rollouts": len(mixed) * args.k,
        "classes": {name: asdict(rate) for name, rate in rates.items()},
        "directions": directions,
        "random_sign_step": random_step,
        "eta": args.eta,
        "method": args.method,
        "weights_restored": True,
    }
    return data, _records(setup, slopes, dict(zip(setup.weights, parts)))


def _set_up(args: argparse.Namespace, stage: Callable[[str, int], Tick]) -> Setup:
    import torch

    from rlvr_pl.policy import load_policy

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


def _direction(
    wide: Policy,
    steps: Any,
    batch: RolloutBatch,
    weights: Tensor,
    found: Any,
    grad_norm: float,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Cosine, norm, signed mass and realised steps of one direction."""
    from rlvr_pl.analysis import entropy_probe as probe
    from rlvr_pl.core.weights import signed_mass

    d = probe.direction(wide, batch, weights, args.micro_batch_tokens)
    length = probe.norm(d)
    m_plus, m_minus = signed_mass(weights)
    return {
        "cosine": cosine(found.slope, grad_norm, length),
        "norm": length,
        "m_plus": m_plus,
        "m_minus": m_minus,
        "sign_step": steps.sign(d, args.eta),
        "adamw": steps.adamw(d, args.eta, None) if args.adamw else None,
        "adamw_clip": steps.adamw(d, args.eta, 1.0) if args.adamw else None,
    }


def _records(setup: Setup, slopes: list[float], parts: dict[str, list[float]]) -> list[dict[str, Any]]:
    batch = setup.batch
    kinds = rollout_classes(setup.advantage, batch.truncated.tolist())
    return [
        {
            "uid": batch.uids[i],
            "sample": batch.samples[i],
            "reward": float(batch.rewards[i]),
            "advantage": setup.advantage[i],
            "length": int(batch.lengths[i]),
            "truncated": bool(batch.truncated[i]),
            "class": CLASSES[kinds[i]] if kinds[i] >= 0 else None,
            "slope": slopes[i],
            "contributions": {name: part[i] for name, part in parts.items()},
        }
        for i in range(len(batch))
    ]


# ---- sampling ------------------------------------------------------------------------------------------------------


def _sampled_batch(policy: Policy, args: argparse.Namespace, stage: Callable[[str, int], Tick]) -> RolloutBatch:
    """The graded rollouts of the chosen questions."""
    from rlvr_pl.data.pools import load_questions
    from rlvr_pl.data.schedule import QuestionSchedule
    from rlvr_pl.grading import GradeRequest, named_grader
    from rlvr_pl.sampling.base import Decoding
    from rlvr_pl.types import Rollout, StopReason, build_batch

    pool = load_questions(args.questions)
    ordered = QuestionSchedule(pool, 1, order=args.order or [q.uid for q in pool]).questions
    chosen = ordered[args.question_offset : args.question_offset + args.n_questions]
    if len(chosen) < args.n_questions:
        last = args.question_offset + args.n_questions
        raise UserError(f"--question-offset and --n-questions reach {last}; the order has {len(ordered)} questions")
    decoding = Decoding(args.temperature, args.top_p, args.max_new_tokens or policy.default_max_new_tokens)
    asked = [q for q in chosen for _ in range(args.k)]
    keys = [("entropy-grad", args.seed, q.uid, i % args.k) for i, q in enumerate(asked)]
    completions = _complete(policy, asked, keys, decoding, stage("rollouts", len(asked)))
    texts = [policy.decode(c.token_ids) for c in completions]
    requests = [
        GradeRequest(text, q, policy.template.render(q), c.token_ids, c.stop_reason is StopReason.LENGTH)
        for text, q, c in zip(texts, asked, completions)
    ]
    grader = named_grader(args.grader)
    try:
        grades = grader.grade(requests, require_box=True)
    finally:
        grader.close()
    rollouts = [
        Rollout(q.uid, i % args.k, policy.prompt_ids(q), c, text, g)
        for i, (q, c, text, g) in enumerate(zip(asked, completions, texts, grades))
    ]
    return build_batch(rollouts, args.k, seed=args.seed, cap=decoding.max_new_tokens)


def _contexts(start: Policy, args: argparse.Namespace, stage: Callable[[str, int], Tick]) -> RolloutBatch:
    """The start policy's greedy responses to the context questions."""
    from rlvr_pl.data.pools import load_questions
    from rlvr_pl.sampling.base import Decoding
    from rlvr_pl.types import Grade, GradeStatus, Rollout, build_batch

    questions = load_questions(args.contexts)
    decoding = Decoding(0.0, 1.0, args.max_new_tokens or start.default_max_new_tokens)
    completions = _complete(start, questions, [()] * len(questions), decoding, stage("contexts", len(questions)))
    ungraded = Grade(GradeStatus.ERROR, float("nan"))
    rollouts = [Rollout(q.uid, 0, start.prompt_ids(q), c, "", ungraded) for q, c in zip(questions, completions)]
    return build_batch(rollouts, 1)


def _complete(
    policy: Policy, questions: Sequence[Question], keys: Sequence[Any], decoding: Decoding, tick: Tick
) -> Any:
    from rlvr_pl.sampling.base import SampleRequest
    from rlvr_pl.sampling.torch import TorchSampler

    sampler = TorchSampler()
    sampler.sync(policy)
    try:
        requests = [SampleRequest(policy.prompt_ids(q), key) for q, key in zip(questions, keys)]
        return sampler.generate(requests, decoding, tick)
    finally:
        sampler.close()


# ---- objectives ----------------------------------------------------------------------------------------------------


def _objective(text: str) -> Objective:
    """The objective that `--objective` names."""
    from jsonargparse import ArgumentError, ArgumentParser

    from rlvr_pl.objectives import Objective

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
    from rlvr_pl.objectives.base import check_weights
    from rlvr_pl.update import measured

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


# ---- pooling -------------------------------------------------------------------------------------------------------


def _summary(files: Sequence[str]) -> Result:
    """Pool the batches of each checkpoint (Table 5)."""
    by_checkpoint: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        batch = _read(file)
        by_checkpoint.setdefault(batch["checkpoint_sha256"], []).append({"file": file, **batch})
    checkpoints = [{**_pool(batches), "checkpoint_sha256": sha} for sha, batches in by_checkpoint.items()]
    tables = []
    for found in checkpoints:
        title = f"{found['checkpoint']}, {len(found['batches'])} batches pooled"
        tables += [_class_table(title, found["classes"]), *_direction_tables(found["batches"])]
    note = "Rates are pooled over batches, with intervals over mixed groups; dH/d(eta) is of each batch."
    return Result({"checkpoints": checkpoints}, tables, [note])


def _pool(batches: list[dict[str, Any]]) -> dict[str, Any]:
    owner: dict[str, str] = {}
    for batch in batches:
        for uid in {r["uid"] for r in batch["rollouts"]}:
            if uid in owner:
                raise UserError(f"{batch['file']}: question {uid!r} is in {owner[uid]} too; pool independent batches")
            owner[uid] = batch["file"]
    rollouts = [r for batch in batches for r in batch["rollouts"]]
    columns = ([r[key] for r in rollouts] for key in ("uid", "advantage", "length", "truncated", "slope"))
    shown = [{k: v for k, v in batch.items() if k not in ("rollouts", "record", "version")} for batch in batches]
    classes = {name: asdict(rate) for name, rate in class_rates(*columns).items()}
    return {"checkpoint": batches[0]["checkpoint"], "classes": classes, "batches": shown}


_FIELDS = {"uid": str, "advantage": (int, float), "length": int, "truncated": bool, "slope": (int, float)}


def _read(file: str) -> dict[str, Any]:
    from rlvr_pl.data.pools import read_json

    content = read_json(file)
    if not isinstance(content, dict) or content.get("record") != _RECORD:
        raise UserError(f"{file}: not a file that `rlvr-pl entropy-grad --out` wrote")
    for i, rollout in enumerate(content.get("rollouts") or [{}]):
        for name, kind in _FIELDS.items():
            if not isinstance(rollout.get(name), kind):
                raise UserError(f"{file}: rollout {i}: {name!r} is missing or of the wrong type")
    return content


# ---- the rest ------------------------------------------------------------------------------------------------------


def _class_table(title: str, classes: dict[str, dict[str, Any]]) -> Table:
    columns = ("rollouts", "mean_tokens", "rate", "relative", "ci_low", "ci_high")
    return Table(
        f"Effect per token on H at {title}",
        ("class", "rollouts", "tokens", "rate", "relative", "low", "high"),
        [[name, *(rate[c] for c in columns)] for name, rate in classes.items()],
    )


def _direction_tables(batches: Sequence[dict[str, Any]]) -> list[Table]:
    """Table 5b in two: the first-order figures, and what steps did."""
    first_order, realised = [], []
    for i, batch in enumerate(batches, 1):
        for name, d in batch["directions"].items():
            first_order.append([i, name, *(d[c] for c in ("slope", "ci_low", "ci_high", "cosine"))])
            realised.append([i, name, *(_small(d[c]) for c in ("sign_step", "adamw", "adamw_clip"))])
        realised.append([i, "random sign", _small(batch["random_sign_step"]), None, None])
    return [
        Table("First-order change of H", ("batch", "direction", "dH/d eta", "low", "high", "cosine"), first_order),
        Table("Change of H in one step", ("batch", "direction", "sign step", "AdamW", "AdamW, clip 1"), realised),
    ]


def _small(x: float | None) -> str | None:
    return None if x is None else f"{x:+.2e}"


def _check(args: argparse.Namespace) -> None:
    for name in ("n_questions", "max_new_tokens", "micro_batch_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if args.k < 2:
        raise UserError(f"--k {args.k}: an advantage needs at least 2 rollouts of a question")
    if args.question_offset < 0 or args.seed < 0:
        raise UserError("--question-offset and --seed must be at least 0")
    if not (args.temperature > 0 and 0 < args.top_p <= 1 and args.eta > 0):
        raise UserError("--temperature and --eta must be above 0, --top-p in (0, 1]")
    if args.file is not None and args.file.exists() and not args.overwrite:
        raise UserError(f"--out {args.file}: the file exists; choose another name or pass --overwrite")
    if args.file is not None and not args.file.parent.is_dir():
        raise UserError(f"--out {args.file}: the folder {args.file.parent} does not exist")


@contextmanager
def _progress() -> Iterator[Callable[[str, int], Tick]]:
    """Bars with ETA on stderr: ``stage(name, total)`` begins one and gives a function that is told how much is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=progress_console(), transient=True) as bar:

        def stage(name: str, total: int) -> Tick:
            task = bar.add_task(name, total=total)
            return lambda done: bar.update(task, completed=done)

        yield stage
