"""Runs rounds: one function for each range of rounds that hold a batch."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from grappler_passes.node_input import split_input
from tf_ooo.layerpipe import compat
from tf_ooo.layerpipe.averages import Averages, read_weight
from tf_ooo.layerpipe.delays import Delays, nodes_between
from tf_ooo.layerpipe.rates import factor_name, factors
from tf_ooo.layerpipe.rounds import Rounds
from tf_ooo.layerpipe.traced import Traced
from tf_ooo.layerpipe.versions import Now
from tf_ooo.xla.compat import import_here


class Ticks:
    """The functions of a step that is spread over rounds.

    Args:
        traced, rounds, delays: of the step.
        now: weights that are read instead of those of the forward pass.
        averages: whether ``now`` are rebuilt from a moving average of the updates.
        late, warmup_steps: see ``rates.factors``.
        count: the variable that counts the batches that have come in.
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
    ) -> None:
        self.traced, self.rounds, self.delays, self.now = traced, rounds, delays, now
        self._late, self._warmup_steps = late, warmup_steps
        self._count = count if late else None
        self._averages = Averages(traced, rounds, now) if averages else None
        self._functions: dict[tuple[int, int], Any] = {}
        dtypes = {
            r.number: traced.outputs[split_input(r.source)[0]][split_input(r.source)[1]]
            for r in delays.registers
        }
        self._infos = dtypes
        self._stores = {
            r.number: [
                compat.register(dtypes[r.number].dtype, dtypes[r.number].shape, r.device)
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
        fed = batch is not None
        key = (low, high)
        if key not in self._functions:
            self._functions[key] = self._make(low, high)
        function = self._functions[key]
        outputs = function(*batch) if fed else function()
        if not low <= self.delays.logs_round <= high:
            return None
        return self.traced.results.unpack(outputs)

    def _make(self, low: int, high: int) -> Any:
        import tensorflow as tf

        traced, delays = self.traced, self.delays
        graph_def = type(traced.graph_def)()
        graph_def.library.CopyFrom(traced.graph_def.library)
        given = {
            *traced.arguments,
            *traced.captured,
            *(one.name for one in self.now),
            *map(factor_name, self._late),
        }
        nodes = [node for node in nodes_between(delays, self.rounds, low, high) if node.name not in given]
        graph_def.node.extend(nodes)
        read = {split_input(text)[0] for node in nodes for text in node.input}
        logs = delays.logs if low <= delays.logs_round <= high else []
        read |= {split_input(text)[0] for text in logs}
        feeds = low <= self.rounds.batch <= high
        made = {r.number for r in delays.registers if low <= r.made <= high}

        def body(*batch: Any) -> list[Any]:
            tensors = dict(zip(traced.arguments, batch, strict=True)) if feeds else {}
            tensors |= traced.captured
            later = {one.handle: read_weight(traced, one) for one in self.now}
            tensors |= self._weights_now(later)
            tensors |= self._rates()
            late = self._stored()
            tensors |= {name: value for name, value in late.items() if name in read}
            replaced = {f"{name}:0": value for name, value in tensors.items() if name in read}
            wanted = [r.source for r in delays.registers if r.number in made]
            results = _fetch(graph_def, tensors, replaced, [*wanted, *logs])
            self._store(late, dict(zip(wanted, results, strict=False)), made)
            if self._averages is not None:
                self._averages.update(later, low, high)
            return [tf.identity(value) for value in results[len(wanted) :]]

        return compat.function(body, traced.specs if feeds else [])

    def _weights_now(self, read: dict[str, Any]) -> dict[str, Any]:
        if self._averages is None:
            return {one.name: read[one.handle] for one in self.now}
        return {one.name: self._averages.rebuilt(one, read[one.handle]) for one in self.now}

    def reset(self) -> None:
        """Before the first round of an epoch."""
        if self._averages is not None:
            self._averages.reset()

    def _rates(self) -> dict[str, Any]:
        """What late layers' learning rates are multiplied with in this round."""
        if self._count is None:
            return {}
        return factors(set(self._late), self._count.read_value(), self._warmup_steps)

    def _stored(self) -> dict[str, Any]:
        import tensorflow as tf

        found = {}
        for r in self.delays.registers:
            shape = self._infos[r.number].shape
            for delay, store in enumerate(self._stores[r.number], 1):
                with tf.device(r.device):
                    # Graph optimizers must know the rank: oneDNN's ends the process on a filter without.
                    found[r.name(delay)] = tf.ensure_shape(store.read_value(), shape)
        return found

    def _store(self, late: dict[str, Any], results: dict[str, Any], made: set[int]) -> None:
        for r in self.delays.registers:
            stores = self._stores[r.number]
            for delay in range(r.depth, 1, -1):
                stores[delay - 1].assign(late[r.name(delay - 1)], read_value=False)
            if r.number in made:
                stores[0].assign(results[r.source], read_value=False)


def _fetch(graph_def: Any, tensors: dict[str, Any], replaced: dict[str, Any], wanted: list[str]) -> list[Any]:
    """Imports the graph; what is wanted and given is handed through."""
    inside = [text for text in wanted if split_input(text)[0] not in tensors]
    made = import_here(graph_def, replaced, [text if ":" in text else f"{text}:0" for text in inside])
    found = dict(zip(inside, made, strict=True))
    return [found[text] if text in found else tensors[split_input(text)[0]] for text in wanted]
