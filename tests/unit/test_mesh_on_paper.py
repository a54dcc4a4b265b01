"""Replicas of a pipeline: how many are taken, what their step takes, what each holds and reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.core.framework import graph_pb2

from grappler_passes.errors import PassError
from grappler_passes.passes.sending import ReadOncePass
from tf_ooo import LayerCosts, Link, OptionsError, simulate
from tf_ooo.errors import MemoryLimitError
from tf_ooo.modes.pipeline.mesh import counts_of, make_mesh, with_whole_parts
from tf_ooo.modes.pipeline.partition import units_of
from tf_ooo.modes.pipeline.planning import PlanRequest, make_plan
from tf_ooo.planning.choosing.figures import StageShare, held_evenly, side_by_side
from tf_ooo.planning.model.task import replica_of_part

EVEN = tuple(LayerCosts(1.0, 1.0, 1.0, weight_bytes=100.0) for _ in range(4))
ONE_LARGE = (LayerCosts(9.0, 9.0, 9.0, weight_bytes=1e6), *EVEN[:3])


def mesh_of(layers, devices, microbatches, replicas, **more):
    wanted = PlanRequest("auto", devices, microbatches, **more)
    return make_mesh(layers, units_of(len(layers), []), wanted, counts_of(replicas, devices, microbatches))


@given(st.integers(1, 40), st.integers(1, 9))
def test_each_replica_has_neighbours_and_about_as_many(microbatches, replicas):
    of_part = replica_of_part(microbatches, replicas)
    shares = [of_part.count(number) for number in range(replicas)]
    assert len(of_part) == microbatches
    assert list(of_part) == sorted(of_part)
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize(
    ("asked", "devices", "microbatches", "counts"),
    [
        (None, 4, 8, (1,)),
        (2, 4, 8, (2,)),
        ("auto", 4, 8, (1, 2, 4)),
        ("auto", 6, 2, (1, 2)),
        ("auto", 1, 8, (1,)),
    ],
)
def test_how_many_replicas_are_tried(asked, devices, microbatches, counts):
    assert counts_of(asked, devices, microbatches) == counts


def test_replicas_that_cannot_be():
    with pytest.raises(
        OptionsError, match="replicas=3: 4 devices cannot be dealt out evenly.*accepted: 1, 2, 4"
    ):
        counts_of(3, 4, 8)
    with pytest.raises(OptionsError, match="replicas=4 share microbatches=2.*take microbatches=4"):
        counts_of(4, 4, 2)


def test_a_layer_that_no_cut_divides_is_replicated():
    """Nine tenths of the work in one layer: two stages take nearly as long as one device, replicas half."""
    cut, both = mesh_of(ONE_LARGE, 2, 4, 1), mesh_of(ONE_LARGE, 2, 4, "auto")
    assert cut.step_s >= 4 * 27
    assert both.replicas == 2
    assert both.step_s == pytest.approx(2 * 36)
    assert [row.count for row in both.tried] == [1, 2]


def test_a_slow_link_keeps_weights_where_they_are():
    """A megabyte at 10 kB/s is 100 s, sent or received twice; the outputs are small."""
    slow = Link(0.0, 1e4)
    chosen = mesh_of(ONE_LARGE, 2, 4, "auto", link=slow)
    assert chosen.replicas == 1
    replicated = mesh_of(ONE_LARGE, 2, 4, 2, link=slow)
    assert replicated.chosen.exchange_s == pytest.approx(1.0003e6 / 1e4, rel=1e-3)
    assert replicated.step_s == pytest.approx(2 * 36 + replicated.chosen.exchange_s)


def stage_share(weight_bytes, stage_bytes, replicas, **more):
    values = {"slot_bytes": 0.0, "update_s": 0.0, "largest_bytes": weight_bytes, "replicas": replicas}
    return StageShare(weight_bytes, stage_bytes, **(values | more))


def test_where_all_hold_the_same_as_much_is_exchanged_as_in_a_ring():
    link = Link(0.0, 1e6)
    assert stage_share(2e6, 8e6, 4).exchange_s(link) == pytest.approx(link.allreduce_s(8e6, 4))
    assert stage_share(8e6, 8e6, 1).exchange_s(link) == 0
    with_overhead = Link(0.0, 1e6, overhead_s_per_byte=1e-7)
    assert stage_share(4e6, 8e6, 2).exchange_s(with_overhead) == pytest.approx(8 + 2 * 8e6 * 1e-7)


def test_who_holds_all_of_a_stage_is_sent_the_gradients_of_all_others():
    assert stage_share(8e6, 8e6, 4).exchange_s(Link(0.0, 1e6)) == pytest.approx(3 * 8)
    assert stage_share(8e6, 8e6, 4, slot_bytes=16e6).bytes == 16e6 + 3 * 8e6
    assert stage_share(0.0, 8e6, 4).bytes == 0


def test_one_large_layer_is_updated_and_held_by_one_device():
    """Planned seconds and bytes are those of the device that has most to do."""
    table = LayerCosts(1.0, 1.0, 1.0, update_s=8.0, weight_bytes=1e6, slot_bytes=2e6)
    layers = (table, LayerCosts(1.0, 1.0, 1.0, update_s=1.0, weight_bytes=1e3))
    mesh = mesh_of(layers, 4, 4, 4)
    assert mesh.step_s == pytest.approx(2 * 3 + 8)
    # The weights, its own gradient, slots, the others' gradients, a sum of two.
    assert max(mesh.chosen.peak_bytes) == pytest.approx(1e6 + 1e6 + 2e6 + 3e6 + 1e6, rel=0.01)
    with pytest.raises(MemoryLimitError) as refused:
        mesh_of(layers, 4, 4, 4, memory_limit_bytes=6_000_000)
    kept = mesh_of(layers, 4, 4, "auto", memory_limit_bytes=refused.value.smallest_bytes)
    assert max(kept.chosen.peak_bytes) * 9 / 8 <= refused.value.smallest_bytes


def test_the_stages_of_one_device_are_held_by_all_replicas():
    """With groups of one layer each of which is a stage, not all of them by the first."""
    layers = [LayerCosts(1.0, 1.0, 1.0, weight_bytes=1e6, slot_bytes=2e6) for _ in range(8)]
    wanted = PlanRequest("modulo", 4, 8, options={"group": 1})
    assert sorted(make_mesh(layers, units_of(8, []), wanted, (4,)).chosen.holders) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_side_by_side_each_replica_takes_as_long_as_alone():
    layers = tuple(LayerCosts(1.0 + n, 2.0, 0.5 * n + 0.5, update_s=0.25) for n in range(4))
    plan = make_plan(layers, units_of(4, []), PlanRequest("1f1b", 2, 4))
    schedule, costs = side_by_side(plan.schedule, [plan.problem.layers] * 3)
    alone = simulate(plan.schedule, list(plan.problem.layers), Link())
    timeline = simulate(schedule, list(costs), Link())
    assert schedule.devices == 6
    assert len(schedule.tasks) == 3 * len(plan.schedule.tasks)
    assert timeline.makespan_s == alone.makespan_s
    ends = timeline.end_s[0].reshape(3, -1)
    assert (ends == ends[0]).all()


def test_replicas_share_the_cores_of_their_machine():
    """Four devices on one core have a quarter of it each, whatever they run."""
    layers = tuple(LayerCosts(1.0, 1.0, 1.0, occupancy=(1, 1, 1)) for _ in range(4))
    link = Link(machines=(0, 0, 0, 0), cores=1)
    assert mesh_of(layers, 4, 8, 4, link=link).step_s == pytest.approx(8 * 12)
    assert mesh_of(layers, 4, 8, 2, link=link).step_s == pytest.approx(8 * 12)


def test_with_a_limit_of_memory_replicas_that_do_not_fit_are_refused_with_the_reason():
    heavy = tuple(LayerCosts(1.0, 1.0, 1.0, weight_bytes=1000.0, activation_bytes=10.0) for _ in range(4))
    chosen = mesh_of(heavy, 4, 8, "auto", memory_limit_bytes=5000)
    reasons = {row.count: row.reason for row in chosen.tried}
    assert "memory" in reasons[4]
    assert chosen.replicas < 4
    with pytest.raises(MemoryLimitError):
        mesh_of(heavy, 4, 8, 4, memory_limit_bytes=5000)


def test_replicas_of_one_device_have_one_micro_batch_each_where_it_fits():
    layers = tuple(LayerCosts(1.0, 1.0, 1.0, weight_bytes=10.0, activation_bytes=100.0) for _ in range(4))
    units = units_of(len(layers), [])
    small = mesh_of(layers, 4, 8, 4)
    whole = with_whole_parts(small, layers, units)
    assert (whole.wanted.microbatches, whole.replicas, whole.larger) == (4, 4, 2.0)
    assert whole.plan.schedule.microbatches == 1
    assert whole.step_s == pytest.approx(small.step_s)
    assert whole.tried == (whole.chosen,)
    # Four layers' activations of one micro-batch fit, those of two do not.
    limited = mesh_of(layers, 4, 8, 4, memory_limit_bytes=700)
    assert with_whole_parts(limited, layers, units) is limited
    # Whole parts fit where forward passes run again, and take longer for it.
    again = mesh_of(layers, 4, 8, 4, memory_limit_bytes=700, recompute="auto")
    assert with_whole_parts(again, layers, units) is again
    pipelines = mesh_of(layers, 4, 8, 2)
    assert with_whole_parts(pipelines, layers, units) is pipelines


def test_the_same_plan_with_other_costs():
    chosen = mesh_of(ONE_LARGE, 2, 4, 2)
    slower = chosen.with_costs([layer.scaled(2) for layer in ONE_LARGE])
    assert slower.step_s == pytest.approx(2 * chosen.step_s)
    assert slower.chosen.holders == chosen.chosen.holders
    assert slower.plan.trial.schedule.lanes == chosen.plan.trial.schedule.lanes


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1e6)), min_size=1, max_size=12), st.integers(1, 4))
def test_replicas_hold_about_as_much_of_each_stage(layers, replicas):
    stages, sizes = [stage for stage, _ in layers], [size for _, size in layers]
    holders = held_evenly(stages, sizes, replicas)
    assert set(holders) <= set(range(replicas))
    for stage in set(stages):
        of_stage = [i for i in range(len(layers)) if stages[i] == stage]
        held = [sum(sizes[i] for i in of_stage if holders[i] == number) for number in range(replicas)]
        assert max(held) <= sum(held) / replicas + max(sizes[i] for i in of_stage)


def graph_of(*rows):
    graph = graph_pb2.GraphDef()
    for row in rows:
        head, _, inputs = row.partition(":")
        name, op = head.split()
        graph.node.add(name=name, op=op, input=inputs.split())
    return graph


READS = ("w _Arg:", "r0 ReadVariableOp: w", "r1 ReadVariableOp: w", "f Neg: r0", "g Neg: r1",
         "both AddN: f g", "write AssignVariableOp: w both")  # fmt: skip


def test_who_read_a_value_reads_that_of_the_op_that_stands_for_it():
    """The other read stays in front of the write, though nobody needs it."""
    result = ReadOncePass({"r1": "r0"})(graph_of(*READS))
    inputs = {node.name: list(node.input) for node in result.graph_def.node}
    assert inputs["g"] == ["r0"]
    assert inputs["r0"] == ["w", "^r1"]
    assert result.replaced == {"g"}


def test_only_reads_can_stand_for_each_other():
    with pytest.raises(PassError, match="'f' is no op that reads a variable"):
        ReadOncePass({"r1": "f"})(graph_of(*READS))
    assert not ReadOncePass({})(graph_of(*READS)).modified


def test_a_layer_that_no_device_can_hold_is_named_with_its_bytes():
    layers = (*EVEN, LayerCosts(1.0, 1.0, 1.0, weight_bytes=1e6, slot_bytes=2e6, name="table"))
    with pytest.raises(MemoryLimitError, match="table alone takes 4000000 bytes.*more devices do not help"):
        mesh_of(layers, 4, 8, 1, memory_limit_bytes=3_000_000)
    with pytest.raises(MemoryLimitError) as raised:
        mesh_of(layers, 1, 8, 1, memory_limit_bytes=4_100_000)
    assert "alone" not in str(raised.value)
