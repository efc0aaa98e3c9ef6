"""Clocks may go backwards and readers may go away."""

from __future__ import annotations

import subprocess
import sys

import pytest


class Backwards:
    """A clock of which every reading is an hour before the last."""

    def __init__(self) -> None:
        self.now = 2e9

    def time(self) -> float:
        self.now -= 3600
        return self.now

    monotonic = perf_counter = process_time = time

    def strftime(self, form: str) -> str:
        return f"19{self.time():.0f}"

    def sleep(self, seconds: float) -> None:
        pass


def test_no_result_depends_on_a_clock(fit, outcome, undisturbed, tmp_path, monkeypatch, capsys):
    clock = Backwards()
    import rlvr_pl.callbacks  # noqa: F401 (so that its modules are among those below)

    ours = [m for name, m in list(sys.modules.items()) if name.startswith("rlvr_pl.") and "time" in vars(m or object())]
    assert len(ours) >= 3
    for module in ours:
        if module.__name__ != "rlvr_pl.grading.pool":  # whose wall clock only stands behind the kernel's limit
            monkeypatch.setattr(module, "time", clock)
    assert fit("--run=r", "--time_limit.limit=1000") == 0
    assert outcome(tmp_path / "r") == outcome(undisturbed)
    assert "stopped" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [["power", "--grid"], ["power", "--pd", "0.2", "--n", "350", "--delta", "3e-2"]])
def test_a_reader_that_has_gone_ends_a_command_quietly(words):
    code = "import sys; from rlvr_pl.cli import entry; entry()"
    process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # as `| head` does when it has seen enough
    assert process.stderr.read() == b""
    assert process.wait() == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device", "x.jsonl"), "No space left"),
        (PermissionError(13, "Permission denied", "x.jsonl"), "Permission denied"),
    ],
)
def test_a_file_that_cannot_be_written_or_read_is_one_line_with_the_remedy(monkeypatch, capsys, error, words):
    from rlvr_pl import cli

    def fail(_):
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert cli.main(["power"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("rlvr-pl: ") and err.count("\n") == 1 and words in err
    assert "x.jsonl: " in err and "mend that or name another place" in err


def test_output_that_nobody_can_take_is_a_failure():
    code = "import sys; from rlvr_pl.cli import entry; entry()"
    words = [sys.executable, "-c", code, "power", "--pd", "0.2", "--n", "350", "--delta", "3e-2"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "rlvr-pl: No space left on device\n")
