"""The run folder: whole files or none, each row once."""

from __future__ import annotations

import json

import pytest

from rlvr_pl.errors import UserError
from rlvr_pl.records import JsonlFile, RunFolder, atomic_write_text, canonical_json, sha256_file


def test_atomic_write_leaves_the_old_file_when_writing_fails(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    atomic_write_text(path, "old")

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        atomic_write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_canonical_json_does_not_depend_on_key_order():
    assert canonical_json({"b": 1, "a": [1.5, "é"]}) == canonical_json({"a": [1.5, "é"], "b": 1}) == '{"a":[1.5,"é"],"b":1}'


def test_sha256_of_a_known_text(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    assert sha256_file(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2's example


def test_jsonl_drops_later_updates_and_sets_a_torn_line_aside(tmp_path, capsys):
    file = JsonlFile(tmp_path / "rollouts.jsonl")
    file.append([{"update": 1, "uid": "a"}, {"update": 2, "uid": "b"}])
    file.append([{"update": 3, "uid": "c"}])
    with file.path.open("a") as f:
        f.write('{"update": 4, "ui')
    assert [r["update"] for r in file.rows()] == [1, 2, 3]
    file.truncate_after(2)
    assert [r["uid"] for r in file.rows()] == ["a", "b"]
    assert file.path.with_name("rollouts.jsonl.torn").read_text() == '{"update": 4, "ui\n'
    assert "set aside" in capsys.readouterr().err
    file.append([{"update": 3, "uid": "again"}])
    assert [r["uid"] for r in file.rows()] == ["a", "b", "again"]


def test_csv_table_widens_its_header_and_cuts_back(tmp_path):
    table = RunFolder(tmp_path).table("metrics.csv")
    table.append({"update": 1, "reward": 0.25})
    table.append({"update": 2, "reward": 0.5, "fork/depth": 3})
    table.append({"update": 3, "reward": None, "fork/depth": 4})
    assert table.path.read_text() == "update,reward,fork/depth\n1,0.25,\n2,0.5,3\n3,,4\n"
    table.truncate_after(2)
    assert table.path.read_text() == "update,reward,fork/depth\n1,0.25,\n2,0.5,3\n"


def test_csv_table_goes_on_with_the_header_it_finds(tmp_path):
    RunFolder(tmp_path).table("m.csv").append({"update": 1, "b": 2, "a": 1})
    RunFolder(tmp_path).table("m.csv").append({"a": 3, "update": 2, "b": 4})
    assert (tmp_path / "m.csv").read_text() == "update,b,a\n1,2,1\n2,4,3\n"


def test_csv_table_forgets_a_torn_last_line(tmp_path):
    table = RunFolder(tmp_path).table("m.csv")
    table.append({"update": 1, "x": 1})
    with table.path.open("a") as f:
        f.write("2,1")
    assert [r["update"] for r in table.rows()] == ["1"]
    table.truncate_after(5)
    assert table.path.read_text() == "update,x\n1,1\n"


def test_damaged_json_is_a_users_error(tmp_path):
    (tmp_path / "run.json").write_text('{"state": ')
    with pytest.raises(UserError, match=r"run\.json: not valid JSON"):
        RunFolder(tmp_path).read_json("run.json")


def test_json_round_trip(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.read_json("none.json") is None
    folder.write_json("a.json", {"x": "é"})
    assert folder.read_json("a.json") == {"x": "é"} == json.loads((tmp_path / "a.json").read_text())
