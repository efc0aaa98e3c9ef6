"""Power and half-widths against the paper's printed figures, the normal distribution and simulation."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_pl.core.power import half_width, power, sample_size, standard_error

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "paper_tables.json").read_text())


@pytest.mark.parametrize("row", GOLDEN["power"], ids=lambda r: f"n{r['n']}")
def test_the_papers_power_table_to_its_printed_digits(row: dict) -> None:
    assert round(100 * standard_error(row["p_d"], row["n"]), 1) == row["se_pp"]
    assert round(power(row["p_d"], row["n"], 0.03), 2) == row["power_3pp"]
    assert round(power(row["p_d"], row["n"], 0.05), 2) == row["power_5pp"]


@pytest.mark.parametrize(("p_d", "about"), [(0.2, 1750), (0.15, 1300)])
def test_the_papers_sample_sizes(p_d: float, about: int) -> None:
    # ((1.960 + 0.842) / 0.03)^2 = 8721 times p_d: 1744 and 1308, which the paper rounds to the nearest 50
    assert 50 * round(sample_size(p_d, 0.03) / 50) == about


@pytest.mark.parametrize("row", GOLDEN["table2"], ids=lambda r: f"level{r['level']}")
def test_the_papers_half_widths_by_level(row: dict) -> None:
    assert round(half_width(row["discordant"], row["n"]), 1) == row["pp"]


def test_the_papers_null_spread() -> None:
    # 1.96 sqrt(69.8) = 1.96 x 8.3546 = 16.375 items; 16.375 / 350 = 4.679%
    assert half_width(69.8) == pytest.approx(1.96 * math.sqrt(69.8), rel=1e-15)
    assert (round(half_width(69.8), 1), round(half_width(69.8, 350), 1)) == (16.4, 4.7)


def test_no_difference_is_found_at_the_level_of_the_test() -> None:
    assert power(0.2, 350, 0.0, alpha=0.01) == pytest.approx(0.01, abs=1e-12)  # inv_cdf and cdf are good to 1e-15


def test_power_agrees_with_simulation() -> None:
    # 200,000 normals around delta/se: the share beyond 1.96 has standard error below sqrt(.25/2e5) = .0011; 4 of them
    shift = 0.03 / standard_error(0.2, 350)
    z = np.random.default_rng(0).normal(shift, 1, 200_000)
    assert power(0.2, 350, 0.03) == pytest.approx(float((abs(z) > 1.959964).mean()), abs=0.0045)


@given(
    p_d=st.floats(0.02, 1.0),
    share=st.floats(0.05, 1.0),
    wanted=st.floats(0.1, 0.99),
    alpha=st.sampled_from([0.01, 0.05]),
)
def test_sample_size_is_the_smallest_that_reaches_the_power(
    p_d: float, share: float, wanted: float, alpha: float
) -> None:
    delta = share * p_d
    n = sample_size(p_d, delta, wanted, alpha)
    assert power(p_d, n, delta, alpha) >= wanted
    assert n == 1 or power(p_d, n - 1, -delta, alpha) < wanted


@pytest.mark.parametrize(
    "call",
    [
        lambda: power(0.0, 350, 0.0),
        lambda: power(0.02, 350, 0.03),  # a net difference beyond the discordance rate
        lambda: power(0.2, 0, 0.03),
        lambda: power(0.2, 350, 0.03, alpha=1.0),
        lambda: power(0.2, 350, math.nan),
        lambda: sample_size(0.2, 0.0),
        lambda: sample_size(0.2, 1e-12),
        lambda: sample_size(0.2, 0.03, power=0.05),
        lambda: half_width(-1),
        lambda: half_width(5, 4),
    ],
)
def test_impossible_arguments(call) -> None:
    with pytest.raises(ValueError):
        call()
