"""Run by test_layerpipe.py in a process of its own: logical CPUs must be set up first.

``python layerpipe_fit.py CHECK...`` prints one line of JSON: what each check found.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf

import tf_ooo
from grappler_passes.dependencies import GraphIndex
from tests.scripts import print_found
from tf_ooo.compat import path_of
from tf_ooo.costs.table import CostTable
from tf_ooo.data_parallel.sync import build
from tf_ooo.layerpipe.reporting import version_bytes
from tf_ooo.layerpipe.running import Epoch
from tf_ooo.layerpipe.spread import spread
from tf_ooo.layerpipe.stages import HIGH, Stages
from tf_ooo.pipeline.compat import value_of
from tf_ooo.pipeline.naming import named
from tf_ooo.pipeline.variables import Moved, all_variables

DEVICES = [f"/job:localhost/replica:0/task:0/device:CPU:{number}" for number in range(4)]
WIDTHS = (20, 17, 12, 9, 4)
BATCHES = 9
# Of the nine batches three are left when the rounds of four devices are full.
TOGETHER = 3


# -- a multilayer perceptron by hand, with the weights that each pass of each batch is to see -------


def perceptron(rate=0.3):
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(width, activation="relu", name=f"d{i}") for i, width in enumerate(WIDTHS[1:-1])
    ]
    model = keras.Sequential(
        [keras.Input((WIDTHS[0],)), *layers, keras.layers.Dense(WIDTHS[-1], name="last")]
    )
    model.compile(keras.optimizers.SGD(rate), "mse", jit_compile=False)
    return model


def rows(number):
    """Batches have unequal numbers of rows."""
    return 11 if number % 4 == 3 else 16


def data(count=BATCHES):
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(rows(n), WIDTHS[0])).astype(np.float32) for n in range(count)]
    y = [rng.normal(size=(rows(n), WIDTHS[-1])).astype(np.float32) for n in range(count)]
    return x, y


def by_hand(delays, weights, rate=0.3, warmup=None, all_weights=False, frozen=(), behind=None):
    """The final weights, and the losses: layer l's forward pass is ``delays[l]`` updates behind.

    Its backward pass reads weights that are ``behind[l]`` updates later than those of its forward pass.
    ``rate``: a number, or a function of the number of a batch.
    """
    behind = delays if behind is None else behind
    x, y = data()
    pairs = perceptron().get_weights()
    history = [
        [(pairs[2 * i].astype(np.float64), pairs[2 * i + 1].astype(np.float64)) for i in range(len(delays))]
    ]
    averages = [[[np.zeros_like(w) for w in pair] for pair in history[0]]]
    losses = []
    for n in range(BATCHES):
        seen = [history[max(0, n - d)][layer] for layer, d in enumerate(delays)]
        at = [max(0, n - d + b) for d, b in zip(delays, behind, strict=True)]
        now = [
            _weights(weights, seen[i][0], history[at[i]][i][0], averages[at[i]][i][0], b)
            for i, b in enumerate(behind)
        ]
        gradients, loss = _gradients(x[n], y[n], seen, now)
        losses.append(loss)
        after = [
            tuple(
                w
                - (rate(n) if callable(rate) else rate)
                * (layer not in frozen)
                * _factor(delays[layer], min(n + (max(delays) + delays[layer]) // 2, BATCHES), warmup)
                * g
                for w, g in zip(*pairs, strict=True)
            )
            for layer, pairs in enumerate(zip(history[n], gradients, strict=True))
        ]
        averages.append(
            [
                [a + 2 / (b + 1) * (w - later - a) for a, w, later in zip(*three, strict=True)]
                for b, *three in zip(behind, averages[n], history[n], after, strict=True)
            ]
        )
        history.append(after)
    if all_weights:
        return [[w for pair in one for w in pair] for one in history]
    return [w for pair in history[-1] for w in pair], losses


def _factor(delay, rounds, warmup):
    return 1.0 if not warmup or not delay else delay ** -(1 - min(rounds / warmup, 1))


def _weights(which, seen, latest, average, delay):
    return {"stash": seen, "latest": latest, "ema": latest + delay * average}[which]


def _gradients(x, y, seen, now):
    """Gradients and loss of one batch; ``now`` are the kernels that dO multiplies with."""
    inputs, outputs = [], x.astype(np.float64)
    for layer, (kernel, bias) in enumerate(seen):
        inputs.append(outputs)
        outputs = outputs @ kernel + bias
        if layer < len(seen) - 1:
            outputs = np.maximum(outputs, 0)
    error = outputs - y
    gradient = 2 * error / error.size
    found = []
    for layer in reversed(range(len(seen))):
        found.append((inputs[layer].T @ gradient, gradient.sum(0)))
        if layer:
            gradient = (gradient @ now[layer].T) * (inputs[layer] > 0)
    return found[::-1], float((error**2).mean())


# -- the same, spread ------------------------------------------------------------------------------


def placed(forward, output_grads, weight_grads, shares=None):
    """Stages from the processors of each layer's F, dO and dW."""
    of = {}
    for layer, three in enumerate(zip(forward, output_grads, weight_grads, strict=True)):
        of.update({(kind, layer): at for kind, at in zip(("F", "dO", "dW"), three, strict=True)})
    shares = shares or {}
    of.update({(HIGH, layer): high for layer, (_, high) in shares.items()})
    return Stages(1 + max(of.values()), of, shares)


