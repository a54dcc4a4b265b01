"""Run by test_pipeline.py in a process of its own: logical CPUs must be set up first.

Arguments: the number of devices, then names of checks.  Prints one JSON object, a check's result by its name.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tf_ooo
from grappler_passes.dependencies import GraphIndex
from tests.scripts import bits_of
from tf_ooo import compat
from tf_ooo.bench import pipeline_workloads
from tf_ooo.costs import CostTable
from tf_ooo.data_parallel.averaging import optimizers_of
from tf_ooo.pipeline import tasks_of
from tf_ooo.pipeline.compat import value_of

DEVICES = int(sys.argv[1])
RNG = np.random.default_rng(0)
X_UNEVEN, Y_UNEVEN = RNG.normal(size=(52, 7)).astype("float32"), RNG.integers(0, 3, 52)
X, Y = X_UNEVEN[:48], Y_UNEVEN[:48]


def mlp():
    layers = [
        keras.layers.Dense(33, activation="relu"),
        keras.layers.Dense(21, activation="gelu"),
        keras.layers.Dense(17),
        keras.layers.Dense(3),
    ]
    return keras.Sequential([keras.Input((7,)), *layers])


def train(make, optimizer, *callbacks, data=(X, Y), epochs=7, batch_size=16, **compiled):
    keras.utils.set_random_seed(3)
    model = make()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compiled = {"metrics": ["accuracy"], "jit_compile": False, **compiled}
    model.compile(optimizer(), compiled.pop("loss", loss), **compiled)
    named = dict(zip(("x", "y", "sample_weight"), data, strict=False))
    history = model.fit(
        **named, batch_size=batch_size, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks)
    )
    return model, history.history


def pipelined(schedule, **options):
    options = {"devices": DEVICES, "microbatches": 4, **options}
    return tf_ooo.OOOBackprop(mode="pipeline", schedule=schedule, **options)


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a.get_weights(), b.get_weights(), strict=True))


def distance(a, b):
    pairs = zip(a.get_weights(), b.get_weights(), strict=True)
    return max(float(np.abs(x - y).max()) for x, y in pairs)


def where_ops_are(report):
    """Kinds of ops by device."""
    found = {}
    for node in report.rewritten_graph.node:
        kind = node.attr["_ooo_kind"].s.decode()
        found.setdefault(node.device[-5:], set()).add(kind)
    return {device: sorted(kinds - {""}) for device, kinds in found.items()}


def uphill(report):
    """Gradients that a later stage takes from an earlier one: backward only goes down."""
    nodes = {node.name: node for node in report.rewritten_graph.node}

    def stage(name):
        node = nodes.get(name)
        backward = node is not None and node.attr["_ooo_kind"].s in (b"dO", b"dW")
        return node.attr["_ooo_stage"].i if backward else None

    found = []
    for name, node in nodes.items():
        sources = [text.partition(":")[0] for text in node.input if text[0] != "^"]
        below = [one for one in sources if None not in (stage(one), stage(name)) and stage(one) < stage(name)]
        found += [f"{one} -> {name}" for one in below]
    return found


def unplanned(report):
    """What ordered ops read of other tasks, though no schedule makes them wait for those.

    Schedules know that F comes after F below, dO after F and after dO above, dW after F, dO and dO above.
    What adds up the gradients of a tied weight, and what follows, is no part of any order.  A loop computes a
    stage's dO and dW, and begins with zeros for its dW.
    """
    graph = report.rewritten_graph
    tasks = tasks_of(graph)
    backward = ("dO", "dW")

    def expected(source, reader):
        if reader.kind not in backward:
            return source.kind == "F" and source.stage <= reader.stage
        if source.kind == "F" or source == reader:
            return True
        return source.kind == "dO" and source.stage >= reader.stage

    index, found, adds = GraphIndex(graph), set(), set()
    controls = [(text[1:], node.name) for node in graph.node for text in node.input if text[0] == "^"]
    ordered = {name for pair in controls for name in pair}
    for i in index.order:
        name, reader = index.names[i], tasks.get(index.names[i])
        for source in (index.names[p] for p, _ in index.data_preds[i]):
            task = tasks.get(source)
            if (
                None in (task, reader)
                or "U" in (task.kind, reader.kind)
                or task.microbatch != reader.microbatch
            ):
                continue
            if expected(task, reader) and source not in adds:
                continue
            if index.ops[i] == "Enter" and task.stage == reader.stage:
                continue
            if {task.kind, reader.kind} == {"dW"}:
                adds.add(name)
            if {task.kind, reader.kind} != {"dW"} or name in ordered:
                found.add(f"{reader.kind}:{reader.stage} reads {task.kind}:{task.stage} ({name})")
    return sorted(found)


ALL = [
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "fast_forward",
    "modulo",
    "zb_h1",
    "zb_h2",
    "zb_auto",
    "zb_v",
    "v_half",
    "v_min",
    "dualpipe_v",
    "auto",
]


def compared(make, optimizer, schedules, options=None, **more):
    """Bits of schedules against the first, and distances from the unsplit batch; 20 steps."""
    stock, before = train(make, optimizer, **more)
    first, out = None, {}
    for schedule in schedules:
        callback = pipelined(schedule, **(options or {}))
        model, history = train(make, optimizer, callback, **more)
        first = first or model
        report = callback.report
        out[schedule] = {
            "equal": same(first, model),
            "distance": distance(stock, model),
            "loss": float(np.abs(np.subtract(history["loss"], before["loss"])).max()),
            "accuracy": history.get("accuracy") == before.get("accuracy"),
            "ops": where_ops_are(report),
            "back": places(model, []),
            "edges": report.added_edges,
            "schedule": report.schedule,
            "notes": report.notes,
            "layers": [row["name"] for row in report.layers],
            "loops": loops(report),
            "unordered": unordered(report),
            "uphill": uphill(report),
            "unplanned": unplanned(report),
            "redundant": redundant(report),
            "skipped": [note for note in report.notes if note.startswith("skipped")],
        }
    return out


def adam():
    return keras.optimizers.Adam(0.01)


def check_schedules():
    """20 steps, every fourth with fewer rows."""
    return compared(mlp, adam, ("gpipe", "zb_h1"), data=(X_UNEVEN, Y_UNEVEN), epochs=5)


def deep():
    """Sixteen layers and an output, sizes odd and unequal: stages for 8 devices in a V."""
    widths = [33, 21, 17, 40, 9, 13, 29, 31, 11, 27, 19, 23, 37, 15, 25, 35]
    layers = [keras.layers.Dense(w, activation="tanh") for w in widths]
    return keras.Sequential([keras.Input((7,)), *layers, keras.layers.Dense(3)])


def adam_of_larger_gradients():
    """With its own small epsilon Adam makes much of gradients that are nearly 0.

    Sums in another order, as those of the unsplit batch are, move weights by 5e-4 then.
    """
    return keras.optimizers.Adam(0.01, epsilon=1e-3)


def check_all_schedules():
    # Four steps on one device, then 20 in stages.
    return compared(deep, adam_of_larger_gradients, ALL, epochs=8)


class Positions(keras.layers.Layer):
    """Tokens and positions, as Keras' examples have them: no data choose the rows of the second."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = keras.layers.Embedding(50, 6), keras.layers.Embedding(7, 6)

    def call(self, x):
        return self.tokens(x) + self.positions(tf.range(x.shape[-1]))


