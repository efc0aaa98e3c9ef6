"""What a study fixes beforehand, what it refuses later, and what it makes of finished runs."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

from rlvr_pl.analysis.run_records import RunRecords
from rlvr_pl.cli import main
from rlvr_pl.core.collapse import CollapseCriterion
from rlvr_pl.errors import UserError
from rlvr_pl.study import runner
from rlvr_pl.study.folder import StudyFolder, evaluation_command, run_settings
from rlvr_pl.study.plan import read_study
from rlvr_pl.study.resolve import Plan, make_plan

PLAN = Plan({}, {"supplied": {}, "mask": {}}, "b" * 64, 4, 32, 24, 40)
START = {"checkpoint_sha256": "a" * 64, "correct": 24, "n": 40}


def test_the_summary_has_what_scripts_ask_for(recorded):
    summary = recorded.summary()
    # updates 3 and 4 had 4 and 6 of 8 rollouts cut, on average 5/8 >= 0.5; updates 1 and 2 only 1/16
    assert summary["arms"]["supplied"]["1"] == {
        "collapsed": True,
        "first_update": 3,
        "final_correct": 8,
        "entropy": 2.0,
    }
    assert summary["arms"]["mask"]["2"] == {
        "collapsed": False,
        "first_update": None,
        "final_correct": 24,
        "entropy": 0.32,
    }
    assert list(summary["arms"]) == ["supplied", "mask"]
    assert (summary["start_correct"], summary["n"], summary["criterion"]["val_floor"]) == (24, 40, 18)
    assert [e["held"] for e in summary["expectations"]] == [True, True, True, True, False]
    assert summary["unfinished"] == []


def test_verdicts_are_made_again_from_the_records(recorded, capsys):
    for arm, seeds in recorded.summary()["arms"].items():
        for seed, found in seeds.items():
            folder = recorded.run(arm, int(seed))
            assert main(["rollout-stats", str(folder), "--json"]) == 0
            told = json.loads(capsys.readouterr().out)["verdict"]
            records = RunRecords(folder)
            rates = [sum(f.truncated for f in update) / len(update) for update in records.rollouts]
            judged = recorded.criterion.judge(rates, records.validation())
            assert told["collapsed"] == judged.collapsed == found["collapsed"]
            assert told["first_update"] == judged.first_update == found["first_update"]


def test_unfinished_runs_are_named_and_left_out(recorded):
    path = recorded.run("mask", 2) / "run.json"
    path.write_text(path.read_text().replace("finished", "stopped"))
    summary = StudyFolder(recorded.path).summary()
    assert summary["unfinished"] == [{"arm": "mask", "seed": 2}]
    assert "2" not in summary["arms"]["mask"]
    assert summary["expectations"][1]["held"] is None


@pytest.mark.parametrize("name", ["start_sha256", "order_sha256"])
def test_a_run_from_elsewhere_is_not_matched(recorded, name):
    path = recorded.run("mask", 1) / "run.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, name: "c" * 64}))
    with pytest.raises(UserError, match=f"not matched: its {name} is cccccccccccc"):
        StudyFolder(recorded.path).summary()


def test_a_run_under_another_rule_is_refused(recorded):
    other = CollapseCriterion(window=3)
    content = {"criterion": json.loads(other.canonical), "sha256": other.sha256}
    (recorded.run("mask", 1) / "criterion.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="ran under another rule"):
        StudyFolder(recorded.path).summary()


STOPPABLE = """
import json, os, signal, sys, time
run = sys.argv[sys.argv.index("--run") + 1]
os.makedirs(run)
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
def say(state):
    with open(run + "/run.json.new", "w") as f:
        json.dump({"state": state}, f)
    os.replace(run + "/run.json.new", run + "/run.json")
say("running")
while not asked:
    time.sleep(0.01)
say("stopped")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_study_that_was_stopped_ends_like_a_run_that_was(
    study_file, write_items, tmp_path, monkeypatch, capsys, number
):
    """With status 0, and a line that says how to go on."""
    write_items(tmp_path / "out" / "start.jsonl", [1] * 24 + [0] * 16)
    monkeypatch.setattr(StudyFolder, "evaluate_start", lambda *_: START)
    monkeypatch.setattr(runner, "ENTRY", STOPPABLE)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.02)

    def stop():
        while not list(tmp_path.glob("out/*/seed-1/run.json")):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    assert main(["study", str(study_file()), "--out", str(tmp_path / "out"), "--json"]) == 0
    thread.join()
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == "rlvr-pl: stopped with 0 of 4 runs done; the same command goes on"
    assert len(json.loads(captured.out)["unfinished"]) == 4


