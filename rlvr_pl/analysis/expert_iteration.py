"""Rounds of expert iteration: search, rationalize (if asked for), distil, evaluate on trained and held-out questions.

Round r takes the next --n-questions of the order and starts from the policy of round r-1. RUN/round-r holds
samples.jsonl, rationales.jsonl, distill/ (a run folder), items/ and report.json. Interrupted rounds go on where they
stopped; a later call with more --rounds adds to finished ones. RUN/cost.json sums everything up.

JSON keys: rounds [{round, start, search, rationalize, distill, trained, held_out, cost}] (what the commands of these
names report, rationalize may be null; trained and held_out are paired comparisons), held_out (start against the last
round), cost, policy (the last round's), run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr_pl.analysis import rationalize as rationalize_command
from rlvr_pl.analysis import search as search_command
from rlvr_pl.analysis.command import Result, Table, add_output_arguments
from rlvr_pl.analysis.distill import add_fit_arguments, compare_items, distill, paired_table, summarize
from rlvr_pl.analysis.explore import add_sampling_arguments, check_counts, open_explorer, progress
from rlvr_pl.cost import FILE_NAME, CostLedger, ledger_path
from rlvr_pl.errors import UserError
from rlvr_pl.records import RunFolder, sha256_file

if TYPE_CHECKING:
    from rlvr_pl.types import Question

EVAL_BATCH_SIZE = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, help="policy that round 1 starts from")
    parser.add_argument("--run", type=Path, required=True, help="folder of the rounds")
    parser.add_argument("--rounds", type=int, default=1, help="(default: %(default)s)")
    search_command.add_question_arguments(parser)
    add_sampling_arguments(parser)
    parser.add_argument("--rationalize", action="store_true", help="also bridge questions that no sample solved")
    rationalize_command.add_bridge_arguments(parser)
    add_fit_arguments(parser)
    add_output_arguments(parser, table=False)


def run(args: argparse.Namespace) -> Result:
    check_counts(args, "rounds", "k", "n_questions")
    if args.n_questions is None:
        raise UserError("--n-questions: say how many questions a round searches")
    everything = search_command.chosen_questions(args, args.start, args.rounds * args.n_questions)
    folder = RunFolder(args.run)
    _settle(folder, args)
    reports = []
    start = args.checkpoint
    for number in range(1, args.rounds + 1):
        questions = everything[(number - 1) * args.n_questions : number * args.n_questions]
        step = Round(number, RunFolder(folder.path / f"round-{number}"), start, questions)
        reports.append(step.folder.read_json("report.json") or step.run(args))
        start = str(step.policy)
    total = sum((CostLedger(**report["cost"]) for report in reports), CostLedger())
    total.write(folder.path / FILE_NAME)
    data = {
        "rounds": reports,
        "held_out": _held_out(folder.path, args.rounds),
        "cost": total.as_dict(),
        "policy": start,
        "run": str(folder.path),
    }
    folder.write_json("report.json", data)
    return Result(data, _tables(data), [f"Policy: {start}", f"Run folder: {folder.path}"])


@dataclass(frozen=True)
class Round:
    """One round: its number, its folder, the policy that it starts from, the questions that it searches."""

    number: int
    folder: RunFolder
    start: str
    questions: Sequence[Question]

    @property
    def policy(self) -> Path:
        """The policy that the round makes."""
        return self.folder.path / "distill" / "snapshots" / "final"

    def run(self, args: argparse.Namespace) -> dict[str, Any]:
        """Do what is left of the round and write its report."""
        path = self.folder.path
        path.mkdir(parents=True, exist_ok=True)
        search, bridges, files = self._explore(args)
        if not self._is_learned():
            distill(files, path / "distill", args, self.start)
            if not self._is_learned():
                raise UserError(f"{path / 'distill'}: was stopped before its end; call again to go on")
        self._evaluate(args)
        learned = summarize(path / "distill")
        parts = [ledger_path(file) for file in files] + [path / "distill" / FILE_NAME]
        report = {
            "round": self.number,
            "start": self.start,
            "search": search,
            "rationalize": bridges,
            "distill": learned,
            "trained": compare_items(self._items("before"), self._items("after")),
            "held_out": learned["held_out"],
            "cost": sum(map(CostLedger.read, parts), CostLedger()).as_dict(),
        }
        self.folder.write_json("report.json", report)
        return report

    def _is_learned(self) -> bool:
        state = RunFolder(self.folder.path / "distill").read_json("run.json")
        return state is not None and state["state"] == "finished"

    def _explore(self, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any] | None, list[Path]]:
        """Search and rationalize; what was found, and the files to distil."""
        from rlvr_pl.expert_iteration.files import read_samples
        from rlvr_pl.expert_iteration.rationalize import unsolved
        from rlvr_pl.expert_iteration.search import search

        samples, rationales = self.folder.path / "samples.jsonl", self.folder.path / "rationales.jsonl"
        with open_explorer(args, self.start, args.hint) as explorer:
            with progress(f"round {self.number}: samples", len(self.questions) * args.k) as tick:
                found = search_command.summarize(search(explorer, self.questions, args.k, samples, tick))
            rows = read_samples([samples])[1] if args.rationalize else []
            if not unsolved(rows):
                return found, None, [samples]
            bridge = rationalize_command.bridge_of(args)
            bridges = rationalize_command.rationalize_with_bar(explorer, rows, bridge, rationales)
        return found, rationalize_command.summarize(bridges), [samples, rationales]

    def _evaluate(self, args: argparse.Namespace) -> None:
        """Answer the round's own questions greedily, before and after."""
        from rlvr_pl.evaluation import evaluate_questions, header, write_items

        for when, policy in (("before", self.start), ("after", str(self.policy))):
            out = self._items(when)
            if out.exists():
                continue
            with (
                open_explorer(args, policy) as e,
                progress(f"trained questions, {when}", len(self.questions)) as tick,
            ):
                greedy = e.decoding.greedy()
                items = evaluate_questions(
                    e.policy, e.sampler, e.grader, self.questions, greedy, batch_size=EVAL_BATCH_SIZE, progress=tick
                )
                about = header(
                    sampler=e.sampler,
                    grader=e.grader,
                    batch_size=EVAL_BATCH_SIZE,
                    decoding=greedy,
                    checkpoint=e.policy.name,
                    sha256=e.policy.sha256,
                )
            write_items(out, about, items)

    def _items(self, when: str) -> Path:
        return self.folder.items / f"trained-{when}.jsonl"