WAYS = ("stash", "latest", "ema")
WEIGHTS = {"two": WAYS, "four": ("stash", "ema"), "dW apart": WAYS, "F apart": WAYS}
# Layer 1's F is on processor 1, its dW on 0: the forward pass reads weights that come from there, a round old
# in round 0; dO's, in round 2, too: they are 2 updates later, of the 4 that the layer's gradient is late.
BEHIND = {"F apart": (4, 2, 2, 0)}
STAGES = {
    "one": placed([0] * 4, [0] * 4, [0] * 4),
    "two": placed([0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]),
    "four": placed(range(4), range(4), range(4)),
    "dW apart": placed([0, 1, 1, 2], [0, 1, 1, 2], [1, 1, 2, 2]),
    "F apart": placed([0, 1, 2, 2], [0, 1, 1, 2], [0, 0, 1, 2]),
    "lowest dO in two parts": placed([0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1], {1: (0.4, 1)}),
    "dO in two parts": placed([0, 1, 2, 2], [0, 1, 1, 2], [0, 1, 2, 2], {2: (0.4, 2)}),
    "dO in two parts below dW": placed([0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 3, 3], {2: (0.4, 2)}),
}


def layer_in(path):
    return path.rpartition("/")[0].rpartition("/")[2]


def spread_over(stages, weights, warmup=None, every=None, count=BATCHES, frozen=None):
    model = perceptron()
    if frozen is not None:
        model.layers[frozen].trainable = False
        model.compile(model.optimizer, "mse", jit_compile=False)
    x, y = data(count)
    build(model, [model.optimizer], model.train_step, iter(tf.data.Dataset.from_tensors((x[0], y[0]))))
    trained = [layer for layer in model.layers if layer.trainable]
    layer_of = {layer.name: number for number, layer in enumerate(trained)}
    moved = Moved(model)
    names = named(all_variables(model))
    homes = {
        id(v): DEVICES[stages.of["dW", layer_of[layer_in(name)]]]
        for name, v in names.items()
        if layer_in(name) in layer_of
    }
    if frozen is not None:  # with the layer before it
        homes |= {id(v): DEVICES[stages.of["F", frozen - 1]] for v in model.layers[frozen].variables}
    moved.move(homes, names.values())
    devices = DEVICES[: stages.processors]
    made = spread(model, (x[0], y[0]), stages, devices, weights, {}, warmup, every)
    made.ticks.reset()
    feed = iter(zip(x, y, strict=True))

    def batches():
        batch = next(feed, None)
        return None if batch is None else [tf.constant(part) for part in batch]

    epoch = Epoch(made.ticks, made.rounds.batch, made.delays.logs_round, batches, TOGETHER)
    losses = []
    while (logs := epoch.step()) is not None:
        losses.append(float(logs["loss"]))
    moved.restore()
    return model.get_weights(), losses, made


