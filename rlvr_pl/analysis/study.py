"""Train the matched arms of a study over its seeds, judge them by its frozen rule, and write the report.

A study file names the start, the question order, the arms, the seeds, the panel, the rule, the budget and what is
expected (docs/studies.md). Arms that are not matched are refused. What is finished is skipped, what was interrupted
goes on, and an arm that fails stops no other. The start is evaluated once; its result sets the rule of all arms, which
is fixed with its hash before update 1.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr_pl.analysis.command import Result, Table, add_output_arguments, emit, progress_console
from rlvr_pl.errors import UserError

if TYPE_CHECKING:
    from rlvr_pl.study.folder import StudyFolder
    from rlvr_pl.study.plan import Study
    from rlvr_pl.study.resolve import Plan
    from rlvr_pl.study.runner import Job

EPILOG = """\
JSON keys: study, arms {arm: {seed: {collapsed, first_update, final_correct, entropy}}}, start_correct, n,
criterion {..., sha256}, expectations: [{expected, held (null while runs are missing), found, ...}], unfinished:
[{arm, seed}], failed: [{arm, seed, reason}], report. The same, without the last two, is in DIR/summary.json.
With --dry-run: study, runs: [{arm, seed, state, updates}], updates, rollouts, max_sampled_tokens (of what is
left to do), differences {arm: {setting: [first arm's, this arm's]}}.

