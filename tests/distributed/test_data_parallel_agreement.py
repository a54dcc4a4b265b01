"""A failure on one rank or on all keeps all in the stock order, is said, and costs no training."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf

from grappler_passes.passes.base import PassResult
from grappler_passes.passes.separate import SeparatePass
from grappler_passes.passes.steps import StepsPass
from tests.distributed import training as t
from tests.zoo import needs_keras_3
from tf_ooo.errors import GraphError
from tf_ooo.fit import comparison, timing
from tf_ooo.fit.comparison import STOCK
from tf_ooo.modes.data_parallel import ordering, planning, profiling, scheduled
from tf_ooo.planning.building.step_model import COMPUTE

pytest.importorskip("horovod", reason="Horovod is not installed; run: make horovod")
pytestmark = [needs_keras_3, pytest.mark.ranks(2), pytest.mark.takes(50)]

TOGETHER, STEPS = 2, 15
NAMED = {"schedule": "fast_forward", "profile_steps": 0}


def _model(together: int = TOGETHER) -> Any:
    layers = [keras.layers.Dense(16, activation="tanh") for _ in range(2)]
    model = keras.Sequential([keras.Input((12,)), *layers, keras.layers.Dense(4)])
    return t.compiled(model, t.momentum(), steps_per_execution=together)


@functools.cache
def _stock(rank: int) -> list[str]:
    model = _model(1)
    t.stock_in_apply(model, t.data(rank, STEPS * t.ROWS))
    return t.bits(model)


def _trained(engine: Any, model: Any = None, callbacks: Any = (), **options: Any) -> Any:
    """The report of a training that has the bits of stock Horovod on all ranks, and one decision."""
    model = model or _model()
    callback = t.ours(model, t.data(engine.rank, STEPS * t.ROWS), callbacks, options=options)
    report = callback.report
    assert t.bits(model) == _stock(engine.rank)
    assert t.equal_on_all_ranks(engine, model)
    assert len(set(engine.gather(report.fallback_reason))) == 1
    return report


def _other_input(graph_def: Any) -> None:
    """A difference of a number and itself."""
    node = next(node for node in graph_def.node if node.op == "Sub")
    node.input[1] = node.input[0]


def _other_op(graph_def: Any) -> None:
    next(node for node in graph_def.node if node.op == "TanhGrad").op = "SigmoidGrad"


def _other_attribute(graph_def: Any) -> None:
    next(node for node in graph_def.node if node.op == "HorovodAllreduce").attr["postscale_factor"].f = 2.0


def _no_communication(graph_def: Any) -> None:
    """A sum of gradients that no rank hears of."""
    node = next(node for node in graph_def.node if node.op == "HorovodAllreduce")
    node.op = "Identity"
    for name in [name for name in node.attr if name != "T"]:
        del node.attr[name]


def _lost_order(graph_def: Any) -> None:
    """Variables read before the step before has updated them."""
    for node in graph_def.node:
        if node.op == "ReadVariableOp":
            kept = [text for text in node.input if not text.startswith("^")]
            del node.input[:]
            node.input.extend(kept)


def _cycle(graph_def: Any) -> None:
    node = next(node for node in graph_def.node if node.op == "TanhGrad")
    producer = next(other for other in graph_def.node if other.name == node.input[1].split(":")[0])
    producer.input.append(f"^{node.name}")


# Each faulty pass does this to the ordered steps, and breaks this rule of verify.py.
FAULTS = {
    "other_input": (_other_input, "data inputs"),
    "other_op": (_other_op, "op"),
    "other_attribute": (_other_attribute, "attributes"),
    "no_communication": (_no_communication, "op"),
    "lost_order": (_lost_order, "side effects"),
    "cycle": (_cycle, "acyclic"),
}


def _plant(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Has the pass that orders all steps change the graph before it returns it."""
    run = StepsPass.run

    def faulty(*arguments: Any) -> PassResult:
        result = run(*arguments)
        change(result.graph_def)
        return result

    monkeypatch.setattr(StepsPass, "run", faulty)


