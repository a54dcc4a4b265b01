"""The link between two devices, measured through TensorFlow's runtime."""

from __future__ import annotations

import time
from unittest import mock

import pytest

from tf_ooo.costs.layer_costs import RUNTIME, Link
from tf_ooo.errors import CostError
from tf_ooo.hosts import runtime_costs
from tf_ooo.hosts import speeds as runtime_link

CPU = "/job:localhost/replica:0/task:0/device:CPU:{}"
SLOW = Link(1.0, 1.0)  # so slow that no message would be through while a device computes

pytestmark = pytest.mark.devices(2)


def test_a_link_is_fitted_to_hops_that_were_made():
    """However busy the machine: of each size three, and all of them fit into the time that has passed."""
    samples, sizes, started = [], (1024, 4 * 1024**2), time.perf_counter()
    with mock.patch.object(runtime_link, "fit_link", lambda hops, flat_ok: samples.extend(hops) or SLOW):
        link = runtime_link.measure_device_link(CPU.format(0), CPU.format(1), sizes=sizes, repeats=3)
    passed_s = time.perf_counter() - started
    assert link.bytes_per_s == SLOW.bytes_per_s
    assert [size for size, _ in samples] == [float(size) for size in sizes for _ in range(3)]
    assert all(hop_s >= 0 for _, hop_s in samples)
    assert 8 * sum(hop_s for _, hop_s in samples) <= passed_s


def test_a_run_of_hops_copies_there_and_back():
    function = runtime_link._hops(CPU.format(0), CPU.format(1), 1024, 8)
    placed = [
        op.device for op in function.get_concrete_function().graph.get_operations() if op.type == "Identity"
    ]
    assert [device.rsplit(":", 1)[1] for device in placed[:8]] == ["1", "0"] * 4


def test_device_that_does_not_exist_is_said():
    with pytest.raises(CostError, match="cannot be measured"):
        runtime_link.measure_device_link(CPU.format(0), CPU.format(7), sizes=(1024, 4096))


def test_the_runtime_is_measured_on_devices_that_there_are():
    """However busy the machine: no time is below 0, and the link keeps what was known of it."""
    link = runtime_costs.with_runtime(Link(0.5, 1e9), [CPU.format(0), CPU.format(1)])
    assert link.bytes_per_s == 1e9
    assert 0 <= link.latency_s <= 0.5
    assert all(getattr(link, name) >= 0 for name in RUNTIME)
