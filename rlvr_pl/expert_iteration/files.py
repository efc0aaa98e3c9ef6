"""Files of samples, rationales and solutions, as distillation reads them."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rlvr_pl.errors import UserError
from rlvr_pl.expert_iteration.filter import Distinct, Solution, SolutionFilter
from rlvr_pl.expert_iteration.records import RATIONALES, SAMPLES, SOLUTIONS, VERSION, Row
from rlvr_pl.jsonl import Kind, iter_jsonl, read_records
from rlvr_pl.records import atomic_write_text

_QUESTION: dict[str, Kind] = {"uid": str, "problem": str, "gold": str}
_OPTIONAL: dict[str, Kind] = {"subject": str, "level": int}
_SOLUTION: dict[str, Kind] = {**_QUESTION, "token_ids": list, "text": str, "source": str}
_SAMPLE: dict[str, Kind] = {
    **_QUESTION,
    "sample": int,
    "correct": frozenset({0, 1}),
    "stop_reason": frozenset({"eos", "length"}),
    "token_ids": list,
    "text": str,
}
_ATTEMPT: dict[str, Kind] = {**_QUESTION, "stage": str, "fate": str, "token_ids": list, "text": str}


def read_samples(paths: Sequence[str | Path]) -> tuple[list[Row], list[Row]]:
    """(headers, rows) of files of sample records. Raises UserError when one is faulty or a sample is in two files."""
    headers, rows = [], []
    owner: dict[tuple[Any, ...], str | Path] = {}
    for path in paths:
        header, mine = _read(path, SAMPLES, _SAMPLE, ("uid", "sample"))
        headers.append(header)
        rows += mine
        for row in mine:
            key = (header.get("checkpoint_sha256"), header.get("seed"), row["uid"], row["sample"])
            if key in owner:
                raise UserError(f"{path}: sample {row['sample']} of {row['uid']!r} is in {owner[key]} as well")
            owner[key] = path
    return headers, rows


@dataclass(frozen=True)
class Found:
    """Solutions of several files.

    Attributes:
        solutions: without repetitions.
        tokenizers: SHA-256 of every tokenizer that their ids are of.
        policies: SHA-256 of the policies that drew them, as far as the files tell.
        samples: how many samples had each fate in the filter; None without files of samples.
    """

    solutions: list[Solution]
    tokenizers: set[str]
    policies: set[str]
    samples: Counter[str] | None


def read_solutions(paths: Sequence[str | Path], keep: SolutionFilter) -> Found:
    """Solutions from files of solutions, of samples (these pass the filter first) and of rationales."""
    kinds: dict[str, list[str | Path]] = {SOLUTIONS: [], SAMPLES: [], RATIONALES: []}
    for path in paths:
        kinds[_kind(path)].append(path)
    headers, samples = read_samples(kinds[SAMPLES])
    found, counts = keep.select(samples)
    for kind, required in ((RATIONALES, _ATTEMPT), (SOLUTIONS, _SOLUTION)):
        for path in kinds[kind]:
            header, rows = _read(path, kind, required, ())
            headers.append(header)
            if kind == RATIONALES:
                rows = [row for row in rows if row["fate"] == "solution"]
            found += [Solution.of(row, row.get("source", "bridge")) for row in rows]
    distinct: dict[str, Distinct] = defaultdict(Distinct)
    return Found(
        solutions=[s for s in found if distinct[s.question.uid].add(s.token_ids, s.text)],
        tokenizers={header["tokenizer_sha256"] for header in headers},
        policies={p for h in headers for p in (h.get("checkpoint_sha256"), *h.get("policies", ())) if p is not None},
        samples=counts if samples else None,
    )


def write_solutions(path: Path, found: Found) -> None:
    """Write a file of solutions, whole or not at all."""
    (tokenizer,) = found.tokenizers
    header = {
        "record": SOLUTIONS,
        "version": VERSION,
        "tokenizer_sha256": tokenizer,
        "policies": sorted(found.policies),
        "samples": found.samples,
    }
    rows = [header, *(s.record() for s in found.solutions)]
    atomic_write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _kind(path: str | Path) -> str:
    kind = next(iter_jsonl(path), (0, {}))[1].get("record")
    if kind not in (SOLUTIONS, SAMPLES, RATIONALES):
        raise UserError(f"{path}: not a file of solutions, samples or rationales (its first line does not say so)")
    return str(kind)


def _read(path: str | Path, kind: str, required: Mapping[str, Kind], unique: tuple[str, ...]) -> tuple[Row, list[Row]]:
    """Header and rows of a file that says what it is, and that is finished."""
    if kind == RATIONALES and len(first := list(islice(iter_jsonl(path), 2))) == 1:
        return _checked(first[0][1], path, kind, set()), []  # every question was solved
    header, rows = read_records(path, kind, required=required, optional=_OPTIONAL, unique=unique)
    header = _checked(header or {}, path, kind, {row["uid"] for row in rows})
    for number, row in enumerate(rows, 2):
        if not all(type(token) is int and token >= 0 for token in row["token_ids"]):
            raise UserError(f"{path}:{number}: 'token_ids' must be a list of token ids")
        row["place"] = f"{path}:{number}"
    return header, rows


def _checked(header: Row, path: str | Path, kind: str, uids: set[str]) -> Row:
    if header.get("version") != VERSION or not isinstance(header.get("tokenizer_sha256"), str):
        raise UserError(f"{path}:1: needs a header of {kind} records, version {VERSION}, with a tokenizer_sha256")
    planned = header.get("questions", len(uids))
    if len(uids) != planned:
        raise UserError(
            f"{path}: unfinished, {len(uids)} of {planned} questions; make the same call again to finish it"
        )
    return header
