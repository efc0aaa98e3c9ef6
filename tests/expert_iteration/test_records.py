"""Files that grow question by question: continued after a cut at any byte, never mixed with anything else."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlvr_pl.cost import CostLedger, ledger_path
from rlvr_pl.errors import UserError
from rlvr_pl.expert_iteration.records import QuestionFile, fill, tokenizer_sha256
from rlvr_pl.types import Question

QUESTIONS = [Question(f"q{i}", f"{i}+1?", str(i + 1)) for i in range(7)]
PARTS = [QUESTIONS[:3], QUESTIONS[3:5], QUESTIONS[5:]]
HEADER = {"record": "samples", "version": 1, "seed": 3, "checkpoint": "here"}
COUNTS = {"q0": 2, "q1": 4, "q2": 2, "q3": 3, "q4": 2, "q5": 5, "q6": 2}


def rows_of(question: Question) -> list[dict]:
    n = COUNTS[question.uid]
    return [{"uid": question.uid, "n": n, "i": i, "text": f"{i}é\n\u2028", "token_ids": [i]} for i in range(n)]


def make(part):
    return {q.uid: rows_of(q) for q in part}


def cost(rows) -> CostLedger:
    return CostLedger(graded=len(rows))


def open_file(path, header=HEADER) -> QuestionFile:
    # the number of a question's rows is told by its first one, as the rationales of a question tell its continuations
    return QuestionFile(path, header, [q.uid for q in QUESTIONS], lambda rows: rows[0]["n"])


def filled(path):
    with open_file(path) as file:
        return fill(file, PARTS, make, cost)


def test_a_filled_file_has_header_and_rows_in_order(tmp_path):
    found = filled(tmp_path / "s.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    assert lines == [HEADER, *(row for q in QUESTIONS for row in rows_of(q))]
    assert (len(found.rows), found.added, found.cost.graded) == (20, 20, 20)  # 2+4+2+3+2+5+2
    assert set(found.rows[0]) == {"uid", "n", "i"}  # texts and ids are not kept in memory


def test_a_finished_file_is_left_as_it_is(tmp_path):
    filled(tmp_path / "s.jsonl")
    before = (tmp_path / "s.jsonl").read_bytes(), ledger_path(tmp_path / "s.jsonl").read_bytes()
    assert filled(tmp_path / "s.jsonl").added == 0
    assert before == ((tmp_path / "s.jsonl").read_bytes(), ledger_path(tmp_path / "s.jsonl").read_bytes())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1))
def test_cut_at_any_byte_and_continued_it_has_the_same_bytes(tmp_path, share):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    if not whole.exists():
        filled(whole)
    data = whole.read_bytes()
    first = data.index(b"\n") + 1  # the header is never torn: it arrives by a rename
    cut.write_bytes(data[: first + round(share * (len(data) - first))])
    found = filled(cut)
    assert cut.read_bytes() == data
    assert found.cost.graded == 20  # counted from the records, whatever the ledger had seen


def test_a_part_is_made_again_whole_but_written_once(tmp_path):
    path = tmp_path / "s.jsonl"
    filled(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:7]))  # header, q0 (2 rows) and q1 (4 rows) of the first part of three questions
    made = []
    with open_file(path) as file:
        fill(file, PARTS, lambda part: made.append([q.uid for q in part]) or make(part), cost)
    assert made == [["q0", "q1", "q2"], ["q3", "q4"], ["q5", "q6"]]
    assert path.read_bytes() == b"".join(lines)


def test_the_ledger_is_kept_while_the_file_grows_and_remembers_time(tmp_path):
    path, seen = tmp_path / "s.jsonl", []
    CostLedger(wall_seconds=100.0).write(ledger_path(path))  # of records that are gone

    def spy(part):
        seen.append(CostLedger.read(ledger_path(path)).graded)
        return make(part)

    with open_file(path) as file:
        fill(file, PARTS[:1], make, cost)
    assert CostLedger.read(ledger_path(path)).wall_seconds < 100.0
    CostLedger(graded=8, wall_seconds=100.0).write(ledger_path(path))
    with open_file(path) as file:
        ledger = fill(file, PARTS, spy, cost).cost
    assert seen == [8, 13]  # after 2+4+2 rows, and after 3+2 more
    assert ledger.wall_seconds > 100.0


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "does not begin with a header"),
        ("notes of mine, no newline", "does not begin with a header"),
        ("notes of mine\n", "line 1 is no record"),
        ("[1, 2]\n", "line 1 is no record"),
        ('{"uid": "q0"}\n', "not a file of samples records"),
        ('{"record": "items", "version": 1}\n', "not a file of samples records"),
        (json.dumps({**HEADER, "seed": 4}) + "\n", "seed was 4, now 3"),
        (json.dumps({**HEADER, "extra": 1}) + "\n", "extra was 1, now null"),
        (json.dumps(HEADER) + '\n{"uid": "q5", "n": 1}\n', ":2: not a row of the question that comes here"),
    ],
)
def test_anything_else_is_refused_and_left_alone(tmp_path, content, told):
    path = tmp_path / "s.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=told.replace("(", "\\(")):
        filled(path)
    assert path.read_text() == content
    assert not ledger_path(path).exists()


def test_the_name_of_a_checkpoint_may_differ_where_its_hash_does_not(tmp_path):
    filled(tmp_path / "s.jsonl")
    with open_file(tmp_path / "s.jsonl", {**HEADER, "checkpoint": "the same weights elsewhere"}) as file:
        assert file.done == len(QUESTIONS)


def test_one_process_at_a_time(tmp_path):
    with (
        open_file(tmp_path / "s.jsonl"),
        pytest.raises(UserError, match="another process"),
        open_file(tmp_path / "s.jsonl"),
    ):
        pass


def test_a_missing_folder_is_told(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        filled(tmp_path / "no" / "s.jsonl")


def test_tokenizers_are_told_apart_by_what_their_ids_mean(policy):
    class Other:
        def get_vocab(self):
            words = policy.tokenizer.get_vocab()
            return {**words, "How": words["many"], "many": words["How"]}

    assert tokenizer_sha256(policy.tokenizer) == tokenizer_sha256(policy.tokenizer)
    assert tokenizer_sha256(policy.tokenizer) != tokenizer_sha256(Other())
