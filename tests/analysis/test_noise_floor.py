"""`rlvr-pl noise-floor`: five synthetic checkpoints with the discordance of the paper's section 4.2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "paper_tables.json").read_text())
# An item that 1 of 5 checkpoints answers splits 1 x 4 = 4 of the 10 pairs; one that 2 answer splits 2 x 3 = 6. These
# numbers of items per level give 10 x the paper's mean discordance, 4 x 77 + 6 x 65 = 698, on its 142 "sometimes".
ONES_AND_TWOS = {1: (8, 2), 2: (13, 13), 3: (15, 18), 4: (20, 20), 5: (21, 12)}
ALWAYS = {1: 10, 2: 20, 3: 20, 4: 15, 5: 14}  # 79 in all


@pytest.fixture
def five(write_items) -> list[str]:
    levels: list[int] = []
    answered: list[set[int]] = []
    for row in GOLDEN["table2"]:
        ones, twos = ONES_AND_TWOS[row["level"]]
        groups = [{i % 5} for i in range(ones)] + [{i % 5, (i + 1) % 5} for i in range(twos)]
        groups += [set(range(5))] * ALWAYS[row["level"]]
        answered += groups + [set()] * (row["n"] - len(groups))
        levels += [row["level"]] * row["n"]
    return [write_items(f"c{run}", [run in s for s in answered], level=levels) for run in range(5)]


def test_the_papers_null_spread_and_turnover(five: list[str], command) -> None:
    data = command("noise-floor", *five)
    assert (data["n"], data["pairs"], len(data["by_pair"])) == (350, 10, 10)
    assert data["mean_discordant"] == pytest.approx(GOLDEN["null_spread"]["mean_discordant"])
    assert round(data["half_width_items"], 1) == GOLDEN["null_spread"]["half_width_items"]
    assert round(data["half_width_pp"], 1) == GOLDEN["null_spread"]["half_width_pp"]
    assert data["discordance_rate"] == pytest.approx(69.8 / 350)
    assert (data["always"], data["never"], data["sometimes"]) == (79, 129, 142)


def test_the_papers_table_2(five: list[str], command) -> None:
    strata = command("noise-floor", *five, "--by", "level")["strata"]
    for stratum, row in zip(strata, GOLDEN["table2"], strict=True):
        assert (stratum["level"], stratum["n"]) == (row["level"], row["n"])
        assert stratum["mean_discordant"] == pytest.approx(row["discordant"])
        assert round(stratum["half_width_pp"], 1) == row["pp"]


def test_pairs_by_hand(write_items, command) -> None:
    files = [write_items("a", [1, 1, 0, 0]), write_items("b", [1, 0, 1, 0]), write_items("c", [1, 0, 0, 0])]
    data = command("noise-floor", *files)
    assert [(p["discordant"], p["net"]) for p in data["by_pair"]] == [(2, 0), (1, -1), (1, -1)]
    assert (data["min_discordant"], data["max_discordant"], data["net_min"], data["net_max"]) == (1, 2, -1, 0)
    assert data["mean_discordant"] == pytest.approx(4 / 3)
    assert (data["always"], data["never"], data["sometimes"]) == (1, 1, 2)


def header(batch_size: int, sha: str = "f00") -> dict:
    return {"record": "items", "version": 1, "engine": "torch", "batch_size": batch_size, "checkpoint_sha256": sha}


def test_self_agreement_may_mix_batch_sizes(write_items, command, refused) -> None:
    # the paper: 154 and 150 right, 28 of 350 items differ, so 16 lost and 12 gained
    batch64 = [1] * 154 + [0] * 196
    batch32 = [0] * 16 + [1] * 138 + [1] * 12 + [0] * 184
    files = [write_items("b64", batch64, header(64)), write_items("b32", batch32, header(32))]
    data = command("noise-floor", "--self", *files)
    assert data["kind"] == "self"
    assert (data["mean_discordant"], data["discordance_rate"]) == (28, 0.08)
    assert "batch_size" in refused("noise-floor", *files)
    other = write_items("other", batch32, header(64, "bad"))
    assert "different weights" in refused("noise-floor", "--self", files[0], other)


def test_share_of_the_discordance_that_needs_no_training(write_items, command) -> None:
    a, b = write_items("a", [1, 1, 1, 1, 0]), write_items("b", [0, 0, 0, 1, 0])
    data = command("noise-floor", a, b, "--self", a, write_items("a2", [0, 1, 1, 1, 0]))
    assert data["kind"] == "checkpoints" and data["self"]["mean_discordant"] == 1
    assert data["self_share"] == pytest.approx(1 / 3)


def test_too_few_files(write_items, refused) -> None:
    a = write_items("a", [1, 0])
    assert "two files" in refused("noise-floor", a)
    assert "two files" in refused("noise-floor")
    assert "--self" in refused("noise-floor", "--self", a)
    assert "given twice" in refused("noise-floor", a, a)
