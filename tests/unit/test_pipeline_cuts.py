from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import MemoryLimitError, OptionsError
from tf_ooo.modes.by_name import Options
from tf_ooo.modes.pipeline.mesh import make_mesh
from tf_ooo.modes.pipeline.partition import Cutter, crossing_bytes, units_of
from tf_ooo.modes.pipeline.planning import SCHEDULES, PlanRequest, make_plan
from tf_ooo.modes.pipeline.reporting import _why, limits_of, section_of
from tf_ooo.planning.building.stages import merged
from tf_ooo.tracing.micro_batches import Division


def layer(seconds, output_bytes=0, inputs=None, **more):
    return LayerCosts(
        seconds,
        2 * seconds,
        3 * seconds,
        output_bytes=output_bytes,
        inputs=inputs,
        name=f"l{seconds}",
        **more,
    )


@pytest.mark.parametrize(
    ("rows", "least", "expected"),
    [
        (16, 1, (8, 8)),
        (15, 1, (15,)),
        (3, 1, (3,)),
        (20, 1, (10, 10)),
        (64, 1, (8,) * 8),
        (200, 1, (25,) * 8),
        (16, 4, (4, 4, 4, 4)),
        (3, 4, (1, 1, 1)),
    ],
)
def test_rows_that_a_micro_batch_has_at_least(rows, least, expected):
    assert Division(8, 8, least).split(rows) == expected


def test_units_stay_whole():
    assert units_of(5, [(1, 2), (2, 3)]) == ((0, 0), (1, 3), (4, 4))
    assert units_of(3, []) == ((0, 0), (1, 1), (2, 2))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_cuts_have_the_shortest_slowest_stage(stages):
    rng = np.random.default_rng(stages)
    layers = tuple(layer(float(s)) for s in rng.uniform(0.5, 3.0, size=9))
    cutter = Cutter(layers, units_of(9, []), Link(), 8)

    def slowest(bounds):
        return max(sum(x.forward_s for x in layers[a : b + 1]) for a, b in bounds)

    every = [
        tuple(itertools.pairwise((0, *ends, 9))) for ends in itertools.combinations(range(1, 9), stages - 1)
    ]
    best = min(slowest([(a, b - 1) for a, b in bounds]) for bounds in every)
    cut = cutter.cut(tuple(range(stages)))
    assert len(cut) == stages
    assert [a for a, _ in cut] == [0, *(b + 1 for _, b in cut[:-1])]
    assert slowest(cut) == pytest.approx(best)


def test_a_slow_link_moves_the_cut_to_where_little_is_sent():
    layers = (layer(1.0, 100), layer(1.0, 10_000), layer(1.0, 100), layer(1.3, 100))
    fast = Cutter(layers, units_of(4, []), Link(), 4).cut((0, 1))
    slow = Cutter(layers, units_of(4, []), Link(bytes_per_s=100), 4).cut((0, 1))
    assert fast == ((0, 1), (2, 3))
    assert slow == ((0, 2), (3, 3))


def test_a_skip_crosses_every_cut_that_it_spans():
    layers = (layer(1.0, 100), layer(1.0, 10), layer(1.0, 1, inputs=(1,)), layer(1.0, 1, inputs=(0, 2)))
    assert [crossing_bytes(layers, last) for last in range(3)] == [100, 110, 101]
    stages = merged(layers, ((0, 0), (1, 2), (3, 3)))
    assert [stage.inputs for stage in stages] == [(), (0,), (0, 1)]
    assert [stage.output_bytes for stage in stages] == [100, 1, 0]
    assert stages[1].weight_grad_s == 6.0


def test_the_report_says_what_a_cut_shares_and_sends():
    layers = (layer(1.0, 2000), layer(1.0, 3000), layer(4.0, 100))
    planned = make_plan(layers, units_of(3, []), PlanRequest("gpipe", 2, 4))
    assert planned.problem.bounds == ((0, 1), (2, 2))
    first, last = (_why(planned, stage, CostTable(layers)) for stage in range(2))
    assert first.startswith(
        "12.00 s of each micro-batch's forward and backward pass, an equal share would be 18.00 s; 3 kB cross"
    )
    assert last.endswith("l4.0 alone takes 24.00 s, and is not cut further")