def test_what_was_fixed_stays_fixed_once_a_run_began(tmp_path, study_file, recorded):
    changed = read_study(study_file(**{"collapsed: true": "collapsed: false"}))
    with pytest.raises(UserError, match="expectations: changed since this study began"):
        recorded.freeze(changed, PLAN, START)
    rule = read_study(study_file(**{"criterion: {window: 2}": "criterion: {window: 4}"}))
    with pytest.raises(UserError, match="criterion, criterion_sha256: changed"):
        recorded.freeze(rule, PLAN, START)
    before = recorded.content
    recorded.freeze(read_study(study_file()), PLAN, START)
    fixed = ("sha256", "frozen", "frozen_at")
    assert [recorded.content[key] for key in fixed] == [before[key] for key in fixed]


def test_before_the_first_run_it_can_still_be_changed(tmp_path, study_file):
    folder = StudyFolder(tmp_path / "new")
    folder.freeze(read_study(study_file()), PLAN, START)
    assert folder.expectations[0].row["collapsed"] is True
    folder.freeze(read_study(study_file(**{"collapsed: true": "collapsed: false"})), PLAN, START)
    assert folder.expectations[0].row["collapsed"] is False


def test_a_study_that_was_changed_by_hand_is_noticed(recorded):
    path = recorded.path / "study.json"
    path.write_text(path.read_text().replace('"val_floor": 18', '"val_floor": 3'))
    with pytest.raises(UserError, match="does not have the hash"):
        StudyFolder(recorded.path).summary()


def test_a_run_has_the_seed_and_the_rule_which_lets_it_go_on(study_file):
    study = read_study(study_file(**{"config:\n": "config:\n  trainer: {callbacks: [{class_path: Mine}]}\n"}))
    rule = CollapseCriterion.from_start(149)
    settings = run_settings(study.settings(study.arms[0]), 7, rule)
    assert settings["seed"] == 7
    mine, stop = settings["trainer"]["callbacks"]
    assert mine == {"class_path": "Mine"}
    assert stop["init_args"]["action"] == "warn"
    assert CollapseCriterion(**stop["init_args"]["criterion"]) == rule


def test_commands_of_an_arm_are_filled_in(tmp_path, study_file):
    lines = (
        "commands: ['search --checkpoint {start} --seed {seed} --out {run}.s.jsonl', "
        "'distill {run}.s.jsonl --hint ''say {answer}'' --run {run}']"
    )
    study = read_study(study_file(**{"mask: {objective: {init_args: {mask_truncated: true}}}": f"mask: {{{lines}}}"}))
    folder = StudyFolder(tmp_path / "new")
    job = next(j for j in folder.jobs(study, PLAN, CollapseCriterion()) if j.arm == "mask" and j.seed == 2)
    run = str(tmp_path / "new" / "mask" / "seed-2")
    assert job.commands == [
        ["search", "--checkpoint", "embedded:start", "--seed", "2", "--out", f"{run}.s.jsonl"],
        ["distill", f"{run}.s.jsonl", "--hint", "say {answer}", "--run", run],
    ]
    assert not (tmp_path / "new" / "mask" / "seed-2.yaml").exists()
    assert (tmp_path / "new" / "supplied" / "seed-2.yaml").exists()


def test_the_start_is_evaluated_as_fit_validates(tmp_path, study_file):
    settings = {
        "model": {"eval_batch_size": 32, "eval_max_new_tokens": 77},
        "data": {"init_args": {"validation": "q.jsonl"}},
        "grader": {"class_path": "rlvr_pl.grading.ExactGrader"},
        "policy": {"untie_embeddings": True},
        "sampler": {"class_path": "rlvr_pl.sampling.vllm.VLLMSampler"},
    }
    words = evaluation_command(read_study(study_file()), settings, tmp_path / "o.jsonl")
    assert words[:4] == ["evaluate", "embedded:start", "--questions", "q.jsonl"]
    for pair in (["--batch-size", "32"], ["--grader", "exact"], ["--max-new-tokens", "77"], ["--sampler", "vllm"]):
        assert pair[1] == words[words.index(pair[0]) + 1]
    assert words[-1] == "--untie-embeddings"
    settings["grader"]["class_path"] = "my.Grader"
    with pytest.raises(UserError, match="grader Grader"):
        evaluation_command(read_study(study_file()), settings, tmp_path / "o.jsonl")


# ---- settings of the arms ------------------------------------------------------------------------------------------


