"""The commands in process: results, one line for every mistake, nothing overwritten."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlvr_pl.cli import main
from rlvr_pl.expert_iteration.files import Found, write_solutions
from rlvr_pl.expert_iteration.filter import Solution
from rlvr_pl.policy_folder import EMBEDDED
from rlvr_pl.types import Question

START = ("--checkpoint", "embedded:start")
SEARCH = ("search", *START, "--n-questions", "24", "--k", "2", "--seed", "1", "--out", "s.jsonl")


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A folder with a search in it, and what the command said."""
    folder = tmp_path_factory.mktemp("searched")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main([*SEARCH]) == 0
    return folder


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def samples(searched, tmp_path):
    for path in searched.iterdir():
        shutil.copy(path, tmp_path)
    return "s.jsonl"


def records(name: str) -> list[dict]:
    return [json.loads(line) for line in Path(name).read_text(encoding="utf-8").splitlines()[1:]]


def told(capsys, *words: str) -> dict:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_second_identical_search_adds_nothing(tmp_path, samples, capsys):
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    found = told(capsys, *SEARCH)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    rows = [json.loads(line) for line in before["s.jsonl"].decode().splitlines()[1:]]
    assert (found["questions"], found["samples"], found["added"]) == (24, 48, 0)
    assert found["correct"] == sum(r["correct"] for r in rows)
    assert found["solved"] == len({r["uid"] for r in rows if r["correct"]})
    assert found["sampled_tokens"] == found["cost"]["sampled_tokens"] == sum(r["length"] for r in rows)
    for column in ("by_subject", "by_level"):
        assert sum(group["questions"] for group in found[column]) == 24
        assert sum(group["solved"] for group in found[column]) == found["solved"]


def test_search_asks_what_fit_would_ask(samples):
    from rlvr_pl.data.module import QuestionData

    schedule = QuestionData(validation=None, questions_per_update=4).schedule
    asked = [q.uid for update in range(1, 7) for q in schedule.batch(update)]
    uids = [row["uid"] for row in records(samples)]
    assert uids[::2] == asked


def test_shards_follow_on_one_another(tmp_path, samples, capsys):
    shard = ("search", *START, "--k", "2", "--seed", "1", "--start", "20", "--n-questions", "4")
    told(capsys, *shard, "--out", "b.jsonl")
    assert records("b.jsonl") == records(samples)[-8:]


def test_an_order_file_and_columns(tmp_path, capsys):
    rows = [{"q": f"How many tickets from 0{i}:15 forward to 05:45 by 45min?", "a": str(i)} for i in range(1, 5)]
    (tmp_path / "pool.json").write_text(json.dumps([*rows, {"q": "How?", "a": ""}]))
    (tmp_path / "order.json").write_text('["pool/3", "pool/1"]')
    words = ("--questions", "pool.json", "--columns", "problem=q", "answer=a", "--order", "order.json", "--k", "1")
    assert main(["search", *START, *words, "--out", "s.jsonl"]) == 2
    assert "empty gold answers: 'pool/4'" in capsys.readouterr().err
    told(capsys, "search", *START, *words, "--drop-empty-gold", "--out", "s.jsonl")
    rows = records("s.jsonl")
    assert [(r["uid"], r["gold"], r["subject"]) for r in rows] == [("pool/3", "4", None), ("pool/1", "2", None)]


def test_rationalize_reports_its_funnel(samples, capsys):
    words = ("rationalize", samples, *START, "--seed", "1", "--out", "r.jsonl")
    first, second = told(capsys, *words), told(capsys, *words)
    assert second["added"] == 0 and first["added"] > 0
    assert {k: v for k, v in first.items() if k not in ("added", "cost")} == {
        k: v for k, v in second.items() if k not in ("added", "cost")
    }
    assert first["questions"] == 24 - told(capsys, *SEARCH)["solved"]
    assert sum(first["rationales"].values()) == 4 * first["questions"]
    assert main(["rationalize", samples, *START, "--seed", "2", "--out", "r.jsonl"]) == 2
    assert "seed was 1, now 2" in capsys.readouterr().err
    assert main(["rationalize", samples, "--checkpoint", "embedded:base", "--out", "b.jsonl", "--rationales", "1"]) == 0
    assert "the samples are of another policy (embedded:start)" in capsys.readouterr().err


def test_a_hint_and_phrases_of_ones_own(tmp_path, samples, capsys):
    (tmp_path / "phrases.txt").write_text("railway tariff\n")  # in the closing phrase of every solution
    words = ("--hint", "{answer} {problem}", "--leak-phrases", "phrases.txt", "--continuations", "1")
    found = told(capsys, "rationalize", samples, *START, *words, "--seed", "1", "--out", "r.jsonl")
    assert found["rationales"]["leak"] > 0
    assert found["rationales"]["answer_in_prefix"] == found["rationales"]["bridged"] == found["solutions"] == 0
    assert json.loads(Path("r.jsonl").read_text(encoding="utf-8").splitlines()[0])["hint"] == "{answer} {problem}"


