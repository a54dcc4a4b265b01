"""Runs rounds: one function for each range of rounds that hold a batch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.graph.node_input import split_input
from grappler_passes.passes.base import PassPipeline
from tf_ooo.compat import func_graphs, keras_variables, tf_functions
from tf_ooo.fit import progress
from tf_ooo.modes.layerpipe.averages import LaterWeights
from tf_ooo.modes.layerpipe.cutting import Register, RoundPass
from tf_ooo.modes.layerpipe.delays import Delays
from tf_ooo.modes.layerpipe.frozen import Copies
from tf_ooo.modes.layerpipe.rounds import Rounds
from tf_ooo.modes.layerpipe.traced import Traced
from tf_ooo.modes.layerpipe.turns import Turns, in_turns
from tf_ooo.tracing.variables import free

Tensors = dict[str, tf.Tensor]


@dataclass(frozen=True)
class PartOfRound:
    """The ops of a round in which only batches in their rounds ``low`` to ``high`` exist, in order.

    ``read``: names of what these ops and results read.  ``logs``: the results, if a batch is in that round.
    ``filled``: registers that take something.
    """

    low: int
    high: int
    turns: Turns
    read: frozenset[str]
    logs: list[str]
    filled: list[Register]


class Ticks:
    """The functions of a step that is spread over rounds.

    Attributes:
        weights: what backward passes read apart from their forward pass.
        last: the last round of a batch, counted from the round in which its first op may run.
        batch_round, results_round: in which a batch comes in, and in which its results come out.
    """

    def __init__(
        self,
        traced: Traced,
        rounds: Rounds,
        delays: Delays,
        weights: LaterWeights,
    ) -> None:
        self.traced, self.rounds, self.delays, self.weights = traced, rounds, delays, weights
        self.copies = Copies(traced, delays.copies)
        self.last, self.batch_round, self.results_round = rounds.last, rounds.batch, delays.logs_round
        self._copies_made = 0
        self._parts: dict[tuple[int, int], PartOfRound] = {}
        self._functions: dict[tuple[int, int, int], Any] = {}
        self._infos: dict[int, OutputInfo] = {}
        self._stores: dict[str, tf.Variable] = {}
        for row in delays.registers:
            name, port = split_input(row.source)
            self._infos[row.number] = info = traced.outputs[name][port]
            for delay in range(1, row.depth + 1):
                self._stores[row.name(delay)] = keras_variables.register(info.dtype, info.shape, row.device)

    @property
    def traced_functions(self) -> int:
        """Count the functions."""
        return len(self._functions)

    def reset(self) -> None:
        """Reset before the first round of an epoch."""
        self.copies.refresh()
        self.weights.reset()

    def empty(self) -> None:
        """Free the memory of what lies between rounds, until the next :meth:`reset`."""
        for variable in (*self._stores.values(), *self.copies.variables, *self.weights.variables):
            free(variable)

    def run(self, low: int, high: int, batches: Sequence[Sequence[tf.Tensor] | None]) -> list[Any]:
        """Rounds in which only batches that are in their rounds ``low`` to ``high`` exist, as one function.

        Nothing in it waits for the end of a round: a processor goes on as soon as it has what it reads.
        A batch, or None, comes in in each round.  Gives the results of as many, or none.
        """
        tensors = [tensor for batch in batches for tensor in batch or ()]
        key = (low, high, len(batches))
        if key not in self._functions:
            with progress.said(_tracing_text(high - low + 1, len(batches), high == self.last)):
                self._functions[key] = function = self._make(*key)
                outputs = function(*tensors)  # traced as it is called
        else:
            outputs = self._functions[key](*tensors)
        if not low <= self.results_round <= high:
            return []
        size = len(self.delays.logs)
        each = (outputs[number * size : (number + 1) * size] for number in range(len(batches)))
        return [self.traced.results.unpack(results) for results in each]

    def _make(self, low: int, high: int, rounds: int) -> Any:
        part = self._part(low, high)
        specs = self.traced.specs if low <= self.batch_round <= high else ()

        def body(*tensors: tf.Tensor) -> list[tf.Tensor]:
            late, logs = self._stored(low, high), []
            ends: Tensors = {}
            for number in range(rounds):
                batch = tensors[number * len(specs) : (number + 1) * len(specs)]
                name = f"round_{number}" if rounds > 1 else ""
                entering, results, ends = self._round(part, batch, late, name, ends)
                late = self._shifted(late, entering)
                logs += [tf.identity(value) for value in results]
            for name, store in self._stores.items():
                if name in late:
                    store.assign(late[name], read_value=False)
            return logs

        return tf_functions.plain_function(body, [spec for _ in range(rounds) for spec in specs])

    def _folder(self, name: str) -> Path | None:
        """Return the folder into which the graphs of a round are dumped."""
        return None if self.traced.dump_dir is None else Path(self.traced.dump_dir) / name

    def _part(self, low: int, high: int) -> PartOfRound:
        if (low, high) in self._parts:
            return self._parts[low, high]
        traced, delays = self.traced, self.delays
        given = {*traced.arguments, *traced.captured, *self.weights.names}
        folder = self._folder(f"rounds_{low}_to_{high}")
        kept = RoundPass(self.rounds, low, high, frozenset(given))
        graph_def = PassPipeline([kept], folder)(delays.graph_def).graph_def
        logs = delays.logs if low <= self.results_round <= high else []
        texts = [*logs, *(text for node in graph_def.node for text in node.input)]
        read = frozenset(split_input(text)[0] for text in texts)
        filled = [row for row in delays.registers if low <= row.made <= high]
        turns = in_turns(graph_def, traced.where, self.rounds.device_of, folder)
        self._parts[low, high] = PartOfRound(low, high, turns, read, logs, filled)
        return self._parts[low, high]

    def _round(
        self, part: PartOfRound, batch: Sequence[tf.Tensor], late: Tensors, name: str, ends: Tensors
    ) -> tuple[dict[int, tf.Tensor], list[tf.Tensor], Tensors]:
        """Adds a round to the function that is traced, behind the round that has these ``ends``.

        Returns what goes into registers, by number; results; its own ends.
        """
        traced, turns = self.traced, part.turns
        tensors = dict(zip(traced.arguments, batch, strict=True)) if batch else {}
        tensors |= traced.captured
        tensors |= self.copies.given()
        weights, behind = self.weights.given(part.low, part.high)
        tensors |= weights
        tensors |= {key: value for key, value in late.items() if key in part.read}
        self._copies_made += 1
        ends = {key: end for key, end in ends.items() if key in turns.before.values()}
        graph_def = turns.copy(self._copies_made, ends, self._folder(f"copy_{self._copies_made}"))
        wanted = [[row.source for row in part.filled], part.logs]
        replaced = {f"{key}:0": value for key, value in tensors.items() if key in part.read} | ends
        texts = [*itertools.chain.from_iterable(wanted), *turns.ends.values()]
        fetched = iter(_fetch(graph_def, tensors, replaced, texts, name))
        entering, results = (list(itertools.islice(fetched, len(own))) for own in wanted)
        behind()
        numbers = [row.number for row in part.filled]
        return dict(zip(numbers, entering, strict=True)), results, dict(zip(turns.ends, fetched, strict=True))

    def _stored(self, low: int, high: int) -> Tensors:
        """Read the registers of batches that are in these rounds; nobody reads the rest."""
        held = {}
        for row in self.delays.registers:
            for delay in range(max(1, low - row.made), min(row.depth, high - row.made) + 1):
                store = self._stores[row.name(delay)]
                with tf.device(row.device):
                    value = tf.raw_ops.ReadVariableOp(resource=store.handle, dtype=store.dtype)
                    # Graph optimizers must know the rank: oneDNN's ends the process on a filter without.
                    held[row.name(delay)] = tf.ensure_shape(value, self._infos[row.number].shape)
        return held

    def _shifted(self, late: Tensors, entering: Mapping[int, tf.Tensor]) -> Tensors:
        """Return the content of the registers after a round."""
        held: Tensors = {}
        for row in self.delays.registers:
            for delay in range(2, row.depth + 1):
                if row.name(delay - 1) in late:
                    held[row.name(delay)] = late[row.name(delay - 1)]
            if row.number in entering:
                with tf.device(row.device):
                    held[row.name(1)] = tf.identity(entering[row.number])
        return held


def _tracing_text(on_their_way: int, rounds: int, to_the_last: bool) -> str:
    """Say how full the devices are in a function of rounds, while it is traced.

    ``to_the_last``: batches are in the last of their rounds, too, which they are not when an epoch begins.
    """
    if rounds > 1:
        return f"tracing {rounds} steps in one function"
    batches = "one batch on its way" if on_their_way == 1 else f"{on_their_way} batches on their way"
    return f"tracing the step with {batches}{'' if to_the_last else ', as an epoch begins'}"


def _fetch(
    graph_def: graph_pb2.GraphDef, tensors: Tensors, replaced: Tensors, wanted: Sequence[str], name: str
) -> list[tf.Tensor]:
    """Imports the ops of a round; what is wanted and given is handed through."""
    inside = [text for text in wanted if split_input(text)[0] not in tensors]
    texts = [text if ":" in text else f"{text}:0" for text in inside]
    by_text = dict(zip(inside, func_graphs.import_here(graph_def, replaced, texts, name), strict=True))
    return [by_text[text] if text in by_text else tensors[split_input(text)[0]] for text in wanted]