def out_of_turn(made):
    """Ops of full rounds that do not wait for the task before, of their own processor, though they could."""
    ticks = made.ticks
    rounds = min(TOGETHER, max((key[2] for key in ticks._functions), default=1))
    graph = ticks._function(0, ticks.last, rounds).get_concrete_function().graph.as_graph_def()
    index, lanes = GraphIndex(graph), {}
    for number in range(rounds):
        for kind in ("F", "dO", "dW"):
            for name, (own, _) in made.traced.where.items():
                i = index.index.get(f"round_{number}/{name}" if rounds > 1 else name)
                if (
                    own == kind
                    and i is not None
                    and name in made.rounds.device_of
                    and index.ops[i] != "Const"
                ):
                    lane = lanes.setdefault(made.rounds.device_of[name], {})
                    lane.setdefault((number, kind), []).append(i)
    found, pairs = [], 0
    for lane in lanes.values():
        earlier = []
        for before, after in itertools.pairwise(lane.values()):
            earlier += before
            free = [i for i in after if not any(index.implied(i, j) for j in earlier)]
            found += [index.names[i] for i in free if not all(index.implied(j, i) for j in before)]
            pairs += len(free)
    return {"rounds": rounds, "free": pairs, "out of turn": found}


def spread_against_by_hand():
    found = {}
    for name, stages in STAGES.items():
        for weights in WEIGHTS.get(name, ("stash",)):
            delays = [2 * stages.stages_after(layer) for layer in range(4)]
            got, losses, made = spread_over(stages, weights)
            expected, one_by_one = by_hand(delays, weights, behind=BEHIND.get(name))
            means = np.cumsum(np.array(one_by_one) * [rows(n) for n in range(BATCHES)])
            means /= np.cumsum([rows(n) for n in range(BATCHES)])
            found[f"{name}, {weights}"] = {
                "distance": max(float(np.abs(a - b).max()) for a, b in zip(got, expected, strict=True)),
                "moved": max(
                    float(np.abs(a - b).max()) for a, b in zip(got, perceptron().get_weights(), strict=True)
                ),
                "loss": float(np.abs(means - losses).max()),
                "notes": list(made.notes),
                "turns": out_of_turn(made),
                "bytes": version_bytes(made),
                "weights_bytes": sum(w.nbytes for w in got),
                "high": sorted(
                    {
                        made.rounds.device_of[op][-5:]
                        for op, (kind, _) in made.traced.where.items()
                        if kind == HIGH and op in made.rounds.device_of
                    }
                ),
            }
    return found


