"""The pictures of a report, as SVG text: drift, validation, what rollouts consist of, signed mass and gradient norms.

An arm has one colour, its seeds are lines of that colour. Equal records give equal bytes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

from rlvr_pl.analysis.plot import COLOURS, FAINT, INK
from rlvr_pl.report.content import Figure, command
from rlvr_pl.report.subject import ReportedRun, Subject

# The plot command's palette with black first, and two more colours for studies of many arms.
PALETTE = ("#000000", *(c for c in COLOURS if c != "#000000"), "#8C564B", "#7F7F7F")
CLASSES = (
    ("eos", "ended", "#DCE6EC"),
    ("cut", "cut off", "#E69F00"),
    ("loop", "loop", "#CC79A7"),
    ("soup", "soup", "#D55E00"),
)
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 9,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#888888",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.hashsalt": "rlvr-pl",
    "svg.fonttype": "path",
}
WIDTH = 9.0


def drift_figure(subject: Subject) -> Figure | None:
    """Entropy and KL on fixed contexts."""
    runs = [run for run in subject.runs if run.drift]
    if not runs:
        return None

    def entropy(ax: Any, run: ReportedRun, style: dict[str, Any]) -> None:
        ax.plot(list(run.drift), [row["entropy"] for row in run.drift.values()], **style)

    def kl(ax: Any, run: ReportedRun, style: dict[str, Any]) -> None:
        # KL at the start is 0, which a logarithmic axis cannot show
        points = [(u, row["kl"]) for u, row in run.drift.items() if row["kl"] > 0]
        if points:
            ax.plot(*zip(*points), **style)

    svg = _overlay(
        subject, runs, [("entropy, nats a token", entropy, "log"), ("KL(start ‖ current), nats a token", kl, "log")]
    )
    return Figure(
        "Figure 2",
        "Drift on fixed contexts: entropy and KL from the start, logarithmic. Rows of each run's drift.csv.",
        "Entropy and KL by update, one line a run",
        svg,
        _plots(subject),
    )


def validation_figure(subject: Subject) -> Figure | None:
    """Greedy validation with its interval, a panel an arm."""
    if not any(run.records.validation() for run in subject.runs):
        return None
    start = subject.runs[0].records.validation().get(0)
    floor = None if subject.criterion is None else subject.criterion.val_floor

    def draw(ax: Any, arm: str, colour: str) -> None:
        runs = subject.of(arm)
        for i, run in enumerate(runs):
            rows = run.records.rows("validation.csv")
            n = rows[0]["n"] if rows else 1
            at = [row["update"] + (i - (len(runs) - 1) / 2) * 0.012 * run.windows["updates"] for row in rows]
            share = [100 * row["correct"] / n for row in rows]
            error = [100 * 1.96 * math.sqrt(max(0.0, s / 100 * (1 - s / 100)) / n) for s in share]
            ax.errorbar(
                at, share, error, fmt="o-", ms=3, capsize=2, elinewidth=0.8, color=colour, alpha=1 - 0.35 * (i > 0)
            )
            for level, dash in ((start, "--"), (floor, ":")):
                if level is not None:
                    ax.axhline(100 * level / n, color=INK, lw=0.8, ls=dash)

    svg = _panels(subject, subject.arms, draw, "% correct")
    lines = "Dashed: the start." + (" Dotted: the floor of the frozen rule." if floor is not None else "")
    return Figure(
        "Figure 1",
        f"Greedy accuracy on held-out questions, with the binomial 95% interval of one checkpoint. {lines}",
        "Share of correct answers by update, one panel an arm",
        svg,
        _plots(subject),
    )


def class_figure(subject: Subject) -> Figure | None:
    """What rollouts consist of, window by window."""
    arms = _sampling(subject)
    if not arms:
        return None

    def draw(ax: Any, arm: str, colour: str) -> None:
        windows = subject.of(arm)[0].windows["windows"]
        edges = [0, *(w["last_update"] for w in windows)]
        below = [0.0] * len(windows)
        for kind, label, shade in CLASSES:
            shares = [100 * _share(w, kind) for w in windows]
            tops = [b + s for b, s in zip(below, shares)]
            ax.stairs(tops, edges, baseline=below, fill=True, color=shade, label=label, lw=0)
            below = tops
        ax.set_ylim(0, 100)

    seeds = f" First seed ({subject.runs[0].seed})." if subject.runs[0].seed is not None else ""
    return Figure(
        "Figure 3",
        f"What the sampled rollouts consist of, windows of {subject.runs[0].window} updates: ended by themselves; cut "
        f"off at the cap in ordinary text; cut off in a loop; cut off in token soup.{seeds}",
        "Stacked shares of rollout classes by update, one panel an arm",
        _panels(subject, arms, draw, "% of rollouts", legend=True),
        _statistics(subject),
    )


def mass_figure(subject: Subject) -> Figure | None:
    """M-/M+ and gradient norms by window."""
    runs = [run for run in subject.runs if run.arm in _sampling(subject)]
    if not runs:
        return None

    def mass(ax: Any, run: ReportedRun, style: dict[str, Any]) -> None:
        _windows(ax, run, "m_ratio", style)
        ax.axhline(1, color=INK, lw=0.8, ls=":")

    def norm(ax: Any, run: ReportedRun, style: dict[str, Any]) -> None:
        _windows(ax, run, "grad_norm_median", style)

    return Figure(
        "Figure 4",
        "Left: negative over positive token mass of the objective's own weights, M₋/M₊, by window. Right: median "
        "gradient norm before clipping, by window.",
        "M-/M+ and gradient norm by update, one line a run",
        _overlay(subject, runs, [("M₋/M₊", mass, "log"), ("gradient norm", norm, "log")]),
        _statistics(subject),
    )


# ---- drawing -------------------------------------------------------------------------------------------------------

Draw = Callable[[Any, ReportedRun, dict[str, Any]], None]


def _overlay(subject: Subject, runs: Sequence[ReportedRun], panels: Sequence[tuple[str, Draw, str]]) -> str:
    """All runs in each of the panels, side by side, under one legend of arms."""
    plt = _pyplot()
    with plt.rc_context(STYLE):
        fig, axes = plt.subplots(1, len(panels), figsize=(WIDTH, 3.6), layout="constrained")
        for ax, (label, draw, scale) in zip(axes, panels):
            for run in runs:
                seeds = [r.seed for r in subject.of(run.arm)]
                style = {"color": _colour(subject, run.arm), "ls": ("-", "--", "-.", ":")[seeds.index(run.seed) % 4]}
                draw(ax, run, style)
            if scale == "log" and any(min(line.get_ydata(), default=0) > 0 for line in ax.lines):
                ax.set_yscale("log")
                _plain_ticks(ax)
            ax.set(xlabel="update", ylabel=label, xlim=(0, 1.01 * max(run.windows["updates"] for run in runs)))
            ax.xaxis.get_major_locator().set_params(integer=True)
            ax.grid(axis="y", color=FAINT, lw=0.6)
        if len(subject.arms) > 1:
            from matplotlib.lines import Line2D

            handles = [Line2D([], [], color=_colour(subject, arm), label=arm) for arm in subject.arms]
            fig.legend(handles=handles, loc="outside upper center", ncols=min(8, len(handles)))
        return _svg(fig)


def _panels(
    subject: Subject, arms: Sequence[str], draw: Callable[[Any, str, str], None], label: str, legend: bool = False
) -> str:
    """A small panel for each arm, all on the same axes."""
    plt = _pyplot()
    columns = min(4, len(arms))
    rows = -(-len(arms) // columns)
    with plt.rc_context(STYLE):
        size = (WIDTH if columns > 1 else 0.6 * WIDTH, 2.1 * rows + 0.5 + 0.8 * (rows == 1))
        fig, axes = plt.subplots(
            rows, columns, figsize=size, sharex=True, sharey=True, layout="constrained", squeeze=False
        )
        for ax, arm in zip(axes.flat, arms):
            draw(ax, arm, _colour(subject, arm))
            ax.set_title(arm, loc="left")
            ax.grid(axis="y", color=FAINT, lw=0.6)
        for ax in axes.flat[len(arms) :]:
            ax.set_visible(False)
        fig.supxlabel("update", fontsize=9)
        fig.supylabel(label, fontsize=9)
        if legend:
            fig.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
        return _svg(fig)


def _sampling(subject: Subject) -> list[str]:
    """Arms that sample their rollouts; the records of the others are stored solutions."""
    return [arm for arm in subject.arms if not any(run.stored for run in subject.of(arm))]


def _windows(ax: Any, run: ReportedRun, name: str, style: dict[str, Any]) -> None:
    points = [(w["last_update"], w[name]) for w in run.windows["windows"] if w[name]]
    if points:
        ax.plot(*zip(*points), **style)


def _share(window: dict[str, Any], kind: str) -> float:
    if kind == "cut":
        return max(0.0, window["truncation"] - window["loop"] - window["soup"])
    return window[kind]


def _colour(subject: Subject, arm: str) -> str:
    if len(subject.arms) == 1:
        return COLOURS[0]
    return PALETTE[subject.arms.index(arm) % len(PALETTE)]


def _plain_ticks(ax: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    low, high = ax.get_ylim()
    if high / low < 5:
        ax.yaxis.set_major_locator(MaxNLocator(5))
    else:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _statistics(subject: Subject) -> list[str]:
    return [command("rollout-stats", *(run.path for run in subject.runs), "--window", subject.runs[0].window)]


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _svg(fig: Any) -> str:
    text = io.StringIO()
    fig.savefig(text, format="svg", metadata={"Date": None})
    _pyplot().close(fig)
    return text.getvalue()


def _plots(subject: Subject) -> list[str]:
    """The commands that draw the same records of each run."""
    return [command("plot", run.path) for run in subject.runs]
