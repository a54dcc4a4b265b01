"""Gets at the variable behind a Keras variable, without importing Keras."""

from __future__ import annotations

from typing import Any


def variable_of_keras(variable: object) -> Any:
    """Return the ``tf.Variable`` of a Keras 3 variable; a Keras 2 variable is one already.

    The public ``value`` will not do: inside an autocast scope it adds a Cast to the graph and returns that.
    """
    return getattr(variable, "_value", variable)


def set_variable_of_keras(variable: object, value: object) -> None:
    """Puts another ``tf.Variable`` behind a Keras 3 variable."""
    object.__setattr__(variable, "_value", value)


def path_of_keras(variable: object) -> str | None:
    """Return Keras 3's name of a variable; None for Keras 2, which has no names of its own."""
    path: str | None = getattr(variable, "path", None)
    return path


def has_gradient(dtype: object) -> bool:
    """Return whether a variable of this dtype can be trained: integers cannot."""
    import tensorflow as tf

    real = tf.as_dtype(dtype).base_dtype
    return bool(real.is_floating or real.is_complex)


def optimizer_variables(model: object) -> list[Any]:
    """Return the variables of optimizers that are attributes of a model: they are never weights."""
    attributes = [getattr(model, "optimizer", None), *vars(model).values()]
    attributes += [getattr(owner, "inner_optimizer", None) for owner in attributes]  # loss scaling wraps one
    optimizers = {id(owner): owner for owner in attributes if hasattr(owner, "apply_gradients")}
    variables: list[Any] = []
    for optimizer in optimizers.values():
        own = getattr(optimizer, "variables", ())
        variables.extend(own() if callable(own) else own)  # a method in Keras 2
        # Nadam's product of decays is not always among them.
        variables.extend(value for value in vars(optimizer).values() if hasattr(value, "_value"))
    return variables
