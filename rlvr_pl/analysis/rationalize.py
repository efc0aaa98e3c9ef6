"""Turn questions that no sample solved into solutions: hinted rationales, unhinted continuations of their first half.

For every question without a correct sample: rationales from a prompt that states the answer; those that verify, end and
hold no leak phrase are cut to their first half; prefixes that hold the answer (as text, or as any number, fraction,
formula or box that grades equal to it) are dropped; the others are continued from the ordinary prompt, and what
verifies is a solution, prefix and continuation together, under the ordinary prompt. An interrupted call goes on where
it stopped. What it cost is in FILE.cost.json.

JSON keys: questions, with_rationale, with_prefix, with_solution, solutions, rationales {wrong, truncated, leak,
answer_in_prefix, bridged}, continuations {wrong, truncated, duplicate, solution}, sampled_tokens, added, cost {...},
out. Each count is the sum of what it splits into.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr_pl.analysis.command import Result, Table, add_output_arguments
from rlvr_pl.analysis.explore import add_explorer_arguments, open_explorer, progress

if TYPE_CHECKING:
    from rlvr_pl.expert_iteration.explorer import Explorer
    from rlvr_pl.expert_iteration.rationalize import Bridge
    from rlvr_pl.expert_iteration.records import Filled, Row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("samples", nargs="+", metavar="SAMPLES", help="sample records of `rlvr-pl search`")
    add_explorer_arguments(parser)
    add_bridge_arguments(parser)
    add_output_arguments(parser, table=False)


def add_bridge_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `bridge_of` reads, and ``--hint``."""
    parser.add_argument("--rationales", type=int, default=4, help="hinted samples of a question (default: 4)")
    parser.add_argument("--continuations", type=int, default=4, help="continuations of a prefix (default: 4)")
    parser.add_argument("--fraction", type=float, default=0.5, help="share of a rationale that is kept (default: 0.5)")
    parser.add_argument(
        "--hint", metavar="TEXT", help="problem of the hinted prompt, with {problem} and {answer} in it"
    )
    parser.add_argument("--leak-phrases", type=Path, metavar="FILE", help="one a line, in place of the shipped list")


def run(args: argparse.Namespace) -> Result:
    from rlvr_pl.expert_iteration.files import read_samples

    bridge = bridge_of(args)
    headers, samples = read_samples(args.samples)
    with open_explorer(args, args.checkpoint, args.hint) as explorer:
        warn_of_other_policy(explorer, headers)
        found = rationalize_with_bar(explorer, samples, bridge, args.out)
    data = {**summarize(found), "out": str(args.out)}
    return Result(data, tables(data), [f"Records: {args.out}"])


def bridge_of(args: argparse.Namespace) -> Bridge:
    """The settings of rationalization."""
    from rlvr_pl.expert_iteration.hidden import read_phrases
    from rlvr_pl.expert_iteration.rationalize import Bridge

    return Bridge(args.rationales, args.continuations, args.fraction, read_phrases(args.leak_phrases))


def rationalize_with_bar(explorer: Explorer, samples: list[Row], bridge: Bridge, out: Path) -> Filled:
    """Rationalize the questions that no sample solved."""
    from rlvr_pl.expert_iteration.rationalize import rationalize, unsolved

    questions = unsolved(samples)
    with progress("questions", len(questions)) as tick:
        return rationalize(explorer, questions, bridge, out, tick)


def warn_of_other_policy(explorer: Explorer, headers: list[Row]) -> None:
    """Unsolved by one policy is not unsolved by another; it may be meant, so it is only said."""
    others = {str(h.get("checkpoint")) for h in headers if h.get("checkpoint_sha256") != explorer.policy.sha256}
    if others:
        print(f"rlvr-pl: warning: the samples are of another policy ({', '.join(sorted(others))})", file=sys.stderr)


def summarize(found: Filled) -> dict[str, Any]:
    """The funnel and its cost, as a JSON object."""
    from rlvr_pl.expert_iteration.rationalize import funnel

    tokens = {"sampled_tokens": found.cost.sampled_tokens, "added": found.added, "cost": found.cost.as_dict()}
    return {**funnel(found.rows), **tokens}


def tables(data: dict[str, Any]) -> list[Table]:
    """The funnel by questions, and what became of rationales and continuations."""
    n = data["questions"]
    steps = (
        ("never solved", "questions"),
        ("verified rationale that leaks no hint", "with_rationale"),
        ("prefix that hides the answer", "with_prefix"),
        ("survived the hint's removal", "with_solution"),
    )
    rows = [[step, data[key], f"{100 * data[key] / n:.1f}%" if n else ""] for step, key in steps]
    found = [Table("Funnel", ["questions with", "n", "share"], rows)]
    for name in ("rationales", "continuations"):
        fates = data[name]
        found.append(Table(name.capitalize(), ["sampled", *fates], [[sum(fates.values()), *fates.values()]]))
    return found