def coalesced_by_hand(every, count, rate=0.3):
    """Every group of batches uses the weights of one update before; the mean of its gradients is the next."""
    x, y = data(count)
    pairs = perceptron().get_weights()
    versions = [
        [(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(*[iter(pairs)] * 2, strict=True)]
    ]
    losses = []
    for group in range(-(-count // every)):
        seen = versions[max(0, group - 1)]
        found = [
            _gradients(x[n], y[n], seen, [kernel for kernel, _ in seen])
            for n in range(group * every, min(count, (group + 1) * every))
        ]
        losses += [loss for _, loss in found]
        versions.append(
            [
                tuple(
                    w - rate * np.mean([one[layer][part] for one, _ in found], axis=0)
                    for part, w in enumerate(weights)
                )
                for layer, weights in enumerate(versions[-1])
            ]
        )
    return [w for pair in versions[-1] for w in pair], losses


def two_versions():
    """PipeDream-2BW; the last group has fewer batches than the others."""
    found = {}
    for name, every, count in (("two", 2, 9), ("two", 5, 13), ("four", 6, 23)):
        got, losses, made = spread_over(STAGES[name], "stash", every=every, count=count)
        expected, one_by_one = coalesced_by_hand(every, count)
        late, _ = by_hand([0] * 4, "stash")
        sizes = [rows(n) for n in range(count)]
        means = np.cumsum(np.array(one_by_one) * sizes) / np.cumsum(sizes)
        versions = made.ticks.versions
        found[f"{name}, {every}"] = {
            "distance": max(float(np.abs(a - b).max()) for a, b in zip(got, expected, strict=True)),
            "matters": max(float(np.abs(a - b).max()) for a, b in zip(got, late, strict=True)),
            "loss": float(np.abs(means - losses).max()),
            "behind": sorted(set(versions.delay_updates.values())),
            "variables": len(versions.delay_updates),
            "bytes": [versions.version_bytes, versions.sum_bytes, sum(w.nbytes for w in got)],
        }
    return found


def frozen_weights():
    """Forward and dO of the frozen layer are on two devices: one copy, and nothing of it in registers."""
    stages = placed([0, 2, 2], [0, 1, 2], [0, 1, 2])
    got, losses, made = spread_over(stages, "stash", frozen=2)
    expected, _ = by_hand([4, 2, 0, 0], "stash", frozen=(2,))
    kernel = got[4]
    shapes = [made.traced.outputs[r.source.partition(":")[0]][0].shape for r in made.delays.registers]
    return {
        "distance": max(float(np.abs(a - b).max()) for a, b in zip(got, expected, strict=True)),
        "moved": float(np.abs(got[0] - perceptron().get_weights()[0]).max()),
        "same": same([kernel], [perceptron().get_weights()[4]]),
        "copied": made.ticks.copies.bytes / kernel.nbytes,
        "registers": [list(s) for s in shapes if s in (kernel.shape, kernel.shape[::-1])],
    }


# -- model.fit -------------------------------------------------------------------------------------


def samples(count=72):
    """The last batch is smaller than the others."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 12, 12, 2)).astype(np.float32)
    return x, (x.mean((1, 2, 3)) > 0).astype(np.int32)


def convnet(optimizer="sgd", dropout=0.2):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((12, 12, 2))
    x = keras.layers.Conv2D(5, 3, padding="same", activation="relu")(inputs)
    skip = x
    x = keras.layers.BatchNormalization()(keras.layers.Conv2D(5, 3, padding="same")(x))
    # Keras 2's Dropout draws from a state that each function has of its own: fits do not go on with masks.
    dropped = dropout if keras.__version__ >= "3" else 0.0
    x = keras.layers.Dropout(dropped)(keras.layers.add([x, skip]))
    x = keras.layers.Dense(7, activation="relu")(keras.layers.Flatten()(x))
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    return model


def fitted(model, callback, epochs=2, more=(), **arguments):
    x, y = samples()
    history = model.fit(
        x, y, batch_size=16, epochs=epochs, shuffle=False, verbose=0, callbacks=[callback, *more], **arguments
    )
    return history.history


def costs_of(model_layers):
    """Costs under which every layer is worth a processor."""
    rows = [tf_ooo.LayerCosts(1.0, 1.2, 0.9, name=str(n)) for n in range(model_layers)]
    return CostTable(rows)


def layerpipe(devices=3, layers=5, **options):
    """Layers may be divided, whether or not that is predicted to gain much."""
    given = {"schedule": "layerpipe", "costs": costs_of(layers)} | options
    return tf_ooo.OOOBackprop(mode="layerpipe", devices=devices, **given)


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def callback_in_fit():
    found = {}
    wanted = {"stash": {}, "ema": {"weights": "ema"}, "pipedream": {"schedule": "pipedream"}}
    for name, options in wanted.items():
        model, callback = convnet(keras.optimizers.Adam(0.01)), layerpipe(**options)
        history = fitted(model, callback, epochs=1, validation_data=samples())
        report = callback.report
        found[name] = {
            "losses": history["loss"] + history["val_loss"],
            "evaluated": model.evaluate(*samples(), verbose=0)[0],
            "trained": [path_of(v) for v in model.trainable_variables],
            "ways": report.layerpipe["ways_bytes"],
            "iterations": int(model.optimizer.iterations.numpy()),
            "delays": report.layerpipe["delay_steps"],
            "layers": [
                {k: v for k, v in row.items() if k not in ("dW", "U", "comm")} for row in report.layers
            ],
            "bytes": report.layerpipe["weight_version_bytes"],
            "weights_bytes": sum(w.nbytes for w in model.get_weights()),
            "home": sorted({value_of(v).device[-5:] for v in model.variables}),
            "notes": report.notes,
            "summary": report.summary(),
            "state": report.state,
        }
    return found


def one_device_is_stock():
    stock, ours = convnet("adam"), convnet("adam")
    expected = fitted(stock, keras.callbacks.Callback())
    callback = tf_ooo.OOOBackprop(mode="layerpipe", devices=1)
    history = fitted(ours, callback)
    slots = ([v.numpy() for v in model.optimizer.variables] for model in (stock, ours))
    return {
        "equal": same(stock.get_weights(), ours.get_weights()) and same(*slots) and history == expected,
        "reason": callback.report.fallback_reason,
    }


def gelus(optimizer=None):
    """Gradients of what follows a layer belong to it: gelu's, a mask's, normalization's."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((12, 12, 2))
    x = keras.layers.Flatten()(inputs)
    for width in (13, 11, 7):
        x = keras.layers.Dropout(0.1)(keras.layers.Dense(width, activation="gelu")(x))
        x = keras.layers.BatchNormalization()(x)
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or "sgd", loss, metrics=["accuracy"], jit_compile=False)
    return model


def shortcuts():
    """Blocks with shortcuts, whose convolutions graph optimizers order otherwise than the trace."""
    keras.utils.set_random_seed(1)
    inputs = x = keras.Input((12, 12, 2))
    for width in (4, 6):
        y = keras.layers.Conv2D(width, 1, strides=2, use_bias=False)(x)
        y = keras.layers.ReLU()(keras.layers.BatchNormalization()(y))
        y = keras.layers.Conv2D(width, 3, padding="same", use_bias=False)(y)
        y = keras.layers.BatchNormalization()(y)
        x = keras.layers.Conv2D(width, 1, strides=2, use_bias=False)(x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.ReLU()(keras.layers.Concatenate()([x, y]))  # a sum would make one layer of the two
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=False)
    return model


def cuts_anywhere():
    """Delays of models that are cut inside of every kind of layer; the default path, which profiles."""
    found = {}
    for devices in (2, 3, 4):
        callback = layerpipe(devices, 7)
        found[f"gelus {devices}"] = [fitted(gelus(), callback, 1)["loss"], callback]
    callback = tf_ooo.OOOBackprop(mode="layerpipe", devices=3, profile_steps=1)
    found["profiled"] = [fitted(convnet(), callback, 1)["loss"], callback]
    callback = tf_ooo.OOOBackprop(mode="layerpipe", devices=3, schedule="layerpipe", profile_steps=1)
    found["shortcuts"] = [fitted(shortcuts(), callback, 1)["loss"], callback]
    callback = layerpipe(4)
    found["convnet 4"] = [fitted(convnet("adam"), callback, 1)["loss"], callback]
    return {
        name: {
            "loss": loss[-1],
            "late": callback.report.layerpipe["delay_steps"],
            "planned": {row["name"]: row["delay_steps"] for row in callback.report.layers},
        }
        for name, (loss, callback) in found.items()
    }


def legacy_optimizers():
    """Keras 2: a fused update of a weight and its slots does what Keras' newer optimizer does."""
    kinds = keras.optimizers, keras.optimizers.legacy
    made = {"adam": lambda kind: kind.Adam(0.01), "momentum": lambda kind: kind.SGD(0.05, momentum=0.9)}
    return {
        name: [fitted(convnet(make(kind)), layerpipe(4), 2)["loss"] for kind in kinds]
        for name, make in made.items()
    }


def average_of_weights():
    """use_ema: with gradients that come late, the average is that of the weights after each update."""
    model = perceptron()
    model.compile(keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.5), "mse", jit_compile=False)
    x, y = data()
    parts = tf.data.Dataset.from_generator(
        lambda: zip(x, y, strict=True),
        output_signature=tuple(tf.TensorSpec([None, part[0].shape[1]]) for part in (x, y)),
    )
    costs = CostTable([tf_ooo.LayerCosts(1.0, 1.0, 1.0) for _ in range(4)])
    start = model.get_weights()
    saves = Saves(BATCHES)
    callback = tf_ooo.OOOBackprop(mode="layerpipe", devices=4, costs=costs, schedule="pipedream")
    model.fit(parts, verbose=0, callbacks=[callback, saves])
    history = by_hand([6, 4, 2, 0], "stash", all_weights=True)
    averages = [w.astype(np.float64) for w in start]
    for n, weights in enumerate(history[1:]):
        first = not n and hasattr(keras, "ops")  # Keras 2 averages the first weights with the initial ones
        averages = weights if first else [0.5 * a + 0.5 * w for a, w in zip(averages, weights, strict=True)]
    got = model.get_weights()  # fit puts the averages in their place at the end
    return {"distance": max(float(np.abs(a - b).max()) for a, b in zip(got, averages, strict=True))}


class Saves(keras.callbacks.Callback):
    """Takes the weights after a batch."""

    def __init__(self, batch):
        super().__init__()
        self.batch, self.weights, self.seen = batch, None, 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.batch:
            self.take()

    def take(self):
        """The weights, and of how many batches they have the updates."""
        self.weights = [v.numpy() for v in self.model.trainable_variables]
        self.updates = int(self.model.optimizer.iterations.numpy())


class Predicts(Saves):
    """Predicts after that batch, before the weights are taken."""

    def on_train_batch_end(self, batch, logs=None):
        if self.seen + 1 == self.batch:
            self.model.predict(samples()[0], verbose=0)
        super().on_train_batch_end(batch, logs)


class Evaluates(Saves):
    """Evaluates after that batch, then takes the weights."""

    def take(self):
        self.model.evaluate(*samples(), verbose=0)
        super().take()


class Gets(Saves):
    """Asks the model for its weights after that batch, then takes them."""

    def take(self):
        self.model.get_weights()
        super().take()


class Writes(Saves):
    """Saves the model after that batch, then takes the weights."""

    def take(self):
        with tempfile.TemporaryDirectory() as folder:
            self.model.save(os.path.join(folder, "model.keras"))
        super().take()


class TrainsByItself(Saves):
    """Calls train_on_batch after that batch, with rows that weigh nothing, then takes the weights."""

    def take(self):
        x, y = samples()
        self.model.train_on_batch(x[:3], y[:3], sample_weight=np.zeros(3, np.float32))
        super().take()
        self.updates -= 1


class Stops(Saves):
    """Ends training after that batch, and takes the weights at the end of the epoch."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch + 1 >= self.batch

    def on_epoch_end(self, epoch, logs=None):
        self.take()


def reloaded(model):
    """As it comes from a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "model.keras")
        model.save(file)
        return keras.models.load_model(file)


