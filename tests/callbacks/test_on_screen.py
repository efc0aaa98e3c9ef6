"""What a person sees: the progress line and the table of completions."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from rlvr_pl.callbacks.completion_table import CompletionTable
from rlvr_pl.callbacks.drift_monitor import DriftMonitor
from rlvr_pl.callbacks.progress import RunProgress
from rlvr_pl.types import Completion, Grade, GradeStatus, Question, Rollout, StopReason, build_batch


def test_a_log_file_gets_a_line_every_few_updates(run, capsys, scripted):
    run(DriftMonitor(n=4, every_n_updates=4), RunProgress(every_n_updates=5), sampler=scripted(lambda u: 0.5))
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("update ")]
    assert [line.split()[1] for line in lines] == ["1/12", "5/12", "10/12", "12/12"]
    assert "reward 0.500  truncated 50%  entropy x1.00" in lines[0]
    assert "tokens/s" in lines[-1] and lines[-1].endswith("0:00:00 left")
    assert out == ""  # stdout belongs to results


def test_a_terminal_gets_a_live_line(run):
    progress = RunProgress()
    screen = io.StringIO()
    progress._console = Console(file=screen, force_terminal=True, width=120)
    run(progress, updates=3)
    assert "3/3" in screen.getvalue() and "reward 0.500" in screen.getvalue()


def test_a_disabled_line_says_nothing(run, capsys):
    progress = RunProgress()
    progress.disable()
    run(progress, updates=2)
    assert "update 1/2" not in capsys.readouterr().err


def test_table_shows_both_ends_of_a_group(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run(CompletionTable(every_n_updates=2, rollouts=2), updates=3)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("answer / gold") == 2  # updates 1 and 2
    first = err[err.index("update 1") : err.index("update 2")]
    assert "How many tickets" in first
    assert "1 / " in first and "2 / " in first  # a right and a wrong answer
    assert "+" in first and "eos, " in first


def test_markup_in_a_completion_is_text():
    """Square brackets are LaTeX here, and must not be read as Rich's own tags."""
    grade = Grade(GradeStatus.WRONG, float("nan"), "[b]")
    rollout = Rollout("q", 0, (1,), Completion((2, 3), StopReason.EOS), "[/red] \\[x\\]", grade)
    report: Any = SimpleNamespace(
        number=1,
        questions=[Question("q", "[bold]?", "1")],
        rollouts=[rollout],
        batch=build_batch([rollout], 1),
        weights=torch.zeros(1, 2),
        diagnoses=None,
    )
    trainer: Any = SimpleNamespace(callbacks=[])
    module: Any = None
    screen = io.StringIO()
    Console(file=screen, width=160).print(CompletionTable().table(trainer, module, report))
    assert "[/red] \\[x\\]" in screen.getvalue() and "[bold]?" in screen.getvalue() and "nan" in screen.getvalue()


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="every_n_updates"):
        RunProgress(0)
    with pytest.raises(ValueError, match="every_n_updates"):
        CompletionTable(rollouts=0)