def check_positions():
    """Adam squares each slice of a sparse gradient by itself: a position must come once, as in one batch."""

    def make():
        inputs = keras.Input((7,), dtype="int32")
        x = Positions()(inputs)
        for _ in range(3):
            x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(2, 3)(x, x))
        return keras.Model(inputs, keras.layers.Dense(3)(x[:, 0]))

    data = (RNG.integers(0, 50, X.shape), Y)
    return compared(make, adam_of_larger_gradients, ("gpipe", "zb_h1"), data=data)


def deep_unet():
    """17 convolutions, three skips."""
    same = {"padding": "same"}
    inputs = x = keras.Input((16, 16, 3))
    skips = []
    for channels in (6, 10, 14):
        x = keras.layers.Conv2D(channels, 3, activation="relu", **same)(x)
        skips.append(keras.layers.Conv2D(channels, 3, activation="gelu", **same)(x))
        x = keras.layers.MaxPooling2D()(skips[-1])
    x = keras.layers.Conv2D(18, 3, activation="relu", **same)(x)
    for channels in (14, 10, 6):
        x = keras.layers.Conv2DTranspose(channels, 2, strides=2, **same)(x)
        x = keras.layers.Concatenate()([x, skips.pop()])
        x = keras.layers.Conv2D(channels, 3, activation="relu", **same)(x)
        x = keras.layers.Conv2D(channels, 3, use_bias=False, **same)(x)
    return keras.Model(inputs, keras.layers.Conv2D(4, 1)(x))


class TiedTransformer(keras.Model):
    """Four blocks; the tokens' embedding is the output layer's kernel too."""

    def __init__(self):
        super().__init__()
        self.embedding = Positions()
        self.attention = [keras.layers.MultiHeadAttention(2, 3) for _ in range(4)]
        self.inner = [keras.layers.Dense(20, activation="gelu") for _ in range(4)]
        self.outer = [keras.layers.Dense(6) for _ in range(4)]

    def call(self, x):
        h = self.embedding(x)
        for attention, inner, outer in zip(self.attention, self.inner, self.outer, strict=True):
            h = h + attention(h, h)
            h = h + outer(inner(h))
        return tf.matmul(h, self.embedding.tokens.embeddings, transpose_b=True)


def check_skips_and_ties():
    """Under every cut of eight devices, one stage or two on each."""
    images, pixels = RNG.normal(size=(48, 16, 16, 3)).astype("float32"), RNG.integers(0, 4, (48, 16, 16))
    tokens = RNG.integers(0, 50, (48, 7))
    runs = {"options": {"microbatches": 8}, "epochs": 3}
    models = (
        (deep_unet, "zb_v", (images, pixels)),
        (TiedTransformer, "dualpipe_v", (tokens, tokens[:, ::-1])),
    )
    return [
        compared(make, adam_of_larger_gradients, ("gpipe", schedule), data=data, **runs)
        for make, schedule, data in models
    ]


def check_wide_encoder():
    """Tensors for which TensorFlow repeats its own bits only where it is told to: docs/pipeline.md."""
    tf.config.experimental.enable_op_determinism()
    bits = []
    for schedule in ("gpipe", "zb_v", "gpipe"):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        made = pipeline_workloads._bert(depth=2, width=256, length=64, rows=16)
        made.model.compile("sgd", made.model.loss, jit_compile=False)
        data = (np.concatenate([array] * 5) for array in (made.x, made.y))
        callback = pipelined(schedule, microbatches=8, profile_steps=1)
        made.model.fit(*data, batch_size=16, shuffle=False, verbose=0, callbacks=[callback])
        report = callback.report
        bits.append([bits_of(made.model), len(report.pipeline["stages"]), len(where_ops_are(report))])
    return bits


IMAGES = RNG.normal(size=(48, 9, 9, 2)).astype("float32")


def conv_with_skips():
    """A small U-Net: two skips, pooling, upsampling."""
    inputs = keras.Input((9, 9, 2))
    a = keras.layers.Conv2D(5, 3, padding="same", activation="relu")(inputs)
    b = keras.layers.Conv2D(7, 3, strides=3, padding="same", activation="relu")(a)
    c = keras.layers.Conv2D(6, 3, padding="same")(b)
    # One bias for the two: oneDNN would compute it with whichever kernel comes first in a graph.
    d = keras.layers.Add()([keras.layers.Conv2D(6, 1, use_bias=False)(b), c])
    e = keras.layers.Concatenate()([keras.layers.UpSampling2D(3)(d), a])
    f = keras.layers.Conv2D(4, 3, padding="same", activation="gelu")(e)
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(f)))