def nothing_is_on_its_way():
    """An epoch on its own, a resumed one, and a drained one are the same training."""
    once, twice = convnet(), convnet()
    fitted(once, layerpipe(), epochs=2)
    fitted(twice, layerpipe(), epochs=1)
    fitted(twice, layerpipe(), epochs=1)
    # Without dropout: Keras does not save the state of its masks.
    saved, whole = (convnet(keras.optimizers.SGD(0.01, momentum=0.9), dropout=0.0) for _ in range(2))
    fitted(saved, layerpipe(), epochs=1)
    saved = reloaded(saved)
    fitted(saved, layerpipe(), epochs=1)
    fitted(whole, layerpipe(), epochs=2)
    kinds = (Predicts, Evaluates, Gets, Writes, TrainsByItself)
    seen = {kind.__name__: kind(2) for kind in kinds}
    for callback in seen.values():
        fitted(convnet(), layerpipe(unroll=1), epochs=1, more=[callback])
    x, y = samples()
    seen["Stops"] = Stops(2)
    late = [seen["Stops"], layerpipe(unroll=1)]
    convnet().fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=late)
    alone = {}
    for updates in {saw.updates for saw in seen.values()}:
        rows, model = 16 * updates, convnet()
        model.fit(x[:rows], y[:rows], batch_size=16, shuffle=False, verbose=0, callbacks=[layerpipe()])
        alone[updates] = [v.numpy() for v in model.trainable_variables]
    others = {name: saw.updates > 2 and same(saw.weights, alone[saw.updates]) for name, saw in seen.items()}
    # Five batches an epoch: the last of each is alone.
    parted, joined = (convnet(keras.optimizers.SGD(0.01, momentum=0.9), dropout=0.0) for _ in range(2))
    for _ in range(2):
        fitted(parted, layerpipe(drain_steps=2), epochs=1)
    fitted(joined, layerpipe(drain_steps=2), epochs=2)
    drained, half, saves = convnet(), convnet(), Saves(2)
    fitted(drained, layerpipe(drain_steps=2), epochs=1, more=[saves])
    x, y = samples()
    half.fit(x[:32], y[:32], batch_size=16, shuffle=False, verbose=0, callbacks=[layerpipe()])
    together = convnet()
    together.compile("sgd", together.loss, metrics=["accuracy"], jit_compile=False, steps_per_execution=3)
    fitted(together, layerpipe(), epochs=2)
    return {
        **others,
        "checkpoint": same(whole.get_weights(), saved.get_weights()),
        "epochs": same(once.get_weights(), twice.get_weights()),
        "drained epochs": same(parted.get_weights(), joined.get_weights()),
        "drained": same(saves.weights, [v.numpy() for v in half.trainable_variables]),
        "steps_per_execution": same(once.get_weights(), together.get_weights()),
    }


