"""Statistics of a load are those of the calls, and agree with numpy's percentiles."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.bench.statistics import Call, percentile, spread, summarise

MS = 1_000_000


def call(start, stamps, end, prompt=10, output=0, **rest):
    return Call(start * MS, end * MS, tuple(stamp * MS for stamp in stamps), prompt, output or len(stamps), **rest)


def test_the_numbers_of_two_overlapping_calls():
    summary = summarise([call(0, [100, 110, 130], 130), call(50, [250, 260], 1050), call(0, [], 5, error="no")])
    assert (summary.requests, summary.failed) == (2, 1)
    assert summary.duration_s == 1.05
    assert summary.output_tokens == 5
    assert summary.output_tokens_per_s == pytest.approx(5 / 1.05)
    assert summary.total_tokens_per_s == pytest.approx(25 / 1.05)
    assert summary.ttft_ms.mean == 150
    assert summary.itl_ms.max == 20
    assert summary.itl_ms.p50 == 10
    assert summary.e2e_ms.max == 1000
    assert summary.tpot_ms.p50 == pytest.approx((15 + 800) / 2)


def test_a_load_without_a_good_call_has_no_numbers():
    summary = summarise([call(0, [], 5, error="refused")])
    assert (summary.requests, summary.failed) == (0, 1)
    assert math.isnan(summary.output_tokens_per_s)
    assert math.isnan(summary.ttft_ms.p99)


def test_a_single_token_has_no_time_per_output_token():
    assert call(0, [4], 4).tpot_ms is None
    assert call(0, [4], 4).itl_ms == []


@settings(deadline=None, max_examples=200)
@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_percentiles_are_those_of_numpy(values, share):
    assert percentile(sorted(values), share) == pytest.approx(float(np.quantile(values, share)), abs=1e-6)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_the_five_numbers_are_in_order(values):
    five = spread(values)
    assert min(values) <= five.p50 <= five.p90 <= five.p99 <= five.max == max(values)
