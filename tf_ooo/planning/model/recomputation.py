"""Layers whose forward runs again before their dO, so that what it computes need not be kept until then."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tf_ooo.costs.layer_costs import LayerCosts, layer_inputs


def with_recomputed(layers: Sequence[LayerCosts], numbers: Collection[int]) -> tuple[LayerCosts, ...]:
    """The costs of all layers, where those of these numbers are computed again; others are as they were.

    Between F and dO such a layer keeps what it reads: the outputs of the layers before it.
    """
    if not numbers:
        return tuple(layers)
    chosen, given = set(numbers), tuple(layers)
    return tuple(
        layer.recomputed(input_bytes(given, number)) if number in chosen else layer
        for number, layer in enumerate(given)
    )


def input_bytes(layers: tuple[LayerCosts, ...], number: int) -> float:
    """Return bytes of what a layer reads of other layers; the data themselves are no layer's."""
    return float(sum(layers[source].output_bytes for source in layer_inputs(layers, number)))


def saved_bytes(layers: tuple[LayerCosts, ...], number: int) -> float:
    """Return the bytes that a layer does not keep between F and dO, where they are computed again."""
    return layers[number].recomputed(input_bytes(layers, number)).recomputed_bytes
