"""Two versions of the weights, and one update for each group of batches (PipeDream-2BW, arXiv 2006.09503).

``every`` batches are a group.  All batches of a group, forward and backward, use the weights of one update
before the newest, so that every gradient is one update late, whatever the layer:

    W(g + 1) = W(g) - optimizer(mean of the gradients of group g at W(g - 1))

Time goes in the same rounds as elsewhere in this mode.  In round t the batch that is in its round r is number
t - r, of group (t - r) // every: what is read and done depends on t modulo ``every`` alone, so that functions
for each such phase need no branches.  The weights of round t have seen (t - u) // every updates, u being the
round of a batch in which a layer is updated; a batch's group must be at most one ahead of that, which
``every`` >= u - r ensures: twice the stages after the first layer, at most 2 (P - 1) batches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from grappler_passes.graph.effects import has_side_effects, only_reads, states_of
from tf_ooo.errors import GraphError
from tf_ooo.modes.layerpipe.coalesce import Sum
from tf_ooo.modes.layerpipe.rounds import Rounds
from tf_ooo.modes.layerpipe.traced import Traced, zeros_on
from tf_ooo.modes.layerpipe.versions import Now


def fewest_batches(processors: int) -> int:
    """Of a group, for which two versions of the weights do."""
    return max(processors, 2 * (processors - 1))


class TwoVersions:
    """What runs between the rounds: sums of gradients and the weights before the newest.

    Args:
        traced, rounds: of the step.
        now: the weights that backward passes read apart from their forward pass.
        sums: of gradients.
        weights: handles of the trained variables.
        optimizer: handles of the optimizers' variables.
        every: batches of a group.

    Raises:
        GraphError: a group is too small for two versions.
    """

    def __init__(
        self,
        traced: Traced,
        rounds: Rounds,
        now: Sequence[Now],
        sums: Sequence[Sum],
        weights: Collection[str],
        optimizer: Collection[str],
        every: int,
    ) -> None:
        self._traced, self._rounds, self._every = traced, rounds, every
        self._added = {total: rounds.of[total.name] for total in sums}
        self._once = _writes(traced, rounds, {*weights, *optimizer})
        self._updated = {
            handle: max(at for at, states in self._once.values() if handle in states)
            for handle in weights
            if any(handle in states for _, states in self._once.values())
        }
        self._reads = _reads(traced, rounds, self._updated)
        self._reads |= {weight.name: (weight.handle, rounds.of[weight.name]) for weight in now}
        read = {handle for handle, _ in self._reads.values()}
        self._updated = {handle: at for handle, at in self._updated.items() if handle in read}
        self._check()
        self._before = {handle: self._copy(handle) for handle in self._updated}
        self._sums = {
            total: zeros_on(rounds.device_of[total.name], traced.outputs[total.name][0]) for total in sums
        }

    @property
    def names(self) -> set[str]:
        """The ops whose results are given."""
        return {*self._reads, *(name for total in self._added for name in (total.before, total.share))}

    @property
    def version_bytes(self) -> int:
        """Of the weights before the newest."""
        return sum(_bytes(variable) for variable in self._before.values())

    @property
    def sum_bytes(self) -> int:
        """Of the sums of gradients."""
        return sum(_bytes(variable) for variable in self._sums.values())

    @property
    def delay_updates(self) -> dict[str, int]:
        """By how many updates the weights that a group uses are behind those that its gradient updates."""
        behind: dict[str, int] = {}
        for handle, at in self._reads.values():
            for tick in range(at, at + self._every):
                seen = (tick - self._updated[handle]) // self._every
                seen -= not self._is_newest(handle, at, self.phase(tick))
                behind[handle] = max(behind.get(handle, 0), (tick - at) // self._every - seen)
        return behind

    def phase(self, tick: int) -> int:
        """The place of a tick in its group of batches; rounds of one phase do the same."""
        return tick % self._every

    def reset(self) -> None:
        """Before the first round: both versions are what the weights are."""
        for handle, before in self._before.items():
            before.assign(self._newest(handle))

    def left_out(self, low: int, phase: int) -> set[str]:
        """Ops that do not run: those of updates, but for the last batch of a group or of all."""
        return {name for name, (at, _) in self._once.items() if not self._ends(at, low, phase)}

    def given(self, low: int, high: int, phase: int) -> dict[str, Any]:
        """What is read in a round: versions of weights, and the sums so far."""
        import tensorflow as tf

        tensors: dict[str, Any] = {}
        for name, (handle, at) in self._reads.items():
            if low <= at <= high:
                newest = self._is_newest(handle, at, phase)
                tensors[name] = self._newest(handle) if newest else self._read(self._before[handle])
        for total, at in self._added.items():
            so_far, variable = (phase - at) % self._every, self._sums[total]
            tensors[total.before] = self._read(variable) if so_far else tf.zeros((), variable.dtype)
            tensors[total.share] = tf.constant(1.0 / (so_far + 1), variable.dtype)
        return tensors

    def added(self, low: int, high: int) -> list[Sum]:
        """The sums that grow in a round."""
        return [total for total, at in self._added.items() if low <= at <= high]

    def kept(self, low: int, high: int, phase: int) -> dict[str, Any]:
        """The newest weights, read before a round in which they are updated."""
        due = [h for h, at in self._updated.items() if low <= at <= high and self._ends(at, low, phase)]
        return {handle: self._newest(handle) for handle in due}

    def store(self, low: int, phase: int, sums: Mapping[Sum, Any], kept: Mapping[str, Any]) -> None:
        """After a round: what :meth:`added` has come to, and :meth:`kept` as the version before."""
        for total, value in sums.items():
            if not self._ends(self._added[total], low, phase):
                self._sums[total].assign(value, read_value=False)
        for handle, value in kept.items():
            self._before[handle].assign(value, read_value=False)

    def _ends(self, at: int, low: int, phase: int) -> bool:
        """Whether the batch in its round ``at`` ends its group or is the last of all, which is in ``low``."""
        draining = low > self._rounds.batch
        return (phase - at) % self._every == self._every - 1 or (draining and at == low)

    def _is_newest(self, handle: str, at: int, phase: int) -> bool:
        wanted = (phase - at) // self._every - 1
        return wanted == (phase - self._updated[handle]) // self._every

    def _check(self) -> None:
        for name, (handle, at) in self._reads.items():
            late = self._updated[handle] - at
            if not 0 <= late <= self._every:
                raise GraphError(
                    f"{name!r} reads {handle!r} {late} batches before its update: with accumulate_steps="
                    f"{self._every} two versions of the weights do for {self._every} at most"
                )

    def _newest(self, handle: str) -> Any:
        import tensorflow as tf

        outside = self._traced.captured[handle]
        with tf.device(outside.device):
            value = tf.raw_ops.ReadVariableOp(resource=outside, dtype=self._before[handle].dtype)
        value.set_shape(self._before[handle].shape)
        return value

    def _read(self, variable: Any) -> Any:
        import tensorflow as tf

        with tf.device(variable.device):
            return variable.read_value()

    def _copy(self, handle: str) -> Any:
        name = next(name for name, (read, _) in self._reads.items() if read == handle)
        return zeros_on(self._traced.captured[handle].device, self._traced.outputs[name][0])


def _writes(traced: Traced, rounds: Rounds, states: Collection[str]) -> dict[str, tuple[int, set[str]]]:
    """The ops that change weights and optimizers' variables: their rounds, and what they change."""
    index, written = traced.index, {}
    for i, op in enumerate(index.ops):
        if has_side_effects(op) and not only_reads(op):
            changed = states_of(index, i) & set(states)
            if changed:
                written[index.names[i]] = rounds.of[index.names[i]], changed
    return written


def _reads(traced: Traced, rounds: Rounds, updated: Mapping[str, int]) -> dict[str, tuple[str, int]]:
    """The readings of weights by forward and backward passes: what they read, and in which round."""
    index, readings = traced.index, {}
    for i, op in enumerate(index.ops):
        name = index.names[i]
        if op != "ReadVariableOp" or traced.where.get(name, ("U",))[0] == "U":
            continue
        for handle in states_of(index, i) & updated.keys():
            readings[name] = handle, rounds.of[name]
    return readings


def _bytes(variable: Any) -> int:
    return int(variable.dtype.size * variable.shape.num_elements())
