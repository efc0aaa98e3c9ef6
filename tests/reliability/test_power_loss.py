"""What a power loss leaves of a checkpoint: set aside with a message, and the previous one is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlvr_pl.callbacks.checkpoint import latest_checkpoint
from rlvr_pl.records import sha256_file

CONTENT = bytes(range(256)) * 4


def checkpoint(folder: Path, update: int) -> Path:
    """A checkpoint as `RunCheckpoint` leaves it, whatever its content."""
    path = folder / f"update-{update:06d}.ckpt"
    path.write_bytes(CONTENT + bytes([update]))
    path.with_suffix(".json").write_text(json.dumps({"update": update, "sha256": sha256_file(path)}))
    return path


def cut(share: float):
    def harm(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])

    return harm


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)


def sidecar(content: bytes | None):
    def harm(path: Path) -> None:
        if content is None:
            path.with_suffix(".json").unlink()
        else:
            path.with_suffix(".json").write_bytes(content)

    return harm


HARMS = {
    "cut at 0%": cut(0),
    "cut at 50%": cut(0.5),
    "cut at 99%": cut(0.99),
    "one bit": flip,
    "no hash": sidecar(None),
    "empty hash file": sidecar(b""),
    "torn hash file": sidecar(b'{"update": 4, "sha'),
    "zeros for a hash": sidecar(b"\0" * 40),
    "no hash in it": sidecar(b'{"update": 4}'),
    "no object": sidecar(b"[4]"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_checkpoint_partial(tmp_path, capsys, harm):
    good, newest = checkpoint(tmp_path, 2), checkpoint(tmp_path, 4)
    HARMS[harm](newest)
    assert latest_checkpoint(tmp_path) == good
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and str(newest) in message and "set aside as update-000004.damaged" in message
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "update-000002.ckpt",
        "update-000002.json",
        "update-000004.damaged",
    ]
    assert latest_checkpoint(tmp_path) == good
    assert capsys.readouterr().err == ""


def test_a_partial_file_is_no_checkpoint(tmp_path, capsys):
    (tmp_path / ".update-000006.ckpt.partial").write_bytes(CONTENT)
    assert latest_checkpoint(tmp_path) is None
    good = checkpoint(tmp_path, 2)
    assert latest_checkpoint(tmp_path) == good
    assert capsys.readouterr().err == ""


def test_when_all_are_damaged_the_run_begins_again(tmp_path, capsys):
    for update in (2, 4):
        cut(0.5)(checkpoint(tmp_path, update))
    assert latest_checkpoint(tmp_path) is None
    assert capsys.readouterr().err.count("set aside") == 2


def test_a_folder_that_is_not_there_holds_none(tmp_path):
    assert latest_checkpoint(tmp_path / "none") is None
