"""Cut a pool of questions into validation, training order, panels and fixed contexts (paper section 3).

Writes into --out: val<N>.json (held out; 50 a subject, levels in proportion), train_order_s<SEED>.json (uids, for
data.order), trained320.json, drift64.json, entropy_grad_1.json and entropy_grad_2.json (parts of the order, where it is
long enough), coverage<N>.json (10 a subject of the validation), uid_map.json, grader.json and splits.json (what was
done, with the SHA-256 of every file). Question sets are JSON lists of question records and serve as --questions.

JSON keys: pool, seed, questions, empty_gold, excluded, twins, splits: {name: {n, file, sha256}}, levels, subjects.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr_pl.analysis.command import Result, Table, add_output_arguments
from rlvr_pl.errors import UserError
from rlvr_pl.records import check_place

if TYPE_CHECKING:
    from rlvr_pl.data.splits import Splits
    from rlvr_pl.types import Question

COLUMNS_FLAG = "--columns {field}=NAME"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", help="question file or data set")
    parser.add_argument("--out", dest="folder", type=Path, required=True, metavar="DIR", help="folder to write into")
    parser.add_argument("--seed", type=int, default=11, help="names every draw (default: %(default)s)")
    parser.add_argument("--per-subject", type=int, default=50, help="validation questions a subject (default: 50)")
    parser.add_argument("--panel-per-subject", type=int, default=10, help="coverage panel a subject (default: 10)")
    parser.add_argument("--exclude", type=Path, metavar="FILE", help="JSON list of uids that an earlier run trained on")
    parser.add_argument(
        "--validation", type=Path, metavar="FILE", help="keep this validation split (questions or uids)"
    )
    parser.add_argument("--columns", nargs="+", default=[], metavar="FIELD=NAME", help="our field = the pool's column")
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that is not empty")
    add_output_arguments(parser, table=False)


def run(args: argparse.Namespace) -> Result:
    from rlvr_pl.data.pools import read_questions, read_uids
    from rlvr_pl.data.splits import make_splits
    from rlvr_pl.records import atomic_write_text

    _check(args)
    everything = read_questions(args.pool, columns=columns_of(args.columns), naming=COLUMNS_FLAG)
    pool = [q for q in everything if q.answer.strip()]
    splits = make_splits(
        pool,
        seed=args.seed,
        per_subject=args.per_subject,
        panel_per_subject=args.panel_per_subject,
        exclude=read_uids(args.exclude) if args.exclude else (),
        validation=read_uids(args.validation) if args.validation else None,
    )
    files, parts = _files(splits, args.seed)
    files["uid_map.json"] = _json(_uid_map(everything, splits))
    files["grader.json"] = _json(GRADER)
    data = {
        "pool": str(args.pool),
        "seed": args.seed,
        "questions": len(pool),
        "empty_gold": [q.uid for q in everything if not q.answer.strip()],
        "excluded": list(splits.excluded),
        "twins": list(splits.twins),
        "splits": {
            name: {"n": n, "file": file, "sha256": hashlib.sha256(files[file].encode()).hexdigest()}
            for name, (n, file) in parts.items()
        },
        "subjects": _count(q.subject for q in splits.validation),
        "levels": _count(q.level for q in splits.validation),
    }
    files["splits.json"] = _json(data)
    for name, text in files.items():
        atomic_write_text(args.folder / name, text)
    rows = [(name, part["n"], part["file"]) for name, part in data["splits"].items()]
    return Result(
        data, [Table(f"Splits of {args.pool}", ["part", "questions", "file"], rows)], _notes(data, args.folder)
    )


GRADER = {
    "grader": "math",
    "training": {"require_box": True, "rule": "the last \\boxed{} grades equal to the gold"},
    "evaluation": {
        "require_box": False,
        "rule": "the last \\boxed{}, else the last number, else the whole text",
        "temperature": 0.0,
        "max_new_tokens": 1024,
        "batch_size": 64,
    },
}
"""How these splits are meant to be graded: `rlvr-pl evaluate` with its defaults."""


def _check(args: argparse.Namespace) -> None:
    for name in ("per_subject", "panel_per_subject"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    folder: Path = args.folder
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder}: a file; name a folder")
    check_place(folder / "splits.json", "--out")
    if folder.is_dir() and any(folder.iterdir()) and not args.overwrite:
        raise UserError(f"--out {folder}: the folder is not empty; choose another or pass --overwrite")


def columns_of(pairs: Sequence[str]) -> dict[str, str]:
    """The mapping that ``--columns FIELD=NAME ...`` writes."""
    for pair in pairs:
        if "=" not in pair:
            raise UserError(f"--columns {pair}: write FIELD=NAME, for example problem=question")
    return dict(pair.split("=", 1) for pair in pairs)


def _files(splits: Splits, seed: int) -> tuple[dict[str, str], dict[str, tuple[int, str]]]:
    """File name -> text, and part -> (number of questions, file name)."""
    sets = {f"val{len(splits.validation)}": splits.validation, f"coverage{len(splits.panel)}": splits.panel}
    sets |= splits.slices
    order = f"train_order_s{seed}"
    files = {f"{order}.json": _json([q.uid for q in splits.order])}
    files |= {f"{name}.json": _json([_record(q) for q in part]) for name, part in sets.items()}
    parts = {order: (len(splits.order), f"{order}.json")}
    return files, parts | {name: (len(part), f"{name}.json") for name, part in sets.items()}


def _record(q: Question) -> dict[str, Any]:
    return {"uid": q.uid, "problem": q.problem, "answer": q.answer, "subject": q.subject, "level": q.level}


def _uid_map(pool: Sequence[Question], splits: Splits) -> dict[str, dict[str, Any]]:
    """uid -> its row in the pool (from 0), what became of it, and its place in the training order."""
    place = {q.uid: i for i, q in enumerate(splits.order)}
    became = dict.fromkeys(place, "train") | {q.uid: "validation" for q in splits.validation}
    became |= dict.fromkeys(splits.excluded, "excluded") | dict.fromkeys(splits.twins, "twin of a validation question")
    return {
        q.uid: {"row": row, "split": became.get(q.uid, "empty gold"), "order": place.get(q.uid)}
        for row, q in enumerate(pool)
    }


def _notes(data: dict[str, Any], folder: Path) -> list[str]:
    from rlvr_pl.data.splits import SLICES

    notes = [f"Written to {folder}."]
    for key, why in {
        "empty_gold": "left out, their gold is empty",
        "excluded": "left out of validation and training order (--exclude)",
        "twins": "left out of the training order, a validation question has the same text",
    }.items():
        if uids := data[key]:
            names = ", ".join(uids) if len(uids) <= 10 else f"{', '.join(uids[:10])}, ..."
            notes.append(f"{len(uids)} {why}: {names}")
    if absent := [name for name in SLICES if name not in data["splits"]]:
        notes.append(f"Not written, the training order is too short: {', '.join(absent)}")
    return notes


def _count(values: Any) -> dict[str, int]:
    counts = Counter(values)
    return {str(key): counts[key] for key in sorted(counts, key=lambda x: (x is None, x))}


def _json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"