class SavesFile(Saves):
    """Writes a checkpoint after that batch."""

    def take(self):
        self.model.save(self.file)


def resumed_in_an_epoch():
    """From a checkpoint where ``drain_steps`` ends: the weights and slots of the fit that went on."""
    found = {}
    ways = {
        **{weights: {"weights": weights} for weights in ("stash", "ema", "latest")},
        "2bw": {"schedule": "pipedream_2bw"},
    }
    x, y = samples()
    for name, options in ways.items():
        whole, saves = convnet(keras.optimizers.SGD(0.01, momentum=0.9), dropout=0.0), SavesFile(2)
        with tempfile.TemporaryDirectory() as folder:
            saves.file = os.path.join(folder, "model.keras")
            fitted(whole, layerpipe(drain_steps=2, **options), epochs=1, more=[saves])
            resumed = keras.models.load_model(saves.file)
        before = resumed.get_weights()
        callback = layerpipe(drain_steps=2, **options)
        resumed.fit(x[32:], y[32:], batch_size=16, shuffle=False, verbose=0, callbacks=[callback])
        slots = [[v.numpy() for v in model.optimizer.variables] for model in (whole, resumed)]
        found[name] = {
            "equal": same(whole.get_weights(), resumed.get_weights()) and same(*slots),
            "moved": not same(before, resumed.get_weights()),
        }
    return found


