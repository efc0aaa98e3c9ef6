"""How much checkpoints of similar accuracy disagree: discordance of all pairs, null spread, always/never/sometimes.

The null spread 1.96 sqrt(D) is how far two equally good checkpoints with D discordant items differ by chance. --self
takes evaluations of identical weights (other batch size, engine, or a repeat): what they disagree on needs no training.
"""

from __future__ import annotations

import argparse
from itertools import combinations
from typing import Any

import numpy as np

from rlvr_pl.analysis.command import Result, Table, add_output_arguments
from rlvr_pl.analysis.items import Panel, load_panel
from rlvr_pl.core.power import half_width
from rlvr_pl.errors import UserError

_HEADINGS = ("n", "pairs", "discordant", "rate", "±items", "±pp")
_COLUMNS = ("n", "pairs", "mean_discordant", "discordance_rate", "half_width_items", "half_width_pp")


EPILOG = """\
JSON keys: kind ("checkpoints" or "self"), files, n, pairs (their number), mean_discordant, min_discordant,
max_discordant, discordance_rate, net_min, net_max (items), half_width_items, half_width_pp, always, never,
sometimes (items right in all, none, some), by_pair: [{a, b, discordant, net}]. With --by: strata, a list of
{level or subject, n, pairs, mean_discordant, discordance_rate, half_width_items, half_width_pp}. With FILE
and --self: self (the same keys) and self_share, the part of the discordance that identical weights show
already.

example: rlvr-pl noise-floor a.jsonl b.jsonl c.jsonl --by level
         rlvr-pl noise-floor --self batch64.jsonl batch32.jsonl"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", metavar="FILE", help="item records of two or more checkpoints")
    parser.add_argument("--self", nargs="+", dest="same", metavar="FILE", help="evaluations of identical weights")
    parser.add_argument("--by", choices=("level", "subject"), help="also give discordance and half-width by stratum")
    parser.add_argument(
        "--allow-mixed", action="store_true", help="accept checkpoints of different engines or batch sizes"
    )
    parser.epilog = EPILOG
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    for files in (args.files, args.same or []):
        if len(set(files)) < len(files):
            raise UserError("noise-floor: a file is given twice; it does not disagree with itself")
    same = None
    if args.same:
        if len(args.same) < 2:
            raise UserError("--self needs two or more evaluations of the same weights")
        same = load_panel(args.same, allow_mixed=True)
        _check_same_weights(same)
    if not args.files:
        if same is None:
            raise UserError("noise-floor needs two files or more, or --self")
        return _report(same, "self", args.by)
    if len(args.files) < 2:
        raise UserError("noise-floor needs two files or more")
    result = _report(load_panel(args.files, allow_mixed=args.allow_mixed), "checkpoints", args.by)
    if same is not None:
        inner = _report(same, "self", args.by)
        floor = result.data["discordance_rate"]
        share = inner.data["discordance_rate"] / floor if floor else None
        result.data |= {"self": inner.data, "self_share": share}
        result.tables += inner.tables
        if share is not None:
            result.notes.append(f"Identical weights already show {share:.0%} of the discordance between checkpoints.")
    return result


def _check_same_weights(panel: Panel) -> None:
    hashes = {run.header["checkpoint_sha256"] for run in panel.runs if run.header and "checkpoint_sha256" in run.header}
    if len(hashes) > 1:
        raise UserError("--self: the headers name different weights (checkpoint_sha256)")


def _report(panel: Panel, kind: str, by: str | None) -> Result:
    correct = panel.correct
    pairs = list(combinations(range(len(correct)), 2))
    right = correct.sum(0)
    data: dict[str, Any] = {"kind": kind, "files": [run.name for run in panel.runs], **_floor(correct)}
    data["by_pair"] = [
        {"a": panel.runs[i].name, "b": panel.runs[j].name, **_pair(correct[i], correct[j])} for i, j in pairs
    ]
    discordant = [pair["discordant"] for pair in data["by_pair"]]
    nets = [pair["net"] for pair in data["by_pair"]]
    data |= {
        "min_discordant": min(discordant),
        "max_discordant": max(discordant),
        "net_min": min(nets),
        "net_max": max(nets),
        "always": int((right == len(correct)).sum()),
        "never": int((right == 0).sum()),
        "sometimes": int(((right > 0) & (right < len(correct))).sum()),
    }
    name = "Identical weights" if kind == "self" else "Checkpoints"
    extra = ("min_discordant", "max_discordant", "net_min", "net_max", "always", "never", "sometimes")
    tables = [
        Table(f"{name}: {len(correct)} evaluations", ("quantity", "value"), [[c, data[c]] for c in _COLUMNS + extra])
    ]
    if by:
        data["strata"] = [{by: value, **_floor(correct[:, rows])} for value, rows in panel.strata(by)]
        cells = [[stratum[by], *(stratum[c] for c in _COLUMNS)] for stratum in data["strata"]]
        tables.append(Table(f"{name} by {by}", (by, *_HEADINGS), cells))
    note = (
        f"A net difference within ±{data['half_width_pp']:.1f} pp is what two equally good checkpoints show by chance."
    )
    return Result(data, tables, [note])


def _floor(correct: np.ndarray) -> dict[str, Any]:
    """Mean discordance over all pairs of rows of `correct` [runs, n], and its null spread."""
    runs, n = correct.shape
    right = correct.sum(0)
    pairs = runs * (runs - 1) // 2
    mean = float((right * (runs - right)).sum() / pairs)  # an item splits this many pairs
    return {
        "n": n,
        "pairs": pairs,
        "mean_discordant": mean,
        "discordance_rate": mean / n,
        "half_width_items": half_width(mean),
        "half_width_pp": half_width(mean, n),
    }


def _pair(a: np.ndarray, b: np.ndarray) -> dict[str, int]:
    return {"discordant": int((a != b).sum()), "net": int(b.sum()) - int(a.sum())}
