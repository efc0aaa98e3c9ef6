"""Mistakes in one line: which setting or class, what is wrong, what would be right."""

from __future__ import annotations

import pytest

from rlvr_pl.cli import main
from rlvr_pl.mistakes import worded

BASE = ["fit", "--policy.name=embedded:start", "--data.updates=1", "--model.group_size=2", "--data.validation=null"]


def test_errors_are_worded():
    message = "Parser key \"model.group_size\":\n  Expected a <class 'int'>. Got value: x"
    assert worded(message, {}) == "--model.group_size: expected an int. Got value: x"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--trainer.callbacks+=Nope"], ["--trainer.callbacks Nope: no callback of that name", "DamageStop,"]),
        (
            ["--trainer.callbacks+=DamageStop", "--trainer.callbacks.windw=3"],
            ["DamageStop has no setting 'windw'; it takes criterion, action"],
        ),
        (
            ["--trainer.callbacks+=DamageStop", "--trainer.callbacks.criterion.windw=3"],
            ["DamageStop has no setting 'criterion.windw'"],
        ),
        (
            ["--trainer.callbacks+=DamageStop", "--trainer.callbacks.criterion.window=-3"],
            ["window=-3: must be a whole number of updates, at least 1"],
        ),
        (["--objective=GRPO", "--objective.nope=3"], ["GRPO has no setting 'nope'; it takes ", "mask_truncated"]),
        (["--objective=Nope"], ["--objective Nope: no objective of that name", "ForkCredit"]),
        (["--objective.aggregation=x"], ["--objective.aggregation: GRPO: expected one of ['token-sum'"]),
        (["--optimizer.lr=nan"], ["--optimizer.lr: AdamW: Expected a float"]),
        (["--model.max_grad_norm=-1"], ["model.max_grad_norm is -1.0: it must be above 0"]),
        (["--model.max_new_tokens=0"], ["model.max_new_tokens is 0: it must be at least 1"]),
        (["--seed=-1"], ["--seed -1: must be at least 0"]),
        (["--trainer.fast_dev_run=true"], ["trainer.fast_dev_run: the length of a run is data.updates"]),
        (["--data.updates=x"], ["--data.updates: QuestionData: expected an int. Got value: x"]),
    ],
)
def test_a_wrong_setting_is_one_short_line(tmp_path, capsys, words, told):
    run = tmp_path / "run"
    assert main([*BASE, f"--run={run}", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(text in line for text in told)
    assert "Union" not in line and "class_path" not in line
    assert not run.exists()


OBJECTIVE = """
from rlvr_pl.objectives import GRPO

class Broken(GRPO):
    def token_weights(self, batch):
        if batch.update > {good}:
            return batch.no_such_field
        return super().token_weights(batch)
"""


def test_an_error_in_the_users_objective_names_its_line_before_anything_is_sampled(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_at_once.py").write_text(OBJECTIVE.format(good=0))
    run = tmp_path / "run"
    assert main([*BASE, f"--run={run}", "--objective=broken_at_once.Broken"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"Broken ({tmp_path}/broken_at_once.py:7, in token_weights): AttributeError: " in line
    assert "no_such_field" in line
    assert not run.exists()


def test_an_error_in_a_later_update_leaves_a_stopped_run_that_goes_on_once_mended(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "broken_later.py"
    file.write_text(OBJECTIVE.format(good=1))
    run = tmp_path / "run"
    words = [*BASE, f"--run={run}", "--data.updates=3", "--checkpoint.every_n_updates=1"]
    assert main([*words, "--objective=broken_later.Broken"]) == 2
    assert "Broken (" in capsys.readouterr().err.splitlines()[-1]
    assert '"state": "stopped"' in (run / "run.json").read_text() and '"updates": 1' in (run / "run.json").read_text()

    import broken_later

    monkeypatch.setattr(broken_later.Broken, "token_weights", broken_later.GRPO.token_weights)
    assert main(["fit", "--resume", str(run)]) == 0
    assert "finished after 3 of 3 updates" in capsys.readouterr().err


def test_a_silent_run_shows_no_progress_and_says_how_it_ended(tmp_path, capsys):
    run = tmp_path / "run"
    assert main([*BASE, f"--run={run}", "--trainer.enable_progress_bar=false"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "LitLogger" not in line]
    assert lines[-1] == f"rlvr-pl: finished after 1 of 1 updates; policy in {run}/snapshots/final"
    assert not any(line.startswith("update ") for line in lines)


def test_a_run_folder_is_no_policy_but_has_some(tmp_path, capsys):
    run = tmp_path / "run"
    assert main([*BASE, f"--run={run}"]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(run), "--out", str(tmp_path / "items.jsonl")]) == 2
    assert f"a run folder; name one of its policies: {run}/snapshots/final" in capsys.readouterr().err
