"""Bytes of the lists that while loops fill: an element in each iteration.

What a recurrent layer keeps for its backward pass is in such lists, of which the graph says only how one
element looks, and how often the loop runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2, types_pb2

from grappler_passes.graph.contexts import ENTERS, EXITS, MERGES, NEXT_ITERATIONS, SWITCHES
from grappler_passes.graph.node_input import data_inputs, split_input
from grappler_passes.graph.training_graph import TrainingGraph

# Which input of an op that adds to a list is the element.
_ADDED = {"TensorListPushBack": 1, "TensorListSetItem": 2}
# What a gradient's loop computes on its way, and the zeros that loops begin with, come on top: measured peaks
# of two recurrent models were up to 1.3 of what was predicted of lists alone.
_BESIDE = 1.3
_TAKING_OFF = "TensorListPopBack"
_EMPTY = ("EmptyTensorList", "TensorListReserve")
_PASSING_ON = ("Identity", *ENTERS, *SWITCHES, *NEXT_ITERATIONS)


def with_list_sizes(training_graph: TrainingGraph, graph_def: graph_pb2.GraphDef) -> TrainingGraph:
    """The training graph with ``output_bytes`` of the Merge through which each list goes around its loop.

    A list that is made empty has no bytes of its own then.  They are None where an element's bytes, or how
    often the loop runs, are not known before it runs.
    """
    lists = _Lists(training_graph, graph_def)
    sizes: dict[str, int | None] = {}
    for name in lists.merges:
        sizes[name] = lists.bytes_of(name)
        if sizes[name] is not None:
            sizes |= dict.fromkeys(lists.made_for(name), 0)
    ops = {name: replace(training_graph.ops[name], output_bytes=size) for name, size in sizes.items()}
    return replace(training_graph, ops={**training_graph.ops, **ops}) if ops else training_graph


class _Lists:
    """The lists that go around the loops of a flat graph."""

    def __init__(self, training_graph: TrainingGraph, graph_def: graph_pb2.GraphDef) -> None:
        self._graph = training_graph
        self._nodes: Mapping[str, node_def_pb2.NodeDef] = {node.name: node for node in graph_def.node}

    @cached_property
    def merges(self) -> list[str]:
        """Where lists enter each iteration."""
        return [
            name
            for name, node in self._nodes.items()
            if node.op in MERGES and node.attr["T"].type == types_pb2.DT_VARIANT and name in self._graph.ops
        ]

    def bytes_of(self, merge: str) -> int | None:
        """Of all elements that the loop adds, and what comes on top; None: not known."""
        added = self._added(merge)
        if added is None:
            return None
        if added == "":
            return 0  # handed on as it is
        element = self._graph.ops[added].output_bytes if added in self._graph.ops else None
        iterations = self._iterations(merge)
        return None if element is None or iterations is None else math.ceil(_BESIDE * element * iterations)

    def made_for(self, merge: str) -> list[str]:
        """The empty list that enters here, if it is one."""
        sources = (self._source(text) for text in self._entering(merge))
        return [name for name in sources if self._nodes[name].op in _EMPTY and name in self._graph.ops]

    def _added(self, merge: str) -> str | None:
        """What an iteration adds to the list: the op of the element; ``""``: nothing.  None: not known."""
        for text in self._data(merge):
            if self._nodes[split_input(text)[0]].op not in NEXT_ITERATIONS:
                continue
            name = self._source(text)
            node = self._nodes[name]
            if node.op in _ADDED:
                own = self._source(self._data(name)[0])
                return self._source(self._data(name)[_ADDED[node.op]], views=False) if own == merge else None
            takes_off = node.op == _TAKING_OFF and self._source(self._data(name)[0]) == merge
            return "" if takes_off or name == merge else None
        return None

    def _iterations(self, merge: str) -> int | None:
        """How often the loop runs at most: its counter is compared with a number that is known."""
        condition = self._conditions.get(merge)
        counts = [] if condition is None else self._limits(condition)
        return min(counts, default=None)

    @cached_property
    def _conditions(self) -> dict[str, str]:
        """What decides whether there is another iteration, by what goes around the loop."""
        deciding = (node for node in self._nodes.values() if node.op in SWITCHES)
        return {split_input(node.input[0])[0]: split_input(self._data(node.name)[1])[0] for node in deciding}

    def _limits(self, condition: str) -> list[int]:
        node = self._nodes[condition]
        if node.op in ("LoopCond", "LogicalAnd", "Identity"):
            return [limit for text in self._data(condition) for limit in self._limits(split_input(text)[0])]
        if node.op != "Less":
            return []
        counter, limit = self._data(condition)[:2]
        begin, end = self._number(counter), self._number(limit)
        return [] if begin is None or end is None else [max(0, end - begin)]

    def _number(self, text: str) -> int | None:
        """A constant, of a loop's variable the one that it begins with, behind a loop how often that ran."""
        name = self._source(text)
        while self._nodes[name].op in MERGES:
            entering = self._entering(name)
            if not entering:
                return None
            name = self._source(entering[0])
        node = self._nodes[name]
        if node.op in EXITS:  # gradients run as often as their loop has counted
            return self._iterations(self._source(self._data(name)[0]))
        if node.op != "Const":
            return None
        value = tf.make_ndarray(node.attr["value"].tensor)
        return int(value) if np.issubdtype(value.dtype, np.integer) and value.size == 1 else None

    def _entering(self, merge: str) -> list[str]:
        """What a loop's variable begins with."""
        return [text for text in self._data(merge) if self._nodes[split_input(text)[0]].op in ENTERS]

    def _source(self, text: str, views: bool = True) -> str:
        """The op whose result comes through here."""
        name = split_input(text)[0]
        while views and self._nodes[name].op in _PASSING_ON:
            name = split_input(self._data(name)[0])[0]
        return name

    def _data(self, name: str) -> list[str]:
        return data_inputs(self._nodes[name])
