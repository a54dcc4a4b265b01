"""Counts how often the while loops of a flat graph run, where their condition compares with a constant."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.graph.contexts import ENTERS, EXITS, MERGES, NEXT_ITERATIONS, SWITCHES
from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.node_input import data_inputs, split_input

_PASSING_ON = ("Identity", *ENTERS, *SWITCHES, *NEXT_ITERATIONS)


def has_loops(graph_def: graph_pb2.GraphDef) -> bool:
    """Return whether there is a loop."""
    return any(node.op in NEXT_ITERATIONS for node in graph_def.node)


def iterations_of_ops(graph_def: graph_pb2.GraphDef) -> dict[str, int]:
    """Return how often ops in loops run at most, by their names; unknown ones are left out."""
    if not has_loops(graph_def):
        return {}
    loops, index = Loops(graph_def), GraphIndex(graph_def)
    of_frame: dict[str, int] = {}
    for i, name in enumerate(index.names):
        frame = index.contexts[i].frame
        if frame and index.ops[i] in MERGES and frame[-1] not in of_frame:
            count = loops.iterations(name)
            if count is not None:
                of_frame[frame[-1]] = count
    return {
        name: math.prod(of_frame[frame] for frame in index.contexts[i].frame)
        for i, name in enumerate(index.names)
        if index.contexts[i].frame and all(frame in of_frame for frame in index.contexts[i].frame)
    }


class Loops:
    """The loops of a flat graph: what goes around each, and its condition."""

    def __init__(self, graph_def: graph_pb2.GraphDef) -> None:
        self.nodes: Mapping[str, node_def_pb2.NodeDef] = {node.name: node for node in graph_def.node}

    def data(self, name: str) -> list[str]:
        """Return the data inputs of an op."""
        return data_inputs(self.nodes[name])

    def source(self, text: str) -> str:
        """Return the op whose result comes through here, of a loop's variable its Merge."""
        name = split_input(text)[0]
        while self.nodes[name].op in _PASSING_ON:
            name = split_input(self.data(name)[0])[0]
        return name

    def entering(self, merge: str) -> list[str]:
        """Return the values that a loop's variable begins with."""
        return [text for text in self.data(merge) if self.nodes[split_input(text)[0]].op in ENTERS]

    def iterations(self, merge: str) -> int | None:
        """Return how often a variable's loop runs at most: its counter is compared with a known number."""
        condition = self._conditions.get(merge)
        counts = [] if condition is None else self._limits(condition)
        return min(counts, default=None)

    @cached_property
    def _conditions(self) -> dict[str, str]:
        """Return, for what goes around a loop, the source of the condition for another iteration."""
        deciding = (node for node in self.nodes.values() if node.op in SWITCHES)
        return {split_input(node.input[0])[0]: split_input(self.data(node.name)[1])[0] for node in deciding}

    def _limits(self, condition: str) -> list[int]:
        node = self.nodes[condition]
        if node.op in ("LoopCond", "LogicalAnd", "Identity"):
            return [limit for text in self.data(condition) for limit in self._limits(split_input(text)[0])]
        if node.op != "Less":
            return []
        counter, limit = self.data(condition)[:2]
        begin, end = self._number(counter), self._number(limit)
        return [] if begin is None or end is None else [max(0, end - begin)]

    def _number(self, text: str) -> int | None:
        """A constant, of a loop's variable the one that it begins with, behind a loop how often that ran."""
        name = self.source(text)
        while self.nodes[name].op in MERGES:
            entering = self.entering(name)
            if not entering:
                return None
            name = self.source(entering[0])
        node = self.nodes[name]
        if node.op in EXITS:  # gradients run as often as their loop has counted
            return self.iterations(self.source(self.data(name)[0]))
        if node.op != "Const":
            return None
        value = tf.make_ndarray(node.attr["value"].tensor)
        return int(value) if np.issubdtype(value.dtype, np.integer) and value.size == 1 else None
