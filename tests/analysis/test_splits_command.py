from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlvr_pl.cli import main
from rlvr_pl.data.pools import load_questions, read_uids
from rlvr_pl.data.schedule import QuestionSchedule


def splits(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["splits", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["splits", *map(str, words), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def write_pool(path: Path, n: int = 60, **changes: Any) -> Path:
    rows = [
        {"uid": f"q{i:02}", "problem": f"p{i}", "answer": str(i), "subject": "ab"[i % 2], "level": i // 2 % 3 + 1}
        | changes
        for i in range(n)
    ]
    path.write_text(json.dumps(rows))
    return path


def test_the_math_pool_is_cut_as_in_the_paper(shared, tmp_path, capsys):
    data = splits(capsys, shared / "data/math_train_12000.jsonl", "--out", tmp_path)
    defects = json.loads((shared / "data/math_defects.json").read_text())
    assert sorted(data["empty_gold"]) == sorted(defects["empty_gold"])
    assert data["questions"] == 11_998
    parts = data["splits"]
    assert {name: part["n"] for name, part in parts.items() if name != "train_order_s11"} == {
        "val350": 350,
        "coverage70": 70,
        "trained320": 320,
        "drift64": 64,
        "entropy_grad_1": 64,
        "entropy_grad_2": 64,
    }
    assert set(data["subjects"].values()) == {50}
    assert parts["train_order_s11"]["n"] == 11_998 - 350 - len(data["twins"])
    pool = load_questions(shared / "data/math_train_12000.jsonl", drop_empty_gold=True)
    # The order and an offset give the update's questions just as `fit` takes them; sets load as questions.
    schedule = QuestionSchedule(pool, 64, order=tmp_path / "train_order_s11.json", start=7464)
    for update, name in ((1, "entropy_grad_1"), (2, "entropy_grad_2")):
        assert schedule.batch(update) == load_questions(tmp_path / f"{name}.json")
    sets = {name: set(read_uids(tmp_path / part["file"])) for name, part in parts.items()}
    assert sets["val350"].isdisjoint(sets["train_order_s11"])
    assert sets["coverage70"] < sets["val350"]
    uid_map = json.loads((tmp_path / "uid_map.json").read_text())
    assert len(uid_map) == 12_000
    assert sum(x["split"] == "validation" for x in uid_map.values()) == 350
    assert {uid for uid, x in uid_map.items() if x["split"] == "empty gold"} == set(defects["empty_gold"])
    assert json.loads((tmp_path / "grader.json").read_text())["training"]["require_box"] is True
    assert json.loads((tmp_path / "splits.json").read_text()) == data


def test_questions_of_an_earlier_run_are_in_no_part(tmp_path, capsys):
    pool = write_pool(tmp_path / "pool.json")
    (tmp_path / "used.json").write_text('["q03", "q04"]')
    words = (pool, "--out", tmp_path / "out", "--per-subject", 5, "--panel-per-subject", 2)
    data = splits(capsys, *words, "--exclude", tmp_path / "used.json")
    assert data["excluded"] == ["q03", "q04"]
    for part in data["splits"].values():
        assert not {"q03", "q04"} & set(read_uids(tmp_path / "out" / part["file"]))
    assert set(data["splits"]) == {"train_order_s11", "val10", "coverage4"}


def test_columns_and_a_kept_validation_split(tmp_path, capsys):
    pool = tmp_path / "pool.json"
    pool.write_text(json.dumps([{"id": i, "question": f"p{i}", "answer": "1"} for i in range(9)]))
    (tmp_path / "val.json").write_text('["4", "2"]')
    data = splits(
        capsys,
        *(pool, "--out", tmp_path / "out", "--columns", "uid=id", "problem=question"),
        *("--validation", tmp_path / "val.json", "--panel-per-subject", 1),
    )
    assert read_uids(tmp_path / "out/val2.json") == ["2", "4"]
    assert data["splits"]["train_order_s11"]["n"] == 7


def test_bad_input_is_one_line_and_writes_nothing(tmp_path, capsys):
    pool, out = write_pool(tmp_path / "pool.json"), tmp_path / "out"
    (tmp_path / "val.json").write_text('["q00"]')
    given = ("--out", out, "--panel-per-subject", 1)
    both = ("--validation", tmp_path / "val.json", "--exclude", tmp_path / "val.json")
    assert "overlap in 1 questions: 'q00'" in refused(capsys, pool, *given, *both)
    assert "must be at least 1" in refused(capsys, pool, *given, "--per-subject", 0)
    assert "write FIELD=NAME" in refused(capsys, pool, *given, "--columns", "uid")
    assert "30 questions, but 50" in refused(capsys, pool, *given)
    assert "pool.json" in refused(capsys, write_pool(tmp_path / "pool.json", uid="same"), *given)
    assert not out.exists()


def test_a_full_folder_is_written_into_only_when_asked(tmp_path, capsys):
    pool = write_pool(tmp_path / "pool.json")
    words = (pool, "--out", tmp_path, "--per-subject", 2, "--panel-per-subject", 1)
    assert "not empty" in refused(capsys, *words)
    assert splits(capsys, *words, "--overwrite")["splits"]["val4"]["n"] == 4
    assert "a file; name a folder" in refused(capsys, pool, "--out", pool)
