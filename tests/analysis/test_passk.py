"""`rlvr-pl passk` and `rlvr-pl coverage` on hand-made panels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def solved(correct: int, n: int) -> list[int]:
    return [1] * correct + [0] * (n - correct)


def test_passk_by_hand(write_samples, command) -> None:
    path = write_samples("s", {"a": solved(1, 4), "b": solved(0, 4), "c": solved(4, 4)})
    data = command("passk", path, "--k", "1,2,4")
    # pass@2 of 1 in 4: 1 - C(3,2)/C(4,2) = 1/2
    assert data["pass_at_k"] == pytest.approx({"1": 500 / 12, "2": 50.0, "4": 200 / 3})
    assert (data["questions"], data["samples"], data["never_solved"], data["never_solved_uids"]) == (3, 12, 1, ["b"])
    assert data["ci"]["2"][0] <= 50 <= data["ci"]["2"][1]
    assert data["mean_length"] is None
    assert list(command("passk", path)["pass_at_k"]) == ["1", "4"]


def test_k_beyond_the_samples_is_refused(write_samples, refused) -> None:
    message = refused("passk", write_samples("s", {"a": solved(1, 8), "b": solved(0, 2)}), "--k", "1,4")
    assert "'b' has 2" in message


@pytest.mark.parametrize("k", ["0", "1,x", "-2", ""])
def test_k_must_be_whole_numbers(k: str, write_samples, capsys) -> None:
    from rlvr_pl.cli import main

    assert main(["passk", write_samples("s", {"a": [1]}), f"--k={k}"]) == 2
    assert "whole numbers" in capsys.readouterr().err


def test_a_repeated_sample_is_refused(tmp_path: Path, refused) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text('{"uid": "a", "sample": 0, "correct": 1}\n' * 2)
    assert f"{path}:2: uid 'a', sample 0 is already in line 1" in refused("passk", path)


def test_item_and_sample_files_are_not_confused(write_items, write_samples, refused) -> None:
    items, samples = write_items("i", [1, 0], None), write_samples("s", {"q0": [1], "q1": [0]})
    assert "'sample' is missing" in refused("passk", items)
    assert "sample records" in refused("compare", items, samples)


def test_coverage_like_the_papers(write_samples, command) -> None:
    # 70 questions, 64 samples of base and 16 of start. Never solved: base q0..q15, start q3..q17; both: 13.
    base = {f"q{i}": solved(0 if i < 16 else 10, 64) for i in range(70)}
    start = {f"q{i}": solved(0 if 3 <= i < 18 else 8, 16) for i in range(70)}
    data = command("coverage", write_samples("base", base), write_samples("start", start), "--k", "1,16")
    assert (data["never_solved_a"], data["never_solved_b"], data["never_solved_both"]) == (16, 15, 13)
    # the start answers q0 q1 q2 of base's 16 with 8 of 16 samples: 24 / 256
    assert data["b_on_never_a"] == {"questions": 16, "solved": 3, "success": 24 / 256}
    # base answers q16 q17 of the start's 15 with 10 of 64: 20 / 960
    assert data["a_on_never_b"] == {"questions": 15, "solved": 2, "success": pytest.approx(20 / 960)}
    one, sixteen = data["deltas"]
    assert one["pass_a"] == pytest.approx(100 * 54 * 10 / 64 / 70)
    assert one["delta_pp"] == pytest.approx(100 * (55 * 0.5 - 54 * 10 / 64) / 70)
    assert one["ci_low"] < one["delta_pp"] < one["ci_high"]
    assert sixteen["pass_b"] == pytest.approx(100 * 55 / 70)


def test_coverage_of_other_questions_is_refused(write_samples, refused) -> None:
    message = refused("coverage", write_samples("a", {"x": [1], "y": [0]}), write_samples("b", {"x": [1], "z": [0]}))
    assert re.search(r"1 only in \S*a\S*: y", message) and re.search(r"1 only in \S*b\S*: z", message)


def test_nothing_unsolved_has_no_success_rate(write_samples, command) -> None:
    data = command("coverage", write_samples("a", {"x": [1]}), write_samples("b", {"x": [1]}))
    assert data["b_on_never_a"] == {"questions": 0, "solved": 0, "success": None}
