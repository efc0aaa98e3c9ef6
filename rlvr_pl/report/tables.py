"""The tables of a report, in the form of the paper's: 1, 2, 3, 4, 4b, 5, power and costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlvr_pl.report.content import Cell, Grid, amount, ask, change, command, number, series, signed, span
from rlvr_pl.report.subject import ReportedRun, Subject

PANELS = (1000, 2000)
EFFECTS = (0.03, 0.05)


def table_1(subject: Subject) -> Grid | None:
    """Greedy accuracy against the start: the end of every run of a study, every validation of a run."""
    if subject.start_items is None:
        return None
    chosen = [(run, u) for run in subject.runs for u in _reported(subject, run) if u]
    files = [run.items[u] for run, u in chosen]
    if not files:
        return None
    words = ["compare", subject.start_items, *files]
    found = ask(*words)
    rows: list[list[Cell]] = []
    for (run, update), paired in zip(chosen, found.get("comparisons", [found])):
        rollouts, tokens = run.exposure(update)
        difference = change(paired["delta_pp"], paired["ci_low"], paired["ci_high"])
        exposure = f"{rollouts:,} / {amount(tokens)}" if tokens else "–"
        turnover = f"{paired['gained']} / {paired['lost']}"
        rows.append([f"{run.label}, update {update}", exposure, _correct(run, update), difference, turnover])
    start = sum(_outcomes(subject.start_items))
    return Grid(
        "Table 1",
        f"Greedy accuracy on the {found['n'] if 'n' in found else found['comparisons'][0]['n']} held-out questions. "
        "Paired comparisons are against the start; the 95% interval resamples items and holds the checkpoints fixed.",
        ["Policy", "Rollouts / tokens after start", "Correct", "Δ vs start, pp [95% CI]", "Gained / lost"],
        [["Start", "0", start, "0", "–"], *rows],
        [command(*words)],
    )


def over_seeds(subject: Subject) -> Grid | None:
    """Each arm of a study over its seeds, against the start and against the first arm."""
    if subject.start_items is None or subject.study is None or all(len(subject.of(a)) < 2 for a in subject.arms):
        return None
    first = subject.arms[0]
    rows: list[list[Cell]] = []
    commands = []
    for arm in subject.arms:
        files = [run.items[max(run.items)] for run in subject.of(arm)]
        words = ["compare", subject.start_items, "--seeds", *files]
        start = ask(*words)
        against = "–"
        commands.append(command(*words))
        if arm != first:
            others = [run.items[max(run.items)] for run in subject.of(first)]
            words = ["compare", *others, "--seeds", *files]
            found = ask(*words)
            against = change(found["delta_pp"], found["ci_low"], found["ci_high"])
            commands.append(command(*words))
        each = " / ".join(signed(x) for x in start["per_seed_pp"])
        rows.append([arm, len(files), change(start["delta_pp"], start["ci_low"], start["ci_high"]), each, against])
    return Grid(
        "Table 1b",
        "Each arm over its seeds, at the end. The 95% interval resamples training seeds and items together; with so "
        "few seeds it understates how much seeds differ.",
        ["Arm", "Seeds", "Δ vs start, pp [95% CI]", "Each seed", f"Δ vs {first}, pp [95% CI]"],
        rows,
        commands,
    )


def table_2(subject: Subject) -> Grid | None:
    """Discordance of policies of similar accuracy, by level."""
    files = subject.standing
    if len(files) < 2:
        return None
    words: list[Any] = ["noise-floor", *files]
    found = ask(*words)
    levels = _levels(files[0])
    if levels:
        words += ["--by", "level"]
        found = ask(*words)
    rows: list[list[Cell]] = [
        [s["level"], s["n"], number(s["mean_discordant"], 1), number(s["half_width_pp"], 1)]
        for s in found.get("strata", [])
    ]
    total = [["All", found["n"], number(found["mean_discordant"], 1), number(found["half_width_pp"], 1)]]
    return Grid(
        "Table 2",
        f"Discordance of the {len(files)} checkpoints that stand above the rule's floor: two of them disagree on "
        f"{found['discordance_rate']:.3f} of the items. {found['always']} items are always right, {found['never']} "
        f"never, {found['sometimes']} sometimes. ± pp is what two equally good checkpoints differ by chance (95%).",
        ["Level", "n", "Mean discordant", "± pp"],
        [*rows, *total],
        [command(*words)],
    )


def power_table(subject: Subject) -> Grid | None:
    """Power of a paired comparison at the discordance that was measured, and at the paper's."""
    files = subject.standing
    n = len(_outcomes(files[0])) if files else 350
    rates = [0.2]
    if len(files) > 1:
        measured = round(ask("noise-floor", *files)["discordance_rate"], 3)
        rates = sorted(rate for rate in {measured, 0.2} if rate >= max(EFFECTS))  # no effect exceeds the discordance
    words = ["power", "--pd", *rates, "--n", *sorted({n, *PANELS}), "--delta", *EFFECTS]
    grid = ask(*words)["grid"]
    rows: list[list[Cell]] = []
    for line in (grid[i : i + len(EFFECTS)] for i in range(0, len(grid), len(EFFECTS))):
        rows.append([line[0]["p_d"], line[0]["n"], number(line[0]["se_pp"], 1), *(number(x["power"], 2) for x in line)])
    needed = ["power", "--pd", *rates, "--delta", EFFECTS[0], "--target-power", 0.8]
    found = ask(*needed)
    items = " and ".join(f"{x['n']:,} items at p_d = {x['p_d']:g}" for x in found.get("grid", [found]))
    return Grid(
        "Power",
        "Power of one paired comparison (two-sided, 5%) at the discordance measured above and at the paper's 0.20. "
        f"80% power for 3 pp needs {items}. Training-seed variance comes on top.",
        ["p_d", "n", "SE (pp)", *(f"Power, Δ = {100 * d:g} pp" for d in EFFECTS)],
        rows,
        [command(*words), command(*needed)],
    )


