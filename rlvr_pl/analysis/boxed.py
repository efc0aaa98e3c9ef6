"""How much of a gain is formatting: boxed rate, accuracy given a box, and what the boxing rate alone explains.

Accuracy is (boxed rate) x (accuracy given boxed) + (correct answers without a box, read from the last number). Holding
accuracy given boxed at A's value, the change of the boxed rate explains rate change x that accuracy; the rest of the
gain is answers changed within boxes, and the fallback.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from rlvr_pl.analysis.command import Result, Table, add_output_arguments
from rlvr_pl.analysis.items import (
    Panel,
    Run,
    Samples,
    check_headers,
    holds_samples,
    load_panel,
    load_samples,
    match_uids,
)
from rlvr_pl.errors import UserError

EPILOG = """\
JSON keys: kind ("items" or "samples"), n (questions); pairs [A, B]: accuracy, boxed_rate,
accuracy_given_boxed, fallback_rate (correct without a box; shares); gain_pp = explained_pp (boxing) +
answers_pp (within boxes) + fallback_pp, explained_share (of the gain). Sample records with unequal counts are
averaged within a question first. Item records also give fallback_correct [A, B] (items), gained,
gained_unboxed (what format can explain at most) and gained_by_state: [{boxed, terminated, items}], the state
of the gained items in A (null without stop_reason).

example: rlvr-pl boxed base.jsonl start.jsonl"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="item records of A, or sample records (several a question)")
    parser.add_argument("b", metavar="B", help="records of B, of the same kind and on the same questions")
    parser.add_argument("--allow-mixed", action="store_true", help="accept records of different engines or batch sizes")
    parser.epilog = EPILOG
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    kinds = [holds_samples(path) for path in (args.a, args.b)]
    if kinds[0] != kinds[1]:
        raise UserError(f"{args.a} and {args.b}: one holds item records and the other sample records")
    if not kinds[0]:
        return _items(load_panel([args.a, args.b], allow_mixed=args.allow_mixed))
    a, b = load_samples(args.a), load_samples(args.b)
    match_uids(a.name, a.counts, b.name, b.counts)
    check_headers([(a.name, a.header), (b.name, b.header)], args.allow_mixed)
    data = {"kind": "samples", "n": len(a.counts), **decompose(_sample_rates(a), _sample_rates(b))}
    return Result(data, [_table(data)], [_note(data)])


def decompose(a: tuple[float, float, float], b: tuple[float, float, float]) -> dict[str, Any]:
    """The gain of B over A split into boxing, answers within boxes and fallback.

    Args:
        a, b: accuracy, boxed rate, and rate of boxed and correct, as shares.
    """
    (acc_a, box_a, right_a), (acc_b, box_b, right_b) = a, b
    given_a = right_a / box_a if box_a else None
    given_b = right_b / box_b if box_b else None
    gain = 100 * (acc_b - acc_a)
    fallback = 100 * ((acc_b - right_b) - (acc_a - right_a))
    explained = None if given_a is None else 100 * (box_b - box_a) * given_a + 0.0  # no negative zero
    return {
        "accuracy": [acc_a, acc_b],
        "boxed_rate": [box_a, box_b],
        "accuracy_given_boxed": [given_a, given_b],
        "fallback_rate": [acc_a - right_a, acc_b - right_b],
        "gain_pp": gain,
        "explained_pp": explained,
        "answers_pp": None if explained is None else gain - explained - fallback,
        "fallback_pp": fallback,
        "explained_share": explained / gain + 0.0 if explained is not None and gain else None,
    }


def _items(panel: Panel) -> Result:
    a, b = panel.runs
    boxed_a, boxed_b = _boxed(a), _boxed(b)
    rates = [
        (float(run.correct.mean()), float(boxed.mean()), float((run.correct & boxed).mean()))
        for run, boxed in ((a, boxed_a), (b, boxed_b))
    ]
    gained = b.correct & ~a.correct
    data = {"kind": "items", "n": len(panel.uids), **decompose(*rates)}
    data["fallback_correct"] = [int((a.correct & ~boxed_a).sum()), int((b.correct & ~boxed_b).sum())]
    data["gained"] = int(gained.sum())
    data["gained_unboxed"] = int((gained & ~boxed_a).sum())
    data["gained_by_state"] = None
    tables = [_table(data)]
    if a.terminated is not None:
        data["gained_by_state"] = [
            {"boxed": box, "terminated": end, "items": int((gained & (boxed_a == box) & (a.terminated == end)).sum())}
            for box in (True, False)
            for end in (True, False)
        ]
        rows = [[s["boxed"], s["terminated"], s["items"]] for s in data["gained_by_state"]]
        tables.append(Table("Gained items by their state in A", ("boxed", "terminated", "items"), rows))
    notes = [
        _note(data),
        f"At most {data['gained_unboxed']} of {data['gained']} gained items can come from acquiring the format.",
    ]
    return Result(data, tables, notes)


def _boxed(run: Run) -> np.ndarray:
    if run.boxed is None:
        raise UserError(f"{run.name}: some rows have no 'boxed' field; evaluate again to have it recorded")
    return run.boxed


def _sample_rates(samples: Samples) -> tuple[float, float, float]:
    """Accuracy, boxed rate, boxed-and-correct rate: means over questions of the rates within a question."""
    if samples.boxed is None:
        raise UserError(f"{samples.name}: some rows have no 'boxed' field; sample again to have it recorded")
    rates = [(c / n, samples.boxed[uid][0] / n, samples.boxed[uid][1] / n) for uid, (n, c) in samples.counts.items()]
    accuracy, boxed, right = np.mean(rates, axis=0).tolist()
    return accuracy, boxed, right


def _table(data: dict[str, Any]) -> Table:
    names = ("accuracy", "boxed_rate", "accuracy_given_boxed", "fallback_rate")
    return Table("Formatting", ("share", "A", "B"), [[name, *data[name]] for name in names])


def _note(data: dict[str, Any]) -> str:
    if data["explained_share"] is None:
        return f"Gain {data['gain_pp']:+.1f} pp; the part that boxing explains is undefined (no gain, or no box in A)."
    return (
        f"The boxing rate alone explains {data['explained_pp']:+.1f} of {data['gain_pp']:+.1f} pp "
        f"({data['explained_share']:.0%})."
    )
