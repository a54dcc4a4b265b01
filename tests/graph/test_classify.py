"""Classification of what Keras users train, checked against definitions written independently."""

from __future__ import annotations

import os
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from classification import (
    check,
    check_no_weight_gradient_needs_another,
    check_shared_ops_are_output_gradients,
    classified_share,
    counted,
)

from grappler_passes.analysis.classify import classify_graph_def, flatten
from grappler_passes.compat import runtime
from grappler_passes.errors import GraphError
from grappler_passes.graph.sizes import KnownShapes
from grappler_passes.graph.training_graph import TrainingGraph
from tests import zoo

pytestmark = pytest.mark.takes(20)
GOLDEN = Path(__file__).parents[1] / "golden" / "classified" / "models"


def classify(function, hints: bool = True) -> TrainingGraph:
    graph_def, fetches = runtime.graph_def_of(function)
    if not hints:
        for node in graph_def.node:
            node.attr.pop("_ooo_variable", None)
    return classify_graph_def(graph_def, fetches)


@pytest.fixture(scope="module")
def traced(request):
    """(trace of the step of the model of that name, its number of trainable weights); batch size unknown.

    And the model, which must stay, as a trace asks it for the names of its variables, and its name.
    """
    model, x, y = zoo.compiled(zoo.SMALL[request.param])
    return zoo.traced_step(model, x, y), len(model.trainable_variables), model, request.param


def of_models(*names):
    return pytest.mark.parametrize("traced", names, indirect=True)


@pytest.mark.parametrize("hints", [True, False], ids=["hints", "structure_only"])
@of_models(*zoo.SMALL)
def test_small_models(traced, hints):
    # Structure alone cannot know that a frozen layer is frozen, but it is not written either.
    check(classify(traced[0], hints), traced[1])


@pytest.mark.skipif(
    not tf.__version__.startswith("2.21."), reason="names of ops are not those of TensorFlow before 2.21"
)
@of_models(*zoo.SMALL)
def test_kinds_and_layers_of_small_models_are_what_was_written_down(traced):
    text, file = counted(classify(traced[0])), GOLDEN / f"{traced[3]}.txt"
    if os.environ.get("TF_OOO_WRITE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text.splitlines() == file.read_text().splitlines()


@of_models(*zoo.SMALL)
def test_backward_flop_is_classified(traced):
    graph_def, fetches = runtime.graph_def_of(traced[0])
    flat = flatten(graph_def, fetches)
    graph = classify_graph_def(flat, fetches)
    for node in flat.node:
        for dim in node.attr["shape"].shape.dim if node.op == "Placeholder" else ():
            dim.size = zoo.BATCH if dim.size < 0 else dim.size
    assert classified_share(graph, flat, KnownShapes(batch_size=zoo.BATCH), dead_ops=True) >= 0.99


@pytest.mark.parametrize("optimizer", zoo.optimizers(*zoo.OPTIMIZERS))
def test_optimizers(optimizer):
    model, x, y = zoo.compiled(zoo.mlp, optimizer)
    graph = classify(zoo.traced_step(model, x, y), hints=False)
    check(graph, len(model.trainable_variables))
    assert len(graph.layers) == 4
    assert all(layer.update_ops for layer in graph.layers)


@pytest.mark.parametrize(
    "optimizer", zoo.optimizers("adam", "global_clip_norm", "loss_scale", "accumulation")
)
def test_rank_0_weights_are_found_behind_one_number_edges(optimizer):
    model, x, y = zoo.compiled(zoo.scalar_weights, optimizer)
    check(classify(zoo.traced_step(model, x, y), hints=False), len(model.trainable_variables))


def test_mixed_precision():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model, x, y = zoo.compiled(zoo.mlp)
        check(classify(zoo.traced_step(model, x, y)), len(model.trainable_variables))
    finally:
        keras.mixed_precision.set_global_policy("float32")


@of_models("convolutions")
def test_names_play_no_part(traced):
    """The same graph under other names is classified in the same way."""
    graph_def, fetches = runtime.graph_def_of(traced[0])
    new = {node.name: f"n{i}" for i, node in enumerate(graph_def.node)}
    before = classify_graph_def(graph_def, fetches)
    for node in graph_def.node:
        node.name = new[node.name]
        inputs = [renamed(text, new) for text in node.input]
        node.ClearField("input")
        node.input.extend(inputs)
    after = classify_graph_def(graph_def, [new[name] for name in fetches])
    assert {new[op.name]: (op.kind, op.layer) for op in before.ops.values()} == {
        op.name: (op.kind, op.layer) for op in after.ops.values()
    }


def renamed(text: str, new: dict[str, str]) -> str:
    name, colon, port = text.lstrip("^").partition(":")
    return ("^" if text.startswith("^") else "") + new[name] + colon + port


def kernel_and_bias(graph: TrainingGraph) -> set[frozenset[str]]:
    return {frozenset(v.rpartition("/")[2] for v in layer.variables) for layer in graph.layers}


@of_models("mlp")
def test_kernel_and_bias_make_one_layer(traced):
    graph = classify(traced[0])
    assert [len(layer.variables) for layer in graph.layers] == [2, 1, 2, 2]
    assert kernel_and_bias(graph) == {frozenset({"kernel", "bias"}), frozenset({"kernel"})}


@of_models("lstm_gru")
def test_layers_are_numbered_in_forward_order(traced):
    graph = classify(traced[0])
    first = [layer.variables[0] for layer in graph.layers]
    assert "embedding" in first[0]
    assert "dense" in first[-1]
    order = [next(i for i, name in enumerate(first) if part in name) for part in ("lstm", "gru")]
    assert order == sorted(order)


def two_networks():
    generator = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(6)]
    )
    critic = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(9, activation="relu"), keras.layers.Dense(1)]
    )
    return generator, critic