def table_3(subject: Subject) -> Grid | None:
    """The drift monitor of the first arm (or of the run) at its validations."""
    runs = [run for run in subject.of(subject.arms[0]) if run.drift]
    rows: list[list[Cell]] = []
    for run in runs:
        for update in _shared(run):
            row = run.drift[update]
            cells = [number(row["entropy"]), number(row["kl"]), number(row["nll"]), _correct(run, update)]
            rows.append([f"{run.label}, update {update}" if update else f"Start ({run.label})", *cells])
    return _drift_grid("Table 3", runs, rows)


def table_4(subject: Subject) -> Grid | None:
    """Every run at its validations: accuracy, drift, soup."""
    if subject.start_items is None:
        return None
    files = [run.items[max(run.items)] for run in subject.runs]
    compared = ask("compare", subject.start_items, *files)
    timetables = {series(_validated(run)) for run in subject.runs}
    own = len(timetables) > 1  # then each row says its updates
    rows: list[list[Cell]] = []
    for run, paired in zip(subject.runs, compared.get("comparisons", [compared])):
        correct = run.records.validation()
        at = _validated(run)
        measured = [u for u in at if u in run.drift]
        soup = [] if run.stored else [w["soup"] for w in run.windows["windows"]]
        rows.append(
            [
                run.label,
                *([series(at)] if own else []),
                series([correct[u] for u in at]),
                change(paired["delta_pp"], paired["ci_low"], paired["ci_high"]),
                series([run.drift[u]["entropy"] for u in measured], 2) if measured else "–",
                series([run.drift[u]["kl"] for u in measured], 3) if measured else "–",
                number(max((x for x in soup if x is not None), default=None), 2),
            ]
        )
    return Grid(
        "Table 4",
        f"Every run at its validations{'' if own else f' (updates {timetables.pop()})'}. Δ is of the last one. Entropy "
        "and KL(start ‖ checkpoint) in nats a token on fixed contexts; soup is its largest share of the rollouts of a "
        f"{subject.runs[0].window}-update window.",
        [
            "Arm",
            *(["Updates"] if own else []),
            *("Correct", "Δ vs start at the end, pp [95% CI]", "Entropy/token", "KL/token", "Soup"),
        ],
        rows,
        [
            command("compare", subject.start_items, *files),
            *_drift_commands(subject.runs[:1]),
            command("rollout-stats", *(run.path for run in subject.runs), "--window", subject.runs[0].window),
        ],
    )


