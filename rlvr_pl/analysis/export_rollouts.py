"""Make the compact public records of every rollout of a run, or of a file of samples.

A row is {uid, update, sample, reward, answer, length, stop_reason}; samples of `rlvr-pl search` have update 0. Texts
and token ids stay behind.

JSON keys: rollouts, questions, updates, correct (reward 1), tokens, out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlvr_pl.analysis.command import Result, Table, add_output_arguments, check_file
from rlvr_pl.errors import UserError
from rlvr_pl.jsonl import Kind, iter_jsonl, read_records
from rlvr_pl.records import RunFolder, atomic_write_text

VERSION = 1
FIELDS = ("uid", "update", "sample", "reward", "answer", "length", "stop_reason")

_SAMPLE: dict[str, Kind] = {
    "uid": str,
    "sample": int,
    "correct": frozenset({0, 1}),
    "length": int,
    "stop_reason": frozenset({"eos", "length"}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder, or sample records of `rlvr-pl search`")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON lines to write")
    parser.add_argument("--overwrite", action="store_true", help="allow --out to replace an existing file")
    add_output_arguments(parser, table=False)


def run(args: argparse.Namespace) -> Result:
    check_file(args.out, args.overwrite)
    about, rows = _of_run(args.run) if args.run.is_dir() else _of_samples(args.run)
    header = {"record": "rollouts", "version": VERSION, **about}
    atomic_write_text(args.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in (header, *rows)))
    data = {
        "rollouts": len(rows),
        "questions": len({row["uid"] for row in rows}),
        "updates": len({row["update"] for row in rows}),
        "correct": sum(row["reward"] == 1 for row in rows),
        "tokens": sum(row["length"] for row in rows),
        "out": str(args.out),
    }
    return Result(data, [Table("Rollouts", list(data)[:-1], [list(data.values())[:-1]])], [f"Records: {args.out}"])


def _of_run(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    folder = RunFolder(path)
    files = sorted(folder.rollouts.glob("*-*.jsonl"))
    if not files:
        raise UserError(f"{path}: no recorded rollouts (rollouts/*.jsonl); a run needs the callback RolloutRecorder")
    state = folder.read_json("run.json") or {}
    about = {name: state.get(name) for name in ("objective", "start", "start_sha256", "seed", "engine")}
    return about, [row for file in files for row in _rows(file)]


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    for number, row in iter_jsonl(file):
        absent = [name for name in FIELDS if name not in row]
        if absent:
            raise UserError(f"{file}:{number}: no {', '.join(absent)}: not a record of a rollout")
        yield {name: row[name] for name in FIELDS}


def _of_samples(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    header, rows = read_records(path, "samples", required=_SAMPLE, keep=(*FIELDS, "correct"))
    about = {"start": header["checkpoint"], "start_sha256": header["checkpoint_sha256"]} if header else {}
    kept = [{**row, "update": 0, "reward": float(row["correct"])} for row in rows]
    return about, [{name: row.get(name) for name in FIELDS} for row in kept]