def gan_step(generator, critic):
    optimizers = keras.optimizers.Adam(), keras.optimizers.SGD(0.1, momentum=0.9)
    for optimizer, model in zip(optimizers, (generator, critic), strict=True):
        optimizer.build(model.trainable_variables)
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    @tf.function
    def step(real):
        noise = tf.random.normal((5, 4))
        with tf.GradientTape() as tape:
            fake = generator(noise)
            critic_loss = entropy(tf.ones((5, 1)), critic(real)) + entropy(tf.zeros((5, 1)), critic(fake))
        variables = critic.trainable_variables
        optimizers[1].apply_gradients(zip(tape.gradient(critic_loss, variables), variables, strict=True))
        with tf.GradientTape() as tape:
            generator_loss = entropy(tf.ones((5, 1)), critic(generator(noise)))
        variables = generator.trainable_variables
        optimizers[0].apply_gradients(zip(tape.gradient(generator_loss, variables), variables, strict=True))
        return critic_loss, generator_loss

    return step.get_concrete_function(tf.TensorSpec((5, 6)))


def test_two_optimizers():
    function = gan_step(*two_networks())
    for hints in (True, False):
        check(classify(function, hints), 8)


def trained_from_one_pass(generator, critic):
    """The critic sees data before it sees what the generator has made."""

    @tf.function
    def step(real):
        with tf.GradientTape(persistent=True) as tape:
            right = critic(real)
            wrong = critic(generator(real[:, :4]))
            losses = tf.reduce_mean(tf.square(right - 1.0)) + tf.reduce_mean(wrong**2), tf.reduce_mean(wrong)
        for loss, model in zip(losses, (critic, generator), strict=True):
            variables = model.trainable_variables
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign(variable - 0.1 * gradient)
        return losses

    return step.get_concrete_function(tf.TensorSpec((5, 6)))


def test_layers_stand_behind_all_that_they_use():
    generator, critic = two_networks()
    layers = classify(trained_from_one_pass(generator, critic)).layers
    names = [variable.path for model in (generator, critic) for variable in model.trainable_variables]
    assert [name for layer in layers for name in sorted(layer.variables, key=names.index)] == names


def test_two_losses_and_two_outputs():
    a, b = keras.Input((8,)), keras.Input((5,))
    h = keras.layers.Dense(16, activation="relu")(a)
    h = keras.layers.Concatenate()([h, keras.layers.Dense(4, activation="tanh")(b)])
    outputs = [keras.layers.Dense(3)(h), keras.layers.Dense(1)(keras.layers.Dense(7)(h))]
    model = keras.Model([a, b], outputs)
    model.compile("adam", loss=["mse", "mae"], loss_weights=[0.3, 2.0], jit_compile=False)
    x = [zoo.features(8), zoo.features(5)]
    y = [zoo.features(3), zoo.features(1)]
    check(classify(zoo.traced_step(model, x, y), hints=False), 10)


def step_with(gradient_results):
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)]
    )
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 1.0)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return gradient_results(loss, norm, gradients)

    function = step.get_concrete_function(tf.TensorSpec((5, 6)), tf.TensorSpec((5, 3)))
    return function, model


@pytest.mark.parametrize(
    "results",
    [lambda loss, n, g: (loss, n), lambda loss, n, g: (loss, g), lambda loss, n, g: None],
    ids=["norm", "gradients", "nothing"],
)
def test_results_that_depend_on_gradients(results):
    function, model = step_with(results)
    graph = classify(function, hints=False)
    assert sum(len(layer.variables) for layer in graph.layers) == 4
    check_no_weight_gradient_needs_another(graph)
    check_shared_ops_are_output_gradients(graph)


@of_models("mlp")
def test_plain_graph_def_without_shapes(traced):
    graph = classify_graph_def(traced[0].graph.as_graph_def())
    assert sum(len(layer.variables) for layer in graph.layers) == traced[1]
    check_no_weight_gradient_needs_another(graph)


def test_not_a_training_graph():
    function = tf.function(lambda x: tf.matmul(x, x)).get_concrete_function(tf.TensorSpec((3, 3)))
    with pytest.raises(GraphError, match="not a training graph"):
        classify(function)


def test_compiled_step_is_named():
    model, x, y = zoo.compiled(zoo.mlp)
    data = tf.nest.map_structure(tf.constant, (x, np.asarray(y)))
    model.train_step(data)
    inner = tf.function(lambda data: model.train_step(data), jit_compile=True)
    function = tf.function(lambda: inner(data)).get_concrete_function()
    with pytest.raises(GraphError, match="jit_compile"):
        classify(function)