def test_the_report_has_the_plans_seconds():
    """GPipe by hand: stage 1's forwards end at 9, its backward passes, 5 each, at 29; stage 0's at 34."""
    layers = (LayerCosts(1.0, 2.0, 3.0, update_s=0.5), LayerCosts(2.0, 1.0, 4.0, update_s=0.25))
    costs = CostTable(layers, link=Link(0.0, 1e9))
    planned = make_mesh(layers, units_of(2, []), PlanRequest("gpipe", 2, 4), (1,))
    rows = section_of(planned, costs, ["CPU:0", "CPU:1"])
    assert rows["predicted_step_s"] == 34.5
    assert rows["serial_step_s"] == 4 * (6.0 + 7.0) + 0.75
    # Two devices are idle in 34.5 s but for the seconds of the tasks.
    assert rows["predicted_bubble_fraction"] == pytest.approx((2 * 34.5 - 52.75) / (2 * 34.5))
    assert rows["link"] == {"latency_s": 0.0, "bytes_per_s": 1e9, "overhead_s_per_byte": 0.0}
    assert [row["seconds"] for row in rows["stages"]] == [
        {"F": 1.0, "dO": 2.0, "dW": 3.0, "U": 0.5},
        {"F": 2.0, "dO": 1.0, "dW": 4.0, "U": 0.25},
    ]
    assert [row["device"] for row in rows["stages"]] == ["CPU:0", "CPU:1"]


def test_more_stages_than_layers_say_so():
    with pytest.raises(OptionsError, match="3 stages are more than the 2 layers"):
        make_plan([layer(1.0), layer(2.0)], units_of(2, []), PlanRequest("gpipe", 3, 4))
    with pytest.raises(OptionsError, match="a loop stays whole"):
        make_plan([layer(1.0), layer(2.0)], units_of(2, [(0, 1)]), PlanRequest("gpipe", 2, 4))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_has_one_task_of_each_kind(schedule):
    rng = np.random.default_rng(3)
    layers = [layer(float(s), 10) for s in rng.uniform(0.5, 3.0, size=11)]
    planned = make_plan(layers, units_of(11, [(4, 5)]), PlanRequest(schedule, 3, 4, Link(1e-3, 1e6)))
    bounds = planned.problem.bounds
    assert bounds[-1][1] == 10
    assert not any(first == 5 for first, _ in bounds)
    devices = planned.schedule.device_of_stage
    assert set(devices) == {0, 1, 2}
    for kind in ("F", "dO", "dW"):
        found = [(t.stage, t.microbatch) for t in planned.schedule.tasks if t.kind == kind]
        assert sorted(found) == [(s, m) for s in range(len(bounds)) for m in range(4)]


def test_auto_takes_the_shortest_step_of_all():
    layers = [layer(s, 10, activation_bytes=5) for s in (1.0, 2.0, 1.5, 0.5, 1.0, 1.2, 0.7)]
    units, link = units_of(7, []), Link(1e-2, 1e4)
    auto = make_plan(layers, units, PlanRequest("auto", 2, 4, link))
    each = [make_plan(layers, units, PlanRequest(name, 2, 4, link)).step_s for name in SCHEDULES]
    assert auto.step_s == pytest.approx(min(each))
    assert auto.timeline.makespan_s == auto.step_s == auto.schedule.predicted_step_s
    assert {candidate.name for candidate in auto.candidates} >= {"gpipe", "zb_v", "modulo"}


def test_cuts_for_a_memory_limit():
    """The slow layer holds little: shared by time, the others do not fit one device."""
    layers = [layer(s, 0, weight_bytes=b) for s, b in ((1.0, 50), (1.0, 50), (1.0, 50), (3.0, 1))]
    units = units_of(4, [])
    free = make_plan(layers, units, PlanRequest("gpipe", 2, 4))
    assert free.problem.bounds == ((0, 2), (3, 3))
    assert max(free.timeline.peak_bytes) > 300
    tight = make_plan(layers, units, PlanRequest("gpipe", 2, 4, memory_limit_bytes=340))
    assert tight.problem.bounds == ((0, 1), (2, 3))
    assert max(tight.timeline.peak_bytes) <= 300


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=7), st.integers(1, 4))
def test_no_cut_has_a_less_full_stage(sizes, stages):
    layers = tuple(layer(1.0, 1, activation_bytes=a, weight_bytes=w) for a, w in sizes)
    stages = min(stages, len(layers))
    cutter = Cutter(layers, units_of(len(layers), []), Link(), 3)

    def fullest(bounds, kept):
        return max(
            sum(2 * x.weight_bytes + kept * x.activation_bytes for x in layers[a : b + 1]) for a, b in bounds
        )

    ends = itertools.combinations(range(len(layers) - 1), stages - 1)
    possible = [tuple(zip([0, *(e + 1 for e in one)], [*one, len(layers) - 1], strict=True)) for one in ends]
    cuts = cutter.cut_by_bytes((1.0,) * stages)
    for kept in (0, 1, 3):
        assert min(fullest(one, kept) for one in cuts) == min(fullest(one, kept) for one in possible)


