"""Gains of dW beside the main stream, measured with compiled pieces of a step on whatever runs the tests."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers, utils

import tf_ooo
from grappler_passes.compat import runtime
from tests import zoo
from tf_ooo.compat import xla
from tf_ooo.costs.table import GainTable
from tf_ooo.errors import BackendError
from tf_ooo.modes.by_name import Options
from tf_ooo.modes.compiled import measuring, planning
from tf_ooo.modes.compiled.measuring import MeasuredGains, launch_s, piece_graph, piece_of, time_piece
from tf_ooo.modes.compiled.planning import capture_of, kernels_by_task
from tf_ooo.modes.compiled.rewrite import rewrite_step
from tf_ooo.modes.compiled.session import CompiledModule, StreamSession
from tf_ooo.modes.compiled.step import CompiledStep, StreamStep, Way
from tf_ooo.planning.model.schedule import Task

pytestmark = zoo.needs_xla_streams


def small_step():
    """A model of three dense layers, two of equal shape, its plain train step and a batch."""
    utils.set_random_seed(1)
    hidden = [layers.Dense(5, activation="relu") for _ in range(3)]
    model, x, y = zoo.stack(zoo.features(5), *hidden)
    optimizer = optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return model, step, tf.constant(x), tf.constant(y)


@pytest.fixture(scope="module")
def planned():
    """Return what a plan is asked with, for the small step."""
    seen = []

    def plan(what):
        seen.append(what)
        return planning.every_layer(what)

    _, step, x, y = small_step()
    session = StreamSession(Options(schedule="multi_stream", any_platform=True))
    CompiledStep(StreamStep(step, step, session, Way(functools.partial(rewrite_step, plan=plan))), (x, y), {})
    return seen[0]


def test_pieces_of_equal_layers_are_timed_once(planned):
    piece = functools.partial(piece_of, planned.step, planned.parts)
    kinds = {str(task): piece(task).kind for task in (Task("dW", n) for n in (1, 2, 3))}
    assert kinds["dW:1"] == kinds["dW:2"] != kinds["dW:3"]
    assert piece(Task("dO", 1)).kind != piece(Task("dO", 2)).kind, "through another layer's kernel"
    assert piece(Task("dW", 77)) is None


def test_a_piece_computes_what_the_step_does(planned):
    """dW beside a dO: the call is on a stream inside the loop, and nothing was taken out of the loop."""
    main, aside = (piece_of(planned.step, planned.parts, task) for task in (Task("dO", 1), Task("dW", 2)))
    graph_def, specs, fetches = piece_graph(planned.step, main, aside)
    runtime.register_functions(graph_def)
    run = xla.repeated_function(graph_def, specs, fetches, 3)
    hlo = xla.hlo_of(run, list(specs.values()), "optimized_hlo")
    inside = next(text for text in hlo.split("\n\n") if "opt-barrier" in text or "call(" in text)
    assert "while(" in hlo
    assert 1 in xla.stream_calls(hlo)
    assert hlo.count("while(") == 1
    assert inside
    given = [tf.random.stateless_uniform(spec.shape, (3, 4)) for spec in specs.values()]
    results = dict(zip(fetches, run(*given), strict=True))
    values = dict(zip(specs, given, strict=True))
    region = aside.regions[0]
    names = dict(zip(_ports(main, aside), values, strict=True))
    product = [values[names[port]].numpy() for port in region.inputs]
    dW = next(value for name, value in results.items() if name.startswith("ooo_dW_timed_0"))  # noqa: N806
    candidates = [a.T @ b for a in product for b in product if a.shape[0] == b.shape[0]]
    assert any(c.shape == dW.shape and np.allclose(c, dW, atol=1e-5) for c in candidates)


def _ports(main, aside):
    """The inputs in the order in which the piece's graph names them."""
    found = {}
    for region in (*aside.regions, *main.regions):
        found.update(dict.fromkeys(region.inputs))
    return list(found)


def test_the_stopwatch_runs_a_piece(planned):
    pieces = (piece_of(planned.step, planned.parts, task) for task in (Task("dO", 1), Task("dW", 2)))
    timing = time_piece(planned.step, *pieces)
    assert timing.seconds >= 0
    assert timing.spread_s >= 0
    assert launch_s() is not None


@pytest.mark.parametrize(("about_s", "rounds"), [(0.0, "_ROUNDS"), (1.0, "_FEW_ROUNDS")])
def test_the_stopwatch_divides_by_rounds(planned, monkeypatch, about_s, rounds):
    """Less what so many rounds of nothing take."""
    monkeypatch.setattr(measuring, "_sampled", lambda run, given: measuring.Timing(5.0, 0.3))
    monkeypatch.setattr(measuring, "_empty_s", lambda rounds: 1.0)
    count = getattr(measuring, rounds)
    main = piece_of(planned.step, planned.parts, Task("dO", 1))
    timing = time_piece(planned.step, main, about_s=about_s)
    assert (timing.seconds, timing.spread_s) == (4.0 / count, 0.3 / count)


