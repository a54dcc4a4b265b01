"""A pass that spoils the step is refused, and training is whole; on two logical devices."""

from __future__ import annotations

import dataclasses

import pytest

from grappler_passes.analysis.steps import is_sum
from grappler_passes.passes.rewrite_plan import AnnotatePass
from tests.graph.pipeline_fits import Training, assert_equal_bits, pipelined, places
from tests.graph.pipeline_models import EVEN, mlp, momentum
from tf_ooo.errors import PassError
from tf_ooo.rewriting import passes

pytestmark = pytest.mark.devices(2)


def loses_a_gradient(graph):
    """A sum over micro-batches adds its first part twice."""
    node = first_sum(graph)
    node.input[1] = node.input[0]
    return f"rule 'data inputs' broken at node '{node.name}'"


def changes_an_op(graph):
    node = first_sum(graph)
    node.op = "Mul"
    return f"rule 'op' broken at node '{node.name}': was AddV2, is Mul"


def closes_a_cycle(graph):
    node = first_sum(graph)
    reader = next(other for other in graph.node if node.name in other.input)
    node.input.append(f"^{reader.name}")
    return "rule 'acyclic' broken at node"


def loses_all_waits(graph):
    """Micro-batches add to the metrics' sums in any order."""
    for node in graph.node:
        kept = [text for text in node.input if text[0] != "^"]
        del node.input[:]
        node.input.extend(kept)
    return "rule 'side effects' broken at node"


def first_sum(graph):
    return next(node for node in graph.node if is_sum(node))


SPOILERS = [loses_a_gradient, changes_an_op, closes_a_cycle, loses_all_waits]


@pytest.fixture(scope="module")
def training():
    """A fit of one step, whose bits are known."""
    training = Training(mlp, momentum, tuple(array[:16] for array in EVEN), epochs=1)
    training.expected = training.piped(pipelined("gpipe"))
    return training


@pytest.fixture
def plant(monkeypatch):
    """Has a spoiler run after the last pass; returns what it says it did."""

    def planted(spoil):
        said = []

        @dataclasses.dataclass(frozen=True)
        class Spoiling(AnnotatePass):
            def run(self, graph_def, training_graph):
                result = super().run(graph_def, training_graph)
                said.append(spoil(result.graph_def))
                return result

        monkeypatch.setattr(passes, "AnnotatePass", Spoiling)
        return said

    return planted


@pytest.mark.parametrize("spoil", SPOILERS)
def test_in_the_pipeline(training, plant, spoil):
    """The step that is refused has run as TensorFlow had it, and the weights are back."""
    said = plant(spoil)
    callback = training.prepared(pipelined("gpipe"))
    with pytest.raises(PassError) as refused:
        training.fit(callback, epochs=2)
    assert str(refused.value).startswith(f"pass 'verify' failed: VerifyError: {said[0]}")
    assert_equal_bits(training.expected.weights, training.model.get_weights())
    assert places(training.model) == ["CPU:0"]
    assert callback.report.rewritten_graph is None


def test_while_layers_are_measured(training, plant):
    said = plant(loses_a_gradient)
    with pytest.raises(PassError) as refused:
        training.fit(pipelined("gpipe"), epochs=2)
    assert said[0] in str(refused.value)
    assert_equal_bits(training.expected.weights, training.model.get_weights())


def test_the_same_pass_without_a_spoiler(training, plant):
    plant(lambda graph: "nothing")
    fitted = training.piped(pipelined("gpipe"))
    assert_equal_bits(training.expected.weights, fitted.weights)
    assert fitted.report.added_edges > 20
