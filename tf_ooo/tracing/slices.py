"""Large gradients in slices, so that what is urgent need not wait until all of one has travelled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from grappler_passes.graph.training_graph import TrainingGraph
from tf_ooo.compat import func_graphs
from tf_ooo.planning.model.schedule import Schedule

Named = Sequence[tuple[str, Any]]


class GradientSlices:
    """Into how many slices each gradient is cut; every element is added up as it would be anyway.

    By name: ``sizes`` in bytes of what may be cut, filled in while a step is traced; ``counts`` of slices.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.counts: Mapping[str, int] = {}

    def wrap(self, step: Callable[[Any], Any], counts: Mapping[str, int]) -> Callable[[Any], Any]:
        def sliced(data: object) -> Any:
            kept, self.counts = self.counts, counts
            try:
                return step(data)
            finally:
                self.counts = kept

        return sliced

    def allreduce(self, named: Named, reduce: Callable[[Named], list[Any]], may_slice: bool) -> list[Any]:
        """``reduce`` of all (name, gradient); of those to be cut slice by slice.

        ``may_slice``: the elements of a gradient are reduced one by one.
        """
        out = []
        for name, gradient in named:
            whole = not may_slice or isinstance(gradient, tf.IndexedSlices)
            elements = 0 if whole else gradient.shape.num_elements() or 0  # 0 also where it is open
            if elements:
                self.sizes[name] = elements * gradient.dtype.size
            count = min(self.counts.get(name, 1), elements)
            with func_graphs.named_message(name):
                cut = count > 1
                out += [_in_slices(name, gradient, count, reduce)] if cut else reduce([(name, gradient)])
        return out


def _in_slices(name: str, gradient: tf.Tensor, count: int, reduce: Callable[[Named], list[Any]]) -> Any:
    elements = gradient.shape.num_elements()
    ends = [elements * (number + 1) // count for number in range(count)]
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    parts = []
    for number, part in enumerate(tf.split(tf.reshape(gradient, [-1]), sizes)):
        with func_graphs.numbered_part(number):
            parts += reduce([(f"{name}_part_{number}", part)])
    return tf.reshape(tf.concat(parts, 0), gradient.shape)


def counts_for(schedule: Schedule, graph: TrainingGraph, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return slices by the names of communications; of n parts of a layer, what is larger is cut into n."""
    counts: dict[str, int] = {}
    for (kind, layer), shares in schedule.parts.items():
        if kind != "comm":
            continue
        names = {op.rsplit("/", 1)[-1] for op in graph.layers[layer].communication_ops} & sizes.keys()
        whole = sum(sizes[name] for name in names)
        counts |= {name: len(shares) for name in sorted(names) if sizes[name] * len(shares) > whole}
    return counts


def parts_of(graph_def: graph_pb2.GraphDef) -> dict[str, int]:
    """Return the slice that each communication belongs to, by the name of its op."""
    return {
        node.name: int(node.attr[func_graphs.PART_ATTR].i)
        for node in graph_def.node
        if func_graphs.PART_ATTR in node.attr
    }
