from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlvr_pl.data.pools import load_questions, read_json, read_uids
from rlvr_pl.errors import UserError
from rlvr_pl.types import Question

ROWS: list[dict[str, Any]] = [
    {"uid": "a", "problem": "1+1?", "answer": "2", "subject": "sum", "level": 1, "source": "x"},
    {"uid": "b", "problem": "2·3? \\boxed{}\n", "answer": "6", "subject": None, "level": None, "source": "y"},
]
QUESTIONS = [
    Question("a", "1+1?", "2", "sum", 1, {"source": "x"}),
    Question("b", "2·3? \\boxed{}\n", "6", None, None, {"source": "y"}),
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """`rows` in the format that the file's ending names."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        import csv

        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return path


def message(path: Path | str, **how: Any) -> str:
    with pytest.raises(UserError) as error:
        load_questions(path, **how)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet", ".csv"])
def test_every_format_gives_the_same_questions(ending, tmp_path):
    assert load_questions(write(tmp_path / f"q{ending}", ROWS)) == QUESTIONS


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet", ".csv"])
def test_columns_are_mapped_and_the_others_kept(ending, tmp_path):
    row = {"id": 7, "question": "1+1?", "gold": 2, "answer": "prose", "Level": "Level 4"}
    path = write(tmp_path / f"q{ending}", [row])
    columns = {"uid": "id", "problem": "question", "answer": "gold", "level": "Level"}
    assert load_questions(path, columns=columns) == [Question("7", "1+1?", "2", None, 4, {"answer": "prose"})]


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet", ".csv"])
def test_without_a_uid_column_questions_are_named_by_file_and_row(ending, tmp_path):
    path = write(tmp_path / f"pool{ending}", [{"problem": "p", "answer": "1"}, {"problem": "q", "answer": "2"}])
    assert [q.uid for q in load_questions(path)] == ["pool/0", "pool/1"]


def test_spreadsheet_csv_with_byte_order_mark_and_crlf_and_quoted_newlines(tmp_path):
    (tmp_path / "q.csv").write_bytes('\ufeffproblem,answer\r\n"a, ""b""\nc",½\r\n'.encode())
    assert load_questions(tmp_path / "q.csv") == [Question("q/0", 'a, "b"\nc', "½")]


def test_crlf_json_lines_are_fine(tmp_path):
    (tmp_path / "q.jsonl").write_bytes(b'{"problem": "p", "answer": "1"}\r\n{"problem": "q", "answer": "2"}\r\n')
    assert [q.answer for q in load_questions(tmp_path / "q.jsonl")] == ["1", "2"]


@pytest.mark.parametrize(
    ("level", "expected"), [(3, 3), (3.0, 3), ("3", 3), ("Level 3", 3), ("Level ?", None), (None, None), ("level 5", 5)]
)
def test_levels_as_data_sets_write_them(level, expected, tmp_path):
    path = write(tmp_path / "q.json", [{"problem": "p", "answer": "1", "level": level}])
    assert load_questions(path)[0].level == expected


@pytest.mark.parametrize("level", ["hard", 2.5, True, [1], "Level 1234"])
def test_other_levels_are_refused(level, tmp_path):
    path = write(tmp_path / "q.json", [{"problem": "p", "answer": "1", "level": level}])
    assert "'level' must be a whole number or 'Level N'" in message(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"problem": 7.5, "answer": float("inf")}, "not JSON: Infinity"),
        ({"problem": None}, "'problem' must be text or a number, not None"),
        ({"problem": " \n"}, "the problem is empty"),
        ({"problem": ["x"]}, "'problem' must be text or a number, not a list"),
        ({"problem": [{"role": "user", "content": "x"}]}, "'problem' must be text or a number, not a list"),
        ({"problem": "a\0b"}, "NUL"),
        ({"problem": "a\ud800b"}, "surrogate"),
        ({"answer": {"value": 1}}, "'answer' must be text or a number, not an object"),
        ({"answer": True}, "'answer' must be text or a number, not True"),
        ({"subject": ["x"]}, "'subject' must be text or a number, not a list"),
        ({"uid": None}, "'uid' must be text or a number, not None"),
        ({"uid": ""}, "the uid is empty"),
    ],
)
@pytest.mark.parametrize("ending", [".jsonl", ".json"])
def test_a_wrong_value_is_named_with_its_place(changes, words, ending, tmp_path):
    path = write(tmp_path / f"q{ending}", [ROWS[0], ROWS[1] | changes])
    text = message(path)
    assert words in text
    assert text.startswith(f"{path}:2:" if ending == ".jsonl" else str(path))


@pytest.mark.parametrize(
    ("ending", "place"), [(".jsonl", ":2:"), (".json", ": row 2:"), (".parquet", ": row 1:"), (".csv", ":2:")]
)
def test_a_missing_column_names_those_that_are_there(ending, place, tmp_path):
    rows = [{"uid": "a", "question": "p", "answer": "1"}]
    if ending in (".jsonl", ".json"):
        rows.insert(0, {"uid": "z", "problem": "p", "answer": "1"})
    path = write(tmp_path / f"q{ending}", rows)
    text = message(path)
    assert place in text
    assert text.endswith("no column 'problem'; there are 'uid', 'question', 'answer'; call yours 'problem'")
    assert message(path, naming="--columns {field}=NAME").endswith("; name yours with --columns problem=NAME")


def test_a_mapped_column_must_be_there_and_the_field_must_exist(tmp_path):
    path = write(tmp_path / "q.jsonl", ROWS)
    assert "no column 'topic'" in message(path, columns={"subject": "topic"})
    assert "unknown difficulty; the fields are uid, problem" in message(path, columns={"difficulty": "level"})


def test_uids_in_some_rows_only_are_refused(tmp_path):
    row = {"problem": "p", "answer": "1"}
    assert "no column 'uid'" in message(write(tmp_path / "a.jsonl", [row | {"uid": "x"}, row]))
    assert "the first row has none" in message(write(tmp_path / "b.jsonl", [row, row | {"uid": "x"}]))


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet", ".csv"])
def test_duplicate_uids_are_listed(ending, tmp_path):
    rows = [{"uid": uid, "problem": "p", "answer": "1"} for uid in "xyzxyy"]
    place = {".jsonl": "q.jsonl:4", ".json": "q.json: row 4", ".parquet": "q.parquet: row 4", ".csv": "q.csv:5"}[ending]
    text = message(write(tmp_path / f"q{ending}", rows))
    assert text.endswith(f"uids that occur more than once: 'x', 'y' (again in {tmp_path / place})")


@pytest.mark.parametrize("empty", ["", "  ", None])
@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet", ".csv"])
def test_empty_golds_are_listed_or_dropped_when_asked(empty, ending, tmp_path):
    path = write(tmp_path / f"q{ending}", [ROWS[0], ROWS[1] | {"answer": empty}])
    text = message(path)
    assert "empty gold answers: 'b'; set drop_empty_gold" in text
    assert load_questions(path, drop_empty_gold=True) == QUESTIONS[:1]
    only = write(tmp_path / f"only{ending}", [ROWS[1] | {"answer": empty, "subject": "s", "level": 1}])
    assert "every gold answer is empty" in message(only, drop_empty_gold=True)


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n \n",
        b"\0\0\0\0",
        b"\xff\xfe{\0}\0",
        b"\xef\xbb\xbf[]",
        b"{",
        b"nonsense",
        b'"text"',
        b"\x80abc",
        b"[" * 200_000,
    ],
)
def test_a_file_of_another_kind_is_a_user_error(ending, content, tmp_path):
    path = tmp_path / f"q.{ending}"
    path.write_bytes(content)
    assert message(path).startswith(str(path))


def test_an_empty_pool_is_refused(tmp_path):
    (tmp_path / "q.json").write_text("[]")
    assert "no questions" in message(tmp_path / "q.json")
    (tmp_path / "q.csv").write_text("problem,answer\n")
    assert "no questions" in message(tmp_path / "q.csv")
    pq.write_table(pa.table({"problem": pa.array([], pa.string())}), tmp_path / "q.parquet")
    assert "no questions" in message(tmp_path / "q.parquet")


def test_ragged_or_ambiguous_csv_is_refused_with_its_line(tmp_path):
    path = tmp_path / "q.csv"
    for content, words in {
        "problem,answer\na,1\nb\n": ":3: not the 2 cells",
        "problem,answer\na,1,2\n": ":2: not the 2 cells",
        "problem,problem\na,1\n": ":1: a column name occurs twice",
        'problem,answer\n"a,1\n': "not CSV",
    }.items():
        path.write_text(content)
        assert words in message(path)


def test_a_torn_parquet_file_is_refused(tmp_path):
    data = write(tmp_path / "q.parquet", ROWS).read_bytes()
    for share in (0.1, 0.5, 0.99):
        (tmp_path / "torn.parquet").write_bytes(data[: int(share * len(data))])
        assert "not a readable Parquet file" in message(tmp_path / "torn.parquet")


def test_paths_that_are_no_files(tmp_path):
    assert "No such file" in message(tmp_path / "absent.jsonl")
    for name in ("no/such/thing", "trian", ""):
        assert "no such file (a data set on the hub is OWNER/NAME)" in message(name)
    (tmp_path / "q.txt").touch()
    assert "ending must be one of" in message(tmp_path / "q.txt")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    assert "cannot be read" in message(tmp_path / "loop.jsonl")
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    assert "cannot be read" in message(tmp_path / "loop.json")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "not a regular file" in message(tmp_path / "pipe.jsonl")


def test_an_order_is_not_a_pool(tmp_path):
    (tmp_path / "order.json").write_text('["a", "b"]')
    assert "a list of uids is an order, not questions" in message(tmp_path / "order.json")


def test_embedded_names_lead_to_the_embedded_questions():
    assert len(load_questions("embedded:val350")) == 350
    assert {q.uid for q in load_questions("embedded:drift")}.isdisjoint(q.uid for q in load_questions("embedded:train"))
    assert "embedded:nope" in message("embedded:nope")


def test_folders_that_datasets_wrote(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(tmp_path / "two")
    assert load_questions(tmp_path / "one") == QUESTIONS
    assert load_questions(tmp_path / "two") == QUESTIONS
    assert load_questions(tmp_path / "two", split="test") == QUESTIONS[1:]
    assert "no split 'nope'; it has train, test" in message(tmp_path / "two", split="nope")
    (tmp_path / "three").mkdir()
    assert "no data set that could be loaded" in message(tmp_path / "three")


def test_a_hub_name_gives_name_config_and_split(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(name: str, config: str | None, *, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", load)
    for name in ("owner/data", "owner/data:main", "owner/data:main:test[:50%]"):
        assert load_questions(name) == QUESTIONS
    assert asked == [
        ("owner/data", None, "train"),
        ("owner/data", "main", "train"),
        ("owner/data", "main", "test[:50%]"),
    ]


def test_without_datasets_a_hub_name_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in message("owner/data")


def test_a_hub_failure_is_one_line(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    assert message("owner/data").endswith("could be loaded: no network")


def test_the_public_files_load(shared):
    train = load_questions(shared / "data/math_train_12000.jsonl", drop_empty_gold=True)
    assert len(train) == 11_998
    defects = json.loads((shared / "data/math_defects.json").read_text())
    text = message(shared / "data/math_train_12000.jsonl")
    assert all(uid in text for uid in defects["empty_gold"])
    assert len(load_questions(shared / "data/math500_test.jsonl")) == 500
    assert load_questions(shared / "data/gsm8k_train.jsonl")[0].answer == "72"


def test_uid_lists(tmp_path):
    path = tmp_path / "order.json"
    path.write_text('["a", 7, {"uid": "b", "problem": "p"}]')
    assert read_uids(path) == ["a", "7", "b"]
    for content, words in {
        "[]": "not empty",
        '{"a": 1}': "must be a JSON list",
        '["a", "b", "a"]': "more than once: 'a'",
        "[true]": "row 1: a uid must be",
        '[{"id": 1}]': "row 1: a uid must be",
        "[1.5]": "row 1: a uid must be",
        '["a",\n]': "order.json:2: not JSON",
        "[NaN]": "NaN is no JSON value",
        "[" + "9" * 5000 + "]": "not JSON",
    }.items():
        path.write_text(content)
        with pytest.raises(UserError) as error:
            read_uids(path)
        assert words in str(error.value)


# ---- whatever the bytes are, a reader either gives questions or a UserError ------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
rows = st.dictionaries(st.sampled_from(["uid", "problem", "answer", "subject", "level", "x"]), json_values, max_size=6)
documents = st.one_of(
    st.lists(rows, max_size=4).map(lambda x: json.dumps(x).encode()),
    st.lists(rows, max_size=4).map(lambda x: "\n".join(map(json.dumps, x)).encode()),
    st.lists(st.lists(st.text(max_size=6), max_size=4).map(",".join), max_size=4).map(
        lambda x: "\n".join(["problem,answer", *x]).encode("utf-8", "surrogatepass")
    ),
    st.binary(max_size=80),
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents, st.sampled_from(["jsonl", "json", "csv", "parquet"]), st.booleans())
def test_any_bytes_give_questions_or_a_user_error(tmp_path, content, ending, drop):
    path = tmp_path / f"q.{ending}"
    path.write_bytes(content)
    try:
        questions = load_questions(path, drop_empty_gold=drop)
    except UserError as error:
        assert str(path) in str(error)
    else:
        assert questions
        assert len({q.uid for q in questions}) == len(questions)
        assert all(q.problem.strip() and q.answer.strip() and "\0" not in q.problem for q in questions)
        "".join(q.uid + q.problem + q.answer + (q.subject or "") for q in questions).encode()
    for read in (read_json, read_uids):
        try:
            read(path)
        except UserError as error:
            assert str(path) in str(error)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_parquet_file_gives_questions_or_a_user_error(tmp_path, data):
    path = write(tmp_path / "q.parquet", ROWS)
    content = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=3)):
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))] or content))
    try:
        assert load_questions(path, drop_empty_gold=True)
    except UserError as error:
        assert str(path) in str(error)
