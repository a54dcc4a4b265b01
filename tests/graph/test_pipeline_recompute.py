"""Layers of a pipeline that run their forward again, on two logical devices: the same bits."""

from __future__ import annotations

import dataclasses

import pytest
import tensorflow as tf

import tf_ooo
from grappler_passes.errors import PassError
from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.passes.repeat import REPEATS_ATTR, RepeatPass, repeats
from tests.graph.pipeline_fits import Training, assert_equal_bits, assert_same_bits, fits_of, pipelined
from tests.graph.pipeline_models import EVEN, IMAGES, UNEVEN, momentum, normal, whole
from tests.zoo import keras
from tf_ooo.modes.pipeline import tasks_of
from tf_ooo.planning.model.schedule import Task

pytestmark = [pytest.mark.devices(2), pytest.mark.takes(60)]
layers = keras.layers


def smooth():
    """Normalized, with activations whose input is kept, and a sum beside them."""
    inputs = keras.Input((7,))
    x = layers.Dense(48)(inputs)
    for width in (40, 56, 48):
        y = layers.Dense(width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.add([x, layers.Dense(48, activation="tanh")(y)])
    return keras.Model(inputs, layers.Dense(3)(x))


def convolutional():
    """With statistics of the batch, which are updated once, and random numbers, which are drawn once."""
    inputs = keras.Input((9, 9, 2))
    x = inputs
    for width in (6, 8, 10):
        x = layers.Conv2D(width, 3, padding="same")(x)
        x = layers.Activation("swish")(layers.BatchNormalization()(x))
        x = layers.Dropout(0.2)(x)
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


def recurrent():
    inputs = keras.Input((6, 5))
    x = layers.Dense(24, activation="gelu")(inputs)
    x = layers.LSTM(12)(layers.Dense(16, activation="gelu")(x))
    return keras.Model(inputs, layers.Dense(3)(layers.Dense(24, activation="gelu")(x)))


@pytest.fixture(name="training", scope="module")
def _training():
    return Training(smooth, momentum, EVEN, epochs=3)


@pytest.fixture(name="plain", scope="module")
def _plain(training):
    return fits_of(training, "gpipe", "zb_h1")


@pytest.fixture(name="again", scope="module")
def _again(training):
    return fits_of(training, "gpipe", "1f1b", "zb_h1", "zb_v", recompute="all")


def named_again(fits):
    return {f"{name} again": fitted for name, fitted in fits.items()}


def repeated_tasks(report):
    """The task of each op that runs again."""
    tasks = tasks_of(report.rewritten_graph)
    return {name: tasks[name] for name in repeats(report.rewritten_graph)}


def test_the_same_bits(training, plain, again):
    fits = {**plain, **named_again(again)}
    assert_same_bits(training, fits, far=1e-5, weights_everywhere=False)
    for fitted in again.values():
        assert fitted.report.pipeline.recomputed
        assert fitted.report.planned.recompute
        assert not plain["gpipe"].report.planned.recompute


def test_what_runs_again_is_part_of_dO(again):
    """Each op that is repeated is there once as F and once as dO of its stage and micro-batch."""
    for fitted in again.values():
        report = fitted.report
        nodes = {node.name: node for node in report.rewritten_graph.node}
        tasks, copies = tasks_of(report.rewritten_graph), repeats(report.rewritten_graph)
        assert len(copies) > 4 * 10
        for copy, original in copies.items():
            first = tasks[original]
            assert first.kind == "F"
            assert tasks[copy] == dataclasses.replace(first, kind="dO")
            assert nodes[copy].op == nodes[original].op
            assert nodes[copy].device == nodes[original].device
        assert {task.microbatch for task in repeated_tasks(report).values()} == set(range(4))


def test_it_waits_for_the_backward_pass(again):
    """In GPipe no op runs again before the last forward of its device has begun."""
    report = again["gpipe"].report
    graph = report.rewritten_graph
    index, tasks = GraphIndex(graph), tasks_of(graph)
    forward = [Task("F", stage, 3) for stage in (0, 1)]
    last = {
        task.stage: [name for name, other in tasks.items() if other == task and index.preds(index.of(name))]
        for task in forward
    }
    for name, task in repeated_tasks(report).items():
        assert any(index.implied(before, name) for before in last[task.stage]), name


def test_mode_auto_under_a_limit(training, plain):
    """Given devices, it lets layers run again where no schedule keeps the limit otherwise."""

    def chosen(limit, **options):
        given = {"devices": 2, "microbatches": 4, "replicas": 1, "fall_back": False, **options}
        return tf_ooo.OOOBackprop(memory_limit_bytes=limit, **given)

    with pytest.raises(tf_ooo.MemoryLimitError) as refused:
        training.piped(chosen(1000, recompute="none"))
    limit = refused.value.smallest_bytes - 200
    with pytest.raises(tf_ooo.MemoryLimitError):
        training.piped(chosen(limit, recompute="none"))
    fitted = training.piped(chosen(limit))
    assert fitted.report.planned.recompute
    assert_equal_bits(fitted.weights, plain["gpipe"].weights)


def test_auto_under_a_limit(training, plain):
    """Only as many as the limit needs; without a limit none."""
    free = max(plain["gpipe"].report.pipeline["predicted_peak_bytes"])
    limit = int((free - 1000) * 9 / 8)
    with pytest.raises(tf_ooo.MemoryLimitError):
        training.piped(pipelined("gpipe", memory_limit_bytes=limit))
    some = training.piped(pipelined("gpipe", memory_limit_bytes=limit, recompute="auto"))
    every = training.piped(pipelined("gpipe", recompute="all"))
    assert 0 < len(some.report.planned.recompute) < len(every.report.planned.recompute)
    assert max(some.report.pipeline["predicted_peak_bytes"]) <= limit * 8 / 9
    assert_equal_bits(some.weights, plain["gpipe"].weights)
    assert "gpipe recomputes" in some.report.summary()
    none = training.piped(pipelined("gpipe", recompute="auto"))
    assert none.report.planned.recompute == ()
    assert not repeats(none.report.rewritten_graph)


def test_a_file_says_which(training, plain, again, tmp_path):
    """A file names what runs again, as a report planned it; a layer that does not exist is refused."""
    report = again["zb_h1"].report
    planned = report.planned
    assert tf_ooo.simulate(planned, report.costs).makespan_s == pytest.approx(report.predicted_step_s)
    (tmp_path / "mine.txt").write_text(planned.to_text())
    fitted = training.piped(pipelined(tmp_path / "mine.txt"))
    assert fitted.report.planned.recompute == planned.recompute
    assert repeats(fitted.report.rewritten_graph) == repeats(report.rewritten_graph)
    assert_equal_bits(fitted.weights, plain["zb_h1"].weights)
    beyond = dataclasses.replace(planned, stages=(), recompute=(99,)).to_text()
    (tmp_path / "mine.txt").write_text(beyond)
    with pytest.raises(tf_ooo.ScheduleError, match=r"recompute 99: the model has \d+ layers, from 0"):
        training.fit(pipelined(tmp_path / "mine.txt"))
    with pytest.raises(tf_ooo.ScheduleError, match="recompute='all': the file's 'recompute' line says"):
        training.fit(pipelined(tmp_path / "mine.txt", recompute="all"))


@pytest.mark.parametrize("make", [convolutional, recurrent])
def test_states_random_numbers_and_loops(make):
    """Statistics move once; masks are those of the forward; a loop does not run again."""
    data = (IMAGES, whole(3, 48)) if make is convolutional else (normal(48, 6, 5), whole(3, 48))
    training = Training(make, momentum, data, epochs=2)
    fits = fits_of(training, "gpipe", "1f1b")
    fits |= named_again(fits_of(training, "gpipe", "zb_h1", recompute="all"))
    assert_same_bits(training, fits, far=None, weights_everywhere=False)
    report = fits["gpipe again"].report
    copied = {node.op for node in report.rewritten_graph.node if REPEATS_ATTR in node.attr}
    assert copied
    never = ("Random", "Assign", "Variable", "Enter", "Merge")
    assert not [op for op in copied if any(word in op for word in never)]


def test_smaller_last_batches():
    training = Training(smooth, momentum, UNEVEN, epochs=2)
    fits = fits_of(training, "gpipe") | named_again(fits_of(training, "gpipe", "1f1b", recompute="all"))
    assert_same_bits(training, fits, far=None, weights_everywhere=False)


def test_mixed_precision():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        training = Training(smooth, momentum, EVEN, epochs=2)
        fits = fits_of(training, "gpipe") | {"again": fits_of(training, "gpipe", recompute="all")["gpipe"]}
        assert_equal_bits(fits["gpipe"].weights, fits["again"].weights)
        assert repeats(fits["again"].report.rewritten_graph)
    finally:
        keras.mixed_precision.set_global_policy("float32")


class TestThePass:
    @pytest.fixture
    def graph(self):
        @tf.function(input_signature=[tf.TensorSpec((3,))])
        def forward(x):
            a = tf.tanh(x, name="a")
            b = tf.exp(a, name="b")
            return tf.add(b, tf.random.normal((3,), name="noise"), name="reader")

        return forward.get_concrete_function().graph.as_graph_def()

    def test_copies_and_readers(self, graph):
        result = RepeatPass(frozenset({"a", "b"}), frozenset({"reader"}))(graph)
        nodes = {node.name: node for node in result.graph_def.node}
        assert list(nodes["b/repeated"].input) == ["a/repeated"]
        assert nodes["reader"].input[0] == "b/repeated"
        assert list(nodes["b"].input) == ["a"]
        assert repeats(result.graph_def) == {"a/repeated": "a", "b/repeated": "b"}
        assert result.replaced == {"reader"}
        copied = RepeatPass(frozenset({"b"}), frozenset({"reader"}))(graph).graph_def
        assert list({node.name: node for node in copied.node}["b/repeated"].input) == ["a"]

    def test_nothing_to_do(self, graph):
        assert not RepeatPass(frozenset(), frozenset())(graph).modified

    def test_what_has_a_state_is_refused(self, graph):
        (noise,) = (node.name for node in graph.node if node.op == "RandomStandardNormal")
        with pytest.raises(PassError, match="a RandomStandardNormal cannot be repeated"):
            RepeatPass(frozenset({noise}), frozenset({"reader"}))(graph)
        with pytest.raises(PassError, match="is not in the graph"):
            RepeatPass(frozenset({"c"}), frozenset({"reader"}))(graph)

    def test_a_copy_that_differs_is_noticed(self, graph):
        class Wrong(RepeatPass):
            def _copy(self, node):
                copy = super()._copy(node)
                if node.op == "Exp":
                    copy.op = "Log"
                return copy

        with pytest.raises(PassError, match="is not what it repeats"):
            Wrong(frozenset({"a", "b"}), frozenset({"reader"}))(graph)