def test_differences_are_listed_and_defaults_are_not(study_file):
    fork = "  fork: {objective: {class_path: ForkCredit, init_args: {center: true}}, model: {max_grad_norm: 0.1}}\n"
    plan = make_plan(read_study(study_file(**{"criterion: {": fork + "criterion: {"})))
    assert plan.differences["supplied"] == {}
    assert plan.differences["mask"] == {"objective.mask_truncated": [False, True]}
    assert plan.differences["fork"] == {
        "model.max_grad_norm": [1.0, 0.1],
        "objective": ["GRPO", "ForkCredit"],
        "objective.center": [None, True],
    }
    # 4 updates of 2 questions with 4 rollouts each
    assert (plan.updates, plan.rollouts, plan.cap, plan.panel) == (4, 32, 24, 64)


REFUSED = {
    "mask: {objective: {init_args: {mask_truncated: true}}}": {
        "mask: {model: {group_size: 8}}": "not matched: model.group_size is 4 and 8",
        "mask: {model: {max_new_tokens: 30}}": "not matched: model.max_new_tokens is 24 and 30",
        "mask: {policy: {untie_embeddings: true}}": "not matched: policy.untie_embeddings is False and True",
        "mask: {validation: {every_n_updates: 1}}": "not matched: validation.every_n_updates is 2 and 1",
        "mask: {objective: {init_args: {mask: true}}}": "arm mask: GRPO has no setting 'mask'",
    },
    "panel: embedded:drift": {"panel: null": "panel: a study needs held-out questions"},
    "criterion: {window: 2}": {"budget: {rollouts: 31}": "a run has 32 rollouts, over the budget of 31"},
}


@pytest.mark.parametrize(
    ("old", "new", "message"), [(old, new, m) for old, pairs in REFUSED.items() for new, m in pairs.items()]
)
def test_arms_that_do_not_fit_are_refused_before_anything_runs(tmp_path, study_file, capsys, old, new, message):
    path = study_file(**{old: new})
    assert main(["study", str(path), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1, told
    assert not (tmp_path / "out").exists()


def test_arms_of_different_engines_are_refused(tmp_path, study_file, capsys, monkeypatch):
    monkeypatch.setattr("rlvr_pl.sampling.vllm.installed", lambda: "0.32.0")
    path = study_file(**{"mask: {": "mask: {sampler: {class_path: VLLMSampler}, "})
    assert main(["study", str(path), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "arms supplied and mask sample with different engines, torch and vllm-0.32.0" in told
    assert told.count("\n") == 1 and not (tmp_path / "out").exists()


def test_arms_may_have_samplers_of_one_engine(study_file):
    path = study_file(**{"mask: {": "mask: {sampler: {init_args: {dtype: float32}}, "})
    assert make_plan(read_study(path)).differences["mask"]["sampler.dtype"] == ["auto", "float32"]


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path, study_file, capsys):
    assert main(["study", str(study_file()), "--out", str(tmp_path / "out"), "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [(r["arm"], r["seed"], r["state"]) for r in plan["runs"]] == [
        ("supplied", 1, "waiting"),
        ("mask", 1, "waiting"),
        ("supplied", 2, "waiting"),
        ("mask", 2, "waiting"),
    ]
    # 4 runs of 4 updates of 8 rollouts of at most 24 tokens
    assert (plan["updates"], plan["rollouts"], plan["max_sampled_tokens"]) == (16, 128, 3072)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_study_from_its_file_to_its_report(tmp_path, study_file, capsys):
    """Real runs in processes of their own; an interrupted one goes on, finished ones are left alone."""
    path = study_file(**{"seeds: [1, 2]": "seeds: [1]"})
    out = tmp_path / "out"
    words = ["study", str(path), "--out", str(out), "--jobs", "2", "--json"]
    assert main(words) == 0
    first = json.loads(capsys.readouterr().out)
    assert first == {**json.loads((out / "summary.json").read_text()), "failed": [], "report": str(out / "report.html")}
    for arm in ("supplied", "mask"):
        folder = out / arm / "seed-1"
        verdict = json.loads((folder / "verdict.json").read_text())
        found = first["arms"][arm]["1"]
        assert verdict["sha256"] == first["criterion"]["sha256"]
        assert verdict["collapsed"] == found["collapsed"]
        start, own = (out / "start.jsonl").read_text(), (folder / "items" / "val-000000.jsonl").read_text()
        assert start.splitlines()[1:] == own.splitlines()[1:]
    weights = out / "mask" / "seed-1" / "snapshots" / "final" / "model.safetensors"
    whole, when = weights.read_bytes(), (out / "supplied" / "seed-1" / "run.json").stat().st_mtime_ns
    state = out / "mask" / "seed-1" / "run.json"
    state.write_text(state.read_text().replace('"finished"', '"running"'))  # as a kill leaves it
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert weights.read_bytes() == whole
    assert (out / "supplied" / "seed-1" / "run.json").stat().st_mtime_ns == when
