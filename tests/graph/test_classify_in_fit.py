"""The same checks on the graph that is really rewritten: optimized by Grappler, inlined and lowered.

In ``fit`` TensorFlow hands the plug-in a graph that differs from the trace in about every node, and
what is planned on is that graph after separation.
"""

from __future__ import annotations

import keras
import pytest
from classification import check, classified_share

import tf_ooo
from grappler_passes.classify import classify_graph_def
from grappler_passes.sizes import KnownShapes
from tests import zoo, zoo_more
from tests.zoo import needs_keras_3
from tf_ooo import planner
from tf_ooo.compat import path_of

BATCH = 3
MODELS = {**zoo.SMALL, **zoo_more.MORE}


@pytest.fixture
def rewrites(monkeypatch):
    """(GraphDef that came, RewriteResult) of each rewrite."""
    found = []
    rewrite_graph = planner.rewrite_graph

    def recorded(graph_def, *arguments):
        result = rewrite_graph(graph_def, *arguments)
        found.append((graph_def, result))
        return result

    monkeypatch.setattr(planner, "rewrite_graph", recorded)
    return found


def fit(model, x, y, rewrites):
    """(GraphDef, RewriteResult) of the training step of one ``fit``."""
    callback = tf_ooo.OOOBackprop(schedule="fast_forward", profile_steps=0, strict=True)
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[callback])
    return rewrites[0]


def check_step(model, x, y, rewrites):
    """The graph as it came and the one that was planned on; the latter's TrainingGraph."""
    graph_def, result = fit(model, x, y, rewrites)
    known = KnownShapes(batch_size=BATCH)
    for graph, nodes in (
        (classify_graph_def(graph_def), graph_def),
        (result.training_graph, result.graph_def),
    ):
        check(graph, len(model.trainable_variables))
        assert classified_share(graph, nodes, known, dead_ops=False) >= 0.99
    found = {name for layer in result.training_graph.layers for name in layer.variables}
    assert found == {path_of(variable).removesuffix(":0") for variable in model.trainable_variables}
    return result.training_graph


@pytest.mark.parametrize("name", MODELS)
def test_models(name, rewrites):
    check_step(*zoo.compiled(MODELS[name]), rewrites)


@needs_keras_3
def test_gan_on_keras_random_noise(rewrites):
    """Seeded noise is the only data that the generator sees."""
    keras.utils.set_random_seed(7)
    graph = check_step(*zoo_more.gan(), rewrites)
    assert len(graph.layers) == 4


@pytest.mark.parametrize("name", ["lstm_gru", "mlp"])
def test_mixed_precision(name, rewrites):
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        check_step(*zoo.compiled(zoo.SMALL[name]), rewrites)
    finally:
        keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize(
    "optimizer", zoo.optimizers("sgd", "momentum", "global_clip_norm", "loss_scale", "accumulation")
)
@pytest.mark.parametrize("build", [zoo.convolutions, zoo_more.only_a_kernel])
def test_optimizers(build, optimizer, rewrites):
    check_step(*zoo.compiled(build, optimizer), rewrites)


def leaf_names(graph):
    """{layer: names of its variables without their path}, for the layers of recurrent cells."""
    names = [sorted(v.rpartition("/")[2] for v in layer.variables) for layer in graph.layers]
    return sorted(group for group in names if group != ["embeddings"])


@needs_keras_3  # Keras 2's LSTM and GRU are calls that a GPU replaces by cuDNN's
def test_separation_keeps_an_lstm_one_layer(rewrites):
    graph = check_step(*zoo.compiled(zoo.bidirectional), rewrites)
    lstm = ["bias", "kernel", "recurrent_kernel"]
    assert leaf_names(graph) == [["bias", "kernel"], lstm, lstm]


@needs_keras_3
def test_a_gru_with_reset_after_is_three_layers(rewrites):
    """Its reset gate lies between the dO of the kernel and that of the recurrent kernel, and the two
    rows of its bias start from one each: no two of the three start from the same dO."""
    graph = check_step(*zoo.compiled(zoo.lstm_gru), rewrites)
    lstm = ["bias", "kernel", "recurrent_kernel"]
    assert leaf_names(graph) == [["bias"], ["bias", "kernel"], lstm, ["kernel"], ["recurrent_kernel"]]


@needs_keras_3
def test_kernel_and_bias_of_a_convolution_that_xla_compiles(rewrites):
    """Keras has XLA compile convolutions in groups: one call computes dO and the kernel's gradient."""
    graph = check_step(*zoo.compiled(grouped_convolution), rewrites)
    assert leaf_names(graph) == [["bias", "kernel"]] * 3
    assert any("jit_compile" in reason for reason in graph.mixed.values())


def grouped_convolution():
    return zoo.stack(
        zoo.features(9, 9, 3),
        keras.layers.Conv2D(6, 3, activation="gelu"),
        keras.layers.Conv2D(4, 3, groups=2, activation="gelu"),
        keras.layers.GlobalAveragePooling2D(),
    )
