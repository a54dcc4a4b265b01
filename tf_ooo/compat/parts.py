"""Layers, optimizers and variables of a model."""

from __future__ import annotations

from typing import Any

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


def is_optimizer(value: Any) -> bool:
    """Whether ``value`` is a Keras 3 optimizer."""
    import keras

    return isinstance(value, keras.optimizers.Optimizer)


def is_layer(value: Any) -> bool:
    """Whether ``value`` is a Keras layer or model."""
    import keras

    return isinstance(value, keras.layers.Layer)


def parts_of(model: Any) -> list[Any]:
    """The model and all layers and models in it."""
    return list(model._flatten_layers(include_self=True, recursive=True))


def attributes_of(owner: Any) -> list[Any]:
    """The values of an object's own attributes."""
    return list(vars(owner).values())


def variables_to_apply(optimizer: Any, given: Any) -> list[Any]:
    """The variables that ``optimizer.apply(grads, given)`` updates."""
    return list(optimizer._trainable_variables if given is None else given)


def state_of(optimizer: Any) -> list[Any]:
    """The variables of an optimizer; also of Horovod's wrapper, whose own property fails with Keras 3."""
    import keras

    inner = getattr(optimizer, "inner_optimizer", None)
    own = list(keras.optimizers.Optimizer.variables.fget(optimizer))
    return own if inner is None else own + state_of(inner)


def path_of(variable: Any) -> str:
    """The name of a Keras or TensorFlow variable."""
    return str(getattr(variable, "path", None) or variable.name)


def is_overwritten_with_gradient(variable: Any) -> bool:
    """Whether an optimizer assigns the gradient to the variable instead of stepping along it."""
    return bool(getattr(variable, "overwrite_with_gradient", False))
