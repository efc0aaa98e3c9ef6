"""Full disks, lost folders, signals, numbers that stop being finite: one line, and nothing that the next start would
stumble over."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from rlvr_pl.callbacks.checkpoint import CheckpointFile
from rlvr_pl.cli import main
from rlvr_pl.policy import load_policy
from rlvr_pl.study.folder import StudyFolder

FAULTS = {
    "rollouts": "/rollouts/",
    "a table": "metrics.csv",
    "the ledger": "cost.json",
    "a checkpoint": "update-000004.ckpt",
    "a hash": "update-000004.json",
    "the final policy": ".final.partial",
}


def last_line(text: str) -> str:
    """The message that ended a command. There must be no traceback before it."""
    assert "Traceback" not in text
    return text.splitlines()[-1]


# ---- the disk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", FAULTS)
def test_a_full_disk_is_one_line_and_the_run_goes_on_later(
    fit, outcome, undisturbed, tmp_path, monkeypatch, capsys, where
):
    """The disk is full when the data reach it, which is where file systems say so."""
    real = os.fsync

    def full(handle: int) -> None:
        if FAULTS[where] in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    assert fit("--run=r") == 1
    message = last_line(capsys.readouterr().err)
    assert "No space left on device" in message and "--resume r" in message
    monkeypatch.setattr(os, "fsync", real)
    assert fit("--run=r") == 0
    assert outcome(tmp_path / "r") == outcome(undisturbed)
    assert not list((tmp_path / "r").rglob("*.partial"))


@contextlib.contextmanager
def file_size_limit(size: int):
    """No file may grow beyond `size` bytes: writes fail with EFBIG, as Python ignores the signal."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_size_limit(fit, outcome, undisturbed, tmp_path, capsys):
    with file_size_limit(200_000):  # a checkpoint has megabytes, a record kilobytes
        assert fit("--run=r") == 1
    message = last_line(capsys.readouterr().err)
    assert "update-000002.ckpt" in message and "File too large" in message and "after update 2" in message
    assert list((tmp_path / "r" / "checkpoints").iterdir()) == []  # the room is given back
    assert fit("--run=r") == 0
    assert outcome(tmp_path / "r") == outcome(undisturbed)


def test_a_checkpoint_or_policy_that_does_not_fit_names_its_file(tmp_path):
    policy = load_policy("embedded:start")
    with file_size_limit(100_000):
        with pytest.raises(OSError, match=r"x\.ckpt") as caught:
            CheckpointFile().save_checkpoint({"weights": torch.zeros(100_000)}, tmp_path / "x.ckpt")
        assert caught.value.errno == errno.EFBIG
        with pytest.raises(OSError, match=r"File too large: .*policy'$"):
            policy.save(tmp_path / "policy")
    assert not (tmp_path / "policy").exists() and not list(tmp_path.glob(".*"))


def test_a_checkpoint_is_what_lightning_would_have_written(tmp_path):
    content = {"state_dict": {"w": torch.arange(5)}, "epoch": 1, "callbacks": {"a": [1, None]}}
    CheckpointFile().save_checkpoint(content, tmp_path / "x.ckpt")
    loaded = CheckpointFile().load_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    assert torch.equal(loaded["state_dict"].pop("w"), torch.arange(5))
    assert loaded == {"state_dict": {}, "epoch": 1, "callbacks": {"a": [1, None]}}


def test_a_folder_that_cannot_be_made_is_a_mistake_of_the_user(fit, tmp_path, capsys):
    (tmp_path / "file").touch()
    for run, words in {"file/r": "cannot write there (Not a directory)", "file": "a file; name a folder"}.items():
        assert fit(f"--run={run}") == 2
        assert words in last_line(capsys.readouterr().err)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


COMMANDS = {
    "plot": ["plot", "r", "--out=OUT.png"],
    "learning-curve": ["learning-curve", "r", "--png=OUT.png"],
    "report": ["report", "r", "--out=OUT.html"],
    "export": ["export", "r", "--out=OUT"],
    "export with another dtype": ["export", "r", "--out=OUT", "--dtype=float32"],
    "export-rollouts": ["export-rollouts", "r", "--out=OUT.jsonl"],
    "rollout-stats": ["rollout-stats", "r", "--out=OUT.csv"],
    "evaluate": ["evaluate", "embedded:start", "--limit=2", "--max-new-tokens=2", "--out=OUT.jsonl"],
    "search": ["search", "--checkpoint=embedded:start", "--n-questions=1", "--k=1", "--out=OUT.jsonl"],
    "schema": ["schema", "--out=OUT.json"],
    "splits": ["splits", "pool.jsonl", "--per-subject=1", "--panel-per-subject=1", "--out=OUT"],
    "study": ["study", "stabilization", "--out=OUT"],
    "quickstart": ["quickstart", "--run=OUT"],
}
"""Commands that write, each with its words; OUT is where."""


