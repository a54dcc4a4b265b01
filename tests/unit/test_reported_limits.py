"""Limits of memory that nobody asked for: whose they are, and what they change in a plan."""

from __future__ import annotations

import dataclasses

import pytest

from tf_ooo import LayerCosts
from tf_ooo.errors import MemoryLimitError
from tf_ooo.hosts.cluster import Devices
from tf_ooo.hosts.ranks.base import SingleEngine
from tf_ooo.hosts.system_memory import ReportedLimit
from tf_ooo.hosts.worker import Facts, limits_of_workers
from tf_ooo.modes.pipeline.mesh import make_mesh, mesh_within, on_best_devices
from tf_ooo.modes.pipeline.partition import units_of
from tf_ooo.modes.pipeline.planning import Limit, PlanRequest, limit_of

ADDRESSES = ("a:1", "b:2", "c:3", "d:4")


def facts(task, limit=None, group="", taken=0):
    return Facts(ADDRESSES, task, "2.21.0", "0.1.0", f"{task}", limit, group, taken)


def limits(workers, computing=None, own=None):
    by_task = {worker.task: worker for worker in workers}
    computing = dict.fromkeys(by_task, 1) if computing is None else computing
    return limits_of_workers(computing, by_task, facts(0) if own is None else own)


def test_each_worker_has_what_its_group_has_left():
    said = limits([facts(1, 1000, "x", 300), facts(2), facts(3, 900, "y", 50)])
    assert {task: limit.bytes for task, limit in said.items()} == {1: 700, 3: 850}
    assert (
        said[1].said == "worker b:2 (task 1) has a control group of 1000 bytes of which 300 were taken before"
    )


def test_processes_of_one_group_share_it():
    workers = [facts(1, 1000, "x", 100), facts(2, 1000, "x", 200)]
    assert [limit.bytes for limit in limits(workers).values()] == [350, 350]
    of_own = facts(0, 1000, "x", 400)
    first = limits(workers, own=of_own)[1]
    assert first.bytes == 150
    assert "1000 bytes, which 3 processes share, of which 700 were taken before" in first.said


def test_gpus_of_a_worker_are_not_limited_by_its_group():
    workers = [facts(1, 1000, "x", 100), facts(2, 1000, "y", 100)]
    assert [limit.said[:10] for limit in limits(workers, {1: 0, 2: 1}).values()] == ["worker c:3"]


def test_a_group_that_is_full_leaves_something_to_refuse():
    assert limits([facts(1, 1000, "x", 3000)])[1].bytes == 1


def test_what_a_worker_of_another_release_says():
    text = facts(1).to_text()
    assert Facts.from_text(text) == facts(1)
    assert Facts.from_text(text.replace('"taken_bytes": 0', '"colour": "red"')) == facts(1)


class Cards(Devices):
    """Two devices that report, and one that does not."""

    def __init__(self):
        super().__init__(("/device:GPU:0", "/device:GPU:1", "/device:CPU:0"))

    def memory_limits(self):
        first, second, _ = self.devices
        return {first: ReportedLimit(900, "the first"), second: ReportedLimit(800, "the second")}


@pytest.mark.parametrize(
    ("asked", "limit"),
    [
        (None, Limit(900, "the second", reported=True, less_bytes=(0, 100, 0))),
        (0, Limit()),
        (2000, Limit(2000, "as asked")),
        ((2000, 2000, 2000), Limit(2000, "as asked")),
        ((1000, 500, 2000), Limit(2000, "as asked", less_bytes=(1000, 1500, 0))),
    ],
)
def test_which_limit_is_taken(asked, limit):
    target = Cards()
    assert limit_of(asked, target, SingleEngine()) == limit


def test_cpus_of_this_process_report_nothing():
    assert limit_of(None, Devices(("/device:CPU:0", "/device:CPU:1")), SingleEngine()) == Limit()


class Ranks:
    size = 2

    def __init__(self, other):
        self._other = other

    def gather(self, mine):
        return [mine, self._other]


def test_ranks_take_the_least_of_all():
    target = Cards()
    own = limit_of(None, target, SingleEngine())
    assert limit_of(None, target, Ranks([None] * 3)) == own
    with_another = limit_of(None, target, Ranks([[700, "another"], None, [1000, "a third"]]))
    assert with_another == Limit(1000, "another", reported=True, less_bytes=(300, 200, 0))
    assert limit_of(2000, target, Ranks([[700, "another"], None, None])).bytes == 2000
    assert limit_of(None, Devices(Cards().devices), Ranks([[700, "another"]] * 3)).least_bytes == 700


LAYERS = tuple(
    LayerCosts(1.0, 1.0, 1.0, activation_bytes=50.0, weight_bytes=100.0, output_bytes=10.0, name=f"layer {i}")
    for i in range(4)
)
UNITS = units_of(len(LAYERS), [])
WANTED = PlanRequest("auto", 2, 8)


