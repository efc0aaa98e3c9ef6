"""Reward functions inside `fit`: several with weights, and what a failing one leaves behind."""

from __future__ import annotations

import csv
import json
import textwrap

import pytest

from rlvr_pl.cli import main

WORDS = [
    "fit",
    "--policy.name=embedded:base",
    "--data.updates=1",
    "--data.validation=null",
    "--model.group_size=4",
    "--model.max_new_tokens=12",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run_rewards.py").write_text(
        textwrap.dedent("""
        def fails(completions, **kwargs):
            numbers = {}
            return [numbers["none"] for _ in completions]

        async def length(completion_ids, **kwargs):
            return [float(len(ids)) for ids in completion_ids]

        def unscored(completions, **kwargs):
            return [None for _ in completions]

        def one(completions):
            return [1.0 for _ in completions]
        """)
    )
    return tmp_path


def test_several_rewards_with_weights_and_the_ready_made_ones(folder):
    (folder / "rewards.yaml").write_text(
        textwrap.dedent("""
        grader:
          class_path: WeightedSum
          init_args:
            graders:
              - {class_path: FunctionGrader, init_args: {path: "run_rewards.py:length"}}
              - {class_path: FunctionGrader, init_args: {path: "run_rewards:unscored"}}
              - {class_path: FunctionGrader, init_args: {path: run_rewards.one}}
              - {class_path: SoftOverlong, init_args: {cap: 12, buffer: 4}}
              - {class_path: FormatReward}
            weights: [0.25, 7.0, 2.0, 1.0, 0.5]
        """)
    )
    assert main([*WORDS, "--config=rewards.yaml", "--run=r"]) == 0
    rows = [json.loads(line) for line in (folder / "r" / "rollouts" / "000001-000100.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    for row in rows:
        # 8 tokens are free, then a quarter for each; nothing is boxed unless the row says so
        overlong = -max(0, row["length"] - 8) / 4
        assert row["parts"][:3] == [[0.25, row["length"]], [7.0, None], [2.0, 1.0]]
        assert row["reward"] == 0.25 * row["length"] + 2 + overlong + 0.5 * (row["boxed"] and bool(row["answer"]))
    (figures,) = csv.DictReader((folder / "r" / "metrics.csv").open())
    assert float(figures["reward"]) == pytest.approx(sum(r["reward"] for r in rows) / 4)


def test_a_failing_grader_class_is_one_line_too(folder, capsys):
    (folder / "run_grader.py").write_text(
        textwrap.dedent("""
        from rlvr_pl.grading import Grader

        class Broken(Grader):
            def grade(self, requests, *, require_box):
                return [request.nothing for request in requests]
        """)
    )
    (folder / "sum.yaml").write_text(
        "grader: {class_path: WeightedSum, init_args: {graders: [{class_path: run_grader.Broken}]}}"
    )
    for number, words in enumerate((["--grader=run_grader.Broken"], ["--config=sum.yaml"])):
        assert main([*WORDS, *words, f"--run=r{number}"]) == 2
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last.startswith("rlvr-pl: Broken (") and "run_grader.py:6, in " in last
        assert json.loads((folder / f"r{number}" / "run.json").read_text())["state"] == "stopped"


def test_a_failing_reward_is_one_line_and_the_run_is_stopped(folder, capsys):
    assert main([*WORDS, "--grader=FunctionGrader", "--grader.path=run_rewards.py:fails", "--run=r"]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("rlvr-pl: reward function run_rewards.py:fails: raised KeyError: 'none' (")
    assert last.endswith("run_rewards.py:4)")
    assert json.loads((folder / "r" / "run.json").read_text())["state"] == "stopped"


@pytest.mark.parametrize(("reward", "ungraded"), [("unscored", True), ("one", False)])
def test_a_run_without_a_single_reward_does_not_end_as_a_plain_success(folder, capsys, reward, ungraded):
    words = ["--grader=FunctionGrader", f"--grader.path=run_rewards.py:{reward}", "--run=r"]
    assert main([*WORDS, *words]) == 0
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("rlvr-pl: finished after 1 of 1 updates")
    assert ("no rollout of it was graded (every reward is null)" in last) == ungraded
