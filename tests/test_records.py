"""The run folder: whole files or none, each row once."""

from __future__ import annotations

import json
import subprocess
import sys

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
    assert (
        canonical_json({"b": 1, "a": [1.5, "é"]})
        == canonical_json({"a": [1.5, "é"], "b": 1})
        == '{"a":[1.5,"é"],"b":1}'
    )


def test_sha256_of_a_known_text(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    assert (
        sha256_file(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )  # FIPS 180-2's example


def test_jsonl_drops_later_updates_and_sets_a_torn_line_aside(tmp_path, capsys):
    file = JsonlFile(tmp_path / "rollouts.jsonl")
    file.append([{"update": 1, "uid": "a"}, {"update": 2, "uid": "b"}])
    file.append([{"update": 3, "uid": "c"}])
    with file.path.open("a") as f:
        f.write('{"update": 4, "ui')
    file.truncate_after(2)
    assert [json.loads(line)["uid"] for line in file.path.read_text().splitlines()] == ["a", "b"]
    assert file.path.with_name("rollouts.jsonl.torn").read_text() == '{"update": 4, "ui\n'
    assert "set aside" in capsys.readouterr().err
    file.append([{"update": 3, "uid": "again"}])
    assert [json.loads(line)["uid"] for line in file.path.read_text().splitlines()] == ["a", "b", "again"]


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


def test_csv_table_sets_a_torn_last_line_aside(tmp_path, capsys):
    table = RunFolder(tmp_path).table("m.csv")
    table.append({"update": 1, "x": 1})
    with table.path.open("a") as f:
        f.write("2,1")
    assert [r["update"] for r in table.rows()] == ["1"]
    table.truncate_after(5)
    assert table.path.read_text() == "update,x\n1,1\n"
    assert (tmp_path / "m.csv.torn").read_text() == "2,1\n"
    assert "set aside in m.csv.torn" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [b"\0\0\0\n", b"2\n", b"2,1,7\n", b"x,1\n", b"\xff,1\n", b"\n"])
def test_damaged_lines_are_set_aside_and_named(tmp_path, capsys, damage):
    """What a power loss may leave in the middle: zeros, half a row, two rows run together."""
    table = RunFolder(tmp_path).table("m.csv")
    table.append({"update": 1, "x": 1})
    with table.path.open("ab") as f:
        f.write(damage + b"3,3\n")
    with pytest.raises(UserError, match=r"m\.csv:3: not a row"):
        table.rows()
    table.truncate_after(5)
    assert table.path.read_text() == "update,x\n1,1\n3,3\n"
    rollouts = JsonlFile(tmp_path / "r.jsonl")
    rollouts.append([{"update": 1}])
    with rollouts.path.open("ab") as f:
        f.write(damage + b'{"update": 3}\n')
    rollouts.truncate_after(5)
    assert rollouts.path.read_text() == '{"update": 1}\n{"update": 3}\n'
    assert capsys.readouterr().err.count("set aside") == 1 + (damage != b"\n")  # an empty line of JSON Lines is none


def test_an_empty_table_begins_anew(tmp_path):
    (tmp_path / "m.csv").touch()
    table = RunFolder(tmp_path).table("m.csv")
    table.truncate_after(0)
    table.append({"update": 1, "x": 1})
    assert table.path.read_text() == "update,x\n1,1\n"


def test_damaged_json_is_a_users_error(tmp_path):
    (tmp_path / "run.json").write_text('{"state": ')
    with pytest.raises(UserError, match=r"run\.json:1: not JSON"):
        RunFolder(tmp_path).read_json("run.json")


def test_json_round_trip(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.read_json("none.json") is None
    folder.write_json("a.json", {"x": "é"})
    assert folder.read_json("a.json") == {"x": "é"} == json.loads((tmp_path / "a.json").read_text())


@pytest.mark.parametrize("text", ["[]", "3", "\udcff", "[" * 100_000])
def test_json_that_is_no_object_is_a_users_error(tmp_path, text):
    (tmp_path / "run.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"run\.json:(1:)? (not|is not) "):
        RunFolder(tmp_path).read_json("run.json")


def test_what_a_kill_left_half_written_is_swept_away_and_nothing_else(tmp_path):
    run = RunFolder(tmp_path / "run")
    kept = [run.path / "config.yaml", run.checkpoints / "update-000001.ckpt", run.snapshots / "final" / "a.partial"]
    left = [run.path / ".run.json.x1.partial", run.checkpoints / ".update-000002.ckpt.partial"]
    for path in (*kept, *left, run.snapshots / ".final.partial" / "model.safetensors", tmp_path / ".other.partial"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    run.sweep()
    files = {p for p in tmp_path.rglob("*") if p.is_file()}
    assert files == {*kept, tmp_path / ".other.partial"}


def test_only_one_process_writes_a_run(tmp_path):
    code = (
        "import sys; from rlvr_pl.records import RunFolder; from rlvr_pl.errors import UserError\n"
        "try: RunFolder(sys.argv[1]).lock()\n"
        "except UserError as error: print(error)\n"
        "else: print('mine')"
    )

    def other() -> str:
        return subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True).stdout

    folder = RunFolder(tmp_path)
    folder.lock()
    folder.lock()
    assert "another process is writing this run" in other()
    del folder
    assert other() == "mine\n"


@pytest.mark.parametrize("name", ["../x.json", "/etc/passwd", "items/../../x", "link/x"])
def test_names_do_not_lead_out_of_the_run_folder(tmp_path, name):
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    (run.path / "link").symlink_to(tmp_path)
    for use in (run.read_json, run.table, lambda n: run.write_json(n, {})):
        with pytest.raises(UserError, match="outside of the run folder"):
            use(name)
    assert not list(tmp_path.glob("x*"))


def test_a_torn_line_that_repeats_a_whole_one_is_torn_all_the_same(tmp_path):
    file = JsonlFile(tmp_path / "r.jsonl")
    file.path.write_bytes(b'{"update": 1}\n{"update": 1}')
    file.truncate_after(5)
    file.append([{"update": 2}])
    assert file.path.read_bytes() == b'{"update": 1}\n{"update": 2}\n'
