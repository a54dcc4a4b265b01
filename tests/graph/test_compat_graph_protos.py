"""GraphDefs and what stands in their nodes: what an upgrade breaks."""

from __future__ import annotations

import pytest
import tensorflow as tf

from grappler_passes.compat import graph_protos
from tests.graph.compat_models import square_step


def test_tensor_proto():
    assert tf.make_ndarray(graph_protos.tensor_proto("text")) == b"text"
    assert not tf.make_ndarray(graph_protos.tensor_proto(False))


def test_zero_of():
    for value in (2.0, 3, True, "text"):
        wanted = tf.constant(value)
        zero = graph_protos.zero_of(wanted.dtype.as_datatype_enum)
        assert tf.make_ndarray(zero) == tf.zeros([], wanted.dtype).numpy()


def test_parse_graph_def():
    _, function = square_step()
    graph_def = function.graph.as_graph_def()
    parsed = graph_protos.parse_graph_def(graph_def.SerializeToString())
    assert parsed == graph_def
    with pytest.raises(Exception, match="(?i)pars|decod"):
        graph_protos.parse_graph_def(b"no graph")


def test_is_graph_def():
    assert graph_protos.is_graph_def(tf.compat.v1.GraphDef())
    assert not graph_protos.is_graph_def(b"")
    assert not graph_protos.is_graph_def(tf.compat.v1.NodeDef())


def test_keep_colocations():
    node = tf.compat.v1.NodeDef()
    node.attr["_class"].list.s.extend([b"loc:@here", b"loc:@gone"])
    graph_protos.keep_colocations(node, lambda name: name == "here")
    assert list(node.attr["_class"].list.s) == [b"loc:@here"]
    graph_protos.keep_colocations(node, lambda name: False)
    assert "_class" not in node.attr, "an empty list is refused by tf.import_graph_def"


def test_copies():
    graph_def = tf.compat.v1.GraphDef()
    graph_def.node.add(name="a", op="NoOp")
    graph_def.library.function.add().signature.name = "f"
    graph_def.versions.producer = 7
    copy = graph_protos.copy_of(graph_def)
    assert copy == graph_def
    copy.node[0].name = "b"
    other = graph_protos.with_nodes(graph_def, iter(copy.node))
    assert [node.name for node in other.node] == ["b"]
    assert (other.library, other.versions) == (graph_def.library, graph_def.versions)
    other.node[0].name = "c"
    assert (graph_def.node[0].name, copy.node[0].name) == ("a", "b")
