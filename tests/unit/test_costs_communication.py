"""Communication seconds by hand, fitting, measuring, units."""

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ooo.costs.communication import fit_link, link_of_ring, parse_bytes, parse_link
from tf_ooo.costs.layer_costs import Link
from tf_ooo.errors import CostError

LINK = Link(latency_s=0.5, bytes_per_s=10)


def test_by_hand():
    assert LINK.seconds(20) == 2.5
    assert LINK.allreduce_s(40, 4) == 6 * (0.5 + 1)
    assert LINK.allreduce_s(40, 1) == 0


@pytest.mark.parametrize("workers", [0, -1, 1.5, True])
def test_bad_worker_counts(workers):
    with pytest.raises(CostError, match="whole number"):
        link_of_ring(LINK, workers)


@given(
    st.floats(1e-7, 1e-2),
    st.floats(1e6, 1e11),
    st.lists(st.integers(1, 2**26), min_size=2, max_size=12, unique=True),
)
def test_exact_samples_give_the_link_back(latency_s, bytes_per_s, sizes):
    truth = Link(latency_s, bytes_per_s)
    link = fit_link([(size, truth.seconds(size)) for size in sizes])
    for size in sizes:
        assert link.seconds(size) == pytest.approx(truth.seconds(size), rel=1e-6)


def test_a_fifth_of_disturbed_samples_does_not_move_the_line():
    truth = Link(1e-4, 1e9)
    sizes = [2**i for i in range(10, 25)]
    samples = [(size, truth.seconds(size) * (50 if i % 5 == 0 else 1)) for i, size in enumerate(sizes)]
    link = fit_link(samples)
    assert link.bytes_per_s == pytest.approx(1e9, rel=0.2)
    assert link.latency_s == pytest.approx(1e-4, rel=0.2)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "at least two sizes"),
        ([(1, 1.0), (1, 2.0)], "got 2 samples of 1"),
        ([(1, 2.0), (9, 1.0)], "larger messages were not slower"),
        ([(1, 1.0), (2, math.nan)], "sample 1"),
        ([(1, 1.0), (-2, 1.0)], "sample 1"),
        ([(1, 1.0), 7], "sample 1: expected"),
    ],
)
def test_samples_that_no_link_explains(samples, message):
    with pytest.raises(CostError, match=message):
        fit_link(samples)


def test_a_link_too_fast_to_measure_has_at_least_the_fastest_message_s_bandwidth():
    link = fit_link([(1000, 2e-3), (1_000_000, 1e-3)], flat_ok=True)
    assert link == Link(1e-3, 1e9)


def test_link_of_a_ring():
    whole = fit_link([(size, LINK.allreduce_s(size, 4)) for size in (100, 1000, 5000)])
    link = link_of_ring(whole, 4)
    assert link.latency_s == pytest.approx(LINK.latency_s)
    assert link.bytes_per_s == pytest.approx(LINK.bytes_per_s)
    with pytest.raises(CostError, match="nobody"):
        link_of_ring(whole, 1)


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("25Gbit", Link(0, 25e9 / 8)),
        ("10 Gbit/s", Link(0, 10e9 / 8)),
        ("100Mbps", Link(0, 100e6 / 8)),
        ("1.5GB/s", Link(0, 1.5e9)),
        ("2GiB/s", Link(0, 2**31)),
        ("25gbit,20us", Link(20e-6, 25e9 / 8)),
        ("500Mbit, 1 ms", Link(1e-3, 500e6 / 8)),
        ("1e3MB", Link(0, 1e9)),
    ],
)
def test_parse_link(text, link):
    parsed = parse_link(text)
    assert parsed.latency_s == pytest.approx(link.latency_s)
    assert parsed.bytes_per_s == pytest.approx(link.bytes_per_s)


@pytest.mark.parametrize(
    "text", ["", "25", "fast", "-1Gbit", "0Gbit", "25Gbyte", "1 Gbit 3", "nanGbit", "1Xbit"]
)
def test_bad_bandwidth(text):
    with pytest.raises(CostError, match="expected a bandwidth such as 25Gbit"):
        parse_link(text)


@pytest.mark.parametrize("text", ["25Gbit,", "25Gbit,20", "25Gbit,20h", "25Gbit,-1us"])
def test_bad_latency(text):
    with pytest.raises(CostError, match="expected a latency such as 20us"):
        parse_link(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 2**34),
        ("16GB", 16 * 10**9),
        ("512 MiB", 2**29),
        ("1.5KiB", 1536),
        ("1000000", 10**6),
        ("3B", 3),
        ("2kB", 2000),
    ],
)
def test_parse_bytes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "16Gbit", "16G", "-1GB", "0", "16gb", "1e40GB", "nan", "1 2"])
def test_bad_bytes(text):
    with pytest.raises(CostError, match="expected"):
        parse_bytes(text)


@given(st.text(max_size=12))
def test_any_text_is_parsed_or_refused_with_a_cost_error(text):
    for parse in (parse_link, parse_bytes):
        with contextlib.suppress(CostError):
            parse(text)
