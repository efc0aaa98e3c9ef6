"""Strict reading of JSON Lines: what passes, and that every fault names the file and the line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_pl import jsonl
from rlvr_pl.errors import UserError
from rlvr_pl.jsonl import iter_jsonl, read_jsonl, read_records

GOOD = b'{"uid": "a", "correct": true}\n'
ITEM = {"uid": str, "correct": bool}


def write(folder: Path, data: bytes) -> Path:
    path = folder / "f.jsonl"
    path.write_bytes(data)
    return path


def test_reads_rows_skipping_white_lines_and_counting_them(tmp_path: Path) -> None:
    path = write(
        tmp_path, GOOD + b"\n  \r\n" + b'{"uid": "b", "correct": false}\r\n' + b'{"uid": "c", "correct": true}'
    )
    assert [number for number, _ in iter_jsonl(path)] == [1, 4, 5]
    assert [row["uid"] for row in read_jsonl(path, required=ITEM, unique=("uid",))] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("data", "line", "words"),
    [
        (b"", None, "the file is empty"),
        (b"\n\n", None, "no rows"),
        (GOOD + b"{oops}\n", 2, "not JSON"),
        (GOOD + b'{"uid": "b", "corr', 2, "torn"),
        (GOOD + '{"uid": "é'.encode()[:-1], 2, "torn"),
        (GOOD + b"[1]\n", 2, "one JSON object"),
        (GOOD + b'{"uid": "\xff", "correct": true}\n', 2, "not UTF-8 at byte 9"),
        (GOOD + b'{"uid": "b\0", "correct": true}\n', 2, "NUL"),
        (GOOD + rb'{"uid": "\ud800", "correct": true}' + b"\n", 2, "surrogate"),
        ('{"uid": "a"}\n'.encode("utf-16"), 1, "UTF-16 byte-order mark"),
        (GOOD + b'{"uid": "b", "correct": NaN}\n', 2, "NaN is not JSON"),
        (GOOD + b'{"uid": "b", "uid": "c", "correct": true}\n', 2, "'uid' occurs twice"),
        (GOOD + b'{"uid": "b"}\n', 2, "'correct' is missing"),
        (GOOD + b'{"uid": 7, "correct": true}\n', 2, "'uid' must be a string, not 7"),
        (GOOD + b'{"uid": "b", "correct": 1}\n', 2, "'correct' must be true or false, not 1"),
        (GOOD + b'{"uid": "b", "correct": true, "level": true}\n', 2, "'level' must be an integer, not true"),
        (GOOD + b'{"uid": "b", "correct": true}\n' + GOOD, 3, "uid 'a' is already in line 1"),
        (GOOD + b'{"a": ' * 200_000 + b"\n", 2, "nested too deeply"),
        (GOOD + b'{"uid": ' + b"9" * 5000 + b"}\n", 2, "not JSON"),
    ],
)
def test_each_fault_is_one_line_with_file_and_line(tmp_path: Path, data: bytes, line: int | None, words: str) -> None:
    path = write(tmp_path, data)
    with pytest.raises(UserError) as caught:
        read_jsonl(path, required=ITEM, optional={"level": int}, unique=("uid",))
    message = str(caught.value)
    assert message.startswith(f"{path}: " if line is None else f"{path}:{line}: ")
    assert words in message and "\n" not in message


def test_over_long_line_is_refused_without_reading_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 2**20)
    path = write(tmp_path, GOOD + b'{"uid": "' + b"x" * 2**21)
    with pytest.raises(UserError, match=r":2: the line is longer than 1 MB"):
        read_jsonl(path)


def test_only_some_fields_can_be_kept(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"uid": "a", "text": "long"}\n{"uid": "b", "correct": true}\n')
    assert read_records(path, None, keep=("uid", "correct"))[1] == [{"uid": "a"}, {"uid": "b", "correct": True}]


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to(loop)
    for path, words in [(tmp_path, "is a folder"), (tmp_path / "gone", "No such file"), (loop, "cannot be read")]:
        with pytest.raises(UserError, match=words):
            read_jsonl(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_unreadable_file(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    path.chmod(0)
    with pytest.raises(UserError, match="cannot be read"):
        read_jsonl(path)


def test_types_integers_are_numbers_but_booleans_are_not(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"x": 1}\n{"x": 1.5}\n')
    assert [row["x"] for row in read_jsonl(path, required={"x": float})] == [1, 1.5]
    with pytest.raises(UserError, match=r":1: 'x' must be a number or null, not true"):
        read_jsonl(write(tmp_path, b'{"x": true}\n'), required={"x": (float, type(None))})


def test_a_set_of_values(tmp_path: Path) -> None:
    allowed = {"correct": frozenset({0, 1})}
    rows = read_jsonl(write(tmp_path, b'{"correct": 1}\n{"correct": false}\n'), required=allowed)
    assert [row["correct"] for row in rows] == [1, False]
    for bad in (b"2", b'"1"', b"[1]", b"null"):
        with pytest.raises(UserError, match=r":2: 'correct' must be 0 or 1, not"):
            read_jsonl(write(tmp_path, b'{"correct": 1}\n{"correct": ' + bad + b"}\n"), required=allowed)


def test_header_is_taken_from_the_first_row_only(tmp_path: Path) -> None:
    head = b'{"record": "items", "version": 1, "engine": "torch"}\n'
    header, rows = read_records(write(tmp_path, head + GOOD), "items", required=ITEM)
    assert header == {"record": "items", "version": 1, "engine": "torch"} and len(rows) == 1
    assert read_records(write(tmp_path, GOOD), "items", required=ITEM)[0] is None
    with pytest.raises(UserError, match=r":1: a file of 'items' records, where 'samples' are needed"):
        read_records(write(tmp_path, head + GOOD), "samples", required=ITEM)
    with pytest.raises(UserError, match=r":2: the field 'uid' is missing"):
        read_records(write(tmp_path, GOOD + head), "items", required=ITEM)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    rows=st.lists(st.dictionaries(st.text(), json_values, max_size=4), min_size=1, max_size=4), ascii_only=st.booleans()
)
def test_round_trip_of_any_objects(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict], ascii_only: bool
) -> None:
    path = tmp_path_factory.mktemp("j") / "f.jsonl"
    path.write_text(
        "".join(json.dumps(r, ensure_ascii=ascii_only) + "\n" for r in rows), encoding="utf-8", newline="\n"
    )
    assert read_jsonl(path) == rows
