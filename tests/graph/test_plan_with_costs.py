"""From a graph and the seconds of its ops to a schedule with predictions, and back into the graph."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tf_ooo
from grappler_passes.analysis.classify import flatten
from grappler_passes.compat import runtime
from tests import zoo
from tf_ooo.costs.devices import device
from tf_ooo.costs.profile import op_seconds
from tf_ooo.errors import CostError, ScheduleError
from tf_ooo.rewriting.lowering import lower, task_ops


@pytest.fixture(scope="module")
def graph_and_seconds():
    model, x, y = zoo.SMALL["convolutions"]()
    model.compile("adam", zoo.keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    @tf.function
    def step(x, y):
        return model.train_step((x, y))

    concrete = step.get_concrete_function(*tf.nest.map_structure(tf.constant, (x, y)))
    return tf_ooo.classify(concrete), op_seconds(
        flatten(*runtime.graph_def_of(concrete)), device("cpu-core")
    ).seconds


@pytest.mark.parametrize("policy", ["in_order", "fast_forward", "auto"])
def test_one_device(graph_and_seconds, policy):
    graph, seconds = graph_and_seconds
    schedule = tf_ooo.plan(graph, seconds, schedule=policy)
    assert schedule.predicted_step_s > 0
    assert schedule.predicted_peak_bytes > 0
    assert {t for t in schedule.tasks if t.kind in ("dO", "dW")} == set(task_ops(graph).ops)
    assert len(lower(schedule, graph).edges) > 0


def test_costs_must_cover_the_graph(graph_and_seconds):
    graph, seconds = graph_and_seconds
    grad = graph.layers[0].weight_grad_ops[-1]
    with pytest.raises(CostError, match=grad.split("/")[-1]):
        tf_ooo.plan(graph, {name: s for name, s in seconds.items() if name != grad}, schedule="in_order")
    with pytest.raises(CostError, match="seconds by op name"):
        tf_ooo.plan(graph, {}, schedule="in_order")


def test_a_pipeline_of_a_graphs_layers(graph_and_seconds):
    graph, seconds = graph_and_seconds
    schedule = tf_ooo.plan(graph, seconds, schedule="1f1b", devices=2, microbatches=4)
    assert schedule.stages[-1][1] == len(graph.layers) - 1


def test_a_schedule_of_another_graph_is_refused(graph_and_seconds):
    graph, _ = graph_and_seconds
    with pytest.raises(ScheduleError, match="missing: "):
        lower(tf_ooo.Schedule.from_text("tf_ooo schedule v1\nmode m\npolicy p\nlane 0 0: dO:0 dW:0\n"), graph)