def check_conv_with_skips():
    clipped = lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.1)  # noqa: E731
    schedules = ("gpipe", "interleaved_1f1b", "modulo", "zb_v")
    return compared(conv_with_skips, clipped, schedules, data=(IMAGES, Y))


WORDS = RNG.integers(0, 29, size=(48, 6))


class Tied(keras.Model):
    """An embedding that is the output's kernel too."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(29, 8)
        self.middle = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(8)]
        self.norm = keras.layers.LayerNormalization()

    def call(self, words):
        hidden = self.embedding(words)
        for layer in self.middle:
            hidden = hidden + layer(hidden)
        return tf.tensordot(self.norm(hidden), tf.transpose(self.embedding.embeddings), 1)


def check_legacy_optimizers():
    """Keras 2: one op updates a weight and its slots, all of which must be on the weight's device."""
    legacy = keras.optimizers.legacy
    made = {
        "adam": lambda: legacy.Adam(0.01, amsgrad=True),
        "momentum": lambda: legacy.SGD(0.01, momentum=0.9, nesterov=True),
        "rmsprop": lambda: legacy.RMSprop(0.001, momentum=0.9, centered=True),
        "ftrl": lambda: legacy.Ftrl(0.01),
    }
    if importlib.util.find_spec("tensorflow_addons"):
        import tensorflow_addons as tfa

        made |= {
            "adamw": lambda: tfa.optimizers.AdamW(1e-4, 0.01),
            "lazy": lambda: tfa.optimizers.LazyAdam(0.01),
            "average": lambda: tfa.optimizers.MovingAverage("adam"),
            "novograd": lambda: tfa.optimizers.NovoGrad(0.01),
        }
    found = {name: compared(mlp, make, ("gpipe", "zb_h1")) for name, make in made.items()}
    return {f"{name}, {schedule}": row for name, rows in found.items() for schedule, row in rows.items()}


def check_tied_embedding():
    decayed = lambda: keras.optimizers.AdamW(0.01, weight_decay=0.02)  # noqa: E731
    schedules = ("gpipe", "fast_forward", "zb_h1")
    return compared(Tied, decayed, schedules, data=(WORDS, np.roll(WORDS, 1, 1)))


def check_used_twice():
    """A layer below another and above it again, and one at the bottom of a second branch."""

    def make():
        again = keras.layers.Dense(12, activation="relu")
        a, b = keras.Input((7,)), keras.Input((6,))
        x = again(keras.layers.Dense(15)(again(keras.layers.Dense(15)(a))))
        y = keras.layers.Dense(12, activation="tanh")(keras.layers.LayerNormalization()(b))
        return keras.Model([a, b], keras.layers.Dense(3)(keras.layers.Dense(10)(x * y)))

    data = ([X, WORDS.astype("float32")], Y)
    return compared(make, adam, ("gpipe", "zb_h1", "modulo"), data=data)


def check_untied_embedding():
    """Its gradient is IndexedSlices."""

    def make():
        layers = [
            keras.layers.Embedding(29, 8),
            keras.layers.Flatten(),
            keras.layers.Dense(9),
            keras.layers.Dense(3),
        ]
        return keras.Sequential([keras.Input((6,)), *layers])

    return compared(make, adam, ("gpipe", "zb_h2"), data=(WORDS, Y))


def check_constant_rows():
    """Graph optimizers find that the rows of the second embedding do not depend on the batch."""

    def make():
        words = keras.Input((6,), dtype="int32")
        places = 0 * words + np.arange(6)
        x = keras.layers.Embedding(29, 8)(words) + keras.layers.Embedding(6, 8)(places)
        x = keras.layers.Dense(9, activation="relu")(keras.layers.Flatten()(x))
        return keras.Model(words, keras.layers.Dense(3)(keras.layers.Dense(7)(x)))

    return compared(make, adam, ("gpipe", "zb_h1"), data=(WORDS.astype("int32"), Y))


def check_many_outputs():
    """Two outputs and losses, weights of rows, a regularizer, statistics, a metric with state, dicts."""
    if not hasattr(keras, "ops"):  # Keras 2 takes other forms of weights and metrics
        return compared(mlp, adam, ("gpipe", "zb_h1"))

    def make():
        inputs = keras.Input((7,), name="left")
        x = keras.layers.Dense(11, activation="relu", kernel_regularizer="l2")(inputs)
        x = keras.layers.Dense(9, activation="relu")(keras.layers.Dense(13)(x))
        class_ = keras.layers.Dense(3, name="class_")(x)
        size = keras.layers.Dense(1, activation="sigmoid", name="size")(x)
        return keras.Model({"left": inputs}, {"class_": class_, "size": size})

    weights = {"class_": np.linspace(0.5, 1.5, len(X)), "size": np.linspace(2.0, 1.0, len(X))}
    labels = {"class_": Y, "size": (Y > 1).astype("float32")[:, None]}
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compared(
        make,
        adam,
        ("gpipe", "zb_h1"),
        data=({"left": X}, labels, weights),
        loss={"class_": crossentropy, "size": "binary_crossentropy"},
        loss_weights={"class_": 0.7, "size": 1.3},
        metrics={"size": [keras.metrics.AUC()]},
    )


def check_frozen_backbone():
    """Six layers that do not train, and a head: cut between the frozen ones."""

    def make():
        layers = [keras.layers.Dense(193 + 16 * i, activation="relu", trainable=False) for i in range(6)]
        return keras.Sequential([keras.Input((7,)), *layers, keras.layers.Dense(5), keras.layers.Dense(3)])

    return compared(make, adam, ("gpipe", "modulo"))