def _settle(folder: RunFolder, args: argparse.Namespace) -> None:
    """Write the plan into a new folder; refuse a folder that has another one, or anything else, in it."""
    from rlvr_pl.configs import find_config

    config = Path(args.config) if args.config else find_config("expert_iteration.yaml")
    if not config.is_file():
        raise UserError(f"--config {config}: no such file")
    settings = {name: value for name, value in vars(args).items() if name not in ("run", "rounds", "json", "config")}
    plan = json.loads(json.dumps({**settings, "config_sha256": sha256_file(config)}, default=str))
    known = folder.read_json("plan.json")
    if known is None and folder.path.is_dir() and any(folder.path.iterdir()):
        raise UserError(f"--run {folder.path}: the folder is not empty and holds no rounds; choose another")
    if known is not None and known != plan:
        names = [name for name in {**known, **plan} if known.get(name) != plan.get(name)]
        raise UserError(f"--run {folder.path}: began with other settings ({', '.join(names)}); choose another folder")
    folder.write_json("plan.json", plan)


def _held_out(path: Path, rounds: int) -> dict[str, Any] | None:
    """The last round's policy against the start, on the held-out questions."""
    first = sorted((path / "round-1" / "distill" / "items").glob("val-*.jsonl"))
    last = sorted((path / f"round-{rounds}" / "distill" / "items").glob("val-*.jsonl"))
    return compare_items(first[0], last[-1]) if len(first) > 1 and last else None


def _tables(data: dict[str, Any]) -> list[Table]:
    rows = []
    for r in data["rounds"]:
        bridged = r["rationalize"]["solutions"] if r["rationalize"] else None
        found = r["search"]
        rows.append(
            [
                r["round"],
                found["questions"],
                found["solved"],
                bridged,
                r["distill"]["solutions"],
                r["distill"]["updates"],
            ]
        )
    columns = ["round", "questions", "solved", "bridged solutions", "solutions learned", "updates"]
    panels = {}
    for r in data["rounds"]:
        panels[f"round {r['round']}, trained"] = r["trained"]
        if r["held_out"]:
            panels[f"round {r['round']}, held out"] = r["held_out"]
    if data["held_out"] and len(data["rounds"]) > 1:
        panels["all rounds, held out"] = data["held_out"]
    cost = Table("Cost", ["", "all rounds"], list(data["cost"].items()))
    return [Table("Expert iteration", columns, rows), paired_table(panels), cost]
