"""Every kind of input with every defect: read right, or refused in one line that names the file, and nothing written.

Each cell of the table is a command on a right input that was damaged in one way. `EXPECTED` says what the line tells
(file and line first, where the file has lines), or `READ` where the defect is none; `CANNOT` says why a kind of input
cannot have a defect.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rlvr_pl.cli import main

Row = dict[str, Any]
Edit = Callable[[bytes], bytes]

DEFECTS = (
    "truncated", "wrong type", "missing field", "duplicate uid", "NUL bytes", "lone surrogate", "100 MB line",
    "BOM", "CRLF", "empty", "symlink loop", "long prompt",
)  # fmt: skip
HUGE = 100 * 10**6
MARK = "MARK"  # stands in a right file where damage is put
HALF = b"\xed\xa0\x80x"  # the bytes of half a surrogate pair, as long as the mark
LONG = "How many? " * 600  # the embedded policy has a context of 512 tokens


@dataclass(frozen=True)
class Kind:
    """One kind of input.

    Attributes:
        file: what is damaged, below the working folder.
        words: the command that reads it.
        make: writes the right input into the working folder, and whatever the command needs beside it.
        damage: defect -> what it makes of the file's bytes.
    """

    file: str
    words: Sequence[str]
    make: Callable[[Path], None]
    damage: Mapping[str, Edit] = field(default_factory=dict)

    def spoil(self, folder: Path, defect: str) -> None:
        """Damage the file of a folder that `make` has filled."""
        path = folder / self.file
        if defect == "symlink loop":
            path.unlink()
            path.symlink_to(path.name)
        else:
            path.write_bytes(self.damage[defect](path.read_bytes()))


def bytes_everywhere() -> dict[str, Edit]:
    """The defects that are the same in every file of text that has a `MARK` in a string."""
    return {
        "truncated": lambda b: b[: b.index(MARK.encode())],
        "NUL bytes": lambda b: b.replace(MARK.encode(), b"a\0b"),
        "lone surrogate": lambda b: b.replace(MARK.encode(), rb"\ud800"),
        "100 MB line": lambda b: b.replace(MARK.encode(), b"x" * HUGE),
        "BOM": lambda b: b"\xef\xbb\xbf" + b,
        "CRLF": lambda b: b.replace(b"\n", b"\r\n"),
        "empty": lambda b: b"",
        "long prompt": lambda b: b.replace(MARK.encode(), LONG.encode()),
    }


def swap(old: str, new: str | bytes) -> Edit:
    """One text for another, which must be there."""

    def edit(content: bytes) -> bytes:
        assert old.encode() in content
        return content.replace(old.encode(), new if isinstance(new, bytes) else new.encode())

    return edit


def rows_edit(write: Callable[[list[Row]], bytes], rows: list[Row], change: Callable[[Row], Any]) -> Edit:
    """A file with its last row changed."""

    def edit(_: bytes) -> bytes:
        last = dict(rows[-1])
        change(last)
        return write([*rows[:-1], last])

    return edit


def rows_damage(write: Callable[[list[Row]], bytes], rows: list[Row], wrong: Row, missing: str) -> dict[str, Edit]:
    """The defects of a file of rows, the damage in its last one."""
    return {
        **bytes_everywhere(),
        "wrong type": rows_edit(write, rows, lambda row: row.update(wrong)),
        "missing field": rows_edit(write, rows, lambda row: row.pop(missing)),
        "duplicate uid": lambda _: write([*rows, rows[-1]]),
    }


def jsonl(rows: Sequence[Row]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def json_list(rows: Sequence[Row]) -> bytes:
    return json.dumps(rows, indent=1).encode()


def csv_table(rows: Sequence[Row]) -> bytes:
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([row[name] for name in names if name in row] for row in rows)
    return text.getvalue().encode()


def put(name: str, content: bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return make


# ---- rows ----------------------------------------------------------------------------------------------------------

QUESTIONS: list[Row] = [
    {"uid": "a", "problem": "How many?", "level": 1, "answer": "2"},
    {"uid": "b", "problem": MARK, "level": 2, "answer": "3"},
]
HEAD = {"version": 1, "engine": "torch", "batch_size": 64}
ITEMS: list[Row] = [
    {"record": "items", **HEAD},
    {"uid": "a", "correct": 1, "subject": "s"},
    {"uid": "b", "correct": 0, "subject": MARK},
]
SAMPLES: list[Row] = [
    {"record": "samples", **HEAD},
    *({"uid": uid, "sample": 0, "correct": 1, "text": MARK if uid == "b" else "2"} for uid in "ab"),
]
ANSWERS: list[Row] = [{"id": "a", "gold": "2", "response": "2"}, {"id": "b", "gold": "3", "response": MARK}]
EVALUATE = ["evaluate", "embedded:start", "--max-new-tokens=2", "--out=items.jsonl", "--questions"]


def question_file(ending: str, write: Callable[[list[Row]], bytes]) -> Kind:
    damage = rows_damage(write, QUESTIONS, {"level": "hard"}, "answer")
    if ending == "csv":
        damage["lone surrogate"] = swap(MARK, HALF)
    return Kind(f"q.{ending}", [*EVALUATE, f"q.{ending}"], put(f"q.{ending}", write(QUESTIONS)), damage)


def row_file(command: Sequence[str], rows: list[Row], name: str) -> Kind:
    damage = rows_damage(jsonl, rows, {name: {}}, name)
    return Kind("f.jsonl", command, put("f.jsonl", jsonl(rows)), damage)


def solutions() -> Kind:
    from rlvr_pl.expert_iteration.records import tokenizer_sha256
    from rlvr_pl.policy import load_policy

    policy = load_policy("embedded:start")
    ids = [*policy.encode("2"), policy.eos_ids[0]]
    rows: list[Row] = [{"record": "solutions", "version": 1, "tokenizer_sha256": tokenizer_sha256(policy.tokenizer)}]
    for uid in "ab":
        problem = MARK if uid == "b" else "How many?"
        rows.append({"uid": uid, "problem": problem, "gold": "2", "token_ids": ids, "text": "2", "source": "search"})
    settings = ["data.validation=null", "data.epochs=1", "trainer.logger=false"]
    return row_file(["distill", "f.jsonl", "--run=run", "--set", *settings], rows, "text")


# ---- tables of Arrow -----------------------------------------------------------------------------------------------


def arrow_table(rows: list[Row]) -> Any:
    import pyarrow

    return pyarrow.Table.from_pylist(rows)


def parquet(rows: list[Row]) -> bytes:
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(arrow_table(rows), file, compression="none")
    return file.getvalue()


def save_folder(folder: Path, rows: list[Row]) -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(folder)


def arrow(rows: list[Row]) -> bytes:
    with tempfile.TemporaryDirectory() as name:
        save_folder(Path(name), rows)
        return (Path(name) / "data-00000-of-00001.arrow").read_bytes()


def arrow_damage(write: Callable[[list[Row]], bytes]) -> dict[str, Edit]:
    def last(**changes: Any) -> Edit:
        return lambda _: write([QUESTIONS[0], {**QUESTIONS[1], **changes}])

    return {
        "truncated": lambda b: b[: len(b) // 2],
        "wrong type": lambda _: write([{**row, "answer": [1]} for row in QUESTIONS]),
        "missing field": lambda _: write([{k: v for k, v in row.items() if k != "answer"} for row in QUESTIONS]),
        "duplicate uid": lambda _: write([*QUESTIONS, QUESTIONS[1]]),
        "NUL bytes": last(problem="a\0b"),
        "lone surrogate": swap(MARK, HALF),
        "100 MB line": last(problem="x" * HUGE),
        "empty": lambda b: b"",
        "long prompt": last(problem=LONG),
    }


# ---- settings ------------------------------------------------------------------------------------------------------

CONFIG = f"""\
policy:
  name: embedded:start
  template: "{MARK}{{problem}}"
