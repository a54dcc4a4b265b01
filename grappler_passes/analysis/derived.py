"""Weights that the forward pass combines before data meet them: weight normalization, low-rank products."""

from __future__ import annotations

from grappler_passes.analysis.gradients import GradientFlow
from grappler_passes.graph.bits import bits_of, several


def units_of(g: GradientFlow) -> list[int]:
    """For each weight its unit: weights that one tensor without data in it is computed from share one.

    ``kernel = normalize(v) * g`` makes one unit of ``v`` and ``g``: the kernel's gradient is no dO, no
    other layer needs it.  Units are numbered by their first weight; most have one.
    """
    first = list(range(len(g.weights)))

    def find(weight: int) -> int:
        while first[weight] != weight:
            weight = first[weight]
        return weight

    for node in _combining(g):
        members = sorted({find(weight) for weight in bits_of(g.depends_on_tensors[node])})
        for member in members[1:]:
            first[member] = members[0]
    numbers: dict[int, int] = {}
    return [numbers.setdefault(find(weight), len(numbers)) for weight in range(len(first))]


def _combining(g: GradientFlow) -> list[int]:
    """Forward ops that combine several weights and nothing else, and whose tensor data meet later."""
    if not any(several(bits) for bits in g.depends_on_tensors):
        return []
    data = g.cut.downstream(g.data_sources | dict.fromkeys(_tables(g), 1))
    met = g.cut.upstream({n: 1 for n, forward in enumerate(g.forward) if forward and g.from_data[n]})
    return [
        node
        for node, bits in enumerate(g.depends_on_tensors)
        if several(bits) and g.forward[node] and met[node] and not data[node]
    ]


def _tables(g: GradientFlow) -> list[int]:
    """Tensors of floating-point numbers that no weight goes into count as data, constants too: the first
    state of a recurrent layer, moving averages, a grid that a network is trained on."""
    return [
        node
        for node, bits in enumerate(g.depends_on_tensors)
        if not bits and any(_is_table(o.dtype, o.shape) for o in g.flow.outputs[node])
    ]


def _is_table(dtype: str, shape: tuple[int | None, ...] | None) -> bool:
    return "float" in dtype and (shape is None or any(dim != 1 for dim in shape))
