"""Whatever a file holds, a reader gives what it promises or one line that names the file.

Questions, JSON Lines, settings of `fit` and policy folders have such tests beside their readers
(``tests/data/test_pools.py``, ``tests/test_jsonl.py``, ``tests/test_config_file.py``, ``tests/test_policy.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlvr_pl.adapters import base_of_folder
from rlvr_pl.analysis.items import load_panel, load_samples
from rlvr_pl.callbacks.checkpoint import CONTENT, check_content, latest_checkpoint
from rlvr_pl.callbacks.drift import Contexts
from rlvr_pl.cost import CostLedger
from rlvr_pl.errors import UserError
from rlvr_pl.expert_iteration.files import read_samples, read_solutions
from rlvr_pl.expert_iteration.filter import SolutionFilter
from rlvr_pl.prompts import template_of_folder
from rlvr_pl.records import CsvTable, JsonlFile, RunFolder
from rlvr_pl.study.plan import Study, read_study

HEAD = {"version": 1, "tokenizer_sha256": "0" * 64, "engine": "torch", "batch_size": 64}
QUESTION = {"uid": "q", "problem": "1+1?", "gold": "2"}
ITEM = {"uid": "q", "correct": 1, "subject": "a", "level": 1, "length": 3, "stop_reason": "eos", "boxed": 1}
SAMPLE = {**QUESTION, "sample": 0, "correct": 1, "stop_reason": "eos", "token_ids": [3, 1], "text": "2", "boxed": 1}
SOLUTION = {**QUESTION, "token_ids": [3, 1], "text": "2", "source": "self"}
RATIONALE = {**QUESTION, "stage": "bridge", "fate": "solution", "token_ids": [3, 1], "text": "2"}
CONTEXTS = {
    "record": "drift-contexts",
    "start_sha256": "0",
    "contexts": [{"uid": "q", "prompt_ids": [1], "completion_ids": [2]}],
}
LEDGER = dict.fromkeys(
    ("sampled_tokens", "prefill_tokens", "graded", "trained_tokens", "optimizer_steps", "wall_seconds"), 1
)  # fmt: skip
LINES: dict[str, tuple[dict[str, Any], Callable[[Path], object]]] = {
    "items": (ITEM, lambda path: load_panel([path])),
    "samples": (SAMPLE, load_samples),
    "samples to learn from": (SAMPLE, lambda path: read_samples([path])),
    "solutions": (SOLUTION, lambda path: read_solutions([path], SolutionFilter())),
    "rationales": (RATIONALE, lambda path: read_solutions([path], SolutionFilter())),
}
RECORD = {"items": "items", "samples": "samples", "samples to learn from": "samples"}


def lines(kind: str, *rows: dict[str, Any]) -> bytes:
    head = {"record": RECORD.get(kind, kind), **HEAD}
    return b"".join(json.dumps(row).encode() + b"\n" for row in (head, *rows))


@pytest.mark.parametrize("kind", LINES)
def test_what_is_right_is_read(tmp_path, kind):
    row, read = LINES[kind]
    (tmp_path / "f.jsonl").write_bytes(lines(kind, row))
    assert read(tmp_path / "f.jsonl")


def faults(kind: str) -> dict[str, tuple[bytes, str]]:
    """Damaged content, and the line that the message names."""
    row = LINES[kind][0]
    good = lines(kind, row)
    field = "correct" if "correct" in row else "text"
    other = {**row, "uid": "r"}
    return {
        "empty": (b"", ""),
        "torn": (good + b'{"uid": "r', ":3"),
        "not JSON": (good + b"{uid}\n", ":3"),
        "no object": (good + b"[1]\n", ":3"),
        "NUL": (good + json.dumps(other).encode()[:-1] + b"\0}\n", ":3"),
        "a lone surrogate": (good + json.dumps({**other, "uid": "\ud800"}).encode() + b"\n", ":3"),
        "not UTF-8": (good + b'{"uid": "\xff"}\n', ":3"),
        "UTF-16": (good.decode().encode("utf-16"), ":1"),
        "a missing field": (good + json.dumps({k: v for k, v in other.items() if k != field}).encode() + b"\n", ":3"),
        "a wrong type": (good + json.dumps({**other, field: {}}).encode() + b"\n", ":3"),
        "NaN": (good + json.dumps({**other, "x": float("nan")}).encode() + b"\n", ":3"),
    }


@pytest.mark.parametrize("fault", faults("items"))
@pytest.mark.parametrize("kind", LINES)
def test_each_fault_names_file_and_line(tmp_path, kind, fault):
    content, line = faults(kind)[fault]
    path = tmp_path / "f.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        LINES[kind][1](path)
    assert str(caught.value).startswith(f"{path}{line}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["items", "samples", "samples to learn from"])
def test_a_row_twice_names_both_lines(tmp_path, kind):
    row, read = LINES[kind]
    (tmp_path / "f.jsonl").write_bytes(lines(kind, row, row))
    with pytest.raises(UserError, match=r"f\.jsonl:3: .* is already in line 2"):
        read(tmp_path / "f.jsonl")


@pytest.mark.parametrize("kind", LINES)
def test_windows_line_endings_and_a_byte_order_mark_are_fine(tmp_path, kind):
    row, read = LINES[kind]
    (tmp_path / "f.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(kind, row).replace(b"\n", b"\r\n"))
    assert read(tmp_path / "f.jsonl")


@pytest.mark.parametrize("kind", LINES)
def test_a_symlink_loop_and_a_folder_are_one_line(tmp_path, kind):
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    for path in (tmp_path / "loop.jsonl", tmp_path):
        with pytest.raises(UserError, match=str(path)):
            LINES[kind][1](path)


# ---- any content ---------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**20) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
quiet = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def changed(row: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """The row with some fields gone or of any value."""
    return st.dictionaries(st.sampled_from(sorted(row)), json_values | st.just("gone"), max_size=3).map(
        lambda edits: {k: v for k, v in {**row, **edits}.items() if v != "gone"}
    )


@pytest.mark.parametrize("kind", LINES)
@quiet
@given(data=st.data())
def test_any_rows_are_read_or_a_user_error(tmp_path, kind, data):
    row, read = LINES[kind]
    content = lines(kind, *data.draw(st.lists(changed(row), max_size=3)))
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=2)):
        content = content[:place] + bytes([data.draw(st.integers(0, 255))]) + content[place + 1 :]
    path = tmp_path / "f.jsonl"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    try:
        assert read(path)
    except UserError as error:
        assert "\n" not in str(error) and str(error)


@quiet
@given(
    st.one_of(changed(CONTEXTS), changed(LEDGER), json_values).map(json.dumps).map(str.encode) | st.binary(max_size=40)
)
def test_any_json_file_is_read_or_a_user_error(tmp_path, content):
    path = tmp_path / "f.json"
    path.write_bytes(content)
    readers = (
        lambda: Contexts.load(path, 1000),
        lambda: CostLedger.read(path),
        lambda: RunFolder(tmp_path).read_json("f.json"),
    )
    for read in readers:
        try:
            read()
        except UserError as error:
            assert str(path) in str(error) and "\n" not in str(error)


@quiet
@given(
    st.lists(
        st.sampled_from([b"update,x", b"1,2", b'{"update": 1}', b"9,9", b"\0\0", b"\xff", b'"', b"{", b""]), max_size=8
    ),
    st.booleans(),
)
def test_any_table_can_be_cut_back_and_continued(tmp_path, content, newline):
    data = b"\n".join(content) + b"\n" * newline
    for path in (tmp_path / "t.csv", tmp_path / "t.jsonl"):
        path.write_bytes(data)
    table = CsvTable(tmp_path / "t.csv")
    table.truncate_after(5)
    table.append({"update": 6, "x": 1})
    assert [int(row["update"]) for row in table.rows()][-1:] == [6]
    file = JsonlFile(tmp_path / "t.jsonl")
    file.truncate_after(5)
    file.append([{"update": 6}])
    assert [json.loads(line)["update"] for line in file.path.read_bytes().splitlines()][-1] == 6


@quiet
@given(
    st.lists(
        st.tuples(st.binary(max_size=20), st.binary(max_size=80) | json_values.map(json.dumps).map(str.encode)),
        max_size=3,
    )
)
def test_any_checkpoint_folder_gives_a_whole_checkpoint_or_none(tmp_path, files):
    for old in tmp_path.iterdir():
        old.unlink()
    for number, (content, sidecar) in enumerate(files, 1):
        (tmp_path / f"update-{number:06d}.ckpt").write_bytes(content)
        (tmp_path / f"update-{number:06d}.json").write_bytes(sidecar)
    assert latest_checkpoint(tmp_path) is None  # no random text is the hash of another


STUDY = {
    "about": "x",
    "start": "embedded:start",
    "seeds": [1, 2],
    "order": {"updates": 1},
    "panel": "embedded:drift",
    "config": {"model": {"group_size": 2}},
    "arms": {"one": {}, "two": {"objective": {"init_args": {"mask_truncated": True}}}},
    "criterion": {"window": 2},
    "budget": {"minutes": 3},
    "expectations": [{"arm": "one", "collapsed": True}],
}
TEMPLATE = {"kind": "text", "name": "x", "text": "{problem}", "hint": "{problem} {answer}"}
ADAPTER = {"base_model_name_or_path": "embedded:start", "peft_type": "LORA"}


def test_the_right_study_is_read(tmp_path):
    (tmp_path / "s.yaml").write_text(json.dumps(STUDY))
    assert [arm.name for arm in read_study(tmp_path / "s.yaml").arms] == ["one", "two"]


@quiet
@given(changed(STUDY).map(json.dumps).map(str.encode) | st.binary(max_size=60), st.integers(0, 400))
def test_any_study_is_read_or_a_user_error(tmp_path, content, end):
    path = tmp_path / "s.yaml"
    path.write_bytes(content[:end] if end % 2 else content)
    try:
        assert isinstance(read_study(path), Study)
    except UserError as error:
        assert str(path) in str(error) and "\n" not in str(error)


@quiet
@given(
    st.one_of(changed(TEMPLATE), changed(ADAPTER), json_values).map(json.dumps).map(str.encode) | st.binary(max_size=40)
)
def test_any_template_and_any_adapter_is_read_or_a_user_error(tmp_path, content):
    for name in ("prompt_template.json", "adapter_config.json"):
        (tmp_path / name).write_bytes(content)
    for read in (lambda: template_of_folder(tmp_path, None), lambda: base_of_folder(tmp_path)):
        try:
            assert read()
        except UserError as error:
            assert str(tmp_path) in str(error) and "\n" not in str(error)


@quiet
@given(
    st.binary(max_size=60)
    | st.dictionaries(st.sampled_from(sorted(CONTENT)), json_values)
    | st.sampled_from(sorted(CONTENT)).map(lambda gone: {k: kind() for k, kind in CONTENT.items() if k != gone})
)
def test_any_file_with_the_right_hash_is_a_checkpoint_or_a_user_error(tmp_path, content):
    path = tmp_path / "update-000001.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(UserError, match="not a checkpoint of a run"):
        check_content(path)
    torch.save({name: kind() for name, kind in CONTENT.items()}, path)
    check_content(path)