def mesh_of(limit, layers=LAYERS):
    wanted = dataclasses.replace(WANTED, memory_limit_bytes=limit.bytes, less_bytes=limit.less_bytes)
    return mesh_within(lambda asked: make_mesh(layers, UNITS, asked, (1,)), wanted, limit)


def test_a_limit_that_the_plan_keeps_changes_nothing():
    free = make_mesh(LAYERS, UNITS, WANTED, (1,))
    within = mesh_of(Limit(10 * free.peak_bytes, "a card", reported=True))
    assert within.plan.schedule == free.plan.schedule
    assert within.wanted == free.wanted


def test_a_plan_that_does_not_keep_it_is_made_anew():
    free = make_mesh(LAYERS, UNITS, WANTED, (1,))
    limit = Limit(int(0.95 * 9 / 8 * free.peak_bytes), "a card", reported=True)
    within = mesh_of(limit)
    assert within.peak_bytes * 9 / 8 <= limit.bytes < free.peak_bytes * 9 / 8
    assert limit.is_far_from(within.peak_bytes)
    assert not limit.is_far_from(free.peak_bytes)


def test_a_layer_that_no_device_holds_is_named_with_who_reports_the_limit():
    large = dataclasses.replace(LAYERS[1], weight_bytes=5000.0, name="wide")
    with pytest.raises(MemoryLimitError) as refused:
        mesh_of(Limit(1000, "worker b:2 says so", reported=True), (LAYERS[0], large, *LAYERS[2:]))
    said = str(refused.value)
    assert said.startswith(
        "memory_limit_bytes=1000 (worker b:2 says so; memory_limit_bytes=0 plans without a limit): even the "
    )
    assert "; wide alone takes " in said
    assert refused.value.smallest_bytes > 5000


def test_a_limit_that_was_asked_for_is_refused_as_ever():
    with pytest.raises(
        MemoryLimitError, match=r"^memory_limit_bytes=100: even the lowest peak needs \d+ bytes"
    ):
        mesh_of(Limit(100, "as asked"))


def test_a_limit_says_bytes_and_a_unit_beside_them():
    error = MemoryLimitError(2**31, 135_646_335, said="worker b:2 says so")
    assert str(error) == (
        "memory_limit_bytes=2147483648 (2.147 GB; worker b:2 says so): even the lowest peak needs 135646335 "
        "bytes (135.6 MB); raise the limit to at least 135646335 or use a smaller batch"
    )
    assert (error.limit_bytes, error.smallest_bytes) == (2**31, 135_646_335)
    assert "(" not in str(MemoryLimitError(1000, 2000))


def test_each_device_keeps_its_own_limit():
    """The fastest plan needs about as much on both; one of them has a third of it."""
    free = make_mesh(LAYERS, UNITS, WANTED, (1,))
    most, least = 2 * free.peak_bytes, int(0.75 * free.peak_bytes)
    for sizes in ((most, least), (least, most)):
        within = mesh_of(Limit.of_devices(sizes, "cards", reported=True))
        assert all(peak * 9 / 8 <= size for peak, size in zip(within.chosen.peak_bytes, sizes, strict=True))
        assert max(within.chosen.peak_bytes) > least
    with pytest.raises(MemoryLimitError):
        mesh_of(Limit(least, "cards", reported=True))


def test_devices_whose_limits_no_plan_keeps_are_told_how_much_more_would_do():
    limit = Limit.of_devices((900, 500), "cards")
    with pytest.raises(MemoryLimitError, match="the devices have 900, 500, and each would need") as refused:
        mesh_of(limit)
    more = refused.value.smallest_bytes - 900
    assert f"each would need {more} more" in str(refused.value)
    within = mesh_of(Limit.of_devices((900 + more, 500 + more), "cards"))
    assert all(map(int.__le__, within.chosen.peak_bytes, (900 + more, 500 + more)))


def test_a_replica_plans_with_the_smaller_device_of_each_place():
    wanted = dataclasses.replace(WANTED, devices=4, memory_limit_bytes=900, less_bytes=(0, 100, 300, 50))
    assert wanted.of_replica(2).less_bytes == (300, 100)
    assert wanted.among((1, 3)).less_bytes == (100, 50)


def test_without_the_smaller_of_devices_that_are_equally_fast():
    """Replicas hold all weights, for which one of three devices has no room."""
    whole = make_mesh(LAYERS, UNITS, dataclasses.replace(WANTED, devices=1), (1,)).peak_bytes
    limit = Limit.of_devices((3 * whole, whole // 20, 3 * whole), "cards")
    wanted = dataclasses.replace(
        WANTED, devices=3, memory_limit_bytes=limit.bytes, less_bytes=limit.less_bytes, microbatches=6
    )
    mesh = on_best_devices(LAYERS, UNITS, wanted)
    assert mesh.on == (0, 2)