@pytest.mark.parametrize("name", FAULTS)
def test_a_pass_that_changes_the_graph_is_refused(engine, monkeypatch, name):
    change, rule = FAULTS[name]
    _plant(monkeypatch, change)
    with t.warnings_of_tf_ooo() as lines:
        report = _trained(engine, **NAMED)
    assert report.fell_back
    assert f"rule {rule!r} broken" in report.fallback_reason
    assert any(report.fallback_reason in line for line in lines)
    assert report.added_edges == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pass_that_changes_the_graph_of_one_rank_keeps_all_in_the_stock_order(engine, monkeypatch, rank):
    if engine.rank == rank:
        _plant(monkeypatch, _other_input)
    with t.warnings_of_tf_ooo():
        report = _trained(engine, **NAMED)
    assert report.fell_back
    assert "data inputs" in report.fallback_reason


def test_a_pass_that_changes_the_graph_that_is_measured_is_refused(engine, monkeypatch):
    """The step as it is profiled, with ops taken apart as those of the ordered one will be."""

    def faulty(self: Any, graph_def: Any, training_graph: Any) -> PassResult:
        changed = type(graph_def)()
        changed.CopyFrom(graph_def)
        _other_input(changed)
        return PassResult(changed, modified=True)

    monkeypatch.setattr(SeparatePass, "run", faulty)
    with t.warnings_of_tf_ooo():
        report = _trained(engine, schedule="search")
    assert report.fell_back
    assert "the step was not profiled" in report.fallback_reason


def test_what_the_first_pass_does_must_be_declared(engine, monkeypatch):
    """It rewires an op of the steps as they came, and does not say so."""
    run = SeparatePass.run

    def spoiling(self: Any, graph_def: Any, training_graph: Any) -> PassResult:
        after = type(graph_def)()
        after.CopyFrom(run(self, graph_def, training_graph).graph_def)
        _other_input(after)
        return PassResult(after, modified=True)

    monkeypatch.setattr(SeparatePass, "run", spoiling)
    with t.warnings_of_tf_ooo():
        report = _trained(engine, **NAMED)
    assert report.fell_back
    assert "rule 'data inputs' broken" in report.fallback_reason


def test_a_pass_that_fails_on_one_rank_keeps_all_in_the_stock_order(engine, monkeypatch):
    def failing(*arguments: Any) -> Any:
        raise ValueError("made to fail")

    if engine.rank == 1:
        monkeypatch.setattr(ordering, "communication_edges", failing)
    with t.warnings_of_tf_ooo():
        report = _trained(engine, schedule="fast_forward")
    assert report.fell_back
    assert "made to fail" in report.fallback_reason


def _reverse_first_1(graph: Any) -> Any:
    return planning.plain_schedule(len(graph.layers), "reverse_first_k", 2, {"k": 1})


@pytest.mark.parametrize("strict", [False, True])
def test_a_rank_with_another_plan_is_noticed(engine, monkeypatch, strict):
    """Ranks that communicate in different orders could wait for one another for ever."""
    ordering_request = scheduled.request_to_order

    def other(model: Any, schedule_for: Any, *more: Any) -> Any:
        own = schedule_for if engine.rank == 0 else _reverse_first_1
        return ordering_request(model, own, *more)

    monkeypatch.setattr(scheduled, "request_to_order", other)
    options = {"schedule": "reverse_first_k", "k": 2, "profile_steps": 0}
    told = r"rank 1 has another graph than rank 0 \(1 of 2 have\)"
    if strict:
        with pytest.raises(GraphError, match=told):
            t.ours(_model(), t.data(engine.rank, STEPS * t.ROWS), options=options | {"strict": True})
        return
    with t.warnings_of_tf_ooo() as lines:
        report = _trained(engine, **options)
    assert report.fell_back
    assert "rank 1 has another graph than rank 0 (1 of 2 have)" in report.fallback_reason
    assert any("another graph" in line for line in lines)