class TestMeasured:
    def test_a_step_is_planned_with_what_was_measured(self, tmp_path):
        """On a CPU calls run one after the other: the report says what was found, the numbers stay."""
        weights = []
        for ours in (False, True):
            model, plain, x, y = small_step()
            step = tf.function(plain, jit_compile=True)
            if ours:
                step = tf_ooo.function(
                    plain, jit_compile=True, schedule="multi_stream", any_platform=True, strict=True,
                    profile_steps=0, measure_gains_s=60, timeline=tmp_path,
                )  # fmt: skip
            step(x, y)
            weights.append(model.get_weights())
        for one, two in zip(*weights, strict=True):
            np.testing.assert_allclose(one, two, atol=1e-6)
        table = step.report.gains
        assert table.saved_s.keys() - table.calculated, "nothing was measured"
        assert all(seconds >= 0 for seconds in table.alone_s.values())
        assert {"dW:1", "dW:2", "dW:3"} <= table.alone_s.keys()
        assert table.launch_s is not None
        (note,) = [note for note in step.report.notes if "measured on" in note]
        assert f"{len(table.saved_s) - len(table.calculated)} pairs" in note
        gains = any(seconds > 0 for seconds in table.saved_s.values())
        assert gains != any("no dW saves time" in note for note in step.report.notes)
        assert GainTable.load(tmp_path / "gains.json") == table

    def test_without_time_gains_are_calculated(self, planned):
        costs = planning.layer_costs(planned, "h100")
        table = MeasuredGains(1e-9)(planned, costs)
        assert table.saved_s
        assert table.calculated == table.saved_s.keys()
        assert "0 pairs" in table.notes[0]
        assert "there was no time to measure them" in table.notes[1]

    def test_the_next_step_s_forward_only_where_there_is_one(self, planned):
        costs = planning.layer_costs(planned, "h100")
        for delay in (False, True):
            regions = {region[0] for region, _ in MeasuredGains(1e-9, delay=delay)(planned, costs).saved_s}
            assert regions == ({"d", "F"} if delay else {"d"})

    def test_it_is_measured_once(self, planned):
        told = []
        gains = MeasuredGains(1e-9, told.append)
        costs = planning.layer_costs(planned, "h100")
        assert gains(planned, costs) is gains(planned, costs)
        assert len(told) == 1


class TestJoint:
    def test_nothing_gains(self, planned):
        with pytest.raises(BackendError, match="no dW saves time beside the main stream"):
            planning.joint(planned, gains=GainTable({("dO:1", 2): -1e-6}), must_gain=True)
        schedule = planning.joint(planned, gains=GainTable({("dO:1", 2): -1e-6}))
        assert set(schedule.lanes) == {(0, 0)}

    def test_without_a_next_step_the_best_place_of_this_one(self, planned):
        """The table's best place is beside the next step's forward; dW:3 waits for dO:2, not for nothing."""
        gains = GainTable({("F:1", 3): 1.0, ("dO:2", 3): 0.001, ("dO:1", 3): 0.2, ("dO:1", 2): -1.0})
        schedule = planning.joint(planned, gains=gains)
        assert schedule.after == ((Task("dW", 3), Task("dO", 2), 0),)
        assert [str(task) for task in schedule.lanes[0, 1] if task.kind == "dW"] == ["dW:3"]
        with pytest.raises(BackendError, match="no dW saves time"):
            planning.joint(planned, gains=GainTable({("F:1", 3): 1.0}), must_gain=True)

    def test_the_table_s_seconds_replace_calculated_ones(self, planned):
        costs = planning.layer_costs(planned, "h100")
        table = GainTable({}, alone_s={"dW:2": 2 * costs[2].weight_grad_s, "F:1": 2 * costs[1].forward_s})
        measured = planning.with_measured(costs, table)
        assert measured[2].weight_grad_s == pytest.approx(2 * costs[2].weight_grad_s)
        assert measured[3].output_grad_s == pytest.approx(2 * costs[3].output_grad_s), (
            "scaled like the others"
        )

    def test_launches_decide(self, planned):
        """A gain of 20 us is worth it, until the kernels that leave the CUDA graphs cost more."""
        gains = GainTable({("dO:1", 2): 2e-5})
        stock = CompiledModule(launches=40, in_graphs=40, graphs=1)
        plan = functools.partial(planning.joint, planned, gains=gains)
        assert (0, 1) in plan().lanes
        for longer_s, moved in ((1e-8, True), (1e-3, False)):
            capture = capture_of(planned, stock)
            slow = type(capture)(capture.kernels, longer_s)
            assert ((0, 1) in plan(capture=lambda _, slow=slow: slow).lanes) == moved

    def test_kernels_are_scaled_to_what_xla_made(self, planned):
        counted = kernels_by_task(planned)
        assert counted["dW:2"] >= 1
        stock = CompiledModule(launches=100, in_graphs=50, graphs=1)
        capture = capture_of(planned, stock)
        scale = 100 / sum(counted.values())
        assert capture.kernels["dW:2"] == pytest.approx(scale * counted["dW:2"])
        assert capture.launch_s == pytest.approx(0.5 * capture_of(planned, None).launch_s)
        assert capture_of(planned, CompiledModule(launches=100, in_graphs=0)) is None
        assert capture_of(planned, CompiledModule(total_bytes=7)) is None
