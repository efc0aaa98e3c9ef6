"""`rlvr-pl compare`: the paper's rows, strata, several B, training seeds, and records that cannot be compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "paper_tables.json").read_text())
HEADER = {"record": "items", "version": 1, "engine": "torch", "batch_size": 64}


def outcomes(n: int, gained: int, lost: int, both: int) -> tuple[list[int], list[int]]:
    rest = n - gained - lost - both
    return [0] * gained + [1] * (lost + both) + [0] * rest, [1] * gained + [0] * lost + [1] * both + [0] * rest


@pytest.mark.parametrize("row", GOLDEN["paired"], ids=lambda r: r["arm"])
def test_the_papers_rows(row: dict, write_items, command) -> None:
    a, b = outcomes(350, row["gained"], row["lost"], row["start"] - row["lost"])
    data = command("compare", write_items("a", a), write_items("b", b))
    assert (data["n"], data["gained"], data["lost"]) == (350, row["gained"], row["lost"])
    assert round(data["delta_pp"], 1) == row["delta_pp"]
    # lattice of 100/350 = .29 pp, rounding of the paper's ends .05
    assert data["ci_low"] == pytest.approx(row["ci"][0], abs=0.4)
    assert data["ci_high"] == pytest.approx(row["ci"][1], abs=0.4)
    assert data["training_seeds"] == 1 and "seed" in data["note"]


def test_order_of_rows_does_not_matter(tmp_path: Path, write_items, command) -> None:
    a, b = outcomes(40, 5, 3, 12)
    path = Path(write_items("b", b))
    head, *rows = path.read_text().splitlines()
    path.with_name("b2.jsonl").write_text("\n".join([head, *reversed(rows)]) + "\n")
    first = command("compare", write_items("a", a), path)
    second = command("compare", write_items("a", a), path.with_name("b2.jsonl"))
    assert {**first, "b": ""} == {**second, "b": ""}


def test_strata_by_hand(write_items, command) -> None:
    # level 1: items 0 1 2 (one gained, one lost); level 2: items 3 4 (one gained)
    a = write_items("a", [0, 1, 1, 0, 0], level=[1, 1, 1, 2, 2])
    b = write_items("b", [1, 0, 1, 1, 0], level=[1, 1, 1, 2, 2])
    strata = command("compare", a, b, "--by", "level")["strata"]
    assert [(s["level"], s["n"], s["gained"], s["lost"], s["discordant"]) for s in strata] == [
        (1, 3, 1, 1, 2),
        (2, 2, 1, 0, 1),
    ]
    assert strata[0]["discordance_rate"] == pytest.approx(2 / 3)
    assert strata[0]["half_width_pp"] == pytest.approx(100 * 1.96 * 2**0.5 / 3)


def test_several_b_with_holm(write_items, command) -> None:
    # exact p of 0 and 6: 2/64 = .03125; of 1 and 6: 2 (1 + 7)/128 = .125; doubled: .0625; kept: max(.0625, .125)
    a = write_items("a", [1] * 10)
    b = write_items("b", [0] * 6 + [1] * 4)
    a2, c = [1] * 9 + [0], [0] * 6 + [1] * 4
    data = command("compare", a, b, write_items("c", [*c[:9], 1]), "--holm")
    assert [x["mcnemar_exact_p"] for x in data["comparisons"]] == [2 / 64, 2 / 64]
    assert [x["holm_p"] for x in data["comparisons"]] == [4 / 64, 4 / 64]
    data = command("compare", write_items("a", a2), b, write_items("c", [1] * 9 + [0]), "--holm")
    assert [x["holm_p"] for x in data["comparisons"]] == [0.25, 1.0]


def test_training_seeds(write_items, command) -> None:
    runs = [write_items(f"r{i}", outcomes(50, *counts)[1]) for i, counts in enumerate([(8, 0, 20), (0, 9, 11)])]
    start = write_items("start", outcomes(50, 8, 0, 20)[0])
    data = command("compare", start, "--seeds", *runs)
    assert (data["seeds_a"], data["seeds_b"], data["training_seeds"]) == (1, 2, 2)
    assert data["ci_low"] < data["item_ci_low"] < data["delta_pp"] < data["item_ci_high"] < data["ci_high"]
    alone = command("compare", start, "--seeds", runs[0])
    assert alone["training_seeds"] == 1 and "One training seed" in alone["note"]


def test_same_seed_gives_the_same_object(write_items, command) -> None:
    a, b = outcomes(60, 9, 7, 20)
    words = ("compare", write_items("a", a), write_items("b", b), "--seed", 3)
    assert command(*words) == command(*words)


def test_other_uids_are_listed(tmp_path: Path, write_items, refused) -> None:
    a = write_items("a", [1, 0, 1])
    b = tmp_path / "b.jsonl"
    b.write_text('{"uid": "q0", "correct": 1}\n{"uid": "x7", "correct": 1}\n')
    message = refused("compare", a, b)
    assert f"2 only in {a}: q1, q2" in message and f"1 only in {b}: x7" in message


def test_faults_of_a_row_name_file_and_line(tmp_path: Path, write_items, refused) -> None:
    a = write_items("a", [1, 0])
    b = tmp_path / "b.jsonl"
    for line, words in [
        ('{"uid": "q1", "correct": 2}', "'correct' must be 0 or 1, not 2"),
        ('{"uid": "q0", "correct": 1}', "uid 'q0' is already in line 1"),
        ('{"correct": 1}', "'uid' is missing"),
        ('{"uid": "q1"', "torn"),
    ]:
        b.write_text(f'{{"uid": "q0", "correct": 1}}\n{line}')
        assert f"{b}:2: " in refused("compare", a, b)
        assert words in refused("compare", a, b)


def test_strata_that_disagree_or_are_unknown(write_items, refused) -> None:
    a = write_items("a", [1, 0], level=[1, 2])
    assert "level of 'q1' is 3, but 2" in refused("compare", a, write_items("b", [1, 0], level=[1, 3]))
    bare = write_items("c", [1, 0])
    assert "no level for q0, q1" in refused("compare", bare, write_items("d", [1, 0]), "--by", "level")


@pytest.mark.parametrize(("key", "value"), [("engine", "vllm-0.11"), ("batch_size", 32)])
def test_other_engines_and_batch_sizes_are_refused(key: str, value, write_items, command, refused) -> None:
    a, b = write_items("a", [1, 0]), write_items("b", [1, 1], {**HEADER, key: value})
    message = refused("compare", a, b)
    assert key in message and "--allow-mixed" in message
    assert command("compare", a, b, "--allow-mixed")["gained"] == 1


def test_a_missing_header_is_a_warning(write_items, capsys) -> None:
    from rlvr_pl.cli import main

    assert main(["compare", write_items("a", [1, 0]), write_items("b", [1, 1], None), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "no header in" in err and json.loads(out)["gained"] == 1


def test_wrong_use(write_items, refused) -> None:
    a = write_items("a", [1, 0])
    assert "two files" in refused("compare", a)
    assert "--resamples" in refused("compare", a, a, "--resamples", 0)
    assert "--by" in refused("compare", a, "--seeds", a, "--by", "level")


def test_tables_go_to_a_file(tmp_path: Path, write_items, command, refused) -> None:
    a, b = write_items("a", [1, 0, 0]), write_items("b", [1, 1, 0])
    out = tmp_path / "t.md"
    command("compare", a, b, "--out", out)
    assert "| all | 3 | 1 | 0 | 33.3 |" in out.read_text()
    assert "exists" in refused("compare", a, b, "--out", out)


def test_hundred_thousand_items_fit_in_memory(tmp_path: Path) -> None:
    # 500 MB is the promise for two files of this size; the child reports the peak of its own memory (ru_maxrss would
    # count the process it was forked from)
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from /proc")
    row = '{{"uid": "train/algebra/{0}.json", "subject": "Algebra", "level": 3, "correct": {1}, "boxed": 1}}\n'
    for name, step in (("a", 2), ("b", 3)):
        (tmp_path / name).write_text("".join(row.format(i, int(i % step == 0)) for i in range(100_000)))
    code = (
        "import re, sys; from rlvr_pl.cli import main; status = main(['compare', *sys.argv[1:], '--json']);"
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1]); sys.exit(status)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "a"), str(tmp_path / "b")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    result, peak = done.stdout.splitlines()
    # i % 6 in {3}: gained (3 | i, odd); {2, 4}: lost
    assert (json.loads(result)["gained"], json.loads(result)["lost"]) == (16667, 33333)
    assert int(peak) < 500 * 1024