def test_distill_learns_and_says_what(tmp_path, samples, capsys):
    words = ("--set", "data.validation=embedded:drift", "data.epochs=1", "model.eval_max_new_tokens=40")
    found = told(capsys, "distill", samples, "--run", "d", *words)
    rows = [json.loads(line) for line in (tmp_path / "d" / "solutions.jsonl").read_text(encoding="utf-8").splitlines()]
    header, solutions = rows[0], rows[1:]
    assert header["record"] == "solutions" and header["samples"] == found["samples"]
    assert found["solutions"] == found["samples"]["solution"] == len(solutions)
    assert sum(found["samples"].values()) == 48
    assert found["updates"] == -(-len(solutions) // 16)
    assert found["trained_tokens"] == sum(row["length"] for row in solutions)
    assert found["cost"]["sampled_tokens"] == found["cost"]["graded"] == 0
    assert found["cost"]["optimizer_steps"] == found["updates"]
    panel = found["held_out"]
    assert panel["n"] == 64 and panel["after"] - panel["before"] == panel["gained"] - panel["lost"]
    assert panel["ci_low"] <= panel["delta_pp"] <= panel["ci_high"]
    # the monitors of every run saw it
    assert {"windows.csv", "updates.csv", "rollouts", "metrics.csv"} <= {p.name for p in (tmp_path / "d").iterdir()}
    learned = told(capsys, "export-rollouts", "d", "--out", "e.jsonl")
    assert (learned["rollouts"], learned["tokens"]) == (len(solutions), found["trained_tokens"])
    assert list(records("e.jsonl")[0]) == ["uid", "update", "sample", "reward", "answer", "length", "stop_reason"]
    # a finished distillation is not trained over, and its solutions can be learned again from its own folder
    assert main(["distill", samples, "--run", "d", *words]) == 2
    again = told(capsys, "distill", "d/solutions.jsonl", "--run", "d2", *words)
    assert (again["solutions"], again["samples"]) == (found["solutions"], None)


def test_export_of_samples(samples, capsys):
    found = told(capsys, "export-rollouts", samples, "--out", "e.jsonl")
    assert (found["rollouts"], found["questions"], found["updates"]) == (48, 24, 1)
    assert main(["export-rollouts", samples, "--out", "e.jsonl"]) == 2
    assert "--overwrite" in capsys.readouterr().err


# ---- mistakes ------------------------------------------------------------------------------------------------------


def one_line(capsys, *words: str) -> str:
    capsys.readouterr()
    assert main([*words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("rlvr-pl: ") and captured.err.count("\n") == 1
    return captured.err


SEARCHES = {
    "embedded:nope": ("--questions", "embedded:nope"),
    "the file is empty": ("--questions", "empty.jsonl"),
    "empty gold": ("--questions", "no_answer.jsonl"),
    "no tokenizer": ("--checkpoint", "no_tokenizer"),
    "embedded:train has 6000 questions": ("--start", "5990", "--n-questions", "24"),
    "--k 0": ("--k", "0"),
    "--top-p 1.5": ("--top-p", "1.5"),
    "no grader": ("--grader", "nope"),
    "leaves room for": ("--max-new-tokens", "600"),
    "does not exist": ("--out", "nowhere/s.jsonl"),
}


@pytest.mark.parametrize("error", SEARCHES)
def test_search_tells_mistakes_and_writes_nothing(tmp_path, capsys, error):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "no_answer.jsonl").write_text('{"uid": "a", "problem": "1+1?", "answer": ""}\n')
    (tmp_path / "no_tokenizer").mkdir()
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (tmp_path / "no_tokenizer" / name).symlink_to(EMBEDDED / "start" / name)
    before = sorted(tmp_path.iterdir())
    words = ("search", *START, "--n-questions", "2", "--k", "2", "--out", "s.jsonl", *SEARCHES[error])
    assert error in one_line(capsys, *words)
    assert sorted(tmp_path.iterdir()) == before


def test_search_leaves_other_files_alone(tmp_path, capsys):
    (tmp_path / "s.jsonl").write_text("a thesis\n")
    assert "choose another name" in one_line(capsys, *SEARCH)
    assert (tmp_path / "s.jsonl").read_text() == "a thesis\n"


def test_distill_tells_mistakes_and_writes_nothing(tmp_path, samples, capsys):
    other = Solution(Question("q", "How?", "2"), (20, 1), "x", "search")
    write_solutions(tmp_path / "other.jsonl", Found([other], {"0" * 64}, set(), None))
    (tmp_path / "items.jsonl").write_text('{"record": "items", "version": 1}\n')
    before = sorted(tmp_path.iterdir())
    for words, error in (
        (("other.jsonl",), "made with another tokenizer"),
        (("items.jsonl",), "not a file of solutions, samples or rationales"),
        (("absent.jsonl",), "absent.jsonl: no such file"),
        ((samples, "--set", "data.epochs"), "write NAME=VALUE"),
        ((samples, "--set", "data.epochs=0"), "epochs"),
        ((samples, "--set", "data.bogus=0"), "bogus"),
        ((samples, "--set", "objective=GRPO"), "samples its rollouts"),
        ((samples, "--config", "absent.yaml"), "absent.yaml"),
        ((samples, "--start", "absent/policy/folder"), "no such folder"),
    ):
        assert error in one_line(capsys, "distill", *words, "--run", "d"), words
    told_by_fit = one_line(capsys, "fit", "--run", "d", "--objective", "ExpertIterationSFT")
    assert "learns from stored solutions; use `rlvr-pl distill`" in told_by_fit
    assert sorted(tmp_path.iterdir()) == before


def test_rounds_tell_mistakes_and_write_nothing(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    before = sorted(tmp_path.iterdir())
    for words, error in (
        ((), "say how many questions a round searches"),
        (("--n-questions", "4000", "--rounds", "2"), "has 6000 questions"),
        (("--n-questions", "4", "--rounds", "0"), "--rounds 0"),
        (("--n-questions", "4", "--config", "absent.yaml"), "absent.yaml"),
        (("--n-questions", "4", "--run", "mine"), "choose another"),
    ):
        assert error in one_line(capsys, "expert-iteration", *START, "--run", "r", *words)
    assert sorted(tmp_path.iterdir()) == before
