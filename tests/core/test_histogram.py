from __future__ import annotations

import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlvr_pl.core.histogram import Histogram

values = st.lists(st.floats(0, 12), min_size=1, max_size=60)


@given(values, st.floats(0, 1))
def test_quantiles_are_right_to_one_bin(xs, q) -> None:
    histogram = Histogram(width=0.01)
    histogram.add(np.array(xs))
    assert histogram.total == len(xs)
    ranked = sorted(xs)
    rank = q * (len(xs) - 1)
    low, high = ranked[math.floor(rank)], ranked[math.ceil(rank)]
    assert low - 0.0101 <= histogram.quantile(q) <= high + 0.0101  # one bin, and rounding of its edges


@given(values, values)
def test_adding_in_parts_and_restoring_change_nothing(xs, ys) -> None:
    parts, whole, restored = Histogram(), Histogram(), Histogram()
    parts.add(np.array(xs))
    restored.load_state_dict(json.loads(json.dumps(parts.state_dict())))
    for histogram in (parts, restored):
        histogram.add(np.array(ys))
    whole.add(np.array(xs + ys))
    for q in (0.0, 0.3, 0.8, 1.0):
        assert parts.quantile(q) == whole.quantile(q) == restored.quantile(q)


def test_empty_and_negative_noise() -> None:
    histogram = Histogram()
    assert math.isnan(histogram.quantile(0.8))
    histogram.load_state_dict(histogram.state_dict())
    histogram.add(np.array([]))
    assert histogram.total == 0
    histogram.add(np.array([-1e-9, 0.0]))
    assert 0 <= histogram.quantile(1.0) <= histogram.width
