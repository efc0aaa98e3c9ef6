"""Entropy, KL to the start and NLL of checkpoints on fixed contexts, teacher-forced (paper, section 4.3, Table 3).

The contexts are questions that no arm trains on with the start policy's greedy completions: generated here, or read
from a run's drift_contexts.json, so that several runs and this command measure on the same tokens. Entropy is of the
next token at temperature 1, KL is (start || checkpoint), NLL is of the start's tokens; all nats a token, means over the
completion tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr_pl.analysis.command import Result, Table, add_output_arguments, progress_console
from rlvr_pl.errors import UserError
from rlvr_pl.records import check_place

if TYPE_CHECKING:
    from rlvr_pl.callbacks.drift import Contexts
    from rlvr_pl.policy import Policy

EPILOG = """\
JSON keys: start {name, entropy, kl, nll, tokens}, checkpoints: [{name, entropy, kl, nll, tokens,
entropy_ratio}] in the order given, contexts {source, n, tokens, start_sha256}.

example: rlvr-pl drift --start embedded:base --checkpoints runs/a/snapshots/update-* --contexts embedded:drift"""
COLUMNS = ("name", "entropy", "kl", "nll", "tokens", "entropy_ratio")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--start", required=True, help="the start policy: embedded:base, a folder or a hub name")
    add("--checkpoints", required=True, nargs="+", metavar="POLICY", help="policies to measure, in this order")
    add("--contexts", default="embedded:drift", help="question set, or a drift_contexts.json (default: %(default)s)")
    add("--n", type=int, default=64, help="use the first N questions of the set (default: %(default)s)")
    add("--max-new-tokens", type=int, help="cap on a greedy completion (default: the start policy's own)")
    add("--save-contexts", type=Path, metavar="FILE", help="keep the contexts for later runs and measurements")
    add("--max-tokens", type=int, default=2048, help="padded tokens of one forward pass (default: %(default)s)")
    add("--untie-embeddings", action="store_true", help="load heads as parameters of their own")
    parser.epilog = EPILOG
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    for name in ("n", "max_new_tokens", "max_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if args.save_contexts is not None and args.save_contexts.exists():
        raise UserError(f"--save-contexts {args.save_contexts}: the file exists; choose another name")
    if args.save_contexts is not None:
        check_place(args.save_contexts, "--save-contexts")
    from rlvr_pl.callbacks.drift import DriftMeter, drift_row
    from rlvr_pl.policy import best_device, load_policy

    with progress_console().status("start policy") as status:
        start = load_policy(args.start, untie_embeddings=args.untie_embeddings, device=best_device())
        contexts = _contexts(args, start)
        if args.save_contexts is not None:
            contexts.save(args.save_contexts)
        meter = DriftMeter(contexts, start, max_tokens=args.max_tokens)
        first = drift_row(meter, start, name=args.start)
        del start
        rows: list[dict[str, Any]] = []
        for i, name in enumerate(args.checkpoints):
            status.update(f"checkpoint {i + 1} of {len(args.checkpoints)}: {name}")
            policy = load_policy(name, untie_embeddings=args.untie_embeddings, device=best_device())
            if policy.head.shape[0] != meter.vocabulary:
                raise UserError(f"{name}: vocabulary of {policy.head.shape[0]}, but the start has {meter.vocabulary}")
            row = drift_row(meter, policy, name=name)
            rows.append({**row, "entropy_ratio": row["entropy"] / first["entropy"] if first["entropy"] else None})
    data = {
        "start": first,
        "checkpoints": rows,
        "contexts": {
            "source": args.contexts,
            "n": len(contexts.uids),
            "tokens": contexts.tokens,
            "start_sha256": contexts.start_sha256,
        },
    }
    table = [[row.get(c) for c in COLUMNS] for row in [{**first, "entropy_ratio": 1.0}, *rows]]
    note = f"{len(contexts.uids)} contexts of the start policy, {contexts.tokens} completion tokens; nats a token."
    return Result(data, [Table("Drift on fixed contexts", COLUMNS, table)], [note])


def _contexts(args: argparse.Namespace, start: Policy) -> Contexts:
    from rlvr_pl.callbacks.drift import Contexts, is_context_file, make_contexts
    from rlvr_pl.data.pools import load_questions
    from rlvr_pl.sampling.base import Decoding
    from rlvr_pl.sampling.torch import TorchSampler

    if is_context_file(args.contexts):
        return Contexts.load(Path(args.contexts), start.head.shape[0])
    questions = load_questions(args.contexts)[: args.n]
    decoding = Decoding(0.0, 1.0, args.max_new_tokens or start.default_max_new_tokens)
    return make_contexts(start, TorchSampler(), questions, decoding)
