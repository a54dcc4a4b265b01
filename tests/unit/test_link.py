"""The link between two devices, from seconds that are made up: a clock that only the devices move."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tf_ooo.costs.layer_costs import Link
from tf_ooo.hosts import speeds
from tf_ooo.hosts import speeds as measuring

SENDER, RECEIVER = "/device:A", "/device:B"
# These are to be found out; messages between devices that are idle are there sooner.
BUSY = Link(latency_s=7e-3, bytes_per_s=1e9, overhead_s_per_byte=3e-10)
IDLE_S, START_S, PRODUCT_S, SEGMENT_S = 2e-3, 0.5, 1e-3, 30e-3


class Devices:
    """Functions that take as long as they would over that link."""

    def __init__(self, monkeypatch, link):
        self.now_s, self.link, self.sizes = 0.0, link, []
        monkeypatch.setattr(speeds, "time", SimpleNamespace(perf_counter=lambda: self.now_s))
        monkeypatch.setattr(measuring, "_hops", self.hops)
        monkeypatch.setattr(measuring, "_beside_messages", self.beside_messages)
        monkeypatch.setattr(speeds, "_in_turns", self.in_turns)

    def takes(self, seconds):
        def numpy():
            self.now_s += seconds

        return lambda: SimpleNamespace(numpy=numpy)

    def hops(self, sender, receiver, size, hops):
        assert (sender, receiver) == (SENDER, RECEIVER)
        self.sizes.append(size)
        return self.takes(START_S + hops * (IDLE_S + size / self.link.bytes_per_s))

    def beside_messages(self, sender, receiver, computing, products, messages, size):
        """The receiver has twice the sender's overhead: 4/3 and 2/3 of the mean."""
        of_mean = {SENDER: 2 / 3, RECEIVER: 4 / 3}[computing]
        longer_s = messages * size * self.link.overhead_s_per_byte * of_mean
        return self.takes(START_S + products * PRODUCT_S + longer_s)

    def in_turns(self, sender, receiver, products, size):
        """Eight segments on either device side by side; with messages seven hops, and one begins later."""
        assert products * PRODUCT_S == pytest.approx(SEGMENT_S)
        if not size:
            return self.takes(8 * SEGMENT_S)
        hop_s = self.link.latency_s + self.link.occupied_s(size) + 2 * self.link.overhead_s_per_byte * size
        return self.takes(9 * SEGMENT_S + 7 * hop_s)


def test_a_link_is_found_out(monkeypatch):
    devices = Devices(monkeypatch, BUSY)
    link = measuring.measure_device_link(SENDER, RECEIVER)
    assert link.latency_s == pytest.approx(BUSY.latency_s)
    assert link.bytes_per_s == pytest.approx(BUSY.bytes_per_s)
    assert link.overhead_s_per_byte == pytest.approx(BUSY.overhead_s_per_byte)
    # Each size once without hops, which is taken off, and once with them.
    assert devices.sizes == [size for size in measuring.MEASURED_BYTES for _ in range(2)]


def test_between_devices_that_compute_no_message_is_faster_than_between_idle_ones(monkeypatch):
    Devices(monkeypatch, Link(1e-3, 1e9))
    link = measuring.measure_device_link(SENDER, RECEIVER)
    assert link.latency_s == pytest.approx(IDLE_S)
    assert link.overhead_s_per_byte == 0.0


def test_on_a_slow_link_no_overhead_is_measured(monkeypatch):
    """Messages would not be through before the computation is."""
    Devices(monkeypatch, Link(7e-3, 1e5, 1e-3))
    assert measuring.measure_overhead_s_per_byte(SENDER, RECEIVER, Link(7e-3, 1e5)) == 0.0


HOSTS = [f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in range(4)]


@pytest.fixture
def links(monkeypatch):
    """Measured between neighbours: which one is slow differs by what is asked."""
    between = {
        (HOSTS[0], HOSTS[1]): Link(3e-3, 2e6, 1e-9),
        (HOSTS[1], HOSTS[2]): Link(1e-3, 1e6, 2e-9),
        (HOSTS[2], HOSTS[3]): Link(2e-3, 3e6, 5e-9),
    }
    monkeypatch.setattr(measuring, "measure_device_link", lambda a, b: between[a, b])


def test_the_slowest_link_counts_for_all(links):
    assert measuring.link_between(HOSTS) == Link(3e-3, 1e6, 5e-9)
    assert measuring.link_between(HOSTS[1:3]) == Link(1e-3, 1e6, 2e-9)


def test_cpus_of_one_process_hand_over(links):
    cpus = [HOSTS[0], HOSTS[0].replace("CPU:0", "CPU:1")]
    assert measuring.link_between(cpus) == Link(30e-6)
    assert measuring.link_between(cpus[:1]) == Link(0.0)
    assert measuring.link_between([*reversed(cpus), HOSTS[1]]) == Link(3e-3, 2e6, 1e-9)


def test_cpus_of_one_host_share_its_cores(monkeypatch):
    monkeypatch.setattr(measuring, "usable_cores", lambda: 6)
    link, cpus = Link(1e-3, 1e9, 5e-10), [f"/job:worker/replica:0/task:{n}/device:CPU:0" for n in range(3)]
    shared = measuring.sharing_cores(link, cpus, ["a", "b", "a"])
    assert shared == Link(1e-3, 1e9, 5e-10, machines=(0, 1, 0), cores=6)
    # Messages take time from those that compute, which is counted on the cores where all share them.
    assert measuring.sharing_cores(link, cpus, ["a"] * 3) == Link(1e-3, 1e9, machines=(0, 0, 0), cores=6)
    assert measuring.sharing_cores(link, cpus, ["a", "b", "c"]) == link
    gpus = [name.replace("CPU", "GPU") for name in cpus]
    assert measuring.sharing_cores(link, gpus, ["a"] * 3) == link
