"""Attributes of one Keras object, past Keras' tracking of attributes."""

from __future__ import annotations

from typing import Any

_SHADOWED = "_ooo_shadowed"
# Keras 2 keeps weights in them, beside the user's attributes.
_LISTS_OF_WEIGHTS = ("_trainable_weights", "_non_trainable_weights")


def shadow(owner: object, name: str, value: object) -> None:
    """Sets an attribute of this one object, behind Keras' tracking, until :func:`unshadow`."""
    before = vars(owner).setdefault(_SHADOWED, {})
    before.setdefault(name, []).append(vars(owner).get(name, _SHADOWED))
    object.__setattr__(owner, name, value)


def unshadow(owner: object, name: str) -> None:
    """Puts back what was there before the latest :func:`shadow` of ``name``."""
    before = vars(owner)[_SHADOWED]
    value = before[name].pop()
    if value is _SHADOWED:
        object.__delattr__(owner, name)
    else:
        object.__setattr__(owner, name, value)
    if not any(before.values()):
        del vars(owner)[_SHADOWED]


def set_on(owner: object, name: str, method: object) -> None:
    """Puts a method on one object, past Keras' tracking of attributes; None: the class' method again."""
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
