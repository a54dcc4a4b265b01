"""Finds the user's names for variables that Keras does not know: where they are held."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_ooo.compat import keras_attributes, keras_layers, keras_variables

if TYPE_CHECKING:
    import keras


def names_of_held(model: keras.Model) -> dict[int, str]:
    """Return names that differ, by the ``id`` of a variable's handle.

    An attribute is called ``layer.counter``, an item of one ``layer.counters[0]``, and what ``train_step`` or
    a ``call`` finds outside of itself as it is called there.
    """
    names: dict[int, str] = {}
    for name, variable in _held_in(model):
        handle = keras_variables.handle_of(variable)
        taken = sum(name == other.partition("#")[0] for other in names.values())
        names.setdefault(id(handle), f"{name}#{taken}" if taken else name)
    return names


def _held_in(model: keras.Model) -> Iterator[tuple[str, Any]]:
    parts = keras_layers.parts_of(model)
    for part in parts:
        for name, value in keras_attributes.named_attributes_of(part).items():
            yield from _variables_in(f"{part.name}.{name}", value)
    for function in (model.train_step, *(part.call for part in parts)):
        for name, value in _found_outside(function).items():
            yield from _variables_in(name, value)


def _found_outside(function: Any) -> Mapping[str, Any]:
    """Return what the function finds in its module, and in functions around it, by name."""
    function = getattr(function, "python_function", function)  # of a tf.function
    try:
        found = inspect.getclosurevars(inspect.unwrap(function))
    except (TypeError, ValueError):  # it is none of Python's, or not filled yet
        return {}
    return {**found.globals, **found.nonlocals}


def _variables_in(name: str, value: object) -> Iterator[tuple[str, Any]]:
    """The variable itself, or those in a list, a tuple or a dictionary."""
    if isinstance(value, tf.Variable):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _variables_in(f"{name}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _variables_in(f"{name}[{number}]", item)