example: rlvr-pl study configs/studies/stabilization.yaml --jobs 2
         rlvr-pl study stabilization --dry-run"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="STUDY", help="study file, or the name of a shipped study")
    parser.add_argument("--out", type=Path, metavar="DIR", help="study folder (default: runs/studies/<file's name>)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, a process each (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="check the arms, print the plan and its cost, and end")
    parser.add_argument("--overwrite", action="store_true", help="remove the study folder first, and begin again")
    parser.epilog = EPILOG
    add_output_arguments(parser, table=False)


def run(args: argparse.Namespace) -> Result:
    if args.jobs < 1:
        raise UserError(f"--jobs {args.jobs}: must be at least 1")
    from rlvr_pl.study.folder import StudyFolder, evaluation_command
    from rlvr_pl.study.plan import find_study, read_study
    from rlvr_pl.study.resolve import make_plan

    study = read_study(find_study(args.file))
    folder = StudyFolder(args.out or Path("runs/studies") / study.name)
    plan = make_plan(study)
    evaluation_command(study, _reference(plan), folder.start_items)  # refuses a start that could not be evaluated
    if not args.overwrite:
        folder.check(study, plan)
    if args.dry_run:
        return _dry_run(study, plan, folder)
    return _conduct(study, plan, folder, args)


def _conduct(study: Study, plan: Plan, folder: StudyFolder, args: argparse.Namespace) -> Result:
    from rlvr_pl.report.page import write_report
    from rlvr_pl.study.runner import locked, run_jobs

    if args.overwrite and folder.path.exists():
        _remove(folder)
    with locked(folder.path) as lock:
        start = folder.evaluate_start(study, _reference(plan))
        folder.freeze(study, plan, start)
        _say_what_is_fixed(folder)
        jobs = folder.jobs(study, plan, folder.criterion)
        seconds = None if study.budget.minutes is None else 60 * study.budget.minutes
        with Watch(jobs) as watch:
            run_jobs(jobs, args.jobs, lock, seconds=seconds, watch=watch)
        if any(job.state in ("stopped", "waiting") for job in jobs):
            done = sum(job.state == "finished" for job in jobs)
            print(f"rlvr-pl: stopped with {done} of {len(jobs)} runs done; the same command goes on", file=sys.stderr)
        summary = folder.summary()
        folder.write_summary(summary)
        report = folder.path / "report.html"
        if any(summary["arms"].values()):
            write_report(folder.path, report)
    failed = [{"arm": job.arm, "seed": job.seed, "reason": job.reason} for job in jobs if job.state == "failed"]
    result = Result({**summary, "failed": failed, "report": str(report)}, _tables(folder), _notes(folder, jobs, report))
    if failed:
        emit(result, args)
        raise SystemExit(1)
    return result


def _reference(plan: Plan) -> Mapping[str, Any]:
    """Settings of the first arm that `fit` trains; the start is evaluated under them."""
    return next(iter(plan.settings.values()))


def _remove(folder: StudyFolder) -> None:
    from rlvr_pl.study.runner import locked

    _ = folder.content  # a UserError for a folder that holds no study
    with locked(folder.path):
        shutil.rmtree(folder.path)


def _say_what_is_fixed(folder: StudyFolder) -> None:
    frozen = folder.content["frozen"]
    print(
        f"rlvr-pl: start {frozen['start_correct']}/{frozen['n']} correct; rule fixed for all arms: validation at most "
        f"{frozen['criterion']['val_floor']}, or truncation at least {frozen['criterion']['truncation']:g} over "
        f"{frozen['criterion']['window']} updates (sha256 {frozen['criterion_sha256'][:12]})",
        file=sys.stderr,
    )


# ---- what is printed -----------------------------------------------------------------------------------------------


def _dry_run(study: Study, plan: Plan, folder: StudyFolder) -> Result:
    from rlvr_pl.study.resolve import difference_words

    jobs = folder.jobs(study, plan, None)
    left = [job for job in jobs if job.state != "finished"]
    updates = sum(job.updates - job.done for job in left if job.updates)
    rollouts = updates * plan.rollouts // plan.updates
    data = {
        "study": study.name,
        "runs": [{"arm": j.arm, "seed": j.seed, "state": j.state, "updates": j.updates} for j in jobs],
        "updates": updates,
        "rollouts": rollouts,
        "max_sampled_tokens": None if plan.cap is None else rollouts * plan.cap,
        "differences": {arm: dict(found) for arm, found in plan.differences.items()},
    }
    most = "" if plan.cap is None else f", at most {rollouts * plan.cap:,} sampled tokens"
    notes = [
        f"{len(left)} of {len(jobs)} runs to do: {updates:,} updates, {rollouts:,} rollouts{most}; "
        f"a run has {plan.updates} updates and {plan.rollouts:,} rollouts.",
        f"The start and every validation answer {plan.panel} questions. Folder: {folder.path}",
    ]
    if any(job.commands and not job.updates for job in left):
        notes.append("Arms made of commands are not in these counts.")
    rows = [[arm.name, difference_words(arm.commands, plan.differences.get(arm.name, {}))] for arm in study.arms]
    return Result(data, [Table(f"Arms of {study.name}", ["arm", f"differs from {study.arms[0].name} in"], rows)], notes)


def _tables(folder: StudyFolder) -> list[Table]:
    from rlvr_pl.core.paired import compare
    from rlvr_pl.study.plan import START

    start = folder.outcomes[START][0]
    rows = []
    for arm in folder.arms:
        for run in folder.outcomes[arm]:
            paired = compare(start.correct, run.correct)
            verdict = run.verdict
            collapse = f"{verdict['first_update']}-{verdict['last_update']}" if verdict["collapsed"] else "no"
            change = f"{paired.delta_pp:+.1f} [{paired.ci_low:+.1f}, {paired.ci_high:+.1f}]"
            cells = [run.measure("final_correct"), change, run.measure("entropy"), run.measure("kl")]
            rows.append([arm, run.seed, collapse, *cells])
    columns = ["arm", "seed", "collapse (updates)", "correct", "against the start, pp [95%]", "entropy", "KL"]
    said = [
        [str(e), {True: "held", False: "did not hold", None: "open"}[j.held], j.detail] for e, j in folder.judgements()
    ]
    return [
        Table(f"Study {folder.content['name']}", columns, rows),
        Table("Expected beforehand", ["expectation", "", "found"], said),
    ]


def _notes(folder: StudyFolder, jobs: list[Job], report: Path) -> list[str]:
    notes = [f"{job.name} failed: {job.reason} (see {job.log})" for job in jobs if job.state == "failed"]
    return [*notes, f"Summary: {folder.path / 'summary.json'}", f"Report: {report}"]


class Watch:
    """One live table of all runs on a terminal; elsewhere a line whenever a run begins or ends."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.console = progress_console()
        self._said = {job.name: job.state for job in jobs}
        self._live: Any = None
        self._begun = time.monotonic()
        self._done_before = {job.name: job.done for job in jobs}

    def __enter__(self) -> Watch:
        if self.console.is_terminal:
            from rich.live import Live

            self._live = Live(self.table(), console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self) -> None:
        if self._live is not None:
            self._live.update(self.table(), refresh=True)
            return
        for job in self.jobs:
            if job.state != self._said[job.name]:
                self._said[job.name] = job.state
                took = f" ({job.seconds:.0f} s)" if job.state == "finished" else ""
                why = f": {job.reason}" if job.reason and not took else ""
                print(f"rlvr-pl: {job.name}: {job.state}{took}{self._left()}{why}", file=sys.stderr, flush=True)

    def table(self) -> Any:
        """The state of every run."""
        from rich.table import Table as RichTable

        table = RichTable(title=f"runs{self._left()}", title_justify="left")
        for name in ("arm", "seed", "", "update", "reward", "cut", "correct", "entropy"):
            table.add_column(name, justify="left" if name in ("arm", "") else "right")
        for job in self.jobs:
            table.add_row(job.arm, str(job.seed), job.state, *_figures(job))
        return table

    def _left(self) -> str:
        """Time left, judged by the updates done so far in this call."""
        done = {job.name: job.done for job in self.jobs}
        new = sum(done[name] - self._done_before[name] for name in done)
        left = sum(max(0, job.updates - done[job.name]) for job in self.jobs if job.state in ("waiting", "running"))
        if not new or not left:
            return ""
        return f", about {left * (time.monotonic() - self._begun) / new / 60:.0f} min left"


def _figures(job: Job) -> list[str]:
    """Updates done, and the newest figures of a run: reward and truncation of its last window, validation, entropy."""
    if job.state == "waiting" and not job.folder.path.exists():
        return [f"0/{job.updates}" if job.updates else "", "", "", "", ""]

    def last(table: str, column: str, digits: int) -> str:
        rows = job.folder.table(table).rows()
        value = rows[-1].get(column) if rows else None
        return f"{float(value):.{digits}f}" if value else ""

    return [
        f"{job.done}/{job.updates}" if job.updates else str(job.done),
        last("windows.csv", "reward", 2),
        last("windows.csv", "truncation", 2),
        last("validation.csv", "correct", 0),
        last("drift.csv", "entropy", 3),
    ]
