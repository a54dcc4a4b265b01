"""Evaluation and prediction while the weights are on their stages' devices; on four logical devices."""

from __future__ import annotations

import traceback

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from grappler_passes import plugin
from tests.graph.pipeline_fits import Training, assert_equal_bits, pipelined
from tests.graph.pipeline_models import (
    TWO_TEXTS,
    UNEVEN,
    X_UNEVEN,
    Custom,
    TiedTransformer,
    Y,
    looped,
    many_outputs,
    mlp,
    momentum,
    normal,
    siamese,
)
from tests.zoo import KERAS_3, keras, needs_keras_3
from tf_ooo.errors import GraphError
from tf_ooo.rewriting import forward

pytestmark = [pytest.mark.devices(4), pytest.mark.takes(60)]
layers = keras.layers

PLACES = np.random.default_rng(1).integers(0, 50, (48, 7))
ALL = {"CPU:0", "CPU:1", "CPU:2", "CPU:3"}
_PASSING_ON = ("ReadVariableOp", "Identity", "Cast", "Transpose", "Reshape", "Enter")
_BIG = ("MatMul", "_FusedMatMul", "Conv2D", "_FusedConv2D", "BatchMatMulV2", "Einsum", "ResourceGather")


@pytest.fixture(name="graphs")
def _graphs(monkeypatch):
    """The graphs that evaluations ran, as they were placed."""
    graphs, rewrite = [], forward.rewrite_forward

    def noting(*arguments):
        placed = rewrite(*arguments)
        graphs.append(placed.graph_def)
        return placed

    monkeypatch.setattr(forward, "rewrite_forward", noting)
    return graphs


def weight_of(name, nodes):
    """The argument whose value a tensor is; None: it is computed from data."""
    node = nodes[name.partition(":")[0]]
    while node.op in _PASSING_ON and node.input:
        node = nodes[node.input[0].partition(":")[0]]
    return node if node.op == "_Arg" and node.attr["T"].type == tf.resource.as_datatype_enum else None


def assert_weights_stay(graph, devices=None):
    """Each product is where its weight is, on all of these devices, or several."""
    nodes, seen = {node.name: node for node in graph.node}, set()
    for node in graph.node:
        for source in node.input:
            weight = None if source[0] == "^" else weight_of(source, nodes)
            if weight is None or node.op not in _BIG:
                continue
            assert node.device == weight.device, f"{node.name} reads {weight.name}"
            seen.add(node.device[-5:])
    assert seen == devices if devices else len(seen) > 1


class Watching(keras.callbacks.Callback):
    """At the end of each epoch: the weights, and what the model evaluates and predicts."""

    def __init__(self, data, predicts=True):
        super().__init__()
        self._data, self._predicts = data, predicts
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        validated = {name[4:]: value for name, value in logs.items() if name.startswith("val_")}
        self.seen.append((self.model.get_weights(), validated, self.evaluated()))

    def evaluated(self):
        x, y = self._data
        logs = self.model.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
        predicted = self.model.predict(x, batch_size=16, verbose=0) if self._predicts else []
        return logs, tf.nest.flatten(predicted)

    def assert_as_stock(self, epochs):
        """Once the fit has ended, on one device: the same bits."""
        assert len(self.seen) == epochs
        for weights, validated, (logs, predicted) in self.seen:
            self.model.set_weights(weights)
            stock_logs, stock_predicted = self.evaluated()
            assert logs == stock_logs
            assert validated == stock_logs
            if self._predicts:
                assert_equal_bits(stock_predicted, predicted)


@pytest.fixture(scope="module", name="perceptron")
def _perceptron():
    """A model that many tests train from its beginning: it is measured, and Keras' functions traced, once."""
    return Training(mlp, momentum, UNEVEN, epochs=2)


def evaluated_in_fit(training, graphs, devices=None, **options):
    """A fit that validates and predicts."""
    watching = Watching(training.data)
    fitted = training.piped(pipelined("1f1b", **options), watching, validation_data=training.data)
    watching.assert_as_stock(training.epochs)
    assert fitted.places == ["CPU:0"]
    assert not [note for note in fitted.report.notes if "on one device" in note]
    for graph in graphs:
        assert_weights_stay(graph, devices)


