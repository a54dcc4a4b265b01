"""Random ops with seeds of their own, in a step that is copied."""

from __future__ import annotations

from typing import Any

_SEED, _SECOND = "seed", "seed2"


def reseeded(graph_def: Any, number: int) -> Any:
    """The graph, in which ops that draw from a seed of their own (``tf.random.normal``) have another one.

    Each copy of such an op begins its stream anew: with one seed, all copies would draw the same numbers.
    Stateless ops, which Keras 3 uses, read their seeds from variables.

    Args:
        graph_def: is left as it is.
        number: of the copy, from 1.
    """
    if not any(_is_seeded(node) for node in graph_def.node):
        return graph_def
    made = type(graph_def)()
    made.CopyFrom(graph_def)
    for node in made.node:
        if _is_seeded(node):
            node.attr[_SECOND].i += number
    return made


def _is_seeded(node: Any) -> bool:
    """Whether it has seeds, and not both 0, which means any."""
    return _SEED in node.attr and _SECOND in node.attr and bool(node.attr[_SEED].i or node.attr[_SECOND].i)
