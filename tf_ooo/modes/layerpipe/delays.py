"""Finds what a round reads from earlier rounds: the registers between rounds.

A tensor that is made in round a and read in round b > a goes through b - a registers, variables on the
reader's device; at the end of each round every register takes the value of the one before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.compat.graph_protos import split_input
from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.graph.dependencies import states_of
from grappler_passes.passes.base import PassPipeline, tensor
from tf_ooo.errors import GraphError
from tf_ooo.modes.layerpipe.cutting import LOCAL, CutPass, Reads, Register, late_name
from tf_ooo.modes.layerpipe.rounds import Rounds
from tf_ooo.modes.layerpipe.traced import Traced, accesses, placeholders_of, read_where_it_is, zeros_on
from tf_ooo.modes.layerpipe.versions import LaterWeight

if TYPE_CHECKING:
    import keras


# Weights that no step changes (layers with ``trainable=False``) are once on each device that reads them. A
# value computed from them alone, a cast or a transpose, is the same in all rounds. So it goes through no
# registers; a device that needs it computes it from its own copy, made when an epoch begins.


def frozen_weights(model: keras.Model, traced: Traced) -> frozenset[str]:
    """Return the placeholders of a model's weights that the step only reads; not of single numbers.

    Callbacks may set single numbers, such as a loss's share, between batches: each round reads them anew.
    """
    written = {state for access in accesses(traced.index) if access.writes for state in access.states}
    weights = (variable for variable in model.weights if len(variable.shape))
    return frozenset(placeholders_of(traced.captured, weights) - written)


class Copies:
    """Holds copies of frozen weights on other devices than their own.

    ``wanted``: ``{placeholder for the value: (handle, device, OutputInfo)}``.
    """

    def __init__(self, traced: Traced, wanted: Mapping[str, tuple[str, str, OutputInfo]]) -> None:
        self._captured, self._wanted = traced.captured, wanted
        self._copies: dict[tuple[str, str], tf.Variable] = {}
        for handle, device, info in wanted.values():
            if device != traced.captured[handle].device and (handle, device) not in self._copies:
                self._copies[handle, device] = zeros_on(device, info)
        self.variables: Collection[tf.Variable] = self._copies.values()

    def refresh(self) -> None:
        """Copy the present weights."""
        for (handle, _), copy in self._copies.items():
            copy.assign(read_where_it_is(self._captured[handle], copy.dtype, copy.shape))

    def given(self) -> dict[str, tf.Tensor]:
        """Return the weights, by placeholder."""
        weights = {}
        for name, (handle, device, info) in self._wanted.items():
            if (copy := self._copies.get((handle, device))) is None:
                weights[name] = read_where_it_is(self._captured[handle], info.dtype, info.shape)
            else:
                with tf.device(device):
                    weights[name] = copy.read_value()
        return weights


class LaterWeights:
    """Holds the latest weights; if ``averaged``, earlier ones, rebuilt from moving averages of updates.

    A weight has one average of its updates, however many processors read it.
    """

    def __init__(
        self, traced: Traced, rounds: Rounds, placeholders: Sequence[LaterWeight], averaged: bool
    ) -> None:
        self.placeholders, self.names = placeholders, {weight.name for weight in placeholders}
        self._traced = traced
        self._span: dict[str, int] = {}
        for weight in placeholders:
            self._span[weight.handle] = max(self._span.get(weight.handle, 0), weight.behind)
        writes = [access for access in accesses(traced.index) if access.writes]
        self._updated = {
            handle: {rounds.of[access.name] for access in writes if handle in access.states}
            for handle in self._span
        }
        self._averages = {
            weight.handle: zeros_on(traced.captured[weight.handle].device, traced.outputs[weight.name][0])
            for weight in placeholders
            if averaged
        }
        self.variables: Collection[tf.Variable] = self._averages.values()

    def reset(self) -> None:
        """Reset before the first round of an epoch: no updates yet."""
        for average in self._averages.values():
            average.assign(np.zeros(average.shape, average.dtype.as_numpy_dtype))

    def given(self, low: int, high: int) -> tuple[dict[str, tf.Tensor], Callable[[], None]]:
        """Return the weights that a round reads, and a function to call behind it."""
        newest: dict[str, tf.Tensor] = {}
        for weight in self.placeholders:
            info, handle = self._traced.outputs[weight.name][0], self._traced.captured[weight.handle]
            newest[weight.handle] = read_where_it_is(handle, info.dtype, info.shape)
        rebuilt = {weight.name: self._rebuilt(weight, newest[weight.handle]) for weight in self.placeholders}
        return rebuilt, lambda: self._update(newest, low, high)

    def _rebuilt(self, weight: LaterWeight, newest: tf.Tensor) -> tf.Tensor:
        """Return approximately the weights of ``weight.behind`` updates ago (LayerPipe2)."""
        average = self._averages.get(weight.handle)
        if average is None:
            return newest
        with tf.device(average.device):
            return newest + tf.cast(weight.behind, newest.dtype) * average.read_value()

    def _update(self, before: dict[str, Any], low: int, high: int) -> None:
        """Follow the updates of a round; ``before`` are the weights at its start."""
        for handle, average in self._averages.items():
            if self._updated[handle].isdisjoint(range(low, high + 1)):
                continue
            with tf.device(average.device):
                after = read_where_it_is(self._traced.captured[handle], average.dtype, average.shape)
                # A window of about as many updates as the weights are behind.
                share = tf.cast(2.0 / (self._span[handle] + 1.0), average.dtype)
                taken_off = before[handle] - after
                average.assign_add(share * (taken_off - average.read_value()), read_value=False)


_NOT_STORED = ("resource", "variant")


@dataclass(frozen=True)
class Delays:
    """Holds a step in which each op has inputs from registers, which are given.

    ``copies``: ``{placeholder: (handle, device, OutputInfo)}`` of frozen weights, as a device reads them.
    ``logs``: the tensor of each result of the step, all for one batch in ``logs_round``.
    """

    graph_def: graph_pb2.GraphDef
    registers: list[Register]
    copies: dict[str, tuple[str, str, OutputInfo]]
    logs: list[str]
    logs_round: int


def delays_of(traced: Traced, rounds: Rounds) -> Delays:
    """Cut all edges between rounds.

    Raises GraphError if a tensor that cannot be stored, such as a list, is read in a later round.
    """
    cuts = _Cuts(traced, rounds)
    for node in traced.graph_def.node:
        cuts.take(node)
    logs_round = max((rounds.of.get(split_input(t)[0], 0) for t in traced.fetches), default=rounds.batch)
    logs = [cuts.read(*split_input(text), logs_round, None) for text in traced.fetches]
    registers = [
        Register(number, tensor(*source), device, rounds.of[source[0]], depth)
        for (source, device), (number, depth) in cuts.rows.items()
    ]
    change = CutPass(cuts.reads, rounds, tuple(registers), cuts.same)
    cut = PassPipeline([change], traced.dump_dir, traced.ran)(traced.graph_def)
    return Delays(cut.graph_def, registers, cuts.copies, logs, logs_round)


class _Cuts:
    """Finds each node's inputs, and ``rows`` of registers for them: (number, depth) by tensor and device."""

    def __init__(self, traced: Traced, rounds: Rounds) -> None:
        self.traced, self.rounds = traced, rounds
        self.reads: dict[str, Reads] = {}
        self.rows: dict[tuple[tuple[str, int], str], tuple[int, int]] = {}
        self.controls: dict[str, list[str]] = {}
        for first, then in rounds.before:
            self.controls.setdefault(then, []).append(first)
        self.same = _same_reads(traced, rounds)
        self.frozen = {node.name: node for node in traced.graph_def.node if node.name in rounds.frozen}
        self.local: dict[tuple[str, str], str] = {}
        self.copies: dict[str, tuple[str, str, OutputInfo]] = {}

    def take(self, node: node_def_pb2.NodeDef) -> None:
        """Take note of the inputs of a node of a round, or of a constant."""
        name, device = node.name, self.rounds.device_of.get(node.name, "")
        if name not in self.frozen:
            inputs = self._inputs(node, self.rounds.of.get(name), device)
            inputs += [f"^{first}" for first in dict.fromkeys(self.controls.get(name, ()))]
            self.reads[name] = Reads(name, tuple(inputs), device)

    def _inputs(self, node: node_def_pb2.NodeDef, at: int | None, device: str) -> list[str]:
        ports = map(split_input, node.input)
        return [self.read(producer, port, at, device) for producer, port in ports if port >= 0]

    def read(self, producer: str, port: int, at: int | None, device: str | None) -> str:
        """Return the input through which a tensor is read in round ``at``."""
        if producer in self.frozen:
            return tensor(self._on(device or "", producer), port)
        if at is None or self.rounds.of.get(producer, at) == at:
            return tensor(producer, port)
        delay = at - self.rounds.of[producer]
        producer = self.same.get(producer, producer)
        info = self.traced.outputs[producer][port]
        if info.dtype in _NOT_STORED:
            raise GraphError(
                f"{producer!r} makes a {info.dtype}, which later rounds would read; recurrent layers can be "
                "spread with unroll=True"
            )
        devices = self.rounds.device_of
        where = device or devices.get(producer) or next(iter(devices.values()))  # an input is on no device
        register, depth = self.rows.get(((producer, port), where), (len(self.rows), delay))
        self.rows[(producer, port), where] = register, max(depth, delay)
        return late_name(register, delay)

    def _on(self, device: str, name: str) -> str:
        """Return a device's own copy of an op that depends on frozen weights alone."""
        if (name, device) in self.local:
            return self.local[name, device]
        node, copy = self.frozen[name], f"{name}/{LOCAL}_{len(self.local)}"
        self.local[name, device] = copy
        if node.op == "ReadVariableOp":
            (handle,) = states_of(self.traced.index, self.traced.index.of(name))
            self.copies[copy] = handle, device, self.traced.outputs[name][0]
        else:
            self.reads[copy] = Reads(name, tuple(self._inputs(node, None, device)), device)
        return copy


def _same_reads(traced: Traced, rounds: Rounds) -> dict[str, str]:
    """Map reads of one variable in one round, with no write between them, to the first."""
    first: dict[tuple[frozenset[str], int, int], str] = {}
    same: dict[str, str] = {}
    writes = Counter[str]()
    for access in accesses(traced.index):
        if access.name not in rounds.of:
            continue
        if access.writes:
            writes.update(access.states)
        elif access.op == "ReadVariableOp":
            key = access.states, sum(writes[state] for state in access.states), rounds.of[access.name]
            same[access.name] = first.setdefault(key, access.name)
    return same