@pytest.fixture
def written(undisturbed, tmp_path, monkeypatch):
    """``written(name, place)``: the words of a command that writes below `place`, the run `r` to write of beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r").symlink_to(undisturbed)
    rows = ({"uid": str(i), "problem": f"{i}+1?", "answer": "1", "subject": "s", "level": 1} for i in range(4))
    (tmp_path / "pool.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lambda name, place: [word.replace("OUT", f"{place}/out") for word in COMMANDS[name]]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_cannot_write_where_it_is_told_says_where_and_what_to_do(written, tmp_path, capsys, name):
    """Below a file, which not even root can write into."""
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    assert main(written(name, "file")) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "file" in captured.err and captured.err.startswith("rlvr-pl: ")
    assert any(remedy in captured.err for remedy in ("choose another", "name another", "a folder that exists"))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("quickstart", "study")])
def test_a_folder_that_takes_no_files_is_told_before_the_work(written, tmp_path, monkeypatch, capsys, name):
    """As the kernel says it of a read-only disk, and of a folder without write permission to all but root."""
    (tmp_path / "shut").mkdir()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "shut" and real(path, mode))
    assert main(written(name, "shut")) == 2
    told = last_line(capsys.readouterr().err)
    assert "shut/out" in told and f"cannot write into {tmp_path}/shut; make it writable or choose another" in told


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("quickstart", "schema")])
def test_a_disk_that_is_full_for_a_command_is_one_line_that_names_the_file(
    written, tmp_path, monkeypatch, capsys, name
):
    (tmp_path / "full").mkdir()
    real = os.fsync

    def full(handle: int) -> None:
        if "/full/" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(StudyFolder, "evaluate_start", lambda *_: {"checkpoint_sha256": "0", "correct": 1, "n": 2})
    assert main(written(name, "full")) == 2
    told = last_line(capsys.readouterr().err)
    assert told.startswith("rlvr-pl: ") and "full/out" in told
    assert "No space left on device; mend that or name another place, and give the command again" in told
    left = {path.name for path in tmp_path.rglob("full/**/*")}
    assert left <= {"out", ".lock"}


def test_a_search_that_fills_the_disk_says_how_far_it_came_and_goes_on_later(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["search", "--checkpoint=embedded:start", "--n-questions=3", "--k=1", "--max-new-tokens=64"]
    assert main([*words, "--out=whole.jsonl"]) == 0
    whole = (tmp_path / "whole.jsonl").read_bytes()
    with file_size_limit(whole.index(b"\n", whole.index(b"\n") + 1) + 10):  # the header, a question, ten bytes
        assert main([*words, "--out=s.jsonl"]) == 1
    told = last_line(capsys.readouterr().err)
    assert told == (
        "rlvr-pl: s.jsonl: File too large; 1 of 3 questions are recorded; once this is mended, the same command goes on"
    )
    assert main([*words, "--out=s.jsonl"]) == 0
    assert (tmp_path / "s.jsonl").read_bytes() == whole


def test_a_folder_that_becomes_read_only(fit, tmp_path, monkeypatch, capsys):
    real = os.replace

    def read_only(source, target):
        if Path(target).name == "cost.json":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", read_only)
    assert fit("--run=r") == 1
    message = last_line(capsys.readouterr().err)
    assert message.startswith("rlvr-pl: r/cost.json: Read-only file system; the run ended after update 1;")


# ---- what an earlier process left ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("run.json", b'{"state": "runn', "run.json:1: not JSON"),
        ("run.json", b"[]", "run.json: not a JSON object"),
        ("run.json", b"", "run.json: the file is empty"),
        ("config.yaml", b"\xff\xfe", "holds another run"),
        ("config.yaml", b"", "holds another run"),
        ("thesis.txt", b"mine", "holds files that are no run's"),
    ],
)
def test_a_folder_with_damaged_files_is_left_alone(fit, tmp_path, capsys, name, content, words):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / name).write_bytes(content)
    assert fit("--run=r") == 2
    assert words in last_line(capsys.readouterr().err)
    assert [(p.name, p.read_bytes()) for p in (tmp_path / "r").iterdir()] == [(name, content)]


def test_a_run_that_died_before_it_wrote_its_config_begins_again(fit, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / ".lock").touch()
    (tmp_path / "r" / ".config.yaml.x.partial").write_text("seed: ")
    assert fit("--run=r", "--data.updates=1") == 0
    assert {p.name for p in (tmp_path / "r").glob(".*")} == {".lock"}


def test_a_run_that_died_after_its_last_checkpoint_only_ends(fit, outcome, tmp_path):
    words = ["--run=r", "--data.updates=2", "--trainer.callbacks+=DamageStop", "--trainer.callbacks+=DriftMonitor"]
    assert fit(*words) == 0
    run = tmp_path / "r"
    before, verdict = outcome(run), (run / "verdict.json").read_text()
    state = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**state, "state": "running"}))
    (run / "snapshots" / "final" / "model.safetensors").unlink()
    assert fit(*words) == 0
    assert outcome(run) == before and (run / "verdict.json").read_text() == verdict
    assert json.loads((run / "run.json").read_text())["state"] == "finished"


def test_two_processes_do_not_write_one_run(fit, tmp_path, capsys):
    assert fit("--run=r", "--data.updates=1") == 0
    state = json.loads((tmp_path / "r" / "run.json").read_text())
    (tmp_path / "r" / "run.json").write_text(json.dumps({**state, "state": "running"}))
    code = "import sys; from rlvr_pl.records import RunFolder; f = RunFolder('r'); f.lock(); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, **pipes) as other:
        assert other.stdout is not None and other.stdin is not None
        other.stdout.readline()
        capsys.readouterr()
        for words in (["--run=r", "--data.updates=1"], ["--run=r", "--data.updates=2", "--overwrite"]):
            assert fit(*words) == 2
            assert "another process is writing this run" in last_line(capsys.readouterr().err)
        other.stdin.close()
    assert fit("--run=r", "--data.updates=1") == 0


# ---- signals -------------------------------------------------------------------------------------------------------

INTERRUPT = """
    import os, signal, sys
    from lightning.pytorch import Callback

    class Interrupt(Callback):
        "Ctrl-C in the middle of update 3, as often as `times` says; once only, however often the run is begun."

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if module.updates_done == 2 and not os.path.exists("done"):
                open("done", "w").close()
                for _ in range(int(open("times").read())):
                    os.kill(os.getpid(), signal.SIGINT)
