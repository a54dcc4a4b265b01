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

import tensorflow as tf

from tf_ooo.errors import GraphError
from tf_ooo.modes.layerpipe.accesses import accesses, bytes_of, read_where_it_is, zeros_on
from tf_ooo.modes.layerpipe.averages import Given
from tf_ooo.modes.layerpipe.coalesce import Sum
from tf_ooo.modes.layerpipe.rounds import Rounds
from tf_ooo.modes.layerpipe.traced import Traced
from tf_ooo.modes.layerpipe.versions import Now


def fewest_batches(processors: int) -> int:
    """Return the size of a group for which two versions of the weights do."""
    return max(processors, 2 * (processors - 1))


class TwoVersions:
    """Sums of gradients and the weights before the newest, of groups of ``every`` batches.

    ``weights``, ``optimizer``: handles of the trained variables, and of the optimizers' variables.  Raises
    GraphError where a group is too small for two versions.
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
        self.now, self.every = now, every
        self._captured, self._rounds = traced.captured, rounds
        self._added = {total: rounds.of[total.name] for total in sums}
        on_variables = accesses(traced.index)
        writes = [access for access in on_variables if access.writes]
        states = {*weights, *optimizer}
        self._once = {access.name: rounds.of[access.name] for access in writes if access.states & states}
        updated = {
            handle: max(rounds.of[access.name] for access in writes if handle in access.states)
            for handle in weights
            if any(handle in access.states for access in writes)
        }
        self._reads = {
            access.name: (handle, rounds.of[access.name])
            for access in on_variables
            if access.op == "ReadVariableOp" and traced.where.get(access.name, ("U",))[0] != "U"
            for handle in access.states & updated.keys()
        }
        self._reads |= {weight.name: (weight.handle, rounds.of[weight.name]) for weight in now}
        read = {handle for handle, _ in self._reads.values()}
        self._updated = {handle: at for handle, at in updated.items() if handle in read}
        self._check()
        infos = {handle: traced.outputs[name][0] for name, (handle, _) in reversed(self._reads.items())}
        self._before = {h: zeros_on(traced.captured[h].device, infos[h]) for h in self._updated}
        self._sums = {
            total: zeros_on(rounds.device_of[total.name], traced.outputs[total.name][0]) for total in sums
        }

    @property
    def names(self) -> set[str]:
        """The ops whose results are given."""
        return {*self._reads, *(name for total in self._added for name in (total.before, total.share))}

    @property
    def bytes(self) -> int:
        """Return the bytes of the weights before the newest."""
        return bytes_of(self._before.values())

    @property
    def sum_bytes(self) -> int:
        """Return the bytes of the sums of gradients."""
        return bytes_of(self._sums.values())

    @property
    def delay_updates(self) -> dict[str, int]:
        """Return by how many updates a group's weights are behind those that its gradient updates."""
        behind: dict[str, int] = {}
        for handle, at in self._reads.values():
            for tick in range(at, at + self.every):
                seen = (tick - self._updated[handle]) // self.every
                seen -= not self._is_newest(handle, at, tick % self.every)
                behind[handle] = max(behind.get(handle, 0), (tick - at) // self.every - seen)
        return behind

    def reset(self) -> None:
        """Reset before the first round: both versions are what the weights are."""
        for handle, before in self._before.items():
            before.assign(self._newest(handle))

    def left_out(self, low: int, phase: int) -> set[str]:
        """Ops that do not run: those of updates, but for the last batch of a group or of all."""
        return {name for name, at in self._once.items() if not self._ends(at, low, phase)}

    def given(self, low: int, high: int, phase: int) -> Given:
        """Return what a round reads, weights and sums so far, and a function to call behind it."""
        tensors: dict[str, tf.Tensor] = {}
        for name, (handle, at) in self._reads.items():
            if low <= at <= high:
                newest = self._is_newest(handle, at, phase)
                tensors[name] = self._newest(handle) if newest else _value(self._before[handle])
        for total, at in self._added.items():
            so_far, variable = (phase - at) % self.every, self._sums[total]
            tensors[total.before] = _value(variable) if so_far else tf.zeros((), variable.dtype)
            tensors[total.share] = tf.constant(1.0 / (so_far + 1), variable.dtype)
        due = [h for h, at in self._updated.items() if low <= at <= high and self._ends(at, low, phase)]
        kept = {handle: self._newest(handle) for handle in due}
        return tensors, lambda sums: self._store(sums, kept, low, phase)

    def added(self, low: int, high: int) -> list[Sum]:
        """Return the sums that grow in a round."""
        return [total for total, at in self._added.items() if low <= at <= high]

    def _store(
        self, sums: Mapping[Sum, tf.Tensor], kept: Mapping[str, tf.Tensor], low: int, phase: int
    ) -> None:
        """Store after a round what :meth:`added` has come to, and weights of before an update."""
        for total, value in sums.items():
            if not self._ends(self._added[total], low, phase):
                self._sums[total].assign(value, read_value=False)
        for handle, value in kept.items():
            self._before[handle].assign(value, read_value=False)

    def _ends(self, at: int, low: int, phase: int) -> bool:
        """Say whether the batch in round ``at`` ends its group or is the last of all, which is in ``low``."""
        draining = low > self._rounds.batch
        return (phase - at) % self.every == self.every - 1 or (draining and at == low)

    def _is_newest(self, handle: str, at: int, phase: int) -> bool:
        wanted = (phase - at) // self.every - 1
        return wanted == (phase - self._updated[handle]) // self.every

    def _check(self) -> None:
        for name, (handle, at) in self._reads.items():
            late = self._updated[handle] - at
            if not 0 <= late <= self.every:
                raise GraphError(
                    f"{name!r} reads {handle!r} {late} batches before its update: with accumulate_steps="
                    f"{self.every} two versions of the weights do for {self.every} at most"
                )

    def _newest(self, handle: str) -> tf.Tensor:
        before = self._before[handle]
        return read_where_it_is(self._captured[handle], before.dtype, before.shape)


def _value(variable: tf.Variable) -> tf.Tensor:
    with tf.device(variable.device):
        return variable.read_value()