@pytest.mark.parametrize("traced_later", [1, 2])
def test_another_plan_of_a_later_trace_is_noticed(engine, monkeypatch, traced_later):
    """The function of an execution that is longer, or shorter, than all before it is traced then.

    Epochs are one execution and one of another length: the first is the one that shows the layers.
    """
    ordering_request, later = scheduled.request_to_order, []

    def other(model: Any, schedule_for: Any, *more: Any) -> Any:
        def own(graph: Any) -> Any:
            return _reverse_first_1(graph) if later and engine.rank == 1 else schedule_for(graph)

        return ordering_request(model, own, *more)

    monkeypatch.setattr(scheduled, "request_to_order", other)
    together = scheduled.ScheduledSteps.__call__

    def calls(self: Any, batches: Any) -> Any:
        ordered = t.ordered_steps(self)
        if len(batches) == traced_later and ordered is not None and ordered.steps.traced:
            later.append(len(batches))
        return together(self, batches)

    monkeypatch.setattr(scheduled.ScheduledSteps, "__call__", calls)
    model = _model()
    steps = {1: 5, 2: 3}[traced_later]
    options = {"schedule": "reverse_first_k", "k": 2, "profile_steps": 0}
    with t.warnings_of_tf_ooo():
        callback = t.ours(model, t.data(engine.rank, steps * t.ROWS), options=options, epochs=3)
    assert later
    assert "rank 1 has another graph than rank 0 (1 of 2 have)" in callback.report.fallback_reason
    assert callback.report.fell_back
    assert t.equal_on_all_ranks(engine, model)


class Noisy(keras.layers.Layer):
    """Adds nothing, with the help of an op that keeps random numbers to itself."""

    def call(self, x: Any) -> Any:
        return x + 0.0 * tf.random.normal(tf.shape(x))


def test_a_step_that_draws_from_a_state_of_its_own_takes_no_turns(engine, quick_plans, monkeypatch, takes):
    """Though the planned order is faster: its ops would begin their random numbers anew."""
    takes.one_at_a_time(9.0, 9.0)
    takes.in_turns((3.0, 1.0), (3.0, 1.0))
    monkeypatch.setattr(planning, "make_plan", t.certain_plan)
    noisy = keras.Sequential([keras.Input((12,)), Noisy(), *_model().layers])
    model = t.compiled(noisy, t.momentum(), steps_per_execution=TOGETHER)
    with t.warnings_of_tf_ooo():
        report = _trained(engine, model, profile_steps=1, compare=True)
    assert report.fell_back
    assert "draws random numbers from a state of its own; name a schedule" in report.fallback_reason


def test_rank_0s_plan_is_taken(engine, quick_plans, monkeypatch):
    """Whatever another rank would have planned."""

    def ranks_own(layers: Any, link: Any, workers: int, *arguments: Any) -> Any:
        return t.gaining("reverse_first_k", layers, link, workers, k=2 if engine.rank == 0 else 1)

    monkeypatch.setattr(planning, "make_plan", ranks_own)
    report = _trained(engine, schedule="search", profile_steps=0)
    assert not report.fell_back, report.fallback_reason
    assert report.added_edges >= TOGETHER
    assert len(set(engine.gather(report.planned.to_text()))) == 1
    # dW of the first k layers come last, in the order in which the next step needs them.
    assert [task.stage for task in report.planned.lanes[COMPUTE] if task.kind == "dW"] == [2, 0, 1]


