"""Power and sample size of a paired comparison of two checkpoints, before anything is run.

The standard error of an accuracy difference is sqrt(p_d / n), where p_d is the share of items on which two checkpoints
disagree (measure it with `rlvr-pl noise-floor`; 0.2 is typical of similar checkpoints on MATH). Training-seed variance
comes on top.
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

from rlvr_pl.analysis.command import Result, Table, add_output_arguments
from rlvr_pl.analysis.items import as_user_error
from rlvr_pl.core.power import power, sample_size, standard_error
from rlvr_pl.errors import UserError

_GRID = {"pd": [0.1, 0.15, 0.2, 0.3], "n": [224, 350, 1000, 2000], "delta": [0.03, 0.05]}


EPILOG = """\
JSON keys: p_d, n, delta, alpha, power, se_pp (percentage points). With --target-power: n is the items needed
and power what they give. Several values of an option, or --grid: {"grid": [...]} of such objects.

example: rlvr-pl power --pd 0.2 --n 350 --delta 0.03
         rlvr-pl power --pd 0.2 --delta 0.03 --target-power 0.8"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pd", type=float, nargs="+", metavar="P", help="discordance rate, in (0, 1]")
    parser.add_argument("--n", type=int, nargs="+", metavar="N", help="items of the panel")
    parser.add_argument(
        "--delta", type=float, nargs="+", metavar="D", help="true difference as a fraction: 0.03 = 3 pp"
    )
    parser.add_argument("--alpha", type=float, default=0.05, help="two-sided level of the test (default 0.05)")
    parser.add_argument("--target-power", type=float, metavar="POWER", help="give the items needed for this power")
    parser.add_argument("--grid", action="store_true", help="tabulate; values not given are filled with common ones")
    parser.epilog = EPILOG
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    needed = ("pd", "delta") if args.target_power is not None else ("pd", "n", "delta")
    values = {name: getattr(args, name) or (_GRID[name] if args.grid else []) for name in needed}
    missing = [f"--{name}" for name, value in values.items() if not value]
    if missing:
        raise UserError(f"{' and '.join(missing)} must be given (or pass --grid)")
    if args.target_power is not None and args.n:
        raise UserError("--target-power asks for the items needed: leave out --n")
    rows = [as_user_error(_row, dict(zip(needed, point)), args) for point in product(*values.values())]
    notes = ["Item uncertainty of one checkpoint pair; training-seed variance comes on top."]
    return Result({"grid": rows} if args.grid or len(rows) > 1 else rows[0], [_table(rows, values, args)], notes)


def _table(rows: list[dict[str, Any]], values: dict[str, list], args: argparse.Namespace) -> Table:
    """One line for each p_d and n, one column for each delta (`rows` count deltas fastest)."""
    width = len(values["delta"])
    lines = [rows[i : i + width] for i in range(0, len(rows), width)]
    effects = [f"{100 * delta:g} pp" for delta in values["delta"]]
    if args.target_power is not None:
        title = f"Items needed for power {args.target_power:g} at level {args.alpha:g}"
        return Table(title, ["p_d", *effects], [[line[0]["p_d"], *(row["n"] for row in line)] for line in lines])
    title = f"Power of a paired comparison at level {args.alpha:g}"
    cells = [[line[0]["p_d"], line[0]["n"], line[0]["se_pp"], *(row["power"] for row in line)] for line in lines]
    return Table(title, ["p_d", "n", "SE pp", *effects], cells)


def _row(point: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    p_d, delta = point["pd"], point["delta"]
    if abs(delta) > 1:
        raise UserError(f"--delta {delta}: a fraction is needed, such as 0.03 for 3 pp")
    n = point["n"] if "n" in point else sample_size(p_d, delta, args.target_power, args.alpha)
    return {
        "p_d": p_d,
        "n": n,
        "delta": delta,
        "alpha": args.alpha,
        "power": power(p_d, n, delta, args.alpha),
        "se_pp": 100 * standard_error(p_d, n),
    }
