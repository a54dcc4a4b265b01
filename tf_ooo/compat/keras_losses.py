"""Losses and metrics: what they add up, divide by and weigh."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_ooo.compat import keras_layers, versions

if TYPE_CHECKING:
    import keras


def summed_losses(model: keras.Model) -> list[str]:
    """Return names of the losses given to ``compile`` that add up a batch instead of averaging it.

    Where a loss has no reduction, the gradient is that of the sum, unless the model's own code averages it.
    """
    summed = {"sum"} if _has_own_loss_code(model, versions.keras_of(model)) else {"sum", "none", None}
    return [loss.name for loss in _losses(model) if loss.reduction in summed]


def masks(model: keras.Model) -> list[str]:
    """Titles of the layers that make masks, and names of losses that divide by something else than rows."""
    masking = versions.keras_of(model).layers.Masking
    return [
        keras_layers.title_of(layer)
        for layer in keras_layers.parts_of(model, itself=False)
        if getattr(layer, "mask_zero", False) or isinstance(layer, masking)
    ] + [
        loss.name
        for loss in _losses(model)
        if _ignored_class(loss) is not None or loss.reduction == "mean_with_sample_weight"
    ]


def is_kerass_own(loss: object) -> bool:
    """Say whether a loss is an object of one of Keras' own classes, whose settings ``get_config`` tells."""
    return hasattr(loss, "get_config") and type(loss).__module__.split(".")[0] in keras_layers.OWN_MODULES


def own_loss_code(model: keras.Model) -> list[str]:
    """Name what is not Keras' own and may decide how a loss depends on the rows of a batch, each in words."""
    said = [] if not _has_own_loss_code(model, versions.keras_of(model)) else [type(model).__name__]
    losses = [loss for loss in tf.nest.flatten(getattr(model, "loss", None)) if callable(loss)]
    for loss in (loss for loss in losses if not _is_known(loss)):
        name = getattr(loss, "name", None) or getattr(loss, "__name__", None) or type(loss).__name__
        said.append(f"loss {name}")
    for layer in keras_layers.parts_of(model, itself=False):
        if getattr(layer, "activity_regularizer", None) is not None:
            said.append(f"activity_regularizer of {keras_layers.title_of(layer)}")
        elif not keras_layers.is_of_kerass_family(layer):
            said.append(f"layer {keras_layers.title_of(layer)}")
    return said


def _is_known(loss: object) -> bool:
    """Return whether a loss is one of Keras' own functions, wrapped or not."""
    function, kinds = getattr(loss, "fn", loss), tuple(k.losses.Loss for k in versions.loaded_keras())
    return all(
        str(getattr(part, "__module__", "")).split(".")[0] in keras_layers.OWN_MODULES
        for part in (type(loss) if isinstance(loss, kinds) else loss, function)
    )


def loss_weights(model: keras.Model) -> Any:
    """Return the loss weights given to ``compile``, as JSON types; None: none, or nobody knows."""
    with contextlib.suppress(Exception):  # a loss that cannot be serialized
        given = model.get_compile_config()["loss_weights"]
        return json.loads(json.dumps(given, default=float))
    return None


def _losses(model: keras.Model) -> list[Any]:
    losses = tf.nest.flatten(getattr(model, "loss", None))
    return [loss for loss in losses if isinstance(loss, versions.keras_of(model).losses.Loss)]


def _ignored_class(loss: object) -> Any:
    """With Keras 2 it is an argument of the loss function."""
    return getattr(loss, "ignore_class", getattr(loss, "_fn_kwargs", {}).get("ignore_class"))


def _has_own_loss_code(model: keras.Model, keras: Any) -> bool:
    kind = type(model)
    return any(
        getattr(kind, name, None) is not getattr(keras.Model, name, None)
        for name in ("train_step", "compute_loss")
    )


@contextlib.contextmanager
def weighted_means(model: keras.Model, weight: object) -> Iterator[None]:
    """Inside the block a number that a ``Mean`` of the model is given counts ``weight`` by default.

    Keras 3 weighs the means of each output's loss by the rows that its trace knows.  ``fit`` traces with open
    rows, so that each batch counts alike; here each micro-batch counts its share of that.
    """
    kind, loss = versions.keras_of(model).metrics.Mean, getattr(model, "_compile_loss", None)
    of_outputs = list(getattr(loss, "metrics", ()))
    whole = isinstance(weight, float) and weight == 1.0
    means = [] if whole else [metric for metric in model.metrics if type(metric) is kind]
    shadows = _Shadows(weight)
    try:
        for metric in means:
            if not any(metric is each for each in of_outputs):
                shadows.update_by(_update_mean, metric)
        for metric in of_outputs:
            shadows.update_by(_update_mean_of_output, metric)
        if loss is not None and hasattr(loss, "metrics") and not loss.built:
            shadows.update_when_built(loss)
        yield
    finally:
        shadows.undo()


class _Shadows:
    """Methods of metrics, and of a loss, that something else stands in for."""

    def __init__(self, weight: object) -> None:
        self._weight = weight
        self._shadowed: list[tuple[Any, str]] = []

    def _shadow(self, owner: object, name: str, value: object) -> None:
        keras_layers.shadow(owner, name, value)
        self._shadowed.append((owner, name))

    def update_by(self, update: Any, metric: Any) -> None:
        self._shadow(metric, "update_state", functools.partial(update, metric.update_state, self._weight))

    def update_when_built(self, loss: Any) -> None:
        """The means of outputs are made when the loss is called first."""
        build = loss.build

        def build_and_shadow(*args: Any) -> None:
            build(*args)
            for metric in loss.metrics:
                self.update_by(_update_mean_of_output, metric)

        self._shadow(loss, "build", build_and_shadow)

    def undo(self) -> None:
        while self._shadowed:
            keras_layers.unshadow(*self._shadowed.pop())


def _update_mean(update: Any, weight: Any, values: Any, sample_weight: Any = None) -> Any:
    single = sample_weight is None and tf.convert_to_tensor(values).shape.rank == 0
    return update(values, sample_weight=weight if single else sample_weight)


def _update_mean_of_output(
    update: Any,
    weight: Any,
    values: Any,
    sample_weight: Any = None,  # noqa: ARG001 - the rows that the trace knows
) -> Any:
    return update(values, sample_weight=weight)
