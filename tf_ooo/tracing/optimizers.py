"""The optimizers of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tf_ooo.compat import keras_attributes, keras_layers, keras_optimizers

if TYPE_CHECKING:
    import keras


def optimizers_of(model: keras.Model) -> list[Any]:
    """Every Keras optimizer that the model, a part of it or a loss-scaling optimizer holds, each once."""
    held: dict[int, Any] = {}
    seen: set[int] = set()
    for part in keras_layers.parts_of(model):
        _collect(part, held, seen)
    return list(held.values())


def _collect(value: object, held: dict[int, Any], seen: set[int]) -> None:
    if id(value) in seen:
        return
    if keras_optimizers.is_optimizer(value):
        held.setdefault(id(value), value)
        within = keras_optimizers.inner_optimizers(value)
    elif keras_layers.is_layer(value):
        within = keras_attributes.attributes_of(value)
    elif isinstance(value, (list, tuple, dict)):
        within = list(value.values()) if isinstance(value, dict) else list(value)
    else:
        return
    seen.add(id(value))
    for item in within:
        _collect(item, held, seen)