grader:
  class_path: rlvr_pl.grading.ExactGrader
data:
  updates: 1
  validation: null
model:
  group_size: 2
  max_new_tokens: 8
trainer:
  logger: false
"""
STUDY = f"""\
about: "{MARK}"
start: embedded:start
seeds: [1]
order: {{updates: 1}}
arms:
  one: {{}}
"""


def yaml_damage(text: str, typed: str, wrong: str, needed: str, twice: str) -> dict[str, Edit]:
    return {
        **bytes_everywhere(),
        "wrong type": swap(typed, wrong),
        "missing field": swap(needed, ""),
        "duplicate uid": lambda b: b + twice.encode(),
    }


def config() -> Kind:
    grader = "  class_path: rlvr_pl.grading.ExactGrader\n"
    damage = yaml_damage(CONFIG, "updates: 1", "updates: many", grader, "data:\n  updates: 2\n")
    damage["missing field"] = swap(grader, "  init_args:\n    x: 1\n")
    return Kind("c.yaml", ["fit", "--config=c.yaml", "--run=run"], put("c.yaml", CONFIG.encode()), damage)


def study() -> Kind:
    damage = yaml_damage(STUDY, "seeds: [1]", "seeds: many", "seeds: [1]\n", "seeds: [2]\n")
    return Kind("s.yaml", ["study", "s.yaml", "--dry-run", "--json"], put("s.yaml", STUDY.encode()), damage)


# ---- policy folders ------------------------------------------------------------------------------------------------


def copy_policy(folder: Path) -> None:
    from rlvr_pl.policy_folder import EMBEDDED

    shutil.copytree(EMBEDDED / "start", folder / "policy")
    (folder / "q.jsonl").write_bytes(jsonl(QUESTIONS))


def mark_in(file: str, **marked: Any) -> Callable[[Path], None]:
    """The policy, with a mark in a text of one of its JSON files that changes nothing."""

    def make(folder: Path) -> None:
        copy_policy(folder)
        path = folder / "policy" / file
        path.write_bytes(set_json(**marked)(path.read_bytes()))

    return make


ASK = ["evaluate", "policy", "--questions=q.jsonl", "--max-new-tokens=2", "--out=items.jsonl"]


def set_json(**changes: Any) -> Edit:
    def edit(content: bytes) -> bytes:
        fields = json.loads(content)
        fields |= changes
        return json.dumps({k: v for k, v in fields.items() if v != "gone"}, indent=1, ensure_ascii=False).encode()

    return edit


def policy_json(file: str, marked: Row, wrong: Row, missing: str, twice: str, long: Row | None = None) -> Kind:
    damage = {**bytes_everywhere(), "wrong type": set_json(**wrong), "missing field": set_json(**{missing: "gone"})}
    damage["duplicate uid"] = lambda b: b.replace(b"{", b"{" + twice.encode(), 1)
    del damage["long prompt"]
    if long:
        damage["long prompt"] = set_json(**long)
    return Kind(f"policy/{file}", ASK, mark_in(file, **marked), damage)


def tokenizer() -> Kind:
    def make(folder: Path) -> None:
        copy_policy(folder)
        path = folder / "policy" / "tokenizer.json"
        path.write_bytes(swap("Bishopside", MARK)(path.read_bytes()))

    kind = policy_json("tokenizer.json", {}, {"model": []}, "model", "")
    return Kind(kind.file, ASK, make, {k: v for k, v in kind.damage.items() if k != "duplicate uid"})


def weights() -> Kind:
    def header(change: Callable[[str], str]) -> Edit:
        def edit(content: bytes) -> bytes:
            size = int.from_bytes(content[:8], "little")
            text = change(content[8 : 8 + size].decode()).encode()
            return len(text).to_bytes(8, "little") + text + content[8 + size :]

        return edit

    def renamed(text: str) -> str:
        return text.replace("model.norm.weight", "model.gone.weight")

    return Kind(
        "policy/model.safetensors",
        ASK,
        copy_policy,
        {
            "truncated": lambda b: b[: len(b) // 2],
            "wrong type": header(lambda t: t.replace("BF16", "TEXT", 1)),
            "missing field": header(renamed),
            "duplicate uid": header(lambda t: t.replace("model.norm.weight", "model.embed_tokens.weight")),
            "NUL bytes": lambda b: b[:8] + b"\0" * 64 + b[72:],
            "lone surrogate": header(lambda t: t.replace("model.norm.weight", "model.\\ud800.weight")),
            "100 MB line": header(lambda t: t[:-1] + " " * HUGE + "}"),
            "BOM": lambda b: b"\xef\xbb\xbf" + b,
            "CRLF": lambda b: b.replace(b"\n", b"\r\n"),
            "empty": lambda b: b"",
        },
    )


# ---- checkpoints ---------------------------------------------------------------------------------------------------

RUN = ["--policy.name=embedded:start", "--data.updates=3", "--data.validation=null", "--model.group_size=2"]
RUN += ["--model.max_new_tokens=4", "--grader=Exact", "--checkpoint.every_n_updates=1", "--trainer.logger=false"]
FORGED = ("wrong type", "missing field")


class Checkpoint(Kind):
    """The newer checkpoint of a run that was stopped twice; it is known by its hash, which forged ones have too."""

    def spoil(self, folder: Path, defect: str) -> None:
        super().spoil(folder, defect)
        if defect in FORGED:
            path = folder / self.file
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            path.with_suffix(".json").write_text(json.dumps({"update": 2, "sha256": digest}))


def checkpoint(run: Path) -> Kind:
    def forged(change: Callable[[Row], Any]) -> Edit:
        def edit(content: bytes) -> bytes:
            fields = torch.load(io.BytesIO(content), weights_only=True)
            change(fields)
            file = io.BytesIO()
            torch.save(fields, file)
            return file.getvalue()

        return edit

    damage = {
        "truncated": lambda b: b[: len(b) // 2],
        "wrong type": forged(lambda fields: fields.update(optimizer_states="x")),
        "missing field": forged(lambda fields: fields.pop("rlvr")),
        "NUL bytes": lambda b: b[:64] + b"\0" * 64 + b[128:],
        "BOM": lambda b: b"\xef\xbb\xbf" + b,
        "CRLF": lambda b: b.replace(b"\n", b"\r\n"),
        "empty": lambda b: b"",
    }
    file = "run/checkpoints/update-000002.ckpt"
    return Checkpoint(file, ["fit", "--resume=run"], lambda folder: shutil.copytree(run, folder / "run"), damage)


# ---- the table -----------------------------------------------------------------------------------------------------

READ = "read right"
KINDS: dict[str, Callable[[], Kind]] = {
    "questions, JSON Lines": lambda: question_file("jsonl", jsonl),
    "questions, JSON": lambda: question_file("json", json_list),
    "questions, CSV": lambda: question_file("csv", csv_table),
    "questions, Parquet": lambda: Kind(
        "q.parquet", [*EVALUATE, "q.parquet"], put("q.parquet", parquet(QUESTIONS)), arrow_damage(parquet)
    ),
    "questions, saved folder": lambda: Kind(
        "q/data-00000-of-00001.arrow", [*EVALUATE, "q"], lambda f: save_folder(f / "q", QUESTIONS), arrow_damage(arrow)
    ),
    "solutions": solutions,
    "item records": lambda: row_file(["compare", "f.jsonl", "f.jsonl"], ITEMS, "correct"),
    "sample records": lambda: row_file(["passk", "f.jsonl", "--k=1"], SAMPLES, "correct"),
    "answers to grade": lambda: row_file(["grade", "f.jsonl", "--grader=exact"], ANSWERS, "response"),
    "config": config,
    "study": study,
    "policy: config.json": lambda: policy_json(
        "config.json",
        {"note": MARK},
        {"hidden_size": "many"},
        "model_type",
        '"model_type": "llama",',
        {"max_position_embeddings": 2},
    ),
    "policy: weights": weights,
    "policy: tokenizer.json": tokenizer,
    "policy: tokenizer_config.json": lambda: policy_json(
        "tokenizer_config.json", {"note": MARK}, {"eos_token": 7}, "eos_token", '"eos_token": "<pad>",'
    ),
    "policy: generation_config.json": lambda: policy_json(
        "generation_config.json", {"note": MARK}, {"eos_token_id": "x"}, "eos_token_id", '"eos_token_id": 7,'
    ),
    "policy: prompt_template.json": lambda: policy_json(
        "prompt_template.json",
        {"name": MARK},
        {"text": 3},
        "kind",
        '"kind": "chat",',
        {"text": LONG + "{problem}"},
    ),
}
CHECKPOINT = "checkpoint of a run"

LOOP = "cannot be read (Too many levels of symbolic links)"
TOO_LONG = "tokens, but embedded:start has a context of 512"
NO_PROMPT = "holds no prompt"
BINARY = "binary: has neither lines nor marks of text"


def lines_of(file: str, last: int, **more: str) -> dict[str, str]:
    """What is told of JSON Lines whose last line, `last`, has the defect."""
    here = f"{file}:{last}: "
    return {
        "truncated": f"{here}the last line is torn",
        "NUL bytes": f"{here}holds NUL bytes",
        "lone surrogate": f"{here}holds half of a surrogate pair",
        "100 MB line": f"{here}the line is longer than 64 MB",
        "BOM": READ,
        "CRLF": READ,
        "empty": f"{file}: the file is empty",
        "symlink loop": f"{file}: {LOOP}",
        **{name.replace("_", " "): text for name, text in more.items()},
    }


def rows_of(file: str, first: str, second: str, **more: str) -> dict[str, str]:
    """What is told of a table of questions: `first` and `second` are the places that it names."""
    return {
        "missing field": f"{first}: no column 'answer'",
        "duplicate uid": f"{file}: uids that occur more than once: 'b' (again in ",
        "NUL bytes": f"{second}: 'problem' holds a NUL character",
        "100 MB line": f"{second}: 'problem' has 100,000,000 characters; a question has at most 4,194,304",
        "long prompt": f"{second}: question b: the prompt has 1800 {TOO_LONG}",
        "symlink loop": f"{file}: {LOOP}",
        **{name.replace("_", " "): text for name, text in more.items()},
    }


def json_of(file: str, line: int, **more: str) -> dict[str, str]:
    """What is told of a JSON file of a policy folder with its mark in `line`."""
    return {
        "truncated": f"{file}:{line}: not JSON: Unterminated string",
        "duplicate uid": f"{file}: not JSON: the key",
        "NUL bytes": f"{file}:{line}: holds NUL bytes",
        "lone surrogate": f"{file}:{line}: holds half of a surrogate pair (\\ud800)",
        "100 MB line": f"{file}: longer than 64 MB",
        "BOM": f"{file}:1: starts with a byte-order mark",  # transformers reads it next, and knows no such mark
        "CRLF": READ,
        "empty": f"{file}: the file is empty",
        "symlink loop": f"{file}: {LOOP}",
        **{name.replace("_", " "): text for name, text in more.items()},
    }


def weights_of(file: str) -> dict[str, str]:
    bad = f"{file}: not a readable file of weights"
    absent = {"missing field": "policy: weights do not fit config.json: 1 wrong or absent, first model.norm.weight"}
    return {**dict.fromkeys(DEFECTS[:-1], bad), **absent}


SET_ASIDE = "run/checkpoints/update-000002.ckpt is damaged or incomplete; set aside as update-000002.damaged"
EXPECTED: dict[str, dict[str, str]] = {
    "questions, JSON Lines": lines_of(
        "q.jsonl",
        2,
        wrong_type="q.jsonl:2: 'level' must be a whole number",
        missing_field="q.jsonl:2: no column 'answer'",
        duplicate_uid="q.jsonl: uids that occur more than once: 'b' (again in q.jsonl:3)",
        long_prompt=f"q.jsonl:2: question b: the prompt has 1800 {TOO_LONG}",
    ),
    "questions, JSON": rows_of(
        "q.json",
        "q.json: row 2",
        "q.json: row 2",
        truncated="q.json:10: not JSON: Unterminated string",
        wrong_type="q.json: row 2: 'level' must be a whole number",
        NUL_bytes="q.json:10: holds NUL bytes",
        lone_surrogate="q.json:10: holds half of a surrogate pair",
        BOM=READ,
        CRLF=READ,
        empty="q.json: the file is empty",
    ),
    "questions, CSV": rows_of(
        "q.csv",
        "",
        "q.csv:3",
        truncated="q.csv:3: not the 4 cells",
        wrong_type="q.csv:3: 'level' must be a whole number",
        missing_field="q.csv:3: not the 4 cells",
        NUL_bytes="q.csv:3: holds NUL bytes",
        lone_surrogate="q.csv:3: is not UTF-8",
        **{"100 MB line": "q.csv:3: not CSV in the row that begins here: field larger than"},
        BOM=READ,
        CRLF=READ,
        empty="q.csv: the file is empty",
    ),
    "questions, Parquet": rows_of(
        "q.parquet",
        "q.parquet: row 1",
        "q.parquet: row 2",
        truncated="q.parquet: not a readable Parquet file",
        wrong_type="q.parquet: row 1: 'answer' must be text",
        lone_surrogate="q.parquet: not a readable Parquet file: 'utf-8' codec",
        empty="q.parquet: not a readable Parquet file",
    ),
    "questions, saved folder": rows_of(
        "q",
        "",
        "q: row 2",
        truncated="q: is no data set that could be loaded",
        wrong_type="q: is no data set that could be loaded: Couldn't cast",
        missing_field="q: is no data set that could be loaded: Keys mismatch",
        lone_surrogate="q: is no data set that could be loaded: 'utf-8' codec",
        empty="q: is no data set that could be loaded",
        symlink_loop="q: is no data set that could be loaded: [Errno 40]",
    ),
    "solutions": lines_of(
        "f.jsonl",
        3,
        wrong_type="f.jsonl:3: 'text' must be a string",
        missing_field="f.jsonl:3: the field 'text' is missing",
        duplicate_uid=READ,  # a question may have several solutions; the same one twice counts once
        long_prompt=f"f.jsonl:3: question b: the prompt has 1800 {TOO_LONG}",
    ),
    "item records": lines_of(
        "f.jsonl",
        3,
        wrong_type="f.jsonl:3: 'correct' must be 0 or 1",
        missing_field="f.jsonl:3: the field 'correct' is missing",
        duplicate_uid="f.jsonl:4: uid 'b' is already in line 3",
    ),
    "sample records": lines_of(
        "f.jsonl",
        3,
        wrong_type="f.jsonl:3: 'correct' must be 0 or 1",
        missing_field="f.jsonl:3: the field 'correct' is missing",
        duplicate_uid="f.jsonl:4: uid 'b', sample 0 is already in line 3",
    ),
    "answers to grade": lines_of(
        "f.jsonl",
        2,
        wrong_type="f.jsonl:2: 'response' must be a string",
        missing_field="f.jsonl:2: the field 'response' is missing",
        duplicate_uid="f.jsonl:3: id 'b' is already in line 2",
        lone_surrogate=READ,  # a model's output may hold one, and is graded as it is
    ),
    "config": {
        "truncated": "c.yaml:3: not YAML",
        "wrong type": "c.yaml:7: data.updates: QuestionData: expected an int. Got value: many",
        "missing field": "c.yaml:4: MathGrader has no setting 'x'",  # its class_path gone, they are the default's
        "duplicate uid": "c.yaml:14: not YAML: 'data' is already in line 6",
        "NUL bytes": "c.yaml:3: not YAML: a control character",
        "lone surrogate": "c.yaml:3: not YAML: found invalid Unicode",
        "100 MB line": "c.yaml: longer than 4 MB",
        "BOM": READ,
        "CRLF": READ,
        "empty": "c.yaml: holds nothing",
        "symlink loop": f"c.yaml: {LOOP}",
        "long prompt": "the prompt has 1811 tokens, but embedded:start has a context of 512",  # by its template
    },
    "study": {
        "truncated": "s.yaml:1: not YAML",
        "wrong type": "s.yaml:3: seeds: needs a list of distinct whole numbers, not 'many'",
        "missing field": "s.yaml: seeds is missing",
        "duplicate uid": "s.yaml:7: not YAML: 'seeds' is already in line 3",
        "NUL bytes": "s.yaml:1: not YAML: a control character",
        "lone surrogate": "s.yaml:1: not YAML: found invalid Unicode",
        "100 MB line": "s.yaml: longer than 4 MB",
        "BOM": READ,
        "CRLF": READ,
        "empty": "s.yaml: holds nothing",
        "symlink loop": f"s.yaml: {LOOP}",
    },
    "policy: config.json": json_of(
        "policy/config.json",
        38,
        wrong_type="policy/config.json: not usable: Validation error for field 'hidden_size'",
        missing_field="policy/config.json: not usable: Unrecognized model",
        long_prompt="q.jsonl:1: question a: the prompt has 3 tokens, but policy has a context of 2",
    ),
    "policy: weights": weights_of("policy/model.safetensors"),
    "policy: tokenizer.json": json_of(
        "policy/tokenizer.json",
        1262,
        wrong_type="policy: cannot read the tokenizer (tokenizer.json, tokenizer_config.json)",
        missing_field="policy: cannot read the tokenizer (tokenizer.json, tokenizer_config.json): Model missing",
    ),
    "policy: tokenizer_config.json": json_of(
        "policy/tokenizer_config.json",
        9,
        wrong_type="policy: cannot read the tokenizer (tokenizer.json, tokenizer_config.json): Special token eos_token",
        missing_field=READ,  # stop ids are those of the generation config, the config and the tokenizer together
    ),
    "policy: generation_config.json": json_of(
        "policy/generation_config.json",
        6,
        wrong_type="policy: end-of-sequence ids ['x', 1, 1] (generation_config.json, ",
        missing_field=READ,
    ),
    "policy: prompt_template.json": json_of(
        "policy/prompt_template.json",
        3,
        wrong_type="policy/prompt_template.json: text must be text, not 3",
        missing_field="policy/prompt_template.json: kind is None; it must be 'text' or 'chat'",
        long_prompt="q.jsonl:1: question a: the prompt has 1803 tokens, but policy has a context of 512",
    ),
    "checkpoint of a run": {
        **dict.fromkeys(("truncated", "NUL bytes", "BOM", "CRLF", "empty", "symlink loop"), SET_ASIDE),
        "wrong type": "run/checkpoints/update-000002.ckpt: not a checkpoint of a run: 'optimizer_states' is no list",
        "missing field": "run/checkpoints/update-000002.ckpt: not a checkpoint of a run: it has no 'rlvr'",
    },
}
del EXPECTED["policy: tokenizer.json"]["duplicate uid"]
CANNOT = {
    "questions, Parquet": dict.fromkeys(("BOM", "CRLF"), BINARY),
    "questions, saved folder": dict.fromkeys(("BOM", "CRLF"), BINARY),
    **{kind: {"long prompt": NO_PROMPT} for kind in ("item records", "sample records", "answers to grade", "study")},
    "policy: weights": {"long prompt": NO_PROMPT},
    "policy: tokenizer.json": {"long prompt": NO_PROMPT, "duplicate uid": "published tokenizers name one id twice"},
    "policy: tokenizer_config.json": {"long prompt": NO_PROMPT},
    "policy: generation_config.json": {"long prompt": NO_PROMPT},
    "checkpoint of a run": {
        "duplicate uid": "has no uids",
        "long prompt": NO_PROMPT,
        **dict.fromkeys(("lone surrogate", "100 MB line"), BINARY),
    },
}


def test_the_table_has_every_cell():
    assert EXPECTED.keys() == {*KINDS, CHECKPOINT}
    for kind in EXPECTED:
        assert EXPECTED[kind].keys() | CANNOT.get(kind, {}).keys() == set(DEFECTS)
        assert not EXPECTED[kind].keys() & CANNOT.get(kind, {}).keys()


@pytest.fixture(scope="module")
def stopped_twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three updates that its time limit ended after the first and again after the second."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    assert main(["fit", *RUN, f"--run={run}", "--time_limit.limit=0.0001"]) == 0
    assert main(["fit", f"--resume={run}"]) == 0
    return run


@pytest.fixture
def working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def content(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def cells() -> list[Any]:
    """Every cell that is a mistake. The fast suite has few files of 100 MB, and of solutions, which begin a run, only
    what other files of lines do not show."""
    found = []
    for kind, told in EXPECTED.items():
        for defect in [d for d in told if told[d] != READ]:
            slow = defect == "100 MB line" and kind not in ("questions, JSON Lines", "config", "study")
            slow |= kind == "solutions" and defect in ("truncated", "NUL bytes", "lone surrogate", "empty")
            found.append(pytest.param(kind, defect, marks=[pytest.mark.slow] * slow))
    return found


@pytest.mark.parametrize(("kind", "defect"), cells())
def test_a_defect_is_one_line_and_nothing_is_written(kind, defect, working, capsys, request):
    found = checkpoint(request.getfixturevalue("stopped_twice")) if kind == CHECKPOINT else KINDS[kind]()
    found.make(working)
    found.spoil(working, defect)
    before = content(working)
    capsys.readouterr()
    told = EXPECTED[kind][defect]
    if told == SET_ASIDE:
        assert main(found.words) == 0  # the checkpoint before it is used
        assert told in capsys.readouterr().err.splitlines()[0]
        assert json.loads((working / "run" / "run.json").read_text())["updates"] == 2
        return
    assert main(found.words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line if told.startswith("the prompt") else line.startswith(f"rlvr-pl: {told}")
    assert len(line) < 500 and content(working) == before
    if defect == "100 MB line":
        (working / found.file).unlink()


def outcome(folder: Path, printed: str) -> bytes | str:
    """What a command wrote, or else printed."""
    for name in ("items.jsonl", "run/snapshots/final/model.safetensors"):
        if (folder / name).exists():
            return (folder / name).read_bytes()
    return printed


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_right_is_read_whatever_its_line_endings_and_marks(kind, working, capsys):
    """The undamaged input, and then each form of it that is no defect, give the same."""
    found = KINDS[kind]()
    results: dict[str | None, bytes | str] = {}
    for defect in (None, *(d for d, told in EXPECTED[kind].items() if told == READ)):
        folder = working / str(defect)
        folder.mkdir()
        found.make(folder)
        if defect is not None:
            found.spoil(folder, defect)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            assert main(found.words) == 0
        results[defect] = outcome(folder, capsys.readouterr().out)
    results.pop("lone surrogate", None)  # another answer, and so another result
    assert all(result == results[None] for result in results.values())


PEAK = r"""
import re, sys
from rlvr_pl.config_file import read_config
from rlvr_pl.data.pools import load_questions
from rlvr_pl.errors import UserError
peak = lambda: 1024 * int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])
before = peak()
try:
    (read_config if sys.argv[1].endswith("yaml") else load_questions)(sys.argv[1])
except UserError:
    print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("kind", ["questions, JSON Lines", "questions, JSON", "questions, CSV", "config"])
def test_a_line_of_100_mb_takes_the_memory_of_a_few_copies_of_it(kind, working):
    """At most four: the bytes, the text, what is parsed of it, and what is checked of that."""
    found = KINDS[kind]()
    found.make(working)
    found.spoil(working, "100 MB line")
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PEAK, found.file], env=where, capture_output=True, text=True, check=True
    )
    (working / found.file).unlink()
    assert int(done.stdout) <= 4 * HUGE
