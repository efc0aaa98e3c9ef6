"""List the tasks of the package reasoning-gym, or show questions of one with their answers and settings."""

from __future__ import annotations

import argparse
import dataclasses

from rlvr_pl.analysis.command import Result, Table, add_output_arguments
from rlvr_pl.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", nargs="?", help="a task to show (default: list them all)")
    parser.add_argument("--size", type=int, default=3, help="questions to show (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="names the questions (default 0)")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    """JSON: ``{"tasks": [{"name", "category"}]}``; for one task ``{"task", "questions": [{"question", "answer"}],
    "settings": {name: default}}``."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UserError("reasoning-gym is not installed: pip install 'rlvr-pl[reasoning]'") from None
    if args.task is None:
        tasks = [{"name": name, "category": cls.__module__.split(".")[1]} for name, (cls, _) in DATASETS.items()]
        tasks.sort(key=lambda task: (task["category"], task["name"]))
        table = Table("Tasks of reasoning-gym", ("category", "name"), [(t["category"], t["name"]) for t in tasks])
        notes = ["Train on one: rlvr-pl fit --data ReasoningGym --data.task NAME --grader ReasoningGymGrader"]
        return Result({"tasks": tasks}, [table], notes)
    from rlvr_pl.data.reasoning_gym import questions

    if args.size < 1:
        raise UserError(f"--size {args.size}: must be at least 1")
    shown = [(q.problem, q.answer) for q in questions(args.task, "train", args.size, args.seed)]
    fields = dataclasses.fields(DATASETS[args.task][1]())
    settings = {f.name: getattr(DATASETS[args.task][1](), f.name) for f in fields if f.name not in ("seed", "size")}
    settings = {name: list(v) if isinstance(v, (tuple, set)) else v for name, v in settings.items()}
    data = {
        "task": args.task,
        "questions": [{"question": q, "answer": a} for q, a in shown],
        "settings": {
            k: v if isinstance(v, (int, float, str, list, dict, type(None))) else str(v) for k, v in settings.items()
        },
    }
    tables = [
        Table(f"Questions of {args.task}", ("question", "answer"), shown),
        Table("Settings (data.config)", ("name", "default"), [(k, str(v)) for k, v in data["settings"].items()]),
    ]
    return Result(data, tables)