def steps_of_endless_data():
    """No more batches are taken than steps_per_epoch says."""
    taken = []

    def endless():
        x, y = samples()
        while True:
            taken.append(1)
            yield x[:16], y[:16]

    model = convnet()
    data = tf.data.Dataset.from_generator(
        endless, output_signature=(tf.TensorSpec([16, 12, 12, 2]), tf.TensorSpec([16], tf.int32))
    )
    model.fit(data, steps_per_epoch=5, epochs=2, verbose=0, callbacks=[layerpipe()])
    return {"iterations": int(model.optimizer.iterations.numpy())}


def message(run):
    try:
        run()
    except tf_ooo.OOOError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def lstm():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6, 4)), keras.layers.LSTM(5, name="lstm"), keras.layers.Dense(2)])
    model.compile("sgd", "mse", jit_compile=False)
    return model


class Twice(keras.Sequential):
    """Applies gradients twice with one optimizer, each time half of them."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x)[:, 0] - y))
        pairs = list(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        self.optimizer.apply_gradients(pairs[:4])
        self.optimizer.apply_gradients(pairs[4:])
        return {"loss": loss}


def twice():
    layers = [keras.layers.Flatten(), *(keras.layers.Dense(width) for width in (7, 6, 5, 1))]
    model = Twice([keras.Input((6, 4)), *layers])
    model.compile("sgd", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def compiled(policy=None, **of_optimizer):
    """Two layers under a policy, with such an optimizer."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Flatten(),
        keras.layers.Dense(3, dtype=policy),
        keras.layers.Dense(2, dtype=policy),
    ]
    model = keras.Sequential([keras.Input((12, 12, 2)), *layers])
    optimizer = keras.optimizers.SGD(0.1, **of_optimizer)
    if policy == "mixed_float16":
        scaled = (
            getattr(keras.optimizers, "LossScaleOptimizer", None) or keras.mixed_precision.LossScaleOptimizer
        )
        optimizer = scaled(optimizer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    return model


def refusals():
    clipped = convnet(keras.optimizers.SGD(0.1, global_clipnorm=1.0))
    falling = convnet(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 100)))
    many = tf_ooo.OOOBackprop(
        mode="layerpipe", devices=4, costs=CostTable([tf_ooo.LayerCosts(1.0, 0.0, 0.0)])
    )
    tiny = keras.Sequential([keras.Input((12, 12, 2)), keras.layers.Flatten(), keras.layers.Dense(2)])
    tiny.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    loop, rng = lstm(), np.random.default_rng(0)
    x, y = rng.normal(size=(32, 6, 4)).astype(np.float32), rng.normal(size=(32, 2)).astype(np.float32)
    two = tf_ooo.OOOBackprop(mode="layerpipe", devices=2, profile_steps=0)
    known = tf_ooo.OOOBackprop(mode="layerpipe", devices=2, costs=CostTable([tf_ooo.LayerCosts(1, 1, 1)] * 4))
    before = [value_of(v).device for v in clipped.variables]
    found = {
        "twice": message(lambda: twice().fit(x, y[:, 0], batch_size=8, verbose=0, callbacks=[known])),
        "group": message(lambda: fitted(convnet(), layerpipe(schedule="pipedream_2bw", accumulate_steps=3))),
        "global_clipnorm": message(lambda: fitted(clipped, layerpipe())),
        "schedule_of_rates": message(lambda: fitted(falling, layerpipe(rate_warmup_steps=5))),
        "more_processors": message(lambda: fitted(tiny, many)),
        "loop": message(lambda: loop.fit(x, y, batch_size=8, verbose=0, callbacks=[two])),
        "devices": message(lambda: fitted(convnet(), tf_ooo.OOOBackprop(mode="layerpipe", devices=9))),
        "schedule": message(lambda: tf_ooo.OOOBackprop(mode="layerpipe", schedule="zb_v")),
        "weights": message(lambda: tf_ooo.OOOBackprop(mode="pipeline", weights="ema")),
    }
    found["lengths"] = message(of_unequal_lengths)
    together = convnet()
    together.compile("sgd", together.loss, jit_compile=False, steps_per_execution=3)
    found["drain"] = message(lambda: fitted(together, layerpipe(drain_steps=4)))
    found |= {
        name: message(lambda given=given: fitted(compiled(**given), layerpipe(layers=2)))
        for name, given in {
            "loss_scale": {"policy": "mixed_float16"},
            "accumulation": {"gradient_accumulation_steps": 2},
            "overwritten": {"use_ema": True, "ema_overwrite_frequency": 2},
        }.items()
        if keras.__version__ >= "3" or name != "accumulation"
    }
    found["put_back"] = [value_of(v).device for v in clipped.variables] == before
    return found


def of_unequal_lengths():
    """Words of 6, 6, 5 ... places."""
    layers = [keras.layers.Embedding(29, 8), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((None,), dtype="int32"), *layers])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    lengths = (6, 6, 5, 6, 6, 6)
    data = tf.data.Dataset.from_generator(
        lambda: ((np.ones((8, n), np.int32), np.ones(8, np.int32)) for n in lengths),
        output_signature=(tf.TensorSpec([8, None], tf.int32), tf.TensorSpec([8], tf.int32)),
    )
    model.fit(data, verbose=0, callbacks=[layerpipe(2, 2)])


def rates_that_warm_up():
    stages = STAGES["four"]
    delays = [2 * stages.stages_after(layer) for layer in range(4)]
    got, _, _ = spread_over(stages, "stash", warmup=10)
    expected, _ = by_hand(delays, "stash", warmup=10)
    others, _ = by_hand(delays, "stash")

    def distance(a, b):
        return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))

    return {"distance": distance(got, expected), "matters": distance(got, others)}


if __name__ == "__main__":
    print_found(globals(), sys.argv[1:], devices=4)
