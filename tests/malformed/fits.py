"""Small trainings: what a refused one must have left as it was, and that a good one follows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.malformed.case import Lost, StockRefuses

ROWS, BATCH, WIDTH = 24, 8, 5
# A fit of some steps on a machine that others use, too.
LONGEST_S = 60.0


def data() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return random.normal(size=(ROWS, WIDTH)).astype("float32"), random.normal(size=(ROWS, 2)).astype(
        "float32"
    )


def perceptron() -> Any:
    """Four layers, compiled; the same weights every time."""
    import keras

    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(6, "tanh") for _ in range(3)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(1e-2), "mse", jit_compile=False)
    return model


def state_of(model: Any) -> dict[str, Any]:
    """Values of all variables, in their order, and what ``fit`` would go on with."""
    from tf_ooo.compat import keras_compiled

    variables = enumerate(model.variables if model.built else ())
    values = {f"variable {place}": np.array(variable) for place, variable in variables}
    optimizer = getattr(model, "optimizer", None)
    states = enumerate(keras_compiled.state_of(optimizer) if optimizer is not None else ())
    values |= {f"variable {place} of the optimizer": np.array(variable) for place, variable in states}
    return {
        **values,
        "jit_compile": getattr(model, "jit_compile", None),
        "stop": getattr(model, "stop_training", False),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Name what differs of what was there before; new variables of an optimizer that is built are none."""
    return [
        name
        for name, value in before.items()
        if name not in after or not np.array_equal(value, after[name], equal_nan=name.startswith("variable"))
    ]


def train(model: Any, x: Any, y: Any, *callbacks: Any, **settings: Any) -> Any:
    import keras

    keras.utils.set_random_seed(3)  # a model may be built only now
    return model.fit(
        x, y, callbacks=list(callbacks), **({"batch_size": BATCH, "shuffle": False, "verbose": 0} | settings)
    )


def refused_or_trains(
    make_model: Callable[[], Any], batch: tuple[Any, Any], callback: Any, **settings: Any
) -> None:
    """Trains with the callback.

    Raises:
        StockRefuses: so does stock training, and the error is not ours.
        Lost: after an error, the model is not what it was before, or does not train with a good option.
        Exception: what ``fit`` raised, and nothing was lost.
    """
    make_model = _seeded(make_model)
    model = make_model()
    before, started = state_of(model), time.monotonic()
    try:
        train(model, *batch, callback, **settings)
    except Exception as error:
        took_s = time.monotonic() - started
        if took_s > LONGEST_S:
            raise Lost(f"{took_s:.0f} s until {error}") from error
        _raise_if_stock_does(make_model, batch, error, settings)
        changed = differences(before, state_of(model))
        if changed and not _trained_whole_steps(make_model, model, batch, callback):
            raise Lost(f"{changed[0]} is not what it was, after {error}") from error
        _train_stock_and_rewritten(make_model, model, batch, error, settings, bits=not changed)
        raise


def _seeded(make_model: Callable[[], Any]) -> Callable[[], Any]:
    """Initializers draw their seeds when they are made."""
    import keras

    def make() -> Any:
        keras.utils.set_random_seed(3)
        return make_model()

    return make


def _trained_whole_steps(make_model: Any, model: Any, batch: Any, callback: Any) -> bool:
    """Return whether it is where stock training is after the profiled steps, before a plan failed.

    They are of micro-batches, whose sums are rounded in another order.
    """
    steps = int(model.optimizer.iterations)
    if not 0 < steps <= 1 + callback._life.mode.options.profile_steps:
        return False
    stock, (x, y) = make_model(), batch
    for step in range(steps):
        rows = slice(step * BATCH % len(x), step * BATCH % len(x) + BATCH)
        train(stock, x[rows], y[rows])
    pairs = zip(stock.get_weights(), model.get_weights(), strict=True)
    return all(np.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True) for a, b in pairs)


def _raise_if_stock_does(make_model: Any, batch: Any, error: Exception, settings: Any) -> None:
    try:
        train(make_model(), *batch, **settings)
    except Exception as stock:
        if type(stock) is type(error) and _last_line(stock) == _last_line(error):
            raise StockRefuses(_last_line(stock)) from error


def _last_line(error: Exception) -> str:
    """Without the names of ops, which differ."""
    return (str(error).strip().splitlines() or [""])[-1].partition("{{node")[0]


def _train_stock_and_rewritten(
    make_model: Any, model: Any, batch: Any, error: Exception, settings: Any, bits: bool
) -> None:
    """The refused model learns what a new one does without a callback, with a good one."""
    import tf_ooo

    try:
        stock = make_model()
        train(stock, *batch, **settings)
    except Exception:
        return  # a model that nobody can train
    try:
        train(model, *batch, tf_ooo.OOOBackprop("single_device", profile_steps=0), **settings)
    except Exception as again:
        raise Lost(f"a good callback is refused as well: {again}, after {error}") from again
    if bits and (changed := differences(state_of(stock), state_of(model))):
        raise Lost(f"{changed[0]} has other bits than in stock training, after {error}") from error