def table_4b(subject: Subject) -> Grid:
    """Every run's windows and what the frozen rule says of them."""
    window = subject.runs[0].window
    rows: list[list[Cell]] = []
    for run in subject.runs:
        windows, whole = [] if run.stored else run.windows["windows"], run.whole
        validation = run.records.validation()
        rows.append(
            [
                run.label,
                _clipping(whole),
                span([w["reward"] for w in windows]),
                span([w["truncation"] for w in windows]),
                span([w["m_ratio"] for w in windows]),
                series([validation[u] for u in sorted(validation)]) or "–",
                collapse_words(run),
            ]
        )
    rule = subject.criterion
    said = "no rule was frozen for it"
    if rule is not None:
        floor = "" if rule.val_floor is None else f", or a validation has at most {rule.val_floor} correct"
        said = (
            f"a {rule.mode} window of {rule.window} updates has a truncation rate of at least {rule.truncation:g}"
            f"{floor} (sha256 {rule.sha256[:12]}, written before update 1)"
        )
    return Grid(
        "Table 4b",
        f"Windows of {window} updates: smallest to largest. Norms are before clipping: median [5th, 95th percentile] "
        f"of updates with a gradient. Collapse: {said}.",
        [
            "Arm",
            "Clipped / nonzero updates (norm)",
            "Reward per window",
            "Truncation per window",
            "M₋/M₊ per window",
            f"Validation, updates {series(sorted(subject.runs[0].records.validation()))}",
            "Collapse",
        ],
        rows,
        [
            command("rollout-stats", *(run.path for run in subject.runs), "--window", window),
            command("rollout-stats", subject.runs[0].path, "--window", subject.runs[0].windows["updates"]),
        ],
    )


def table_5(subject: Subject) -> list[Grid]:
    """The entropy-gradient decomposition, where its batches lie in the folder (``entropy_grad*.json``)."""
    files = sorted(subject.path.glob("entropy_grad*.json"))
    if not files:
        return []
    words = ["entropy-grad", "--summarize", *files]
    grids = []
    for found in ask(*words)["checkpoints"]:
        classes: list[list[Cell]] = [
            [
                name.replace("_", ", "),
                rate["rollouts"],
                number(rate["mean_tokens"], 0),
                number(rate["rate"], 2),
                _relative(rate),
            ]
            for name, rate in found["classes"].items()
        ]
        grids.append(
            Grid(
                "Table 5a",
                f"Effect of a token of each class on the entropy of the fixed contexts, at {found['checkpoint']}, "
                f"{len(found['batches'])} batches pooled.",
                ["Rollouts", "Number", "Mean tokens", "Per-token rate", "Relative to positive [95% CI]"],
                classes,
                [command(*words)],
            )
        )
        directions: list[list[Cell]] = [
            [i, name, change(d["slope"], d["ci_low"], d["ci_high"]), signed(d["cosine"], 2), f"{d['sign_step']:+.1e}"]
            for i, batch in enumerate(found["batches"], 1)
            for name, d in batch["directions"].items()
        ]
        grids.append(
            Grid(
                "Table 5b",
                "First-order change of that entropy along each loss's direction; intervals over mixed groups.",
                ["Batch", "Weighting", "dH/dη [95% CI]", "cos(∇H, d)", "Realized sign step ΔH"],
                directions,
                [command(*words)],
            )
        )
    return grids


