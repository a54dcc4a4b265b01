"""Passes that spoil a compiled step: what they make is refused by name, and the stock step trains."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from xla_steps import ASKED, plain_step

import tf_ooo
from grappler_passes.passes.base import PassResult
from tests import zoo
from tf_ooo.modes.compiled.barriers import JoinPass
from tf_ooo.modes.compiled.outline import CALL_PREFIX

pytestmark = [zoo.needs_xla_streams]


def functions_of_calls(graph_def):
    return [f for f in graph_def.library.function if f.signature.name.startswith(CALL_PREFIX)]


def drop_an_update(graph_def):
    updates = [node for node in graph_def.node if node.op == "AssignSubVariableOp"]
    for node in graph_def.node:
        kept = [text for text in node.input if text != f"^{updates[-1].name}"]
        node.input[:] = kept
    graph_def.node.remove(updates[-1])


def update_by_another_gradient(graph_def):
    """Give an update another gradient of the same shape: two results of one join change places."""
    join = next(node for node in graph_def.node if node.name == "ooo_join_0")
    join.input[0], join.input[1] = join.input[1], join.input[0]


def swap_the_inputs_within_a_call(graph_def):
    node = next(n for f in functions_of_calls(graph_def) for n in f.node_def if n.op == "MatMul")
    node.input[0], node.input[1] = node.input[1], node.input[0]


def transpose_within_a_call(graph_def):
    node = next(n for f in functions_of_calls(graph_def) for n in f.node_def if n.op == "MatMul")
    node.attr["transpose_a"].b = not node.attr["transpose_a"].b


def close_a_cycle(graph_def):
    """A call waits for the join that waits for it."""
    call = next(node for node in graph_def.node if node.op == "XlaCallModule")
    call.input.append("^ooo_join_0")


def take_a_call_out(graph_def):
    call = next(node for node in graph_def.node if node.op == "XlaCallModule")
    call.name = "elsewhere"


SPOILING = {
    drop_an_update: "may not be dropped",
    update_by_another_gradient: "data inputs",
    swap_the_inputs_within_a_call: "data inputs",
    transpose_within_a_call: "transpose_a is not what it was",
    close_a_cycle: "cycle",
    take_a_call_out: "names no node",
}


@pytest.fixture(params=SPOILING, ids=lambda spoil: spoil.__name__)
def spoiled(request, monkeypatch):
    """The join pass does its work and spoils the graph; the calls of what spoils it."""
    run, spoilings = JoinPass.run, []

    def spoiling(self, graph_def, training_graph):
        result = run(self, graph_def, training_graph)
        request.param(result.graph_def)
        spoilings.append(request.param)
        return PassResult(result.graph_def, True, result.notes)

    monkeypatch.setattr(JoinPass, "run", spoiling)
    return spoilings


def trained(decorate):
    """The weights after two steps, and the function."""
    model, plain, x, y = plain_step()
    step = decorate(plain)
    for _ in range(2):
        step(tf.constant(x), y=tf.constant(y))
    return model.get_weights(), step


def test_the_stock_step_trains_and_the_report_says_why(spoiled):
    stock, _ = trained(tf.function(jit_compile=True))
    weights, step = trained(tf_ooo.function(jit_compile=True, **(ASKED | {"strict": False})))
    assert spoiled
    assert step.report.fell_back
    assert "verify" in step.report.fallback_reason
    assert SPOILING[spoiled[0]] in step.report.fallback_reason
    for own, expected in zip(weights, stock, strict=True):
        np.testing.assert_array_equal(own, expected)


def test_strict_raises(spoiled):
    _, plain, x, y = plain_step()
    step = tf_ooo.function(jit_compile=True, **ASKED)(plain)
    with pytest.raises(tf_ooo.PassError, match="verify"):
        step(tf.constant(x), y=tf.constant(y))
    assert spoiled


def test_what_nothing_spoils_is_written_after_each_pass(tmp_path):
    _, step = trained(tf_ooo.function(jit_compile=True, dump_dir=tmp_path, **ASKED))
    assert not step.report.fell_back
    names = ["input", "store", "outline", "hold_back", "join", "colocations", "verify"]
    folder = tmp_path / "rewritten"
    written = sorted(path.name for path in folder.glob("*.pbtxt"))
    assert written == [f"{number:02d}_{name}.pbtxt" for number, name in enumerate(names)]
    assert "ooo_join_0" in (folder / "04_join.pbtxt").read_text()
    assert (folder / "prepared" / "01_gates.pbtxt").exists()
