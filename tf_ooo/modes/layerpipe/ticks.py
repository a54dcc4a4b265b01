"""Runs rounds: one function for each range of rounds that hold a batch."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from tensorflow.core.framework import graph_pb2

from grappler_passes.graph.node_input import split_input
from grappler_passes.passes.base import PassPipeline
from tf_ooo.compat import func_graphs, keras_variables, tf_functions
from tf_ooo.modes.layerpipe.averages import Averages, read_weight
from tf_ooo.modes.layerpipe.delays import Delays, RoundPass
from tf_ooo.modes.layerpipe.frozen import Copies
from tf_ooo.modes.layerpipe.rates import factor_name, factors
from tf_ooo.modes.layerpipe.registers import Register
from tf_ooo.modes.layerpipe.rounds import Rounds
from tf_ooo.modes.layerpipe.seeds import ReseedPass
from tf_ooo.modes.layerpipe.traced import Traced
from tf_ooo.modes.layerpipe.turns import Turns, in_turns, verified
from tf_ooo.modes.layerpipe.two_versions import TwoVersions
from tf_ooo.modes.layerpipe.versions import Now


@dataclass(frozen=True)
class PartOfRound:
    """The ops of a round in which only batches in their rounds ``low`` to ``high`` exist.

    Attributes:
        turns: these ops, in order.
        read: names of what they and the results read.
        logs: the tensors of the results, none if no batch is in its round of results.
        filled: the registers that something is put into.
        phase: see ``two_versions``.
    """

    low: int
    high: int
    turns: Turns
    read: frozenset[str]
    logs: list[str]
    filled: list[Register]
    phase: int


class Ticks:
    """The functions of a step that is spread over rounds.

    Args:
        traced, rounds, delays: of the step.
        now: weights that are read instead of those of the forward pass.
        averages: whether ``now`` are rebuilt from a moving average of the updates.
        late, warmup_steps: see ``rates.factors``.
        count: the variable that counts the batches that have come in.
        versions: where several batches' gradients are one update.
    """

    def __init__(
        self,
        traced: Traced,
        rounds: Rounds,
        delays: Delays,
        now: Sequence[Now] = (),
        averages: bool = False,
        late: Set[int] = frozenset(),
        warmup_steps: int = 1,
        count: Any = None,
        versions: TwoVersions | None = None,
    ) -> None:
        self.traced, self.rounds, self.delays, self.now = traced, rounds, delays, now
        self._late, self._warmup_steps = late, warmup_steps
        self._count = count if late else None
        self._averages = Averages(traced, rounds, now) if averages else None
        self.versions, self._tick = versions, 0
        self.copies = Copies(traced, delays.copies)
        self._parts: dict[tuple[int, int], PartOfRound] = {}
        self._copies_made = 0
        self._functions: dict[tuple[int, int, int, int], Any] = {}
        dtypes = {
            r.number: traced.outputs[split_input(r.source)[0]][split_input(r.source)[1]]
            for r in delays.registers
        }
        self._infos = dtypes
        self._stores = {
            r.number: [
                keras_variables.register(dtypes[r.number].dtype, dtypes[r.number].shape, r.device)
                for _ in range(r.depth)
            ]
            for r in delays.registers
        }

    @property
    def last(self) -> int:
        """The last round of a batch, counted from the round in which its first op may run."""
        return self.rounds.last

    @property
    def average_bytes(self) -> int:
        """Of the moving averages of updates."""
        return 0 if self._averages is None else self._averages.bytes

    def run(self, low: int, high: int, batch: Any) -> Any:
        """One round, in which only batches that are in their rounds ``low`` to ``high`` exist.

        Args:
            batch: the tensors of the batch that comes in; None where none does.

        Returns:
            The results of the batch that is in its round of results, or None.
        """
        outputs = self._function(low, high, 1)(*(batch or ()))
        self._tick += 1
        if not low <= self.delays.logs_round <= high:
            return None
        return self.traced.results.unpack(outputs)

    def run_full(self, batches: Sequence[Any]) -> list[Any]:
        """A round for each of these batches, in which batches are in all rounds, as one function.

        Nothing in it waits for the end of a round: a processor goes on as soon as it has what it reads.

        Returns:
            The results of as many batches.
        """
        function = self._function(0, self.last, len(batches))
        outputs = function(*(tensor for batch in batches for tensor in batch))
        self._tick += len(batches)
        size = len(self.delays.logs)
        return [
            self.traced.results.unpack(outputs[number * size : (number + 1) * size])
            for number in range(len(batches))
        ]

    @property
    def traced_functions(self) -> int:
        """How many functions there are."""
        return len(self._functions)

    def _function(self, low: int, high: int, rounds: int) -> Any:
        key = (low, high, rounds, self.versions.phase(self._tick) if self.versions is not None else 0)
        if key not in self._functions:
            self._functions[key] = self._make(*key)
        return self._functions[key]

    def _make(self, low: int, high: int, rounds: int, phase: int) -> Any:
        import tensorflow as tf

        traced = self.traced
        parts = [self._part(low, high, phase + number) for number in range(rounds)]
        specs = traced.specs if low <= self.rounds.batch <= high else []

        def body(*tensors: Any) -> list[Any]:
            late, logs = self._stored(low, high), []
            ends: dict[str, Any] = {}
            for number, part in enumerate(parts):
                batch = tensors[number * len(specs) : (number + 1) * len(specs)]
                name = f"round_{number}" if rounds > 1 else ""
                entering, results, ends = self._round(part, batch, late, name, ends)
                late = self._shifted(late, entering)
                logs += [tf.identity(value) for value in results]
            self._store(late)
            return logs

        return tf_functions.plain_function(body, [spec for _ in range(rounds) for spec in specs])

    def _part(self, low: int, high: int, phase: int) -> PartOfRound:
        """The ops of a round in which only these rounds' batches exist."""
        if self.versions is None and (low, high) in self._parts:
            return self._parts[low, high]
        traced, delays = self.traced, self.delays
        given = {
            *traced.arguments,
            *traced.captured,
            *(weight.name for weight in self.now),
            *map(factor_name, self._late),
        }
        if self.versions is not None:
            given |= self.versions.names | self.versions.left_out(low, phase)
        folder = None if traced.dump_dir is None else traced.dump_dir / f"rounds_{low}_to_{high}"
        kept = RoundPass(self.rounds, low, high, frozenset(given))
        graph_def = PassPipeline([kept], folder)(delays.graph_def).graph_def
        logs = delays.logs if low <= delays.logs_round <= high else []
        read = {split_input(text)[0] for node in graph_def.node for text in node.input}
        read |= {split_input(text)[0] for text in logs}
        filled = [row for row in delays.registers if low <= row.made <= high]
        turns = in_turns(graph_def, traced.where, self.rounds.device_of)
        self._parts[low, high] = PartOfRound(low, high, turns, frozenset(read), logs, filled, phase)
        return self._parts[low, high]

    def _round(
        self, part: PartOfRound, batch: Sequence[Any], late: dict[str, Any], name: str, ends: dict[str, Any]
    ) -> tuple[dict[int, Any], list[Any], dict[str, Any]]:
        """Adds a round to the function that is traced, behind the round that has these ``ends``.

        Returns what goes into registers, by number; results; its own ends.
        """
        traced = self.traced
        tensors = dict(zip(traced.arguments, batch, strict=True)) if batch else {}
        tensors |= traced.captured
        tensors |= self.copies.given()
        later = {} if self.versions else {now.handle: read_weight(traced, now) for now in self.now}
        tensors |= self._weights_now(later, part)
        tensors |= self._rates()
        tensors |= {key: value for key, value in late.items() if key in part.read}
        wanted = [r.source for r in part.filled]
        sums = self.versions.added(part.low, part.high) if self.versions else []
        kept = self.versions.kept(part.low, part.high, part.phase) if self.versions else {}
        self._copies_made += 1
        ends = {key: end for key, end in ends.items() if key in part.turns.before.values()}
        graph_def = verified(ReseedPass(self._copies_made), part.turns.following(ends))
        last = list(part.turns.ends.values())
        texts = [*wanted, *part.logs, *(total.name for total in sums), *last]
        results = _fetch(part, graph_def, tensors, texts, name, ends)
        results, last = results[: len(results) - len(last)], results[len(results) - len(last) :]
        if self._averages is not None:
            self._averages.update(later, part.low, part.high)
        if self.versions is not None:
            added = dict(zip(sums, results[len(results) - len(sums) :], strict=True))
            self.versions.store(part.low, part.phase, added, kept)
        entering = {r.number: value for r, value in zip(part.filled, results, strict=False)}
        ends = dict(zip(part.turns.ends, last, strict=True))
        return entering, results[len(wanted) : len(results) - len(sums)], ends

    def _weights_now(self, read: dict[str, Any], part: PartOfRound) -> dict[str, Any]:
        if self.versions is not None:
            return self.versions.given(part.low, part.high, part.phase)
        if self._averages is None:
            return {weight.name: read[weight.handle] for weight in self.now}
        return {weight.name: self._averages.rebuilt(weight, read[weight.handle]) for weight in self.now}

    def reset(self) -> None:
        """Before the first round of an epoch."""
        self._tick = 0
        self.copies.refresh()
        if self.versions is not None:
            self.versions.reset()
        if self._averages is not None:
            self._averages.reset()

    def _rates(self) -> dict[str, Any]:
        """What late layers' learning rates are multiplied with in this round."""
        if self._count is None:
            return {}
        return factors(set(self._late), self._count.read_value(), self._warmup_steps)

    def _stored(self, low: int, high: int) -> dict[str, Any]:
        """What the registers hold of batches that are in these rounds; the rest is read by nobody."""
        import tensorflow as tf

        held = {}
        for r in self.delays.registers:
            shape = self._infos[r.number].shape
            for delay, store in enumerate(self._stores[r.number], 1):
                if not low <= r.made + delay <= high:
                    continue
                with tf.device(r.device):
                    value = tf.raw_ops.ReadVariableOp(resource=store.handle, dtype=store.dtype)
                    # Graph optimizers must know the rank: oneDNN's ends the process on a filter without.
                    held[r.name(delay)] = tf.ensure_shape(value, shape)
        return held

    def _shifted(self, late: dict[str, Any], entering: dict[int, Any]) -> dict[str, Any]:
        """What the registers hold after a round."""
        import tensorflow as tf

        held: dict[str, Any] = {}
        for r in self.delays.registers:
            for delay in range(2, r.depth + 1):
                if r.name(delay - 1) in late:
                    held[r.name(delay)] = late[r.name(delay - 1)]
            if r.number in entering:
                with tf.device(r.device):
                    held[r.name(1)] = tf.identity(entering[r.number])
        return held

    def _store(self, late: dict[str, Any]) -> None:
        for r in self.delays.registers:
            for delay, store in enumerate(self._stores[r.number], 1):
                if r.name(delay) in late:
                    store.assign(late[r.name(delay)], read_value=False)


def _fetch(
    part: PartOfRound,
    graph_def: graph_pb2.GraphDef,
    tensors: dict[str, Any],
    wanted: list[str],
    name: str,
    ends: dict[str, Any],
) -> list[Any]:
    """Imports the ops of a round; what is wanted and given is handed through."""
    replaced = {f"{key}:0": value for key, value in tensors.items() if key in part.read} | ends
    inside = [text for text in wanted if split_input(text)[0] not in tensors]
    texts = [text if ":" in text else f"{text}:0" for text in inside]
    fetched = func_graphs.import_here(graph_def, replaced, texts, name)
    by_text = dict(zip(inside, fetched, strict=True))
    return [by_text[text] if text in by_text else tensors[split_input(text)[0]] for text in wanted]