def cost_table(subject: Subject) -> Grid | None:
    """What each run cost, and how equal that was."""
    runs = [run for run in subject.runs if run.ledgers]
    if not runs:
        return None
    words = ["cost", *(f"{_short(run)}={','.join(map(str, run.ledgers))}" for run in runs)]
    found = ask(*words)
    names = ("sampled_tokens", "prefill_tokens", "graded", "trained_tokens", "optimizer_steps", "wall_seconds")
    rows: list[list[Cell]] = [
        [run.label, *(amount(found["arms"][_short(run)][name]) for name in names)] for run in runs
    ]
    if len(runs) > 1:
        ratios = [found["ratio"][name] for name in names]
        rows.append(["largest / smallest", *("–" if r is None or r == float("inf") else f"{r:.2f}" for r in ratios)])
    return Grid(
        "Costs",
        "Everything that a run learned from; validation and monitors are not counted. Seconds are of the machine that "
        "ran it, with whatever else it had to do.",
        ["Arm", "Sampled tokens", "Prompt tokens", "Graded", "Trained tokens", "Optimizer steps", "Seconds"],
        rows,
        [command(*words)],
    )


# ---- cells ---------------------------------------------------------------------------------------------------------


def _reported(subject: Subject, run: ReportedRun) -> list[int]:
    updates = sorted(run.items)
    return updates if subject.study is None else updates[-1:]


def _validated(run: ReportedRun) -> list[int]:
    return [u for u in sorted(run.items) if u]


def _shared(run: ReportedRun) -> list[int]:
    """Updates at which the run was validated and drift measured; without validations all of the latter."""
    return [u for u in sorted(run.drift) if u in run.items or not run.items]


def _correct(run: ReportedRun, update: int) -> Cell:
    return run.records.validation().get(update, "–")


def _outcomes(path: Path) -> list[bool]:
    from rlvr_pl.analysis.items import load_panel

    return load_panel([path]).runs[0].correct.tolist()


def _levels(path: Path) -> bool:
    from rlvr_pl.analysis.items import load_panel

    return all(level is not None for level in load_panel([path]).columns["level"])


def _drift_grid(name: str, runs: Sequence[ReportedRun], rows: Sequence[Sequence[Cell]]) -> Grid | None:
    if not rows:
        return None
    tokens = next(iter(runs[0].drift.values()))["tokens"]
    return Grid(
        name,
        f"Fixed-context drift monitor of {runs[0].arm}: start-policy contexts that no arm trains on, {tokens:,.0f} "
        "tokens, nats a token. It measures how far the policy moved there, not the entropy of what it writes itself.",
        ["Checkpoint", "Entropy/token", "KL(start ‖ ckpt)/token", "NLL of start tokens", "Correct"],
        rows,
        _drift_commands(runs),
    )


def _drift_commands(runs: Sequence[ReportedRun]) -> list[str]:
    """Commands that measure the final policy of each run again (the other rows are in its drift.csv)."""
    return [
        command(
            *("drift", "--start", run.state["start"], "--checkpoints", run.path / "snapshots" / "final"),
            *("--contexts", run.path / "drift_contexts.json"),
        )
        for run in runs
        if run.drift
    ]


def _clipping(whole: dict[str, Any]) -> str:
    if whole["nonzero"] is None:
        return "–"
    norms = [whole[f"grad_norm_{name}"] for name in ("median", "p5", "p95")]
    shown = "no gradient" if norms[0] is None else f"{norms[0]:.3g} [{norms[1]:.3g}, {norms[2]:.3g}]"
    return f"{whole['clipped']} / {whole['nonzero']} ({shown})"


def collapse_words(run: ReportedRun) -> str:
    """Whether the run collapsed by its frozen rule, and in which updates; a dash without a rule."""
    verdict = run.verdict
    if verdict is None:
        return "–"
    if not verdict["collapsed"]:
        return "no"
    first, last = verdict["first_update"], verdict["last_update"]
    return f"yes (updates {first}–{last})" if first != last else f"yes (update {first})"


def _relative(rate: dict[str, Any]) -> str:
    if rate["relative"] is None:
        return "–"
    if rate["ci_low"] is None:
        return number(rate["relative"], 2)
    return f"{rate['relative']:.2f} [{rate['ci_low']:.2f}, {rate['ci_high']:.2f}]"


def _short(run: ReportedRun) -> str:
    return run.arm if run.seed is None else f"{run.arm}-s{run.seed}"