def check_long_tail():
    """Products of activations with each other between two layers: much of the step, and no weights.

    The layer behind them is a stage of its own, and its gradient serves the first layer alone.
    """
    if not hasattr(keras, "ops"):
        return compared(mlp, adam, ("gpipe", "zb_h1"))

    def make():
        inputs = keras.Input((7,))
        x = keras.layers.Reshape((60, 60))(keras.layers.Dense(3600)(inputs))
        for _ in range(6):
            x = keras.ops.softmax(keras.ops.matmul(x, keras.ops.transpose(x, (0, 2, 1))) / 60) + x
        x = keras.layers.Dense(400, activation="relu")(keras.layers.Flatten()(x))
        return keras.Model(inputs, keras.layers.Dense(3)(x))

    return compared(make, adam, ("gpipe", "zb_h1"))


def check_batch_normalization():
    """Normalizes each micro-batch; moving averages are weights too, and compared with the others."""

    def make():
        inputs = keras.Input((7,))
        x = inputs
        for width in (12, 10, 9):
            x = keras.layers.ReLU()(keras.layers.BatchNormalization()(keras.layers.Dense(width)(x)))
        return keras.Model(inputs, keras.layers.Dense(3)(x))

    return compared(make, adam, ("gpipe", "zb_h1", "dualpipe_v"))


def check_memory_limit():
    """Activations of eight micro-batches are too much, those of three are not; then too little for any."""
    rows = (np.tile(X, (32, 1)), np.tile(Y, 32))
    many = {"data": rows, "batch_size": 768, "epochs": 4}
    free = pipelined("gpipe", microbatches=8)
    first, _ = train(mlp, adam, free, **many)
    limit = int(0.72 * max(free.report.pipeline["predicted_peak_bytes"]))
    folder = tempfile.mkdtemp()
    limited = pipelined("auto", microbatches=8, memory_limit_bytes=limit, timeline=folder)
    second, _ = train(mlp, adam, limited, **many)
    before = limited.report.pipeline["predicted_peak_bytes"]
    equal, schedule = same(first, second), limited.report.schedule

    def message(work):
        try:
            work()
        except tf_ooo.OOOError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def larger(count):
        settings = {"batch_size": 768 * count, "verbose": 0, "shuffle": False, "callbacks": [limited]}
        return message(lambda: second.fit(np.tile(X, (32 * count, 1)), np.tile(Y, 32 * count), **settings))

    def looped():
        inputs = keras.Input((7, 1))
        return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.LSTM(5)(inputs)))

    limits = {"microbatches": 8, "memory_limit_bytes": 10_000}
    short = pipelined("auto", microbatches=8)
    train(mlp, adam, short, **many | {"epochs": 1})
    return {
        "short": [note for note in short.report.notes if "before the model was cut" in note],
        "larger": larger(2) or max(limited.report.pipeline["predicted_peak_bytes"]) <= limit,
        "larger_peaks": [before, limited.report.pipeline["predicted_peak_bytes"]],
        "much_larger": larger(64),
        "loop": message(lambda: train(looped, adam, pipelined("1f1b", **limits))),
        "refused": message(lambda: train(mlp, adam, pipelined("auto", **limits), **many)),
        "equal": equal,
        "within": max(before) <= limit,
        "written": sorted(os.listdir(folder)),
        "tasks_drawn": sum(
            event.get("cat") in ("F", "dO", "dW", "U")
            for event in json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
        ),
        "tasks": len(limited.report.planned.tasks),
        "schedule": schedule,
    }


def check_two_inputs():
    def make():
        a, b = keras.Input((7,)), keras.Input((6,))
        left = keras.layers.Dense(11, activation="relu")(a)
        right = keras.layers.Dense(13, activation="relu")(b)
        both = keras.layers.Dropout(0.3, seed=5)(keras.layers.Concatenate()([left, right]))
        return keras.Model([a, b], keras.layers.Dense(3)(keras.layers.Dense(10)(both)))

    data = ([X, WORDS.astype("float32")], Y)
    return compared(make, adam, ("gpipe", "zb_h1", "modulo"), data=data)


def check_mixed_precision():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        out = compared(mlp, adam, ("gpipe", "dualpipe_v"))
    finally:
        keras.mixed_precision.set_global_policy("float32")
    keras.mixed_precision.set_global_policy("mixed_float16")
    where = keras.optimizers if hasattr(keras.optimizers, "LossScaleOptimizer") else keras.mixed_precision
    scaled = lambda: where.LossScaleOptimizer(adam(), dynamic_growth_steps=5)  # noqa: E731
    try:
        return out | {
            f"{name} scaled": one for name, one in compared(mlp, scaled, ("gpipe", "zb_h1")).items()
        }
    finally:
        keras.mixed_precision.set_global_policy("float32")


class Custom(keras.Model):
    """A train_step of its own that returns a loss which is no metric."""

    def __init__(self):
        super().__init__()
        self.layers_ = [
            keras.layers.Dense(12, activation="relu"),
            keras.layers.Dense(9),
            keras.layers.Dense(3),
        ]

    def call(self, x, training=False):
        for layer in self.layers_:
            x = layer(x)
        return x

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - tf.one_hot(y, 3)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class OwnMeans(Custom):
    """Its train_step updates means by itself, one with a number, one with a number for each row."""

    def __init__(self):
        super().__init__()
        self.loss_tracker = keras.metrics.Mean(name="mean_loss")
        self.by_row = keras.metrics.Mean(name="by_row")

    def train_step(self, data):
        x, y = data
        logs = super().train_step(data)
        self.loss_tracker.update_state(logs["loss"])
        self.by_row.update_state(tf.reduce_sum(x, axis=1))
        return {"mean_loss": self.loss_tracker.result(), "by_row": self.by_row.result()}


