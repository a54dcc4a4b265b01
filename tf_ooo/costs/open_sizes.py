"""Sizes that only a run knows, as large as they can get: rows that a batch looks up (``Unique``), all that an
optimizer computes from them, and cuDNN's notes of a batch normalization.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.graph.dependencies import split_input

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2, node_def_pb2

_Outputs = Mapping[str, Sequence[OutputInfo]]
# At most as many rows come out as go in.
_NEVER_MORE_ROWS = frozenset({"Unique", "UniqueV2", "UnsortedSegmentSum"})
_RESERVED_PORT = 5


def with_largest_sizes(graph_def: graph_pb2.GraphDef, outputs: _Outputs) -> dict[str, tuple[OutputInfo, ...]]:
    """Open sizes as large as they can be; what depends on an open input (a batch size) stays open."""
    largest = {name: tuple(infos) for name, infos in outputs.items()}
    open_nodes = [node for node in graph_def.node if not all(map(is_closed, largest.get(node.name, ())))]
    bounded: set[tuple[str, int]] = set()
    changed = True
    while changed:  # nodes come in any order, and there may be loops
        changed = False
        for node in open_nodes:
            for port, info in list(_closed_now(node, largest, bounded)):
                infos = largest[node.name]
                largest[node.name] = (*infos[:port], info, *infos[port + 1 :])
                bounded.add((node.name, port))
                changed = True
    return largest


def _closed_now(
    node: node_def_pb2.NodeDef, outputs: _Outputs, bounded: set[tuple[str, int]]
) -> Iterator[tuple[int, OutputInfo]]:
    """Outputs of the node whose sizes are open, and can be told by now."""
    sources = [split_input(text) for text in node.input]
    for port, info in enumerate(outputs[node.name]):
        if is_closed(info):
            continue
        if node.op == "FusedBatchNormV3" and port == _RESERVED_PORT:
            yield port, replace(info, shape=(0,))
            continue
        usable = sources[:1] if node.op in _NEVER_MORE_ROWS else [s for s in sources if s in bounded]
        for name, source_port in usable:
            infos = outputs.get(name, ())
            filled = _filled(info, infos[source_port]) if 0 <= source_port < len(infos) else None
            if filled is not None:
                yield port, filled
                break


def _filled(info: OutputInfo, source: OutputInfo) -> OutputInfo | None:
    """``info`` with the sizes of ``source`` where it has none; None: open too, or of another rank."""
    if source.shape is None or None in source.shape:
        return None
    if info.shape is None:
        return replace(info, shape=source.shape)
    if len(info.shape) != len(source.shape):
        return None
    sizes = zip(info.shape, source.shape, strict=True)
    return replace(info, shape=tuple(theirs if own is None else own for own, theirs in sizes))


def is_closed(info: OutputInfo) -> bool:
    """Return whether all sizes are known."""
    return info.shape is not None and None not in info.shape
