"""Runs rounds: one function for each range of rounds in which batches are."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from grappler_passes.compat.graph_protos import split_input
from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.passes.base import PassPipeline
from tf_ooo.compat import func_graphs, keras_variables, nests, tf_functions, train_function
from tf_ooo.fit import timing
from tf_ooo.modes.layerpipe.cutting import Register, RoundPass
from tf_ooo.modes.layerpipe.delays import Copies, Delays, LaterWeights
from tf_ooo.modes.layerpipe.rounds import Rounds
from tf_ooo.modes.layerpipe.traced import Traced
from tf_ooo.modes.layerpipe.turns import Turns, in_turns
from tf_ooo.tracing.variables import free

Tensors = dict[str, tf.Tensor]


@dataclass(frozen=True)
class PartOfRound:
    """Holds the ops of a round, in order, in which only batches in their rounds ``low`` to ``high`` exist.

    ``read``: names of the tensors that they read.  ``logs``: the results, if a batch is in that round.
    ``filled``: registers that take a value.
    """

    low: int
    high: int
    turns: Turns
    read: frozenset[str]
    logs: list[str]
    filled: list[Register]


class Ticks:
    """Holds the functions of a step that is spread over rounds.

    Attributes:
        weights: the weights that backward passes read, if others than their forward pass.
        last: the last round of a batch, counted from the round in which its first op may run.
        batch_round, results_round: in which a batch comes in, and in which its results come out.
    """

    def __init__(self, traced: Traced, rounds: Rounds, delays: Delays, weights: LaterWeights) -> None:
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
        """Return the number of traced functions."""
        return len(self._functions)

    def reset(self) -> None:
        """Reset before the first round of an epoch."""
        self.copies.refresh()
        self.weights.reset()

    def empty(self) -> None:
        """Free the memory of registers until the next :meth:`reset`."""
        for variable in (*self._stores.values(), *self.copies.variables, *self.weights.variables):
            free(variable)

    def run(self, low: int, high: int, batches: Sequence[Sequence[tf.Tensor] | None]) -> list[Any]:
        """Run rounds with only the batches in their rounds ``low`` to ``high``, as one function.

        Nothing in it waits for the end of a round: a processor goes on as soon as its inputs are there. Each
        round takes in a batch or None.  Returns the results of as many batches, or none.
        """
        tensors = [tensor for batch in batches for tensor in batch or ()]
        key = (low, high, len(batches))
        if key in self._functions:
            outputs = self._functions[key](*tensors)
        else:
            with timing.said(_tracing_text(high - low + 1, len(batches), high == self.last)):
                self._functions[key] = self._make(*key)
                outputs = self._functions[key](*tensors)  # traced as it is called
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
            for name in filter(late.__contains__, self._stores):
                self._stores[name].assign(late[name], read_value=False)
            return logs

        return tf_functions.plain_function(body, [spec for _ in range(rounds) for spec in specs])

    def _folder(self, name: str) -> Path | None:
        return None if self.traced.dump_dir is None else Path(self.traced.dump_dir) / name

    def _part(self, low: int, high: int) -> PartOfRound:
        if (low, high) in self._parts:
            return self._parts[low, high]
        traced, delays, folder = self.traced, self.delays, self._folder(f"rounds_{low}_to_{high}")
        given = frozenset({*traced.arguments, *traced.captured, *self.weights.names})
        kept = RoundPass(self.rounds, low, high, given)
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
        """Add a round to the traced function, behind the round that has these ``ends``.

        Returns the values for registers, by number; the results; its own ends.
        """
        traced, turns = self.traced, part.turns
        arguments = dict(zip(traced.arguments, batch, strict=True)) if batch else {}
        copies = self.copies.given()
        weights, behind = self.weights.given(part.low, part.high)
        read = {key: value for key, value in late.items() if key in part.read}
        tensors = {**arguments, **traced.captured, **copies, **weights, **read}
        self._copies_made += 1
        ends = {key: end for key, end in ends.items() if key in turns.before.values()}
        graph_def = turns.copy(self._copies_made, ends, self._folder(f"copy_{self._copies_made}"))
        replaced = {f"{key}:0": value for key, value in tensors.items() if key in part.read} | ends
        texts = [*(row.source for row in part.filled), *part.logs, *turns.ends.values()]
        fetched = iter(_fetch(graph_def, tensors, replaced, texts, name))
        entering = {row.number: next(fetched) for row in part.filled}
        results = [next(fetched) for _ in part.logs]
        behind()
        return entering, results, dict(zip(turns.ends, fetched, strict=True))

    def _stored(self, low: int, high: int) -> Tensors:
        """Read the registers of batches that are in these rounds; the rest are not read."""
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
        """Return the contents of the registers after a round."""
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
    """Import the ops of a round; wanted tensors that are given are passed through."""
    inside = [text for text in wanted if split_input(text)[0] not in tensors]
    texts = [text if ":" in text else f"{text}:0" for text in inside]
    by_text = dict(zip(inside, func_graphs.import_here(graph_def, replaced, texts, name), strict=True))
    return [by_text[text] if text in by_text else tensors[split_input(text)[0]] for text in wanted]


# Rounds in one function, and the ops of all of them: a large graph takes TensorFlow long.
_ROUNDS, _OPS = (8, 4, 2), 20_000


class Batches:
    """Takes the batches of an epoch out of Keras' iterator.

    ``of_epoch``: their number, if known: Keras counts the steps, the data may go on. ``taken``: how many were
    taken in this epoch.
    """

    def __init__(self, of_epoch: int | None) -> None:
        self.taken = 0
        self._of_epoch = of_epoch
        self._waiting: list[Any] = []

    def look(self, iterator: Iterator[Any]) -> Any:
        """Return the batch that comes next without taking it; None at the end of the data."""
        self._waiting = self._waiting or train_function.take(iterator, 1)
        return self._waiting[0] if self._waiting else None

    def take(self, iterator: Iterator[Any]) -> Any:
        """Return the next batch; None at the end of the data."""
        batch = self.look(iterator)
        self.taken += len(self._waiting)
        self._waiting = []
        return batch

    def take_of_epoch(self, iterator: Iterator[Any]) -> Any:
        """Return the next batch; None at the end of the epoch."""
        ended = self._of_epoch is not None and self.taken >= self._of_epoch
        return None if ended else self.take(iterator)


class Epoch:
    """Runs the rounds from an epoch's first batch to the last; ``rounds``: how many have run.

    ``batches`` gives the next batch's tensors, or None at the end of the data.  ``together``: how many rounds
    run as one, if all of them hold a batch.
    """

    def __init__(
        self, ticks: Ticks, batches: Callable[[], Sequence[tf.Tensor] | None], together: int = 1
    ) -> None:
        self._ticks, self._batches, self._together = ticks, batches, together
        self.rounds = 0
        self._taken = self._given = 0
        self._count: int | None = None  # of all batches, once the data have ended
        self._ahead: deque[Sequence[tf.Tensor]] = deque()
        self._data_ended = False
        self._results: deque[Any] = deque()

    def timed_step(self, step_s: deque[float]) -> Any:
        """Run :meth:`step`; add its rounds' mean seconds, if none of them was traced."""
        started, rounds, functions = time.perf_counter(), self.rounds, self._ticks.traced_functions
        outputs = self.step()
        if outputs is not None:
            nests.synchronize(outputs)
        ran = self.rounds - rounds
        if ran and self._ticks.traced_functions == functions:
            step_s.append((time.perf_counter() - started) / ran)
        return outputs

    def step(self) -> Any:
        """Return the results of the next batch; None once the data have ended.

        After the last batch's results all rounds have run, so no gradient is on its way.
        """
        while not self._results and not self._finished:
            self._next_rounds()
        if not self._results:
            return None
        self._given += 1
        if self._count is not None and self._given == self._count:
            self.drain()
        return self._results.popleft()

    @property
    def _finished(self) -> bool:
        return self._count is not None and (not self._count or self.rounds >= self._count + self._ticks.last)

    @property
    def ahead(self) -> int:
        """Return how many batches have been taken whose results have not been returned."""
        return self._taken + len(self._ahead) - self._given

    def is_full(self) -> bool:
        """Return whether the next step runs rounds that all hold batches; take the batches it needs."""
        if self._results or self._count is not None or self.rounds < self._ticks.last:
            return False
        self._look_ahead(self._together)
        return bool(self._ahead)

    def drain(self) -> None:
        """Take no more batches; finish those on their way."""
        self._data_ended = True
        if not self._ahead:
            self._count = self._taken
        while not self._finished:
            self._next_rounds()

    def _look_ahead(self, count: int) -> None:
        """Take batches until so many have not come in yet."""
        while len(self._ahead) < count and not self._data_ended:
            if (batch := self._batches()) is None:
                self._data_ended = True
            else:
                self._ahead.append(batch)

    def _next_rounds(self) -> None:
        full = self._count is None and self.rounds >= self._ticks.last
        self._look_ahead(self._together if full else 1)
        if full and len(self._ahead) == self._together:
            self._run(0, self._ticks.last, self._together)
            return
        if self._count is None and self.rounds >= self._ticks.batch_round and not self._ahead:
            self._count = self._taken
        low = 0 if self._count is None else max(0, self.rounds - self._count + 1)
        high = min(self._ticks.last, self.rounds)
        if low <= high:
            self._run(low, high, 1)

    def _run(self, low: int, high: int, rounds: int) -> None:
        feeds = self._count is None and low <= self._ticks.batch_round <= high
        batches = [self._ahead.popleft() if feeds else None for _ in range(rounds)]
        self._results += self._ticks.run(low, high, batches)
        self._taken += rounds if feeds else 0
        self.rounds += rounds


def rounds_together(ops: int) -> int:
    """Return how many rounds of so many ops may run as one function."""
    return next((count for count in _ROUNDS if count * ops <= _OPS), 1)


def structure_of(batch: object) -> Any:
    """Return what all batches share: parts, types, all dimensions but the first."""
    specs = nests.Packed(batch).specs
    return nests.signature(batch)[0], [(spec.dtype, tuple(spec.shape[1:])) for spec in specs]
