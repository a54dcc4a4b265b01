"""Finds layers of a model, tells what they are, and sets attributes of Keras objects past Keras' tracking."""

from __future__ import annotations

import contextlib
import functools
import inspect
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tf_ooo.compat import versions

if TYPE_CHECKING:
    import keras


_SHADOWED = "_ooo_shadowed"
# Keras 2 keeps weights in these, beside the user's attributes.
_LISTS_OF_WEIGHTS = ("_trainable_weights", "_non_trainable_weights")


def shadow(owner: object, name: str, value: object) -> None:
    """Set an attribute of this one object, hidden from Keras' tracking, until :func:`unshadow`."""
    before = vars(owner).setdefault(_SHADOWED, {})
    before.setdefault(name, []).append(vars(owner).get(name, _SHADOWED))
    object.__setattr__(owner, name, value)


def unshadow(owner: object, name: str) -> None:
    """Put back what was there before the latest :func:`shadow` of ``name``."""
    before = vars(owner)[_SHADOWED]
    value = before[name].pop()
    if value is _SHADOWED:
        object.__delattr__(owner, name)
    else:
        object.__setattr__(owner, name, value)
    if not any(before.values()):
        del vars(owner)[_SHADOWED]


@contextlib.contextmanager
def shadowed(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute of an object inside the block, as :func:`shadow` does."""
    shadow(owner, name, value)
    try:
        yield
    finally:
        unshadow(owner, name)


def set_on(owner: object, name: str, method: object) -> None:
    """Set a method of one object, hidden from Keras' tracking; None: restore the class' method."""
    if method is not None:
        object.__setattr__(owner, name, method)
    elif name in vars(owner):
        object.__delattr__(owner, name)


def attributes_of(owner: object) -> list[Any]:
    """Return the values of an object's own attributes."""
    return list(vars(owner).values())


def named_attributes_of(owner: object) -> dict[str, Any]:
    """Return an object's own attributes by name, without TensorFlow's and Keras 2's lists of them."""
    return {
        name: value
        for name, value in vars(owner).items()
        if not name.startswith("_self_") and name not in _LISTS_OF_WEIGHTS
    }


OWN_MODULES = ("keras", "tf_keras")
# Layers of these modules add no losses of their own.
_FAMILY = (*OWN_MODULES, "keras_hub", "keras_nlp", "keras_cv")


def is_layer(value: object) -> bool:
    """Return whether ``value`` is a layer or model of a loaded Keras."""
    return any(isinstance(value, keras.layers.Layer) for keras in versions.loaded_keras())


def is_kerass_own(layer: keras.layers.Layer) -> bool:
    """Return whether a layer's class is Keras' own, so that ``get_config`` tells its settings."""
    return type(layer).__module__.split(".")[0] in OWN_MODULES


def is_of_kerass_family(layer: keras.layers.Layer) -> bool:
    """Return whether a layer's class is Keras' own or from its model libraries."""
    return type(layer).__module__.split(".")[0] in _FAMILY


def parts_of(model: keras.Model, itself: bool = True) -> list[Any]:
    """Return the model (unless ``itself`` is False) and all layers and models in it."""
    return list(model._flatten_layers(include_self=itself, recursive=True))


def is_wholly_built(model: keras.Model) -> bool:
    """Return whether the model and all layers in it have their weights.

    A subclassed model that was given shapes, and has a weight of its own, claims to be built although its
    layers are not.
    """
    return all(part.built for part in parts_of(model))


def learned_from_data(layer: keras.layers.Layer) -> dict[str, int]:
    """Return check sums of what ``adapt`` has learned or was given: statistics, a vocabulary.

    Not all of it is in variables: a built ``Normalization`` computes with constants.
    """
    sums = {}
    if hasattr(layer, "adapt_mean"):
        values = (np.asarray(value).tobytes() for value in (layer.mean, layer.variance))
        sums["learned statistics"] = zlib.crc32(b"".join(values))
    if hasattr(layer, "get_vocabulary"):
        sums["vocabulary"] = zlib.crc32("\0".join(map(str, layer.get_vocabulary())).encode())
    return sums


def unsynchronized(model: keras.Model) -> list[str]:
    """Name the layers that ask for statistics over all replicas, which only a strategy has."""
    layers = parts_of(model, itself=False)
    return [title_of(layer) for layer in layers if getattr(layer, "synchronized", False)]


def title_of(layer: keras.layers.Layer) -> str:
    """Return the path of a layer; its name with Keras 2, and if it has not been built."""
    return str(getattr(layer, "path", None) or layer.name)


def made_in_strategy(model: keras.Model) -> bool:
    """Return whether a model was made in the scope of a ``tf.distribute`` strategy, even of one replica."""
    return not type(model.distribute_strategy).__name__.startswith("_DefaultDistributionStrategy")


def batch_normalizations(model: keras.Model) -> list[str]:
    """Return the titles of the layers that normalize over the rows of a batch."""
    return [title_of(layer) for layer in _layers(model, versions.keras_of(model).layers.BatchNormalization)]


def _layers(model: keras.Model, *kinds: type) -> list[Any]:
    """Return the layers of these kinds, including those within other layers."""
    return [layer for layer in parts_of(model, itself=False) if isinstance(layer, kinds)]


def moving_averages(model: keras.Model) -> list[tuple[Any, Any, float]]:
    """Return mean, variance and momentum of each batch normalization that keeps the variance of its rows.

    Keras 2's fused layer is left out, as it corrects the variance for the rows' number, and renormalization.
    """
    kind = versions.keras_of(model).layers.BatchNormalization
    return [
        (layer.moving_mean, layer.moving_variance, float(layer.momentum))
        for layer in parts_of(model, itself=False)
        if type(layer) is kind and layer.built
        if not getattr(layer, "fused", False) and not getattr(layer, "renorm", False)
    ]


def normalizing_in_training(model: keras.Model) -> list[str]:
    """Return the titles of the layers that normalize over a batch's rows while the model trains.

    Frozen layers do not.  Nor, with Keras 2, do layers that are only called with ``training=False``, or whose
    model is.  Keras 3's ``fit`` runs functional models with ``training=True``, whatever their calls said.
    """
    kind = versions.keras_of(model).layers.BatchNormalization
    called = parts_of(model, itself=False) if versions.is_of_keras_2(model) else []
    never = {id(part) for layer in called if _called_in_inference(layer) for part in parts_of(layer)}
    training = (layer for layer in _layers(model, kind) if layer.trainable and id(layer) not in never)
    return list(map(title_of, training))


def _called_in_inference(layer: keras.layers.Layer) -> bool:
    """Return whether every call of a layer in functional models says ``training=False``."""
    options = [
        node.arguments.kwargs if hasattr(node, "arguments") else getattr(node, "call_kwargs", {})
        for node in getattr(layer, "_inbound_nodes", [])
    ]
    return bool(options) and all(kwargs.get("training") is False for kwargs in options)


def stateful_layers(model: keras.Model) -> list[str]:
    """Return the titles of the recurrent layers that keep states of their rows from batch to batch."""
    return [title_of(layer) for layer in recurrent(model) if layer.stateful]


def recurrent(model: keras.Model) -> list[Any]:
    """Return the recurrent layers, including those within other layers."""
    return _layers(model, versions.keras_of(model).layers.RNN)


@contextlib.contextmanager
def inference_only(model: keras.Model) -> Iterator[None]:
    """Make layers compute as in inference inside the block: no masks, no statistics."""
    with contextlib.ExitStack() as shadows:
        for layer in parts_of(model, itself=False):
            if is_of_kerass_family(layer) and "training" in inspect.signature(layer.call).parameters:
                shadows.enter_context(shadowed(layer, "call", _in_inference(layer.call)))
        yield


def _in_inference(call: Any) -> Any:
    signature = inspect.signature(call)

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["training"] = False
        return call(*bound.args, **bound.kwargs)

    return called


def computes_in_half(model: keras.Model) -> bool:
    """Return whether the model, or one of its layers, computes in 16 bits."""
    return any(getattr(part, "compute_dtype", "") in ("float16", "bfloat16") for part in parts_of(model))


def random_layers(model: keras.Model) -> list[str]:
    """Return the titles of the layers that drop or disturb something at random while they train."""
    layers = versions.keras_of(model).layers
    kinds = (layers.Dropout, layers.GaussianDropout, layers.GaussianNoise, layers.AlphaDropout)
    return [
        title_of(layer)
        for layer in _layers(model, *kinds)
        if getattr(layer, "rate", None) or getattr(layer, "stddev", None)
    ]
