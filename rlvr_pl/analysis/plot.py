"""Draw a run: drift, validation, truncation and what it consists of, signed mass, gradient norm (PNG and SVG).

Several runs are drawn into one picture, a colour each. The span that a run's frozen rule calls damaged is shaded.
"""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr_pl.analysis.command import Result, add_output_arguments, check_file
from rlvr_pl.analysis.rollout_stats import statistics
from rlvr_pl.analysis.run_records import RunRecords
from rlvr_pl.errors import UserError
from rlvr_pl.records import atomic_write_bytes

EPILOG = """\
JSON keys: files [PNG, SVG], runs [{run, updates, collapsed}].

example: rlvr-pl plot runs/orl --out orl.png
         rlvr-pl plot runs/orl runs/orl-mask --labels supplied mask --out arms.png"""

# Okabe and Ito's palette: told apart under every common colour-vision deficiency, and in this order also in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK, FAINT = "#333333", "#D9D9D9"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run folder; up to seven are drawn into one picture")
    add("--out", type=Path, metavar="FILE", help="PNG to write; the SVG goes beside it (default: RUN/plot.png)")
    add("--labels", nargs="+", metavar="TEXT", help="a name for each run (default: the folder's)")
    add("--window", type=int, default=10, help="updates in a window of rollouts (default: %(default)s)")
    parser.epilog = EPILOG
    add_output_arguments(parser, table=False)


def run(args: argparse.Namespace) -> Result:
    labels = args.labels or [path.resolve().name for path in args.runs]
    if args.window < 1:
        raise UserError(f"--window {args.window}: must be at least 1")
    if len(args.runs) > len(COLOURS):
        raise UserError(f"{len(args.runs)} runs: at most {len(COLOURS)} can be told apart in one picture")
    if len(labels) != len(args.runs):
        raise UserError(f"--labels names {len(labels)} runs, but {len(args.runs)} are given")
    out: Path = args.out or args.runs[0] / "plot.png"
    if out.suffix.lower() not in (".png", ".svg"):
        raise UserError(f"--out {out}: the ending must be .png (the SVG is written beside it)")
    check_file(out, overwrite=True)
    runs = [Drawn.read(path, label, colour, args.window) for path, label, colour in zip(args.runs, labels, COLOURS)]
    files = save(figure(runs), out)
    data = {
        "files": [str(f) for f in files],
        "runs": [{"run": str(r.path), "updates": r.updates, "collapsed": r.damage is not None} for r in runs],
    }
    return Result(data, notes=[f"wrote {f}" for f in files])


@dataclass(frozen=True)
class Drawn:
    """What is drawn of one run: rows of drift, validation, windows and gradient norms, and the damaged span."""

    path: Path
    label: str
    colour: str
    updates: int
    drift: list[dict[str, float]]
    validation: list[dict[str, float]]
    windows: list[dict[str, Any]]
    norms: list[tuple[float, float]]
    damage: tuple[int, int] | None

    @classmethod
    def read(cls, path: Path, label: str, colour: str, window: int) -> Drawn:
        """From the run's records; what the run did not record stays empty."""
        records = RunRecords(path)
        found = statistics(records, window)
        verdict = found["verdict"]
        return cls(
            path=path,
            label=label,
            colour=colour,
            updates=found["updates"],
            drift=records.rows("drift.csv"),
            validation=records.rows("validation.csv"),
            windows=found["windows"],
            norms=[(u, step.grad_norm) for u, step in sorted(records.steps().items()) if step.grad_norm > 0],
            damage=(verdict["first_update"], verdict["last_update"]) if verdict and verdict["collapsed"] else None,
        )


