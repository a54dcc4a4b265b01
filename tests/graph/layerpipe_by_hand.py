"""Training a multilayer perceptron by hand, in NumPy: each pass of a batch sees the weights it is to see."""

from __future__ import annotations

import numpy as np

from tests.zoo import keras

WIDTHS = (20, 17, 12, 9, 4)
RATE = 0.3
BATCHES = 9


def perceptron(rate=RATE):
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


def distance(a, b):
    """The largest difference between two lists of weights."""
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


def same(a, b):
    """Return whether they have the same bits."""
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def mean_losses(losses):
    """Return what Keras reports after each batch: the mean over the rows so far."""
    sizes = [rows(n) for n in range(len(losses))]
    return np.cumsum(np.array(losses) * sizes) / np.cumsum(sizes)


def by_hand(delays, weights, rate=RATE, all_weights=False, frozen=(), behind=None, divided=None):
    """The final weights, and the losses: layer l's forward pass is ``delays[l]`` updates behind.

    Args:
        rate: a number, or a function of the number of a batch.
        behind: backward passes read weights that are ``behind[l]`` updates later than those of their forward
            pass; as many as the latter are behind, if None.
        divided: ``{layer: (share, behind)}``: of the first rows of a dO in two parts.
    """
    behind = delays if behind is None else behind
    x, y = data()
    history = [_in_pairs(perceptron().get_weights())]
    averages = [[[np.zeros_like(w) for w in pair] for pair in history[0]]]
    losses = []
    for n in range(BATCHES):
        seen = [history[max(0, n - d)][layer] for layer, d in enumerate(delays)]

        def kernel(layer, later, n=n, seen=seen):
            at = max(0, n - delays[layer] + later)
            latest, average = history[at][layer][0], averages[at][layer][0]
            return _kernel(weights, seen[layer][0], latest, average, later)

        now = [[(1.0, kernel(layer, later))] for layer, later in enumerate(behind)]
        for layer, (share, later) in (divided or {}).items():
            now[layer].insert(0, (share, kernel(layer, later)))
        gradients, loss = _gradients(x[n], y[n], seen, now)
        losses.append(loss)
        after = [
            tuple(
                w - (rate(n) if callable(rate) else rate) * (layer not in frozen) * g
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
        return [_flat(pairs) for pairs in history]
    return _flat(history[-1]), losses


def _in_pairs(weights):
    """Kernel and bias of each layer, in double precision."""
    exact = [w.astype(np.float64) for w in weights]
    return list(zip(exact[::2], exact[1::2], strict=True))


def _flat(pairs):
    return [w for pair in pairs for w in pair]


def _kernel(which, seen, latest, average, delay):
    return {"stash": seen, "latest": latest, "ema": latest + delay * average}[which]


def _gradients(x, y, seen, now):
    """Gradients and loss of one batch; ``now`` are the kernels that dO multiplies with, each to some rows."""
    inputs, outputs = [], x.astype(np.float64)
    for layer, (kernel, bias) in enumerate(seen):
        inputs.append(outputs)
        outputs = outputs @ kernel + bias
        if layer < len(seen) - 1:
            outputs = np.maximum(outputs, 0)
    error = outputs - y
    gradient = 2 * error / error.size
    gradients = []
    for layer in reversed(range(len(seen))):
        gradients.append((inputs[layer].T @ gradient, gradient.sum(0)))
        if layer:
            ends = [round(len(x) * share) for share, _ in now[layer]]
            parts = np.split(gradient, ends[:-1])
            products = [part @ kernel.T for part, (_, kernel) in zip(parts, now[layer], strict=True)]
            gradient = np.concatenate(products) * (inputs[layer] > 0)
    return gradients[::-1], float((error**2).mean())
