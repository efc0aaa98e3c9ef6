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
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr_pl.analysis.command import Result, Table, add_output_arguments, check_file, jsonable, progress_bar
from rlvr_pl.core.entropy_gradient import CLASSES, class_rates, cosine, effect, rollout_classes
from rlvr_pl.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.analysis.entropy_batch import Setup, Stage
    from rlvr_pl.policy import Policy
    from rlvr_pl.types import RolloutBatch

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

_RECORD = "entropy-grad"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--summarize", nargs="+", metavar="FILE", help="pool the batches of earlier --out files; nothing is measured")
    add("--checkpoint", default="embedded:start", help="policy to measure at (default: %(default)s)")
    add("--start", help="policy whose greedy responses are the contexts (default: the checkpoint)")
    add(
        "--contexts",
        default="embedded:drift",
        help="their questions, or a drift_contexts.json of a run (default: %(default)s)",
    )
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


def _measure(args: argparse.Namespace, stage: Stage) -> tuple[dict[str, Any], list[dict]]:
    """The figures of one batch, and a record of each of its measured rollouts."""
    from rlvr_pl.analysis import entropy_probe as probe
    from rlvr_pl.analysis.entropy_batch import set_up

    setup = set_up(args, stage)
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
    from rlvr_pl.text_file import read_json

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
    if args.file is not None:
        check_file(args.file, args.overwrite)


@contextmanager
def _progress() -> Iterator[Stage]:
    """Bars with ETA on stderr: ``stage(name, total)`` begins one and gives a function that is told how much is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress_bar(*columns) as bar:

        def stage(name: str, total: int) -> Callable[[int], None]:
            task = bar.add_task(name, total=total)
            return lambda done: bar.update(task, completed=done)

        yield stage