"""


def test_ctrl_c_ends_after_the_update_with_status_0(fit, outcome, undisturbed, tmp_path, capsys):
    (tmp_path / "interrupt.py").write_text(textwrap.dedent(INTERRUPT))
    (tmp_path / "times").write_text("1")
    words = ["--trainer.callbacks+=interrupt.Interrupt"]
    assert fit("--run=r", *words) == 0
    told = capsys.readouterr().err
    assert "rlvr-pl: stopped after update 3 for SIGINT; go on with --resume" in told
    assert last_line(told).startswith("rlvr-pl: stopped after 3 of 4 updates")
    assert json.loads((tmp_path / "r" / "run.json").read_text())["state"] == "stopped"
    assert fit("--run=r", *words) == 0
    assert outcome(tmp_path / "r") == outcome(undisturbed)


def test_ctrl_c_twice_ends_at_once(fit, small, outcome, undisturbed, tmp_path):
    (tmp_path / "interrupt.py").write_text(textwrap.dedent(INTERRUPT))
    (tmp_path / "times").write_text("2")
    words = ["--run=r", "--trainer.callbacks+=interrupt.Interrupt"]
    code = "import sys; from rlvr_pl.cli import entry; entry()"
    done = subprocess.run([sys.executable, "-c", code, "fit", *small, *words], stderr=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGINT
    assert "rlvr-pl: SIGINT: ends after this update; once more ends it at once" in done.stderr
    assert last_line(done.stderr) == "rlvr-pl: ended at once; --resume goes on from the last checkpoint"
    assert fit(*words) == 0
    assert outcome(tmp_path / "r") == outcome(undisturbed)


# ---- a checkpoint of another run -------------------------------------------------------------------------------------


ENDS_EARLY = """
from lightning.pytorch import Callback

class EndsEarly(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        trainer.should_stop = module.updates_done == 1
"""


def cut_short(content: dict[str, Any], kind: str) -> None:
    """Take a row from one tensor of a checkpoint."""
    place: Any = content["state_dict"]
    if kind == "master":
        place = content["BF16Precision"]["masters"]
    elif kind == "optimizer":
        place = next(iter(content["optimizer_states"][0]["state"].values()))
    pairs = enumerate(place) if kind == "master" else list(place.items())
    key = next(key for key, value in pairs if value.ndim == 2)
    place[key] = place[key][:-1].clone()


@pytest.mark.parametrize("kind", ["weight", "master", "optimizer"])
def test_a_checkpoint_whose_tensors_have_another_shape_is_one_line(tmp_path, monkeypatch, capsys, kind):
    """Its hash is right: somebody put it there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "ends_early.py").write_text(ENDS_EARLY)
    words = ["fit", "--policy.name=embedded:start", "--data.updates=2", "--data.validation=null", "--run=run"]
    words += ["--model.group_size=2", "--checkpoint.every_n_updates=1", "--precision.master_weights=true"]
    words += ["--model.uniform_update=step", "--trainer.callbacks+=ends_early.EndsEarly"]
    assert main(words) == 0
    capsys.readouterr()
    path = tmp_path / "run" / "checkpoints" / "update-000001.ckpt"
    content = torch.load(path, weights_only=True)
    cut_short(content, kind)
    torch.save(content, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_suffix(".json").write_text(json.dumps({"update": 1, "sha256": digest}))
    assert main(["fit", "--resume=run"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "continuing" not in line]
    assert line.startswith("rlvr-pl: run/checkpoints/update-000001.ckpt: ") and len(line) < 500
    assert "this run" in line
