"""The optimizers of a model."""

from __future__ import annotations

from typing import Any

from tf_ooo import compat


def optimizers_of(model: Any) -> list[Any]:
    """Every Keras optimizer that the model, a part of it or a loss-scaling optimizer holds, each once."""
    held: dict[int, Any] = {}
    seen: set[int] = set()
    for part in compat.parts_of(model):
        _collect(part, held, seen)
    return list(held.values())


def _collect(value: Any, held: dict[int, Any], seen: set[int]) -> None:
    if id(value) in seen:
        return
    if compat.is_optimizer(value):
        held.setdefault(id(value), value)
        within = compat.inner_optimizers(value)
    elif compat.is_layer(value):
        within = compat.attributes_of(value)
    elif isinstance(value, (list, tuple, dict)):
        within = list(value.values()) if isinstance(value, dict) else list(value)
    else:
        return
    seen.add(id(value))
    for item in within:
        _collect(item, held, seen)
