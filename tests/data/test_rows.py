"""Filters, the user's own row function, chat messages, and data sets of the real `datasets`."""

from __future__ import annotations

import json
import textwrap

import pytest

from rlvr_pl.cli import main
from rlvr_pl.data.pools import load_questions
from rlvr_pl.errors import UserError

ROWS = [
    {"uid": "a", "problem": "1+1?", "answer": "2", "level": 1, "source": "book"},
    {"uid": "b", "problem": "2+2?", "answer": "4", "level": 2, "source": "web"},
    {"uid": "c", "problem": "3+3?", "answer": "#### 6", "level": 3, "source": "book"},
]
CHAT = [
    {
        "prompt": [{"role": "system", "content": "Be short."}, {"role": "user", "content": f"{n}+{n}?"}],
        "solution": str(2 * n),
    }
    for n in range(1, 5)
]
PREPARE = """
def gold(row):
    return {**row, "answer": row["answer"].rpartition("#### ")[2]}

def odd(row):
    return row if row["level"] % 2 else None

def fails(row):
    return row["nothing"]

def number(row):
    return 3
"""


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "mine.py").write_text(PREPARE)
    return "q.jsonl"


def uids(*args, **how):
    return [q.uid for q in load_questions(*args, **how)]


def test_rows_are_kept_by_value(rows):
    assert uids(rows, where={"source": "book"}) == ["a", "c"]
    assert uids(rows, where={"level": [2, 3]}) == ["b", "c"]
    assert uids(rows, where={"level": ["2", "3"], "source": "book"}) == ["c"]
    levels = {q.level for q in load_questions("embedded:val350", where={"level": [1, 5]})}
    assert levels == {1, 5}


def test_a_function_changes_rows_and_leaves_some_out(rows):
    assert [q.answer for q in load_questions(rows, prepare="mine.py:gold")] == ["2", "4", "6"]
    assert uids(rows, prepare="mine.py:odd") == ["a", "c"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"where": {"sources": "book"}}, r"q\.jsonl:1: data\.where names the column 'sources'; there are 'uid'"),
        ({"where": {"source": "radio"}}, r"no questions in it that data\.where and data\.prepare leave"),
        ({"prepare": "mine.py:fails"}, r"mine\.py:fails: q\.jsonl:1 raised KeyError: 'nothing' \(.*mine\.py:9\)"),
        ({"prepare": "mine.py:number"}, r"returned int for q\.jsonl:1; it must return the row, or None"),
        ({"prepare": "mine.py:nope"}, r"data\.prepare mine\.py:nope: mine\.py has no function nope"),
        ({"prepare": "nope.py:f"}, r"there is no file nope\.py"),
    ],
)
def test_mistakes_name_the_place(rows, how, message):
    with pytest.raises(UserError, match=message):
        load_questions(rows, **how)


def test_a_prompt_may_be_chat_messages(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.Table.from_pylist(CHAT), tmp_path / "q.parquet")
    columns = {"problem": "prompt", "answer": "solution"}
    first = load_questions(tmp_path / "q.parquet", columns=columns)[0]
    assert (first.problem, first.answer) == ("1+1?", "2")
    assert list(first.messages) == CHAT[0]["prompt"]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "robot", "content": "x"}], "message 1: must be an object with a role"),
        ([{"role": "user", "content": "x"}, "hello"], "message 2: must be an object"),
        (["hello"], "'problem' must be text or a number, not a list"),
        ([{"role": "user", "content": None}], "message 1, content' must be text"),
        ([{"role": "system", "content": "x"}], "holds no message of the user"),
    ],
)
def test_messages_that_are_none(tmp_path, messages, message):
    (tmp_path / "q.json").write_text(json.dumps([{"problem": messages, "answer": "1"}]))
    with pytest.raises(UserError, match=message):
        load_questions(tmp_path / "q.json")


# ---- the real datasets ---------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    both = {"train": datasets.Dataset.from_list(CHAT[:3]), "test": datasets.Dataset.from_list(CHAT[3:])}
    datasets.DatasetDict(both).save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


def test_a_saved_data_set_with_its_splits(saved):
    columns = {"problem": "prompt", "answer": "solution"}
    assert [q.answer for q in load_questions(saved, columns=columns)] == ["2", "4", "6"]
    (held_out,) = load_questions(saved, columns=columns, split="test")
    assert list(held_out.messages) == CHAT[3]["prompt"]


def test_a_folder_of_files_and_a_stream(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert uids(tmp_path / "pool") == ["a", "b", "c"]
    asked = {}

    def load(name, config, split, streaming=False):
        asked.update(name=name, config=config, split=split, streaming=streaming)
        return datasets.Dataset.from_list(ROWS).to_iterable_dataset() if streaming else datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert uids("someone/pool:main:test", stream=2) == ["a", "b"]
    assert asked == {"name": "someone/pool", "config": "main", "split": "test", "streaming": True}
    assert uids("someone/pool") == ["a", "b", "c"]
    assert asked == {"name": "someone/pool", "config": None, "split": "train", "streaming": False}


def test_a_run_on_chat_messages_with_a_reward_in_trls_form(saved, tmp_path, monkeypatch):
    """The reward sees conversations as TRL hands them over."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat_rewards.py").write_text(
        textwrap.dedent("""
        seen = []

        def reward(prompts, completions, completion_ids, solution, **kwargs):
            seen.append((prompts, completions, solution))
            return [float(len(c[0]["content"]) % 2) for c in completions]
        """)
    )
    from rlvr_pl.policy import load_policy

    policy = load_policy("embedded:base")
    policy.tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    policy.save(tmp_path / "chatty")
    (tmp_path / "chatty" / "prompt_template.json").write_text('{"kind": "chat", "name": "chat", "user": "{problem}"}')
    words = ["--policy.name=chatty", f"--data.train={saved}", "--data.validation=null", "--data.updates=1", "--run=r"]
    columns = '--data.columns={"problem": "prompt", "answer": "solution"}'
    reward = ["--grader=FunctionGrader", "--grader.path=chat_rewards:reward"]
    small = ["--model.group_size=2", "--model.max_new_tokens=8"]
    assert main(["fit", *words, columns, *reward, *small]) == 0
    import chat_rewards

    ((prompts, completions, solution),) = chat_rewards.seen
    assert [m["role"] for m in prompts[0]] == ["system", "user"] and len(prompts) == 2
    assert [m["role"] for m in completions[0]] == ["assistant"]
    assert len(solution) == 2
