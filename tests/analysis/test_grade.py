"""`rlvr-pl grade`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

pytest.importorskip("math_verify")

from rlvr_pl.analysis import grade
from rlvr_pl.analysis.command import Result, emit
from rlvr_pl.errors import UserError

ROWS = [
    {"id": "a", "gold": r"\frac{1}{2}", "response": r"so \boxed{0.5}"},
    {"id": "b", "gold": "3", "response": "the answer is 3"},
    {"id": "c", "gold": "3", "response": "the answer is 4"},
    {"id": 4, "gold": "x+1", "response": "\ud800 \\boxed{1+x} \0"},
]


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    grade.add_arguments(parser)
    return parser.parse_args(list(words))


def run(path: Path, *words: str) -> Result:
    return grade.run(parsed(str(path), *words))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_rows_in_order_with_every_field(file: Path) -> None:
    rows = run(file).data["rows"]
    assert [(r["id"], r["status"], r["reward"], r["answer"]) for r in rows] == [
        ("a", "correct", 1.0, "0.5"),
        ("b", "correct", 1.0, "3"),
        ("c", "wrong", 0.0, "4"),
        (4, "correct", 1.0, "1+x"),
    ]
    assert all(r["seconds"] >= 0 for r in rows)


def test_the_training_rule_needs_a_box(file: Path) -> None:
    assert [r["status"] for r in run(file, "--require-box").data["rows"]] == [
        "correct",
        "no_answer",
        "no_answer",
        "correct",
    ]


def test_other_graders(file: Path, tmp_path: Path) -> None:
    assert run(file, "--grader", "exact").data["counts"] == {"correct": 1, "wrong": 3}
    code = tmp_path / "mine.py"
    code.write_text("def reward(completions, answer, **kwargs):\n    return [len(a) for a in answer]\n")
    assert [r["reward"] for r in run(file, "--grader", f"{code}:reward").data["rows"]] == [11.0, 1.0, 1.0, 3.0]
    with pytest.raises(UserError, match="no grader 'nope'"):
        run(file, "--grader", "nope")


def test_json_on_stdout_and_nothing_else(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = parsed(str(file), "--json")
    emit(grade.run(args), args)
    shown = capsys.readouterr()
    assert [r["id"] for r in json.loads(shown.out)["rows"]] == ["a", "b", "c", 4]


def test_a_table_for_people(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = parsed(str(file))
    emit(grade.run(args), args)
    assert "4 answers: 3 correct, 1 wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": "a", "gold": "1"}\n', "answers.jsonl:1: the field 'response' is missing"),
        ('{"id": "a", "gold": 1, "response": "1"}\n', "answers.jsonl:1: 'gold' must be a string"),
        ('{"id": "a", "gold": "1", "response": "1"}\n' * 2, "answers.jsonl:2: id 'a' is already in line 1"),
        ("", "answers.jsonl: the file is empty"),
    ],
)
def test_a_faulty_file_is_refused_by_line(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        run(file)