class Device:
    """Computes a step when somebody waits for it, so many seconds as a test has said; tells the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = self.step_s = 0.0
        monkeypatch.setattr(timing, "nests", SimpleNamespace(synchronize=self.wait_for))
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now_s))

    def wait_for(self, outputs: Any) -> None:
        assert outputs is not None
        self.now_s += self.step_s


@pytest.fixture
def takes(engine, monkeypatch):
    """Makes steps of a phase take so many seconds: of rank 0, of rank 1."""
    device = Device(monkeypatch)

    def one_at_a_time(*by_rank: float) -> None:
        profile_one = profiling.Profiling._profile_one

        def timed(self: Any, batch: Any) -> Any:
            device.step_s = by_rank[engine.rank]
            return profile_one(self, batch)

        monkeypatch.setattr(profiling.Profiling, "_profile_one", timed)

    def in_turns(*by_rank: tuple[float, float]) -> None:
        """A pair for each rank: in the stock order and in the planned one."""
        take_turn = scheduled.InTurns._take_turn

        def timed(self: Any, which: str, batches: Any) -> Any:
            device.step_s = by_rank[engine.rank][which != STOCK] * len(batches)
            return take_turn(self, which, batches)

        monkeypatch.setattr(scheduled.InTurns, "_take_turn", timed)

    return SimpleNamespace(one_at_a_time=one_at_a_time, in_turns=in_turns)


# Seconds of a step by rank, in the stock order and in the planned one; those of the slowest rank; whether the
# planned one is taken.
TIMES = {
    "slower_on_rank_1": (((2.0, 1.0), (2.0, 3.0)), (2.0, 3.0), False),
    "slower_on_rank_0": (((2.0, 3.0), (2.0, 1.0)), (2.0, 3.0), False),
    "faster_where_it_counts": (((2.0, 3.0), (4.0, 1.0)), (4.0, 3.0), True),
}


@pytest.mark.parametrize("name", TIMES)
def test_the_slowest_rank_counts(engine, quick_plans, monkeypatch, takes, name):
    """All ranks wait for it in every step; no more of them are compared than the test needs to be sure."""
    monkeypatch.setattr(comparison, "FASTER_LEVEL", 0.5)
    monkeypatch.setattr(comparison, "NO_GAIN_LEVEL", 0.5)
    seconds, slowest, kept = TIMES[name]
    takes.one_at_a_time(9.0, 9.0)
    takes.in_turns(*seconds)
    monkeypatch.setattr(planning, "make_plan", t.certain_plan)
    report = _trained(engine, compare=True)
    assert report.compared_steps == 4
    assert (report.stock_step_s, report.measured_step_s) == slowest
    assert report.fell_back is not kept
    assert kept or "measured 3.00 s a step against 2.00 s" in report.fallback_reason


# These are the same, and what is said, where one step at a time takes 1 s and 3 s.
ALONE_OR_TOGETHER = {
    "several_are_faster": ((2.0, 2.5), (2.0, 2.5), "measured 2.50 s a step against 2.00 s"),
    "one_is_faster": (
        (4.0, 4.5),
        (4.0, 4.5),
        "one step at a time took 3000.00 ms, several together 4000.00 ms",
    ),
    "one_is_faster_on_the_slowest": (
        (2.0, 2.5),
        (5.0, 5.5),
        "one step at a time took 3000.00 ms, several together 5000.00 ms",
    ),
}


@pytest.mark.parametrize("name", ALONE_OR_TOGETHER)
def test_the_slowest_rank_counts_where_no_order_is_predicted_to_gain(
    engine, quick_plans, monkeypatch, takes, name
):
    """The stock order is compared, with gradients that are handed over in turn."""
    monkeypatch.setattr(comparison, "FASTER_LEVEL", 0.5)
    monkeypatch.setattr(comparison, "NO_GAIN_LEVEL", 0.5)
    *seconds, said = ALONE_OR_TOGETHER[name]
    takes.one_at_a_time(1.0, 3.0)
    takes.in_turns(*seconds)
    monkeypatch.setattr(planning, "TRIED", 10.0)  # no plan is worth it
    report = _trained(engine, compare=True)
    assert report.fell_back
    assert report.compared_steps == 4
    assert said in report.fallback_reason
