"""Layers, optimizers and variables of a model."""

from __future__ import annotations

from typing import Any

from tf_ooo.compat.versions import loaded_keras

_SHADOWED = "_ooo_shadowed"


def shadow(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute of this one object, behind Keras' tracking, until :func:`unshadow`."""
    before = vars(owner).setdefault(_SHADOWED, {})
    before.setdefault(name, []).append(vars(owner).get(name, _SHADOWED))
    object.__setattr__(owner, name, value)


def unshadow(owner: Any, name: str) -> None:
    """Puts back what was there before the latest :func:`shadow` of ``name``."""
    before = vars(owner)[_SHADOWED]
    value = before[name].pop()
    if value is _SHADOWED:
        object.__delattr__(owner, name)
    else:
        object.__setattr__(owner, name, value)
    if not any(before.values()):
        del vars(owner)[_SHADOWED]


def is_layer(value: Any) -> bool:
    """Whether ``value`` is a layer or model of any Keras that is loaded."""
    return any(isinstance(value, keras.layers.Layer) for keras in loaded_keras())


def is_kerass_own(layer: Any) -> bool:
    """Whether the class of a layer is one of Keras, whose settings ``get_config`` tells."""
    return type(layer).__module__.split(".")[0] in ("keras", "tf_keras")


def parts_of(model: Any) -> list[Any]:
    """The model and all layers and models in it."""
    return list(model._flatten_layers(include_self=True, recursive=True))


def made_in_strategy(model: Any) -> bool:
    """Whether a model was made in the scope of a ``tf.distribute`` strategy, of one replica too."""
    return not type(model.distribute_strategy).__name__.startswith("_DefaultDistributionStrategy")


def attributes_of(owner: Any) -> list[Any]:
    """The values of an object's own attributes."""
    return list(vars(owner).values())


def path_of(variable: Any) -> str:
    """The name of a Keras or TensorFlow variable."""
    return str(getattr(variable, "path", None) or variable.name)


def is_overwritten_with_gradient(variable: Any) -> bool:
    """Whether an optimizer assigns the gradient to the variable instead of stepping along it."""
    return bool(getattr(variable, "overwrite_with_gradient", False))
