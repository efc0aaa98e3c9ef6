"""An arm with runs keeps the settings that these were trained under; arms and seeds may be added, not dropped."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rlvr_pl.cli import main
from rlvr_pl.study.folder import StudyFolder, run_settings
from rlvr_pl.study.plan import read_study
from rlvr_pl.study.resolve import full_settings, make_plan

MASK = "mask: {objective: {init_args: {mask_truncated: true}}}"
MORE = """\
  found: {commands: ['search --checkpoint {start} --k 4 --out {run}.s.jsonl', 'distill --run {run}']}
  watched: {trainer: {callbacks: [{class_path: CompletionTable}]}}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory, write_recorded, write_run):
    """A study whose runs are all finished, with the settings that `fit` writes down; one arm is made of commands, and
    one has a callback of its own. A folder with `small.yaml` and `out`."""
    path = tmp_path_factory.mktemp("made")
    start = write_recorded(path).start_items
    file = path / "small.yaml"
    text = file.read_text().replace("seeds: [1, 2]", "seeds: [1]").replace("criterion: {", f"{MORE}criterion: {{")
    file.write_text(text)
    study = read_study(file)
    plan = make_plan(study)
    folder = StudyFolder(path / "out")
    folder.path.mkdir()
    shutil.copy(start, folder.start_items)
    outcomes = [json.loads(line)["correct"] for line in start.read_text().splitlines()[1:]]
    found = {"checkpoint_sha256": "a" * 64, "correct": sum(outcomes), "n": len(outcomes)}
    folder.freeze(study, plan, found)
    for arm in study.arms:
        run = write_run(folder.run(arm.name, 1), [1, 0, 1, 0], {0: outcomes, 4: outcomes}, [0.5] * 5)
        state = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**state, "order_sha256": plan.order_sha256}))
        if not arm.commands:
            own = replace(arm, overrides=run_settings(study.settings(arm), 1, folder.criterion))
            (run / "config.yaml").write_text(yaml.safe_dump(full_settings(study, own)))
    return path


@pytest.fixture
def done(made, tmp_path):
    """The study folder of a copy of that, beside its `small.yaml` in the working folder."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return StudyFolder(tmp_path / "out")


def written(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}


def edited(old: str, new: str) -> None:
    path = Path("small.yaml")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


OTHER = "has a run (seed-1) under other settings: "
CHANGES = [
    (
        "mask_truncated: true",
        "aggregation: sequence-mean",
        f"arm mask {OTHER}objective.aggregation was 'token-sum' and is now 'sequence-mean'; "
        "objective.mask_truncated was True and is now False;",
    ),
    ("max_new_tokens: 24", "max_new_tokens: 25", f"{OTHER}model.max_new_tokens was 24 and is now 25;"),
    (
        MASK,
        "mask: {objective: {class_path: ForkCredit}}",
        f"arm mask {OTHER}objective was 'GRPO' and is now 'ForkCredit';",
    ),
    (
        "[{class_path: CompletionTable}]",
        "[{class_path: CompletionTable, init_args: {rollouts: 5}}]",
        f"arm watched {OTHER}trainer.callbacks.1.rollouts was 4 and is now 5;",
    ),
    (
        "[{class_path: CompletionTable}]",
        "[]",
        f"arm watched {OTHER}trainer.callbacks.1 was 'CompletionTable' and is now unset;",
    ),
    (
        "--k 4",
        "--k 8",
        f"arm found {OTHER}commands.1 was 'search --checkpoint {{start}} --k 4 --out {{run}}.s.jsonl' and is now "
        "'search --checkpoint {start} --k 8 --out {run}.s.jsonl';",
    ),
    ("seeds: [1]", "seeds: [2]", "seed 1 of arm found has a run, and small.yaml no longer names it"),
    (MORE, "", "arm found has a run, and small.yaml no longer names it"),
    ("window: 2", "window: 4", "criterion, criterion_sha256: changed since this study began"),
]


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(("old", "new", "message"), CHANGES)
def test_what_contradicts_a_run_is_refused_in_a_line(done, capsys, old, new, message, more):
    edited(old, new)
    before = written(done.path)
    assert main(["study", "small.yaml", "--out", str(done.path), *more]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1, told
    assert "--out" in told and "--overwrite" in told
    assert written(done.path) == before


def test_the_same_study_goes_on_and_arms_and_seeds_may_be_added(done, capsys):
    edited("seeds: [1]", "seeds: [1, 2]")
    edited(MASK, f"{MASK}\n  third: {{objective: {{init_args: {{aggregation: sequence-mean}}}}}}")
    assert main(["study", "small.yaml", "--out", str(done.path), "--dry-run", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    finished = [(run["arm"], run["seed"]) for run in runs if run["state"] == "finished"]
    assert sorted(finished) == [("found", 1), ("mask", 1), ("supplied", 1), ("watched", 1)]
    assert len(runs) == 2 * 5


def test_a_study_that_wrote_no_settings_down_has_those_of_its_runs(done, capsys):
    path = done.path / "study.json"
    content = json.loads(path.read_text())
    for arm in content["arms"].values():
        del arm["settings"], arm["sha256"]
    path.write_text(json.dumps(content))
    assert main(["study", "small.yaml", "--out", str(done.path), "--dry-run"]) == 0
    edited("max_new_tokens: 24", "max_new_tokens: 25")
    assert main(["study", "small.yaml", "--out", str(done.path), "--dry-run"]) == 2
    assert "model.max_new_tokens was 24 and is now 25" in capsys.readouterr().err


def test_a_setting_that_an_earlier_version_did_not_know_counts_once_it_is_said(done, capsys):
    path = done.path / "study.json"
    content = json.loads(path.read_text())
    for name, arm in content["arms"].items():
        del arm["settings"], arm["sha256"]
        if not arm["commands"]:
            config = done.run(name, 1) / "config.yaml"
            settings = yaml.safe_load(config.read_text())
            del settings["model"]["uniform_update"]
            config.write_text(yaml.safe_dump(settings))
    path.write_text(json.dumps(content))
    assert main(["study", "small.yaml", "--out", str(done.path), "--dry-run"]) == 0
    edited("max_new_tokens: 24", "max_new_tokens: 24, uniform_update: skip")
    assert main(["study", "small.yaml", "--out", str(done.path), "--dry-run"]) == 2
    assert "model.uniform_update was unset and is now 'skip'" in capsys.readouterr().err


def test_a_report_refuses_a_run_under_other_settings(done, capsys):
    assert main(["report", str(done.path)]) == 0
    config = done.run("mask", 1) / "config.yaml"
    config.write_text(config.read_text().replace("mask_truncated: true", "mask_truncated: false"))
    capsys.readouterr()
    assert main(["report", str(done.path), "--overwrite"]) == 2
    assert "not matched: its objective.mask_truncated is False, the study's is True" in capsys.readouterr().err


def test_settings_changed_by_hand_are_noticed(done, capsys):
    path = done.path / "study.json"
    path.write_text(path.read_text().replace('"mask_truncated": true', '"mask_truncated": false'))
    assert main(["report", str(done.path)]) == 2
    assert "does not have the hash" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--overwrite"]])
def test_a_grader_that_cannot_judge_the_start_is_refused_before_anything_is_removed(done, capsys, more):
    edited("config:\n", "config:\n  grader: {class_path: FormatReward}\n")
    before = written(done.path)
    assert main(["study", "small.yaml", "--out", str(done.path), *more]) == 2
    told = capsys.readouterr().err
    assert "grader FormatReward: a study evaluates its start with one of MathGrader, ExactGrader" in told
    assert told.count("\n") == 1 and written(done.path) == before