def check_own_means():
    """The last batch has 4 rows, in micro-batches of 2, 1 and 1."""
    settings = {"data": (X_UNEVEN, Y_UNEVEN), "metrics": None, "loss": None}
    _, stock = train(OwnMeans, adam, **settings)
    _, parted = train(OwnMeans, adam, pipelined("1f1b", microbatches=3), **settings)
    return {name: [stock[name], parted[name]] for name in ("mean_loss", "by_row")}


def check_custom_train_step():
    return compared(Custom, adam, ("gpipe", "zb_h1"), metrics=None, loss=None)


@keras.saving.register_keras_serializable("tests")
class Traced(keras.layers.Layer):
    """A layer that is a tf.function of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = keras.layers.Dense(19, activation="tanh")

    def build(self, shape):
        self.inner.build(shape)

    @tf.function
    def call(self, x):
        return self.inner(x)


class TracedStep(keras.Model):
    """Its train_step is one, with a condition."""

    @tf.function
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            if tf.reduce_sum(x) > 1e9:
                loss *= 2.0
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def check_traced_parts():
    """Functions that TensorFlow would use again as they were traced before the variables were moved."""

    def make():
        inputs = keras.Input((7,))
        x = keras.layers.Dense(23, activation="gelu")(Traced()(inputs))
        return TracedStep(inputs, keras.layers.Dense(3)(x))

    found = compared(make, adam, ("gpipe", "1f1b"), metrics=None)

    def held():
        """One that no method holds is not found: refused, not left untrained."""
        model = mlp()
        last = model.layers[-1]
        last.call = tf.function(last.call)
        return model

    try:
        train(held, adam, pipelined("gpipe"))
        refused = ""
    except tf_ooo.BackendError as error:
        refused = str(error)
    return {"schedules": found, "refused": refused}


def check_models_within():
    """What a callback has an inner model predict in a fit; and after it, with other weights."""

    def make():
        encoder = keras.Sequential(
            [keras.Input((7,)), keras.layers.Dense(12), keras.layers.Dense(9)], name="inner"
        )
        inputs = keras.Input((7,))
        return keras.Model(inputs, keras.layers.Dense(3)(encoder(inputs)))

    seen = []

    class Predicts(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            encoder = self.model.get_layer("inner")
            seen.append(float(np.abs(encoder.predict(X, verbose=0) - np.asarray(encoder(X))).max()))

    model, _ = train(make, adam, pipelined("1f1b"), Predicts())
    encoder = model.get_layer("inner")
    encoder.set_weights([2 * weight for weight in encoder.get_weights()])
    seen.append(float(np.abs(encoder.predict(X, verbose=0) - np.asarray(encoder(X))).max()))
    return seen


def check_plain_sgd():
    """Sees a factor on all gradients, which Adam does not; every fourth batch has fewer rows."""
    rates = {
        "sgd": lambda: keras.optimizers.SGD(0.3),
        "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    }
    uneven = {"data": (X_UNEVEN, Y_UNEVEN), "epochs": 5}
    return {name: compared(mlp, rate, ("gpipe", "zb_h1"), **uneven) for name, rate in rates.items()}


class AddsLoss(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * tf.reduce_mean(tf.square(x)))
        return x


def nested():
    """An inner model that is used twice, a penalty for its activations, and one for a kernel."""
    inner = keras.Sequential([keras.Input((12,)), keras.layers.Dense(12, "tanh"), keras.layers.Dense(12)])
    inputs = keras.Input((7,))
    x = inner(inner(keras.layers.Dense(12, kernel_regularizer="l2")(inputs)))
    return keras.Model(inputs, keras.layers.Dense(3)(AddsLoss()(x)))


def check_features():
    """What optimizers and callbacks of Keras do: as in stock training, with a last batch of 4 rows."""
    sgd, decays = keras.optimizers.SGD, keras.optimizers.schedules.ExponentialDecay(0.2, 3, 0.5)
    calls = keras.callbacks
    cases = {
        "accumulation": (lambda: sgd(0.2, gradient_accumulation_steps=2), []),
        "use_ema": (lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3), []),
        "clipnorm": (lambda: sgd(0.2, clipnorm=0.1), []),
        "clipvalue": (lambda: sgd(0.2, clipvalue=0.01), []),
        "schedule": (lambda: sgd(decays), []),
        "scheduler": (
            lambda: sgd(0.2),
            [lambda: calls.LearningRateScheduler(lambda epoch: 0.2 / (1 + epoch))],
        ),
        "plateau": (
            lambda: sgd(0.2),
            [lambda: calls.ReduceLROnPlateau("loss", patience=0, min_delta=1.0)],
        ),
        "stopping": (
            lambda: sgd(0.2),
            [lambda: calls.EarlyStopping("loss", patience=0, min_delta=10.0, restore_best_weights=True)],
        ),
        "swapped": (
            lambda: keras.optimizers.Adam(0.01, use_ema=True),
            [lambda: calls.SwapEMAWeights(swap_on_epoch=True)],
        ),
    }
    weights = RNG.random(52).astype("float32")
    found = {}
    for name, (optimizer, more) in cases.items():
        settings = {"data": (X_UNEVEN, Y_UNEVEN, weights), "epochs": 4}
        stock, before = train(nested, optimizer, *(make() for make in more), **settings)
        model, history = train(nested, optimizer, pipelined("zb_h1"), *(make() for make in more), **settings)
        slots = zip(stock.optimizer.variables, model.optimizer.variables, strict=True)
        found[name] = {
            "weights": distance(stock, model),
            "slots": max(float(np.abs(a.numpy() - b.numpy()).max()) for a, b in slots),
            "history": {key: [before[key], history[key]] for key in before},
        }
    return found


def check_several_optimizers():
    """keras.optimizers.MultiOptimizer: each layer's own."""
    chosen = []

    def make():
        chosen.append(mlp())
        return chosen[-1]

    def several():
        first = chosen[-1].layers[0].name
        by_path = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), {f"{first}/.*": adam()})
        return keras.optimizers.MultiOptimizer(by_path)

    found = compared(make, several, ("gpipe", "1f1b"))
    counts = [int(one.iterations) for one in optimizers_of(chosen[-1])]
    return {"schedules": found, "counts": counts}


