"""Losses and metrics: what they add up, divide by and weigh."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_ooo.compat import keras_layers, nests, versions

if TYPE_CHECKING:
    import keras


def summed_losses(model: keras.Model) -> list[str]:
    """Return names of the losses given to ``compile`` that add up a batch instead of averaging it.

    Where a loss has no reduction, the gradient is that of the sum, unless the model's own code averages it.
    """
    summed = {"sum"} if _has_own_loss_code(model) else {"sum", "none", None}
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
    said = [type(model).__name__] if _has_own_loss_code(model) else []
    for loss in tf.nest.flatten(getattr(model, "loss", None)):
        if callable(loss) and not _is_known(loss):
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
    kind = versions.keras_of(model).losses.Loss
    return [loss for loss in tf.nest.flatten(getattr(model, "loss", None)) if isinstance(loss, kind)]


def _ignored_class(loss: object) -> Any:
    """With Keras 2 it is an argument of the loss function."""
    return getattr(loss, "ignore_class", getattr(loss, "_fn_kwargs", {}).get("ignore_class"))


def _has_own_loss_code(model: keras.Model) -> bool:
    own, kerass = type(model), versions.keras_of(model).Model
    names = ("train_step", "compute_loss")
    return any(getattr(own, name, None) is not getattr(kerass, name, None) for name in names)


@contextlib.contextmanager
def weighted_means(model: keras.Model, weight: object) -> Iterator[None]:
    """Inside the block a number that a ``Mean`` of the model is given counts ``weight`` by default.

    Keras 3 weighs the means of each output's loss by the rows that its trace knows.  ``fit`` traces with open
    rows, so that each batch counts alike; here each micro-batch counts its share of that.
    """
    kind = versions.keras_of(model).metrics.Mean
    loss: Any = getattr(model, "_compile_loss", None)
    of_outputs = nests.each_once(getattr(loss, "metrics", ()))
    whole = isinstance(weight, float) and weight == 1.0
    means = [] if whole else [metric for metric in model.metrics if type(metric) is kind]
    with contextlib.ExitStack() as shadows:

        def weigh(metric: Any, always: bool) -> None:
            update = functools.partial(_update_mean, metric.update_state, weight, always)
            shadows.enter_context(keras_layers.shadowed(metric, "update_state", update))

        def build_and_weigh(build: Any, *args: Any) -> None:
            build(*args)
            for metric in loss.metrics:
                weigh(metric, always=True)

        for metric in nests.each_once([*of_outputs, *means]):
            weigh(metric, always=any(metric is each for each in of_outputs))
        if hasattr(loss, "metrics") and not loss.built:  # it makes the means of outputs in its first call
            build = functools.partial(build_and_weigh, loss.build)
            shadows.enter_context(keras_layers.shadowed(loss, "build", build))
        yield


def _update_mean(update: Any, weight: Any, always: bool, values: Any, sample_weight: Any = None) -> Any:
    """``always``: the weight takes the place of the rows that the trace knows."""
    weighs = always or (sample_weight is None and tf.convert_to_tensor(values).shape.rank == 0)
    return update(values, sample_weight=weight if weighs else sample_weight)