def test_the_memory_limit_is_kept_or_named():
    layers = [layer(s, 10, activation_bytes=100, weight_bytes=7) for s in (1.0, 2.0, 1.5, 0.5)]
    units = units_of(4, [])
    free = make_plan(layers, units, PlanRequest("gpipe", 2, 8))
    assert max(free.timeline.peak_bytes) > 1000
    tight = make_plan(layers, units, PlanRequest("auto", 2, 8, memory_limit_bytes=720))
    assert max(tight.timeline.peak_bytes) <= 720
    with pytest.raises(MemoryLimitError) as error:
        make_plan(layers, units, PlanRequest("auto", 2, 8, memory_limit_bytes=50))
    least = make_plan(layers, units, PlanRequest("auto", 2, 8, memory_limit_bytes=error.value.smallest_bytes))
    # Measured peaks are up to an eighth above predicted ones.
    assert 1.125 * max(least.timeline.peak_bytes) <= error.value.smallest_bytes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"devices": 0}, "devices=0"),
        ({"devices": True}, "devices=True"),
        ({"devices": ["CPU:0", "disk"]}, "'disk' is no device name"),
        ({"devices": []}, "accepted: an int"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"chunks": 2}, "interleaved_1f1b"),
        ({"group": 2, "schedule": "gpipe"}, "modulo"),
    ],
)
def test_options_that_are_refused(options, said):
    with pytest.raises(OptionsError, match=said):
        Options(mode="pipeline", **options)


@pytest.mark.parametrize(
    "devices", [1, ["CPU:0"], ["/GPU:0", "/job:worker/replica:0/task:1/device:CPU:0"], "host1:22,host2:22"]
)
def test_devices_that_are_accepted(devices):
    assert Options(mode="pipeline", devices=devices).devices == devices


def test_a_stage_keeps_as_many_cores_busy_as_its_layers_on_average():
    layers = (
        LayerCosts(1, 4, 0, occupancy=(1.0, 0.5, 0.25)),
        LayerCosts(3, 1, 0, occupancy=(0.5, 1.0, 0.75)),
        LayerCosts(2, 2, 2, occupancy=(0.25, 0.5, 0.5)),
    )
    first, second = merged(layers, ((0, 1), (2, 2)))
    assert first.occupancy == pytest.approx(((1 + 1.5) / 4, (2 + 1) / 5, 0.5))
    assert second.occupancy == pytest.approx((0.25, 0.5, 0.5))
    unknown = dataclasses.replace(layers[0], occupancy=None)
    assert merged((unknown, *layers[1:]), ((0, 1), (2, 2)))[0].occupancy is None


def test_the_report_says_what_sharing_cores_costs():
    layers = tuple(LayerCosts(1, 1, 2, name=name, occupancy=(1, 1, 1)) for name in "ab")
    link = Link(1e-5, machines=(0, 0), cores=2)
    plan = make_mesh(layers, units_of(2, ()), PlanRequest("gpipe", 2, 4, link), (1,))
    costs = CostTable(layers, link)
    # 2 devices with all of the machine each: 4 * (1 + 1 + 2) s of both together, and no bubble is left.
    assert plan.step_s == pytest.approx(2 * 4 * 4, rel=1e-3)
    assert any(text.startswith("devices that share 2 cores 3") for text in limits_of(plan, costs))
    row = section_of(plan, costs, ["CPU:0", "CPU:1"]).link
    assert row.text() == "no limit, 0.01 ms each message; devices share the 2 cores of a machine"
    apart = dataclasses.replace(link, machines=())
    plan = make_mesh(layers, units_of(2, ()), PlanRequest("gpipe", 2, 4, apart), (1,))
    costs = CostTable(layers, apart)
    assert not any("share" in text for text in limits_of(plan, costs))
    assert section_of(plan, costs, ["CPU:0", "CPU:1"])["link"].get("cores") is None


def test_a_cut_along_branches_has_no_stage_of_two():
    """Branches have 6 and 4 equal layers, and one joins them: by time alone a stage has layers of both."""
    inputs = [(), *((i,) for i in range(5)), (), *((i,) for i in range(6, 9)), (5, 9)]
    layers = tuple(layer(1.0, inputs=read) for read in inputs)
    cutter = Cutter(layers, units_of(11, []), Link(), 4)
    by_time, along = cutter.cut((0, 1, 2, 3)), ((0, 2), (3, 5), (6, 7), (8, 10))
    assert any(first <= 5 < last for first, last in by_time)
    assert cutter.cut_along_branches((0, 1, 2, 3)) == (along,)
    assert cutter.cut_along_branches((0,)) == (), "fewer stages than branches"
    assert make_plan(layers, cutter.units, PlanRequest("1f1b", 4, 2, Link())).problem.bounds == along


def test_branches_that_take_less_than_half_a_stage_are_not_cut_along():
    inputs = [(), (0,), (1,), (), (2, 3), (4,), (5,), (6,)]  # the fourth layer is beside the first three
    layers = tuple(layer(1.0, inputs=read) for read in inputs)
    assert Cutter(layers, units_of(8, []), Link(), 4).cut_along_branches((0, 1)) == ()
    chain = tuple(layer(1.0) for _ in range(8))
    assert Cutter(chain, units_of(8, []), Link(), 4).cut_along_branches((0, 1, 2)) == ()
