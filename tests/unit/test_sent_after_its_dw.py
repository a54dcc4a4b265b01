"""GPipe and 1F1B as they are: what a dO sends to the stage before waits for the dW beside it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tensorflow.core.framework import graph_pb2

from grappler_passes.graph.dependencies import GraphIndex
from tf_ooo import LayerCosts, Link, simulate
from tf_ooo.rewriting import staged as rewriting
from tf_ooo.rewriting.placing import one_pipeline
from tf_ooo.rewriting.plan import plan

COSTS = [LayerCosts(1, 2, 4, output_bytes=8), LayerCosts(1, 2, 4)]


def step_of(*rows):
    """``"name kind:layer: input"``."""
    graph, where = graph_pb2.GraphDef(), {}
    for row in rows:
        name, kind, inputs = row.split(" ", 2)
        graph.node.add(name=name, op="Tanh", input=inputs.split())
        task, _, layer = kind.partition(":")
        where[name] = task, int(layer), 0
    index = GraphIndex(graph)
    return SimpleNamespace(
        index=index,
        where=where,
        steps=[0] * len(index),
        turns=[0] * len(index),
        sizes={},
        count=1,
        sums=frozenset(),
        joined=frozenset(),
    )


def backward():
    """o1 is sent to stage 0; w1 reads the gradient that o1 is made of."""
    return step_of(
        "f0 F:0 ", "f1 F:1 f0", "a1 dO:1 f1", "o1 dO:1 a1", "w1 dW:1 a1", "o0 dO:0 o1", "w0 dW:0 o0"
    )  # fmt: skip


def scheduled(name):
    return plan(layers=COSTS, schedule=name, mode="pipeline", devices=2, microbatches=1, link=Link(0, 4))


@pytest.mark.parametrize(("name", "waits"), [("gpipe", True), ("1f1b", True), ("zb_h1", False)])
def test_in_the_graph(monkeypatch, name, waits):
    monkeypatch.setattr(rewriting, "place", lambda step, homes, sizes, replicas: {})
    placed = rewriting.StagedPlan(scheduled(name), None, one_pipeline([0, 1], ["/device:A", "/device:B"]), ())
    rewrite, _ = rewriting._rewrite_plan(backward(), placed)
    assert (("w1", "o1") in rewrite.edges) == waits
    assert (("o1", "w1") in rewrite.edges) == (not waits)
    assert len(rewrite.priorities) == 7


@pytest.mark.parametrize(("name", "sent_s"), [("gpipe", 10), ("1f1b", 10), ("zb_h1", 6)])
def test_in_the_simulation(name, sent_s):
    """F:0, 2 s on the link, F:1, dO:1 of 2 s; then dW:1 of 4 s, before or after."""
    messages = simulate(scheduled(name), COSTS, Link(0, 4)).messages
    assert [(m.source, m.target, m.start_s) for m in messages] == [(0, 1, 1), (1, 0, sent_s)]