def check_rnn():
    def make():
        one, two = keras.layers.LSTM(6, return_sequences=True, unroll=True), keras.layers.GRU(5, unroll=True)
        layers = [one, two, keras.layers.Dense(3)]
        return keras.Sequential([keras.Input((4, 2)), *layers])

    data = (RNG.normal(size=(48, 4, 2)).astype("float32"), Y)
    return compared(make, adam, ("gpipe", "zb_h1"), data=data)


def check_loops():
    """Recurrent layers whose loops are not unrolled, cut behind the first loop and behind the second."""

    def make():
        layers = [
            keras.layers.LSTM(6, return_sequences=True),
            keras.layers.GRU(7, return_sequences=True),
            keras.layers.SimpleRNN(5),
            keras.layers.Dense(3),
        ]
        return keras.Sequential([keras.Input((4, 2)), *layers])

    data = (RNG.normal(size=(48, 4, 2)).astype("float32"), Y)
    # A GRU of Keras 3 takes its bias apart, a layer of costs for each part.
    last = 5 if keras.__version__ >= "3" else 3
    cuts = {"first": [last, *[1] * last], "second": [*[1] * (last - 1), last - 2, 1]}
    out = {}
    for cut, seconds in cuts.items():
        costs = CostTable([tf_ooo.LayerCosts(s, s, s) for s in seconds])
        options = {"microbatches": 2, "costs": costs}
        found = compared(make, adam, ("gpipe", "zb_h1"), options, data=data, epochs=3)
        out |= {f"{schedule}, {cut}": one for schedule, one in found.items()}
    return out


class LanguageModel(keras.Model):
    """Loops between an embedding and the same one as the output's kernel."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(29, 8)
        self.loops = [keras.layers.LSTM(8, return_sequences=True) for _ in range(2)]

    def call(self, words):
        hidden = self.embedding(words)
        for loop in self.loops:
            hidden = loop(hidden)
        return tf.tensordot(hidden, tf.transpose(self.embedding.embeddings), 1)


def check_loops_and_skips():
    """What comes out of a loop meets something of a lower layer; each cut there is."""

    def residual():
        inputs = keras.Input((4, 3))
        x = keras.layers.Dense(6)(inputs)
        for _ in range(2):
            x = keras.layers.Add()([x, keras.layers.LSTM(6, return_sequences=True)(x)])
        return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(x)))

    def used_again():
        lstm, inputs = keras.layers.LSTM(6, return_sequences=True), keras.Input((4, 6))
        x = lstm(keras.layers.Dense(6)(lstm(inputs)))
        return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(x)))

    cases = {
        "used again": (used_again, 3, (RNG.normal(size=(48, 4, 6)).astype("float32"), Y)),
        "residual": (residual, 4, (RNG.normal(size=(48, 4, 3)).astype("float32"), Y)),
        "tied": (LanguageModel, 3, (WORDS, np.roll(WORDS, 1, 1))),
    }
    out = {}
    for name, (make, layers, data) in cases.items():
        for cut in range(1, layers):
            seconds = [[layers - cut, cut][number >= cut] for number in range(layers)]
            costs = CostTable([tf_ooo.LayerCosts(s, s, s) for s in seconds])
            options = {"microbatches": 2, "costs": costs}
            found = compared(make, adam, ("gpipe", "zb_h1"), options, data=data, epochs=2)
            out |= {f"{schedule}, {name}, cut at {cut}": one for schedule, one in found.items()}
    return out


def unordered(report):
    """Tasks of a lane that do not wait for the one before, though most of their ops should.

    A stage's dO and dW of a micro-batch run in any order where backward is one task, and where one loop
    computes both: what of the dW feeds that loop does not wait for later tasks either.
    """
    graph, lanes = report.rewritten_graph, report.planned.lanes.values()
    fused = report.planned.fused_backward
    index, ops, loops = GraphIndex(graph), {}, {}
    for name, task in tasks_of(graph).items():
        i = index.index[name]
        if index.contexts[i].frame:
            loops.setdefault(task, []).append(i)
        elif index.ops[i] not in ("Const", "NoOp"):
            ops.setdefault(task, []).append(i)
    found = []
    for lane in lanes:
        tasks = [task for task in lane if task.kind in ("F", "dO", "dW") and ops.get(task)]
        for before, after in itertools.pairwise(tasks):
            one = (before.stage, before.microbatch) == (after.stage, after.microbatch)
            looped = loops.get(dataclasses.replace(after, kind="dO"), []) if after.kind == "dW" else []
            if one and (before.kind, after.kind) == ("dO", "dW") and (fused or looped):
                continue
            able = [i for i in ops[after] if not any(index.implied(i, j) for j in looped)]
            free = [i for i in able if not any(index.implied(j, i) for j in ops[before])]
            if len(free) > len(able) / 2:
                found.append(f"{before} {after}")
    return found


def redundant(report):
    """Control edges between tasks, or from and to a join, that follow from all others."""
    graph = report.rewritten_graph
    index, tasks = GraphIndex(graph), tasks_of(graph)

    def ours(name, reader):
        if "tf_ooo_join" in name + reader:
            return True
        if all("Variable" in index.ops[index.index[one]] for one in (name, reader)):
            return False  # TensorFlow's own, between accesses to one variable
        kinds = {tasks[one].kind for one in (name, reader) if one in tasks}
        return kinds <= {"F", "dO", "dW"} and len({tasks.get(name), tasks.get(reader)} - {None}) == 2

    found = []
    for node in graph.node:
        inputs = [text.lstrip("^").partition(":")[0] for text in node.input]
        for text in node.input:
            name = text[1:]
            if text[0] == "^" and ours(name, node.name):
                i = index.index[name]
                others = [index.index[one] for one in inputs if one != name]
                if inputs.count(name) > 1 or any(index.implied(i, other) for other in others):
                    found.append(f"{name} -> {node.name}")
    return found


def loops(report):
    """How many while loops start on each device, and whether one has ops on several."""
    places = {}
    for node in report.rewritten_graph.node:
        if node.op == "Enter":
            places.setdefault(node.attr["frame_name"].s, set()).add(node.device[-5:])
    count = {device: sum(device in on for on in places.values()) for device in ("CPU:0", "CPU:1")}
    return {"started": count, "parted": sum(len(on) > 1 for on in places.values())}


def attention():
    """A transformer layer, whose bits depend on the names of ops."""
    inputs = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(19, 32)(inputs) + keras.layers.Embedding(8, 32)(0 * inputs + np.arange(8))
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(4, 8)(x, x))
    return keras.Model(inputs, keras.layers.Dense(3)(x[:, 0]))


def check_one_device_is_stock():
    """One device and one micro-batch: the bits of the stock step."""
    out = {}
    tokens = RNG.integers(0, 19, (48, 8)).astype("int32")
    for make, data in ((mlp, (X, Y)), (conv_with_skips, (IMAGES, Y)), (attention, (tokens, Y))):
        stock, before = train(make, adam, data=data)
        callback = pipelined("gpipe", devices=1, microbatches=1)
        model, history = train(make, adam, callback, data=data)
        out[make.__name__] = same(stock, model) and history == before
    return out


class Interrupt(keras.callbacks.Callback):
    """Raises in one of its methods, the first time the model is distributed; notes where its weights were."""

    def __init__(self, method, error):
        super().__init__()
        self.method, self.error, self.seen = method, error, []
        setattr(self, method, self.stop)

    def stop(self, *args, **kwargs):
        found = places(self.model)
        if len(found) > 1:
            self.seen += found
            raise self.error


def interruptions():
    return {
        "a callback": Interrupt("on_train_batch_end", RuntimeError("stopped here")),
        "the end of an epoch": Interrupt("on_epoch_end", RuntimeError("stopped here")),
        "the validation": Interrupt("on_test_batch_begin", RuntimeError("stopped here")),
        "ctrl-c": Interrupt("on_train_batch_begin", KeyboardInterrupt()),
    }


class Failing(keras.Model):
    """Raises in a line of Keras' own fit."""

    fails = False

    def __init__(self):
        super().__init__()
        self.inside = mlp()

    def call(self, x):
        return self.inside(x)

    def _should_eval(self, *args):
        if self.fails:
            raise RuntimeError("stopped between two calls")
        return super()._should_eval(*args)


