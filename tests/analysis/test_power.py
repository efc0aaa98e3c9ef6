"""`rlvr-pl power`: one point, the items needed, a grid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "paper_tables.json").read_text())


def test_the_papers_table_as_a_grid(command) -> None:
    grid = command("power", "--pd", 0.2, "--n", 224, 350, 1000, 2000, "--delta", 0.03, 0.05)["grid"]
    for row, (three, five) in zip(GOLDEN["power"], zip(grid[::2], grid[1::2]), strict=True):
        assert (three["n"], three["delta"], five["delta"]) == (row["n"], 0.03, 0.05)
        assert (round(three["power"], 2), round(five["power"], 2)) == (row["power_3pp"], row["power_5pp"])
        assert round(three["se_pp"], 1) == row["se_pp"]


def test_one_point_and_the_items_needed(command) -> None:
    assert round(command("power", "--pd", 0.2, "--n", 350, "--delta", 0.03)["power"], 2) == 0.24
    for row in GOLDEN["sample_size_80pct_3pp"]:
        n = command("power", "--pd", row["p_d"], "--delta", 0.03, "--target-power", 0.8)["n"]
        assert 50 * round(n / 50) == row["n_about"]  # the paper rounds to the nearest 50


def test_a_grid_fills_what_is_not_given(command) -> None:
    assert {row["n"] for row in command("power", "--grid", "--n", 99)["grid"]} == {99}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pd", 0.2, "--delta", 0.03], "--n must be given"),
        (["--pd", 0.2, "--n", 350, "--delta", 3], "0.03 for 3 pp"),
        (["--pd", 0.02, "--n", 350, "--delta", 0.03], "cannot exceed"),
        (["--pd", 0.2, "--n", 0, "--delta", 0.03], "at least 1"),
        (["--pd", 0.2, "--n", 350, "--delta", 0.03, "--target-power", 0.8], "leave out --n"),
        (["--pd", 0.2, "--delta", 0.03, "--target-power", 1.5], "power must lie"),
    ],
)
def test_wrong_use(words: list, message: str, refused) -> None:
    assert message in refused("power", *words)
