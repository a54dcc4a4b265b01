"""Ops through which everything passes: nothing on the way from the sources to the end goes by them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from grappler_passes.graph.flow import Propagation


def dominators(nodes: Sequence[int], graph: Propagation, entries: Collection[int]) -> list[int]:
    """The nodes that no edge passes by: of ``x -> h -> y, x -> y`` with the entry x these are x and y.

    ``nodes`` are in a topological order; none before the last of ``entries``, where something enters, counts.
    """
    position = {node: i for i, node in enumerate(nodes)}
    last_reader = list(range(len(nodes)))
    for i, node in enumerate(nodes):
        for pred in graph.preds[node]:
            if pred in position:
                last_reader[position[pred]] = max(i, last_reader[position[pred]])
    furthest = max((position[node] for node in entries), default=0)
    passed_by_all = []
    for i, node in enumerate(nodes):
        if furthest <= i:
            passed_by_all.append(node)
        furthest = max(furthest, last_reader[i])
    return passed_by_all