class FailingAtTheEnd(keras.optimizers.Adam):
    """Raises where fit tells it that training is over."""

    def finalize_variable_values(self, variables):
        raise RuntimeError("stopped at the end")


def places(model, others=None):
    variables = [*model.variables, *(model.optimizer.variables if others is None else others)]
    return sorted({value_of(v).device[-5:] for v in variables})


LOADING = """
import json, sys, keras
from tests.scripts import bits_of
model = keras.models.load_model(sys.argv[1])
print(json.dumps([bits_of(model), "tf_ooo" in sys.modules]))
"""


def check_variables_move_and_return():
    """During a fit; after an exception elsewhere and the next fit; after the data raise; files in between."""
    out = {}
    callback = pipelined("zb_h1")
    folder = tempfile.mkdtemp()
    path, whole = f"{folder}/weights.weights.h5", f"{folder}/model.keras"
    seen = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: out.setdefault("during", []).append(places(callback.model))
    )
    saving = (
        keras.callbacks.ModelCheckpoint(path, save_weights_only=True),
        keras.callbacks.ModelCheckpoint(whole),
    )
    model, _ = train(mlp, adam, callback, seen, *saving, epochs=3)
    out["after"] = places(model)
    other = mlp()
    other.load_weights(path)
    out["file"] = same(model, other)
    loaded = subprocess.check_output([sys.executable, "-c", LOADING, whole])
    out["file without us"] = json.loads(loaded) == [bits_of(model), False]

    fits = {"batch_size": 16, "epochs": 3, "verbose": 0}
    for name, raising in interruptions().items():
        try:
            model.fit(X, Y, **fits, callbacks=[pipelined("gpipe"), raising], validation_data=(X, Y))
        except (RuntimeError, KeyboardInterrupt):
            # Within the handler: nothing needs the garbage collector.
            out[f"interrupted by {name}"] = [raising.seen, places(model)]

    once = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda n, logs: len(places(model)) > 1 and model.train_on_batch(X[:4], Y[:4])
    )
    parted = pipelined("gpipe")
    model.fit(X, Y, **fits, callbacks=[parted, once])
    out["trained by others"] = [places(model), [note[:45] for note in parted.report.notes]]

    failing, _ = train(Failing, adam, epochs=1)
    failing.fails = True
    try:
        data = {"validation_data": (X, Y), "callbacks": [pipelined("gpipe")]}
        failing.fit(X, Y, batch_size=4, epochs=2, verbose=0, **data)
    except RuntimeError:
        out["unseen"] = places(failing)
    failing.fails = False
    before = failing.get_weights()
    failing.fit(X, Y, batch_size=16, epochs=1, verbose=0)
    out["next fit"] = places(failing)
    out["trained on"] = not np.array_equal(before[0], failing.get_weights()[0])

    model = mlp()
    model.compile(FailingAtTheEnd(1e-2), "mse", jit_compile=False)
    try:
        model.fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[pipelined("gpipe")])
    except RuntimeError:
        out["at the end"] = places(model)

    model, _ = train(mlp, adam, epochs=1)

    def rows():
        for _ in range(6):
            yield X[:16], Y[:16]
        raise ValueError("no more data")

    try:
        model.fit(rows(), verbose=0, epochs=2, steps_per_epoch=5, callbacks=[pipelined("gpipe")])
    except Exception as error:
        out["data"] = [type(error).__name__, *places(model)]
    return out


