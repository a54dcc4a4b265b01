"""Passes that spoil a graph: what they make is refused, the stock step trains, and the bits are its own."""

from __future__ import annotations

import pytest

import tf_ooo
from grappler_passes.passes.base import PassResult
from grappler_passes.passes.rewrite_plan import OrderPass
from grappler_passes.passes.separate import SeparatePass
from tests import zoo
from tests.same_bits import Training, assert_ordered, assert_same_bits


@pytest.fixture(scope="module")
def training():
    return Training(lambda: zoo.compiled(zoo.mlp), "mlp")


def drop_an_update(graph_def):
    """A weight would keep its value, and nothing else would change."""
    updates = [node.name for node in graph_def.node if node.op == "AssignSubVariableOp"]
    kept = [node for node in graph_def.node if node.name != updates[-1]]
    for node in kept:
        inputs = [text for text in node.input if text != f"^{updates[-1]}"]
        node.ClearField("input")
        node.input.extend(inputs)
    kept = [type(node).FromString(node.SerializeToString()) for node in kept]
    graph_def.ClearField("node")
    graph_def.node.extend(kept)


def swap_the_inputs_of_a_weight_gradient(graph_def):
    node = next(n for n in graph_def.node if n.op in ("MatMul", "_FusedMatMul") and is_weight_gradient(n))
    node.input[0], node.input[1] = node.input[1], node.input[0]


def close_a_cycle(graph_def):
    """The op that computes dW waits for one that reads it."""
    node = next(n for n in graph_def.node if is_weight_gradient(n) and n.op == "MatMul")
    reader = next(n for n in graph_def.node if node.name in n.input)
    node.input.append(f"^{reader.name}")


def is_weight_gradient(node):
    return node.attr["_ooo_kind"].s == b"dW"


SPOILING = [drop_an_update, swap_the_inputs_of_a_weight_gradient, close_a_cycle]


@pytest.fixture(params=SPOILING, ids=lambda spoil: spoil.__name__)
def spoiled(request, monkeypatch):
    """The order pass does its work and spoils the graph; the calls of what spoils it."""
    run, calls = OrderPass.run, []

    def spoiling(self, graph_def, training_graph):
        result = run(self, graph_def, training_graph)
        request.param(result.graph_def)
        calls.append(request.param)
        return PassResult(result.graph_def, True, result.notes)

    monkeypatch.setattr(OrderPass, "run", spoiling)
    return calls


def test_the_stock_step_trains_and_the_report_says_why(training, spoiled, caplog):
    ours = training.ours(strict=False)
    assert spoiled
    assert ours.report.fell_back
    assert "verify" in ours.report.fallback_reason
    assert_same_bits(training.stock, ours.trained)
    said = [record for record in caplog.records if "verify" in record.getMessage()]
    assert len(said) == 1


def test_strict_raises(training, spoiled):
    with pytest.raises(tf_ooo.PassError, match="verify"):
        training.ours()
    assert spoiled


def take_out(graph_def, name):
    """The op goes and who read it reads what it read: all shapes fit, the gradients are wrong."""
    gone = next(node for node in graph_def.node if node.name == name)
    kept = [node for node in graph_def.node if node.name != name]
    for node in kept:
        inputs = [gone.input[0] if text.split(":")[0] == name else text for text in node.input]
        node.ClearField("input")
        node.input.extend(inputs)
    kept = [type(node).FromString(node.SerializeToString()) for node in kept]
    graph_def.ClearField("node")
    graph_def.node.extend(kept)


@pytest.mark.parametrize("strict", [False, True])
def test_what_the_first_pass_does_must_be_declared(training, monkeypatch, strict):
    """An op of the step as it came is gone, and the pass that took it out does not say so."""
    run, calls = SeparatePass.run, []

    def spoiling(self, graph_def, training_graph):
        after = type(graph_def).FromString(run(self, graph_def, training_graph).graph_def.SerializeToString())
        calls.append(next(node.name for node in after.node if node.op in ("ReluGrad", "TanhGrad")))
        take_out(after, calls[-1])
        return PassResult(after, modified=True)

    monkeypatch.setattr(SeparatePass, "run", spoiling)
    if strict:
        with pytest.raises(tf_ooo.PassError, match="verify.*Grad was dropped and no pass says"):
            training.ours()
        return
    ours = training.ours(strict=False)
    assert calls
    assert ours.report.fell_back
    assert f"'kept' broken at node '{calls[0]}'" in ours.report.fallback_reason
    assert_same_bits(training.stock, ours.trained)


def test_the_same_training_is_rewritten_where_nothing_spoils_it(training):
    assert_same_bits(training.stock, training.plain.trained)
    assert_ordered(training.plain.report)