def figure(runs: Sequence[Drawn]) -> Any:
    """The picture as a matplotlib figure (Agg; no window is opened)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: tuple[tuple[str, str, Callable[[Any, Drawn, bool], None]], ...] = (
        ("Entropy on fixed contexts", "nats a token", _entropy),
        ("KL(start ‖ current) on fixed contexts", "nats a token", _kl),
        ("Greedy validation, 95% interval", "% correct", _validation),
        ("Rollouts that hit the cap", "% of rollouts", _shares),
        ("Signed token mass M₋ / M₊", "ratio", _mass),
        ("Gradient norm before clipping", "norm", _norm),
    )
    with plt.rc_context(_STYLE):
        fig, axes = plt.subplots(3, 2, figsize=(10, 9.5), sharex=True, layout="constrained")
        for ax, (title, unit, draw) in zip(axes.flat, panels):
            for one in runs:
                if one.damage is not None:
                    ax.axvspan(one.damage[0] - 1, one.damage[1], color=one.colour, alpha=0.08, lw=0)
                    ax.axvline(one.damage[0] - 1, color=one.colour, lw=0.8, ls="--")
                draw(ax, one, len(runs) == 1)
            ax.set_title(title, loc="left")
            ax.set_ylabel(unit)
            _finish(ax, runs)
        for ax in axes[-1]:
            ax.set_xlabel("update")
        _name(fig, runs)
    return fig


def save(fig: Any, out: Path) -> list[Path]:
    """Write the PNG (200 dots an inch) and the SVG beside it."""
    import matplotlib.pyplot as plt

    files = {out.with_suffix(".png"): {"dpi": 200}, out.with_suffix(".svg"): {"metadata": {"Date": None}}}
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rlvr-pl"}):
        for path, how in files.items():
            write_figure(fig, path, **how)
    plt.close(fig)
    return list(files)


def write_figure(fig: Any, path: Path, **how: Any) -> None:
    """Write a figure of matplotlib, whole or not at all; `how` goes to its `savefig`."""
    drawn = io.BytesIO()
    fig.savefig(drawn, format=path.suffix[1:], **how)
    atomic_write_bytes(path, drawn.getvalue())


# ---- panels ----------------------------------------------------------------------------------------------------------


def _entropy(ax: Any, run: Drawn, alone: bool) -> None:
    _line(ax, run, [(r["update"], r["entropy"]) for r in run.drift], "o")


def _kl(ax: Any, run: Drawn, alone: bool) -> None:
    _line(ax, run, [(r["update"], r["kl"]) for r in run.drift], "o")


def _validation(ax: Any, run: Drawn, alone: bool) -> None:
    points = [(r["update"], *_wilson(r["correct"], r["n"])) for r in run.validation if r.get("n")]
    if points:
        updates, share, low, high = ([100 * x if i else x for x in column] for i, column in enumerate(zip(*points)))
        errors = [[s - lo for s, lo in zip(share, low)], [hi - s for s, hi in zip(share, high)]]
        ax.errorbar(updates, share, errors, color=run.colour, marker="o", ms=4, capsize=2, elinewidth=0.9)


def _shares(ax: Any, run: Drawn, alone: bool) -> None:
    """One run: all that hit the cap, and the loops and soup among them; several runs: the cap alone."""
    kinds = {"truncation": ("all", run.colour, "-")}  # drawn wide, so that soup on top of it leaves it visible
    if alone:
        kinds |= {"soup": ("token soup", COLOURS[1], "--"), "loop": ("loops", COLOURS[2], ":")}
    for name, (label, colour, style) in kinds.items():
        points = [(w["last_update"], 100 * w[name]) for w in run.windows]
        width = 2.8 if alone and style == "-" else 1.7
        ax.plot(*zip(*points), color=colour, ls=style, lw=width, label=label, clip_on=False)
    if alone:
        ax.legend(loc="upper left")
    ax.set_ylim(0, 102)


def _mass(ax: Any, run: Drawn, alone: bool) -> None:
    kinds = {"m_ratio": ("token weights of the objective", run.colour, "-")}
    pairs = [(w["m_ratio"], w["plain_m_ratio"] or 0) for w in run.windows if w["m_ratio"] is not None]
    if alone and not all(math.isclose(own, plain, rel_tol=1e-6) for own, plain in pairs):
        kinds["plain_m_ratio"] = ("plain advantages", COLOURS[4], "--")
    for name, (label, colour, style) in kinds.items():
        points = [(w["last_update"], w[name]) for w in run.windows if w[name] is not None]
        if points:
            ax.plot(*zip(*points), color=colour, ls=style, label=label)
    ax.axhline(1, color=INK, lw=0.8, ls=":")
    if len(kinds) > 1:
        ax.legend(loc="best")


def _norm(ax: Any, run: Drawn, alone: bool) -> None:
    if run.norms:
        ax.plot(*zip(*run.norms), ".", color=run.colour, ms=2.5, alpha=0.35, rasterized=True)
        medians = [(w["last_update"], w["grad_norm_median"]) for w in run.windows if w["grad_norm_median"] is not None]
        if medians:
            ax.plot(*zip(*medians), color=run.colour)
        ax.set_yscale("log")


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _line(ax: Any, run: Drawn, points: Sequence[tuple[float, float]], marker: str) -> None:
    if points:
        ax.plot(*zip(*points), color=run.colour, marker=marker, ms=3.5)


def _finish(ax: Any, runs: Sequence[Drawn]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    end = max(r.updates for r in runs)
    ax.set_xlim(-0.01 * end, 1.01 * end)
    ax.grid(axis="y", color=FAINT, lw=0.7)
    ax.set_axisbelow(True)
    drawn = [line for line in ax.lines if line.get_transform() == ax.transData]  # not the rules across the panel
    if not drawn:
        ax.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=ax.transAxes, color="#888888")
        ax.set_yticks([])
    elif ax.get_yscale() == "log":
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(ScalarFormatter())
        ax.yaxis.set_minor_formatter(NullFormatter())
    elif ax.get_autoscaley_on():
        values = [y for line in drawn for y in line.get_ydata()]
        if min(values) >= 0:
            ax.set_ylim(0, max(ax.get_ylim()[1], 1.05 * max(values)))


def _name(fig: Any, runs: Sequence[Drawn]) -> None:
    """The picture's title and what the shade means; for several runs a legend of their colours."""
    if len(runs) > 1:
        from matplotlib.lines import Line2D

        names = [r.label + (" (collapsed)" if r.damage else "") for r in runs]
        handles = [Line2D([], [], color=r.colour, lw=2, label=name) for r, name in zip(runs, names)]
        fig.legend(handles=handles, loc="outside upper left", ncols=4, frameon=False, fontsize=10)
        return
    one = runs[0]
    shade = f"   shaded: updates {one.damage[0]}-{one.damage[1]}, collapsed by the frozen rule" if one.damage else ""
    fig.suptitle(one.label + shade, x=0.01, ha="left", fontsize=11, color=INK)


def _wilson(correct: float, n: float, z: float = 1.959964) -> tuple[float, float, float]:
    """Share correct and its Wilson 95% interval (items only; it says nothing of training seeds)."""
    p = correct / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return p, centre - half, centre + half


_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.labelcolor": INK,
    "axes.edgecolor": "#888888",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.7,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "savefig.facecolor": "white",
}
