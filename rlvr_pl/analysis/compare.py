"""Paired comparison of item records: gained, lost, difference with its interval, McNemar.

The interval resamples items and is conditional on the checkpoints; --seeds adds training seeds as a second level.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import numpy as np

from rlvr_pl.analysis.command import Result, Table, add_output_arguments
from rlvr_pl.analysis.items import Panel, add_resample_arguments, load_panel
from rlvr_pl.core.paired import PairedResult, compare, compare_seeds, holm
from rlvr_pl.core.power import half_width
from rlvr_pl.errors import UserError

_ONE_SEED = (
    "One training seed a side: the interval covers which items were asked, not which seed was trained. "
    "Another seed can reverse the sign."
)


EPILOG = """\
JSON keys: a, b, n, gained, lost, discordant, discordance_rate, delta_pp, ci_low, ci_high, mcnemar_exact_p,
mcnemar_midp, half_width_items, half_width_pp (B minus A; percentage points of n; 95%), training_seeds, note.
With --by: strata, a list of the same with the stratum's value. Several B: {"a", "comparisons": [...]}, each
with holm_p under --holm. With --seeds: a and b (lists), n, seeds_a, seeds_b, delta_pp, ci_low, ci_high (seeds
and items resampled), item_ci_low, item_ci_high (runs held fixed), per_seed_pp, seed_sd_pp, training_seeds,
note.

example: rlvr-pl compare start.jsonl update80.jsonl --by level
         rlvr-pl compare start.jsonl update40.jsonl update80.jsonl --holm
         rlvr-pl compare supplied_s7.jsonl supplied_s8.jsonl --seeds mask_s7.jsonl mask_s8.jsonl"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="item records: A, then one or more B (or A's runs)")
    parser.add_argument("--seeds", nargs="+", metavar="B", help="B's runs, one a training seed; FILE are then A's runs")
    parser.add_argument("--by", choices=("level", "subject"), help="also compare within each stratum")
    parser.add_argument("--holm", action="store_true", help="Holm-correct the exact p-values over several B")
    add_resample_arguments(parser, "items")
    parser.add_argument("--allow-mixed", action="store_true", help="accept records of different engines or batch sizes")
    parser.epilog = EPILOG
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    if args.seeds:
        if args.by or args.holm:
            raise UserError("--seeds compares two groups of runs: leave out --by and --holm")
        return _seeded(load_panel([*args.files, *args.seeds], allow_mixed=args.allow_mixed), args)
    if len(args.files) < 2:
        raise UserError("compare needs two files or more: A, then B")
    return _items(load_panel(args.files, allow_mixed=args.allow_mixed), args)


def _items(panel: Panel, args: argparse.Namespace) -> Result:
    a, others = panel.runs[0], panel.runs[1:]
    everything = np.arange(len(panel.uids))
    comparisons = []
    strata = panel.strata(args.by) if args.by else []
    tables = []
    for b in others:
        row = {"a": a.name, "b": b.name, **_compare(a.correct, b.correct, everything, args)}
        cells = [["all", *_cells(row)]]
        if args.by:
            row["strata"] = [{args.by: value, **_compare(a.correct, b.correct, rows, args)} for value, rows in strata]
            cells += [[stratum[args.by], *_cells(stratum)] for stratum in row["strata"]]
        tables.append(Table(f"{b.name} against {a.name}", (args.by or "items", *_COLUMNS), cells))
        comparisons.append({**row, "training_seeds": 1, "note": _ONE_SEED})
    notes = [_ONE_SEED]
    if args.by:
        notes.append("A stratum picked after looking has a wider interval than the one shown.")
    if args.holm:
        adjusted = holm([c["mcnemar_exact_p"] for c in comparisons])
        for c, p in zip(comparisons, adjusted):
            c["holm_p"] = p
        cells = [[c["b"], f"{c['mcnemar_exact_p']:.2g}", f"{c['holm_p']:.2g}"] for c in comparisons]
        tables.append(Table("Holm-adjusted exact p", ("B", "p", "adjusted p"), cells))
    elif len(others) > 1:
        notes.append(f"{len(others)} comparisons: pass --holm for p-values that allow for their number.")
    return Result(comparisons[0] if len(others) == 1 else {"a": a.name, "comparisons": comparisons}, tables, notes)


_COLUMNS = ("n", "gained", "lost", "delta pp", "low", "high", "exact p", "null ±pp")


def _cells(row: dict[str, Any]) -> list[Any]:
    numbers = [row[name] for name in ("n", "gained", "lost", "delta_pp", "ci_low", "ci_high")]
    return [*numbers, f"{row['mcnemar_exact_p']:.2g}", row["half_width_pp"]]


def _compare(a: np.ndarray, b: np.ndarray, rows: np.ndarray, args: argparse.Namespace) -> dict[str, Any]:
    result: PairedResult = compare(a[rows], b[rows], resamples=args.resamples, seed=args.seed)
    return {
        **asdict(result),
        "discordant": result.discordant,
        "discordance_rate": result.discordant / result.n,
        "half_width_items": half_width(result.discordant),
        "half_width_pp": half_width(result.discordant, result.n),
    }


def _seeded(panel: Panel, args: argparse.Namespace) -> Result:
    split = len(args.files)
    result = compare_seeds(panel.correct[:split], panel.correct[split:], resamples=args.resamples, seed=args.seed)
    seeds = max(result.seeds_a, result.seeds_b)
    note = _ONE_SEED
    if seeds > 1:
        each = ", ".join(f"{x:+.1f}" for x in result.per_seed_pp)
        note = f"{seeds} training seeds resampled together with the items; their spread is itself uncertain."
        note += f" Difference of each seed: {each} pp." if each else " Unequal numbers of runs: not paired by seed."
    names = [run.name for run in panel.runs]
    data = {"a": names[:split], "b": names[split:], **asdict(result), "training_seeds": seeds, "note": note}
    rows = [
        ["seeds and items", result.delta_pp, result.ci_low, result.ci_high],
        ["items only", result.delta_pp, result.item_ci_low, result.item_ci_high],
    ]
    title = f"B ({result.seeds_b} runs) against A ({result.seeds_a} runs)"
    table = Table(title, ("resampled", "delta pp", "low", "high"), rows)
    return Result(data, [table], [note])