def test_the_bits_of_stock_on_the_devices_of_the_stages(perceptron, graphs):
    """Batches of two sizes, one trace for validation, two for prediction."""
    evaluated_in_fit(perceptron, graphs, devices=ALL)
    assert len(graphs) == (3 if KERAS_3 else 2)


def normalized():
    """With all that runs otherwise in training."""
    hidden = [
        part
        for width in (33, 21, 40, 17)
        for part in (layers.Dense(width), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.3))
    ]
    return keras.Sequential([keras.Input((7,)), *hidden, layers.Dense(3)])


class OwnSteps(Custom):
    """Evaluates and predicts by itself, several outputs and a metric that training knows nothing of."""

    def __init__(self):
        super().__init__()
        self.layers_ = [layers.Dense(width, activation="relu") for width in (12, 9, 17, 11, 3)]
        self.margin = keras.metrics.Mean(name="margin")

    @property
    def metrics(self):
        return [*super().metrics, self.margin]

    def test_step(self, data):
        x, y = data
        logits = self(x, training=False)
        loss = tf.reduce_mean(tf.keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
        top = tf.math.top_k(logits, 2).values
        self.margin.update_state(top[:, 0] - top[:, 1])
        return {"loss": loss, "margin": self.margin.result()}

    def predict_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        logits = self(x, training=False)
        return {"logits": logits, "best": tf.argmax(logits, axis=1)}


def test_steps_of_one_s_own(graphs):
    training = Training(OwnSteps, momentum, UNEVEN, epochs=2, loss=None, metrics=None)
    seen, model = [], training.model

    def evaluated():
        logs = model.evaluate(*UNEVEN, batch_size=16, verbose=0, return_dict=True)
        return {"margin": logs["margin"]}, tf.nest.flatten(model.predict(X_UNEVEN, batch_size=16, verbose=0))

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append((model.get_weights(), evaluated()))

    training.piped(pipelined("1f1b"), Watch())
    assert graphs
    for graph in graphs:
        assert_weights_stay(graph)
    for weights, (logs, predicted) in seen:
        model.set_weights(weights)
        stock_logs, stock_predicted = evaluated()
        assert logs == stock_logs
        assert_equal_bits(stock_predicted, predicted)


@pytest.mark.parametrize(
    ("make", "data"),
    [
        (normalized, UNEVEN),
        (siamese, TWO_TEXTS),
        (lambda: TiedTransformer(blocks=1), (PLACES, PLACES)),
    ],
)
def test_models(make, data, graphs):
    """A weight that is used twice is nowhere but where it stands."""
    evaluated_in_fit(Training(make, momentum, data, epochs=2), graphs)


def test_loops_stay_on_one_device(graphs):
    evaluated_in_fit(Training(looped, momentum, (normal(48, 4, 2), Y), epochs=1), graphs)
    for graph in graphs:
        loops = {}
        for node in graph.node:
            if node.op == "Enter":
                loops.setdefault(node.attr["frame_name"].s, set()).add(node.device[-5:])
        assert len(loops) == (3 if KERAS_3 else 1)  # Keras 2 calls functions for the others
        assert all(len(devices) == 1 for devices in loops.values())
        assert len(set.union(*loops.values())) == len(loops)
    assert graphs


@needs_keras_3
def test_several_outputs_weights_of_rows_and_regularizers(graphs):
    """Losses of outputs, of kernels and of rows."""
    x, sizes = X_UNEVEN, normal(52, 1)
    y = {"class_": UNEVEN[1], "size": 1 / (1 + np.exp(-sizes))}
    loss = {"class_": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"}
    training = Training(many_outputs, momentum, ({"left": x}, y), epochs=2, metrics=None, loss=loss)
    evaluated_in_fit(training, graphs)


def test_replicas(perceptron, graphs):
    """Each holds a part of the weights, to which batches go."""
    training = perceptron.on(UNEVEN)
    training._measured = None
    evaluated_in_fit(training, graphs, replicas=2)
    assert graphs


def test_several_batches_in_a_call(graphs):
    """The last call has fewer."""
    evaluated_in_fit(Training(mlp, momentum, UNEVEN, epochs=1, steps_per_execution=3), graphs)
    assert graphs


def test_rows_that_no_device_would_hold_at_once(perceptron):
    """Batch by batch: no op has more rows than those that were asked for."""
    many = np.tile(X_UNEVEN, (40, 1))
    rows, seen = [], []

    class Predicting(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            kept = self.model.predict_step

            def noting(data):
                rows.append(tf.nest.flatten(data)[0].shape[0])
                return kept(data)

            self.model.predict_step = noting
            seen.append((self.model.get_weights(), self.model.predict(many, batch_size=32, verbose=0)))
            del self.model.predict_step

    perceptron.piped(pipelined("1f1b"), Predicting(), epochs=1)
    ((weights, predicted),) = seen
    perceptron.model.set_weights(weights)
    assert_equal_bits([perceptron.model.predict(many, batch_size=32, verbose=0)], [predicted])
    assert set(rows) <= {32, None}
    assert len(predicted) == len(many) > 2000


def test_on_a_batch_and_of_generators(perceptron, graphs):
    """Callbacks may ask for these besides."""
    seen, model = [], perceptron.model

    def asked():
        data = tf.data.Dataset.from_tensor_slices(UNEVEN).batch(24)
        return [
            model.predict_on_batch(X_UNEVEN[:5]),
            model.test_on_batch(X_UNEVEN[:5], UNEVEN[1][:5]),
            model.evaluate(data, verbose=0, steps=2),
            model.predict(data.repeat(), verbose=0, steps=3),
        ]

    class Asking(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append((model.get_weights(), asked()))

    perceptron.piped(pipelined("1f1b"), Asking(), epochs=1)
    ((weights, before),) = seen
    model.set_weights(weights)
    for stock, ours in zip(asked(), before, strict=True):
        np.testing.assert_array_equal(stock, ours)
    assert len(graphs) >= 4
    for graph in graphs:
        assert_weights_stay(graph)


def test_a_fit_that_stops_early(perceptron, graphs):
    """By what was validated, in the same epoch as stock does; the best weights come back."""

    def stopping():
        return keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True)

    wrong = (X_UNEVEN, (UNEVEN[1] + 1) % 3)
    training = perceptron.on(UNEVEN)
    training.epochs, training._measured = 9, None  # measured in four micro-batches
    stock = training.left(training.fit(stopping(), validation_data=wrong))
    ours = training.piped(pipelined("gpipe", microbatches=1), stopping(), validation_data=wrong)
    assert 1 < len(ours.history["val_loss"]) < 9
    assert len(ours.history["val_loss"]) == len(stock.history["val_loss"])
    np.testing.assert_allclose(ours.history["val_loss"], stock.history["val_loss"], rtol=1e-4)
    assert ours.places == ["CPU:0"]
    for graph in graphs:
        assert_weights_stay(graph)


def test_what_is_validated_before_the_plan_and_behind_it(perceptron, graphs):
    """One function for each; afterwards the model has Keras' own again."""
    watching, lasts = Watching(UNEVEN), {"steps_per_epoch": 2, "epochs": 3}
    perceptron.fit(pipelined("1f1b", profile_steps=3), watching, validation_data=UNEVEN, **lasts)
    watching.assert_as_stock(3)
    assert graphs
    for function in (perceptron.model.test_function, perceptron.model.predict_function):
        assert not hasattr(function, "guarded")


def test_what_cannot_be_placed_runs_on_one_device(perceptron, monkeypatch):
    """An error of ours and another one: the first for what evaluates, which is traced first."""
    kinds = [GraphError, KeyError]

    def fails(*_):
        raise (kinds.pop(0) if len(kinds) > 1 else kinds[0])("an op that nobody knows")

    monkeypatch.setattr(forward, "place_forward", fails)
    watching = Watching(UNEVEN)
    fitted = perceptron.piped(pipelined("1f1b"), watching, validation_data=UNEVEN)
    watching.assert_as_stock(2)
    notes = [note for note in fitted.report.notes if "all weights are sent" in note]
    assert len(notes) == 2
    assert all("an op that nobody knows" in note for note in notes)
    assert [note.split()[0] for note in notes] == ["evaluate", "predict"]
    assert ["KeyError" in note for note in notes] == [False, True]


class UntraceableAlone(Custom):
    """Its steps raise unless Keras' own function traces them."""

    def __init__(self):
        super().__init__()
        self.layers_ = [layers.Dense(width, activation="relu") for width in (12, 9, 17, 11, 3)]

    def test_step(self, data):
        self.refuse()
        return {"mean": tf.reduce_mean(self(data[0]))}

    def predict_step(self, data):
        self.refuse()
        return self(data[0] if isinstance(data, tuple) else data)

    def refuse(self):
        frames = "".join(frame.filename for frame in traceback.extract_stack())
        if "tracing/flat.py" in frames:
            raise ValueError("not here\nnor there")


def test_a_step_that_only_keras_can_trace_runs_on_one_device():
    training = Training(UntraceableAlone, momentum, UNEVEN, epochs=2, loss=None, metrics=None)
    seen, model = [], training.model

    def evaluated():
        mean = model.evaluate(*UNEVEN, batch_size=16, verbose=0, return_dict=True)["mean"]
        one = model.test_on_batch(*UNEVEN, return_dict=True)["mean"]
        return mean, one, model.predict(X_UNEVEN, batch_size=16, verbose=0).tolist()

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append((model.get_weights(), evaluated()))

    notes = training.piped(pipelined("1f1b"), Watch()).report.notes
    assert [note for note in notes if "not here" in note] == [
        f"{what} runs on one device, to which all weights are sent: ValueError: not here"
        for what in ("evaluate", "predict")
    ]
    for weights, before in seen:
        model.set_weights(weights)
        assert evaluated() == before
    assert len(seen) == 2


def test_a_function_of_the_models_own_is_left_alone(graphs):
    calls = []

    class Own(keras.Sequential):
        def make_predict_function(self, force=False):
            calls.append(force)
            return super().make_predict_function(force)

    def make():
        return Own([keras.Input((7,)), *(layers.Dense(width) for width in (9, 11, 8, 3))])

    evaluated_in_fit(Training(make, momentum, UNEVEN, epochs=1), graphs)
    assert calls
    assert len(graphs) == 1


# -- in host memory --------------------------------------------------------------------------------------


def devices_of_evaluations(model):
    """Return the devices of the products that evaluate and predict compute; TensorFlow's first is another."""
    devices = set()
    model.test_function = model.predict_function = None  # or nothing is traced

    def look(graph_def):
        devices.update(node.device[-5:] for node in graph_def.node if node.op in _BIG)

    request = plugin.register(plugin.Request("evaluations", look))
    try:
        with plugin.tracing(request), tf.device("CPU:2"):
            model.evaluate(*UNEVEN, batch_size=16, verbose=0)
            model.predict(X_UNEVEN, batch_size=16, verbose=0)
    finally:
        plugin.unregister(request.id)
    assert request.marked
    return devices


def test_after_the_fit_a_model_in_host_memory_is_evaluated_there():
    def in_host_memory():
        with tf_ooo.host_memory():
            return mlp()

    for make, expected in ((in_host_memory, {"CPU:0"}), (mlp, {"CPU:2"})):
        training, watching = Training(make, momentum, UNEVEN, epochs=1), Watching(UNEVEN)
        training.piped(pipelined("1f1b"), watching, validation_data=UNEVEN)
        watching.assert_as_stock(1)
        assert devices_of_evaluations(training.model) == expected
        training.model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        assert devices_of_evaluations(training.model) == expected