def check_fit_again_and_executions():
    """Two fits with one callback; several steps an execution; validation within."""
    first, _ = train(mlp, adam, pipelined("zb_h1"), epochs=4)
    callback = pipelined("zb_h1")
    second, _ = train(mlp, adam, callback, epochs=2, steps_per_execution=3)
    history = second.fit(
        X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False, callbacks=[callback], validation_data=(X, Y)
    ).history
    values = second.evaluate(X, Y, batch_size=16, verbose=0)
    few = pipelined("zb_h1")
    third, _ = train(mlp, adam, few, epochs=1, batch_size=2)
    planned = [few.report.planned.microbatches]
    third.fit(X, Y, batch_size=16, epochs=3, verbose=0, shuffle=False, callbacks=[few])
    planned.append(few.report.planned.microbatches)
    return {
        "equal": same(first, second),
        "val": float(abs(history["val_loss"][-1] - values[0])),
        "steps": len(callback.report.pipeline["step_s"]),
        "places": places(second) + places(third),
        "planned": planned,
        "unordered": unordered(few.report),
    }


class Twice(keras.Model):
    """Applies its gradients, then reads the weights again."""

    def __init__(self):
        super().__init__()
        self.one, self.two = keras.layers.Dense(5), keras.layers.Dense(3)

    def call(self, x):
        return self.two(self.one(x))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data[0])))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": tf.reduce_mean(self(data[0]))}


def check_uneven_rows():
    """Last batches of 6, 2 and 1 rows in four micro-batches: 2, 2, 1 and 1 rows; one each; one."""
    found = {}
    for rows in (54, 50, 49):
        data = (np.concatenate([X, X])[:rows], np.concatenate([Y, Y])[:rows])
        found |= {f"{rows}": compared(mlp, adam, ("gpipe", "zb_h1"), data=data, epochs=5)}
    return found


def check_compiled_by_keras():
    """As on a GPU, where Keras sets jit_compile: not compiled during the fit, also for its evaluations."""
    stock, before = train(mlp, adam)
    keras_compiles, seen = compat.keras_compiles_by_itself, []
    compat.keras_compiles_by_itself = lambda model: True
    saw = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(saw.model.jit_compile)
    )
    keras.utils.set_random_seed(3)
    model, callback = mlp(), pipelined("gpipe")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(adam(), loss, metrics=["accuracy"], jit_compile=True)
    fit = {"batch_size": 16, "epochs": 7, "verbose": 0, "shuffle": False, "validation_data": (X, Y)}
    model.fit(X, Y, **fit, callbacks=[callback, saw])
    compat.keras_compiles_by_itself = keras_compiles
    return {
        "distance": distance(stock, model),
        "seen": sorted(set(seen)),
        "after": model.jit_compile,
        "notes": [note for note in callback.report.notes if "jit_compile" in note],
    }


def check_masks():
    """Said, as each micro-batch's loss divides by its own mask."""
    words = np.where(RNG.random((48, 6)) < 0.3, 0, RNG.integers(1, 29, size=(48, 6)))

    def make():
        embedding = keras.layers.Embedding(29, 8, mask_zero=True)
        layers = [embedding, *(keras.layers.Dense(width) for width in (7, 5, 3))]
        return keras.Sequential([keras.Input((6,)), *layers])

    callback = pipelined("gpipe")
    train(make, adam, callback, data=(words, RNG.integers(0, 3, (48, 6))))
    return [note for note in callback.report.notes if "masked" in note]


def one_layer():
    return keras.Sequential([keras.Input((7,)), keras.layers.Dense(3)])


def stateful():
    layers = [keras.layers.Reshape((1, 7)), keras.layers.LSTM(4, stateful=True), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((7,), batch_size=16), *layers])


def check_refusals():
    """Each with its error."""
    summed = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    unreduced = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    cases = {
        "xla": (mlp, {"jit_compile": True}, {}),
        "eager": (mlp, {"run_eagerly": True}, {}),
        "sum": (mlp, {"loss": summed}, {}),
        "none": (mlp, {"loss": unreduced}, {}),
        "stateful": (stateful, {}, {}),
        "reads": (Twice, {"loss": None, "metrics": []}, {}),
        "device": (mlp, {}, {"devices": ["CPU:0", "CPU:7"]}),
        "same": (mlp, {}, {"devices": ["CPU:0", "CPU:0"]}),
        "many": (mlp, {}, {"devices": DEVICES + 1}),
        "replicas": (mlp, {}, {"replicas": 2}),
        "layers": (one_layer, {}, {"schedule": "interleaved_1f1b", "chunks": 9}),
        "group": (one_layer, {}, {"schedule": "modulo", "group": 9}),
        "text": (mlp, {}, {"devices": "CPU:0,CPU:1"}),
    }
    out = {}
    for name, (make, compiled, options) in cases.items():
        options = {"schedule": "gpipe", **options}
        try:
            callback = pipelined(options.pop("schedule"), **options)
            train(make, adam, callback, **compiled)
        except tf_ooo.OOOError as error:
            out[name] = [type(error).__name__, str(error)]
        else:
            out[name] = ["nothing", ""]
    return out


def main():
    cpu = tf.config.list_physical_devices("CPU")[0]
    configuration = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, configuration)
    print(json.dumps({name: globals()[f"check_{name}"]() for name in sys.argv[2:]}, default=str))


main()
