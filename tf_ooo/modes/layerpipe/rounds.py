"""Finds the round and the device of every op of a step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from grappler_passes.graph.dependencies import has_side_effects, states_of
from tf_ooo.errors import GraphError
from tf_ooo.modes.layerpipe.traced import Access, Traced, accesses
from tf_ooo.planning.model.schedule import Schedule

# Says which processor runs which tasks of a layer, and in which round. Time goes in rounds. A batch that
# enters in round n is in its forward pass on processor p in round n + p and in its backward pass in round n +
# 2 (P - 1) - p, P being the number of processors. In each round every processor works on other batches, and
# reads only tensors of earlier rounds. The gradient of a layer on processor p is applied 2 (P - 1 - p) rounds
# after its forward pass (LayerPipe2, arXiv 2512.08160: twice the number of stages after the layer).

# The part nearer to the loss of a dO in two parts, and what comes before it.
HIGH = "dO/high"


@dataclass(frozen=True)
class Stages:
    """Says where the tasks of layers run.

    Attributes:
        of: ``{(kind, layer): processor}`` for F, dO and dW, and HIGH; for a dO in two parts, of the part
            nearer to the input.  An update runs with its dW.
        shares: ``{layer: (share, processor)}`` for a dO in two parts, of the part nearer to the loss.
    """

    processors: int
    of: Mapping[tuple[str, int], int]
    shares: Mapping[int, tuple[float, int]]

    def backward_round_on(self, processor: int) -> int:
        """Return the round of all backward passes on a processor."""
        return 2 * (self.processors - 1) - processor

    def stages_after(self, layer: int) -> int:
        """Return S(l) of LayerPipe2: processors between the layer and the loss."""
        return self.processors - 1 - min(self.of["F", layer], self.of["dW", layer])

    def delay_steps(self, layer: int) -> int:
        """Return how many steps after its forward pass a layer's gradient is applied: 2 S(l)."""
        return 2 * self.stages_after(layer)

    def read_round(self, layer: int) -> int:
        """Return the round in which the forward pass reads weights, earlier if they come from afar."""
        return self.of["F", layer] - (self.of["F", layer] != self.of["dW", layer])

    def round_of(self, kind: str, layer: int) -> int:
        """Return the round of a task, counted from that in which its batch comes in."""
        if kind == "U":
            return self.read_round(layer) + self.delay_steps(layer)
        return self.of["F", layer] if kind == "F" else self.backward_round_on(self.of[kind, layer])


def stages_of(schedule: Schedule, layers: int) -> Stages:
    """Return the stages of a ``layerpipe`` or ``pipedream`` schedule."""
    of: dict[tuple[str, int], int] = {}
    parts: dict[int, list[tuple[int, int]]] = {}
    for (device, _), tasks in schedule.lanes.items():
        for task in tasks:
            if task.microbatch or task.kind == "U":
                continue
            for layer in schedule.layers_of(task.stage):
                of[task.kind, layer] = device
                if task.kind == "dO":
                    parts.setdefault(layer, []).append((task.part, device))
    shares = {}
    for layer, placed in parts.items():
        if len(placed) > 1:
            (_, low), (_, high) = sorted(placed)[0], sorted(placed)[-1]
            of["dO", layer] = low
            if low != high:
                shares[layer] = (schedule.parts["dO", layer][-1], high)
                of[HIGH, layer] = high
    processors = 1 + max(device for device, _ in schedule.lanes)
    for layer in range(layers):  # without work, and so in no lane
        before = of.get(("F", layer - 1), 0)
        known = next((of[kind, layer] for kind in ("F", "dW", "dO") if (kind, layer) in of), before)
        for kind in ("F", "dO", "dW"):
            of.setdefault((kind, layer), known)
    return Stages(processors, of, shares)


# Moving one state's accesses may move another's.
_TRIES = 4
GIVEN = ("Placeholder", "_Arg")
_WHOLE = ("int32", "int64")


@dataclass(frozen=True)
class Rounds:
    """Says when and where ops run.

    Attributes:
        of: ``{op: round}``, 0 or more, without constants.
        batch: the round in which a batch comes in.
        before: ``(first, then)`` ops on one variable, in their order within a round.
        delay_steps: ``{handle: rounds}`` from the first forward reading of a weight to its update.
        frozen: ops that depend only on frozen weights and constants; they are in no round.
    """

    of: Mapping[str, int]
    device_of: Mapping[str, str]
    batch: int
    before: tuple[tuple[str, str], ...]
    delay_steps: Mapping[str, int]
    frozen: frozenset[str] = frozenset()

    @property
    def last(self) -> int:
        """Return the last round of a batch."""
        return max(self.of.values(), default=0)


@dataclass(frozen=True)
class Retiming:
    """Represents a step that is to be spread over rounds.

    Attributes:
        stages, devices: the places of its tasks, and the processors' names.
        weights: ``{handle: layer}`` of trained variables.
        given: placeholders that get values with each batch, its own and others.
        unchanged: placeholders of weights that no step changes.
        wanted: rounds of ops that differ from their task's.
    """

    traced: Traced
    stages: Stages
    devices: Sequence[str]
    weights: Mapping[str, int]
    given: Collection[str]
    unchanged: frozenset[str]
    wanted: Mapping[str, int]

    def rounds(self) -> Rounds:
        """Find when and where each op runs. GraphError: an update needs a gradient that is made later."""
        targets = self._targets() | dict(self.wanted)
        at = self._settled(targets)
        for _ in range(_TRIES):
            moved = self._with_the_last_write(at) | self._after_their_reads(at)
            if not moved:
                break
            targets |= moved
            at = self._settled(targets)
        delay_steps = self._delays_of_weights(at)
        self._check(at, delay_steps)
        first = min(at.values(), default=0)
        return Rounds(
            {name: value - first for name, value in at.items()},
            self._placed(),
            -first,
            tuple(self._in_order()),
            delay_steps,
            frozenset(self.constant - self._constant()),
        )

    # -- what is known of the ops --------------------------------------------------------------------

    @cached_property
    def _accesses(self) -> list[Access]:
        return accesses(self.traced.index)

    @cached_property
    def _home(self) -> dict[str, str]:
        """Return the device of each variable, by its placeholder."""
        captured = self.traced.captured.items()
        return {name: tensor.device for name, tensor in captured if tensor.dtype.name == "resource"}

    @cached_property
    def _shapes(self) -> set[str]:
        """Return ops that compute whole numbers, such as shapes, which belong to no task."""
        outputs = ((name, self.traced.outputs[name]) for name in self.traced.index.names)
        whole = {name for name, infos in outputs if infos and all(info.dtype in _WHOLE for info in infos)}
        return whole - set(self.traced.arguments)

    @cached_property
    def constant(self) -> set[str]:
        """Return ops that depend on no batch, and on no variable that changes."""
        return self._constant(self.unchanged)

    def _constant(self, unchanged: frozenset[str] = frozenset()) -> set[str]:
        index = self.traced.index
        constant: set[str] = set()
        for i in index.order:
            name, op = index.names[i], index.ops[i]
            if op in GIVEN:
                fixed = name not in self.given and name not in self._home
            elif op == "ReadVariableOp":
                fixed = states_of(index, i) <= unchanged
            else:
                above = {index.names[p] for p, _ in index.data_preds[i]}
                fixed = not has_side_effects(op) and above <= constant
            if fixed:
                constant.add(name)
        return constant

    @cached_property
    def _users(self) -> dict[str, list[Access]]:
        """Return the ops on each variable that may change, in the step's order."""
        users: dict[str, list[Access]] = {}
        for access in self._accesses:
            for state in access.states:
                if state in self._home and state not in self.unchanged:
                    users.setdefault(state, []).append(access)
        return users

    @cached_property
    def _states(self) -> list[list[Access]]:
        """Return the users of each state that is no weight."""
        return [users for state, users in self._users.items() if state not in self.weights]

    def _kind(self, name: str) -> str:
        return self.traced.where.get(name, ("",))[0]

    @cached_property
    def _order(self) -> dict[str, int]:
        """Return the places in the index of the ops that are in a round, in topological order."""
        index = self.traced.index
        nowhere = self.constant | self._home.keys()
        return {index.names[i]: i for i in index.order if index.names[i] not in nowhere}

    # -- rounds --------------------------------------------------------------------------------------

    def _targets(self) -> dict[str, int]:
        """Return the best rounds of ops: those of tasks, and those of variables."""
        stages, where = self.stages, self.traced.where
        targets: dict[str, int] = dict.fromkeys(self.given, 0)
        for name, (kind, layer) in where.items():
            if name in self._order and name not in self.given:
                targets[name] = stages.round_of(kind, layer)
        for access in self._accesses:
            layers = [self.weights[state] for state in access.states if state in self.weights]
            if layers and not access.writes and self._kind(access.name) == "F":
                home = self._home.get(next(iter(access.states)))
                reader = stages.of["F", where[access.name][1]]
                targets[access.name] = reader - (home is not None and home != self.devices[reader])
        for name, layer in self._read_after_update():
            targets[name] = stages.round_of("U", layer)
        return targets | self._with_their_writes(targets)

    def _read_after_update(self) -> Iterable[tuple[str, int]]:
        """Yield reads of weights that see the step's update, as an average does, with their layers."""
        updated: set[str] = set()
        for access in self._accesses:
            for state in access.states & self.weights.keys():
                if access.writes:
                    updated.add(state)
                elif state in updated and access.name not in self.traced.where:
                    yield access.name, self.weights[state]

    def _with_their_writes(self, targets: Mapping[str, int]) -> dict[str, int]:
        """Return rounds of accesses to states that a step reads and writes in several places, as seeds.

        All are in the round of the earliest, so that a batch reads what earlier batches have written.  The
        count of steps goes on when a batch comes in: updates read the number of their batch.
        """
        moved: dict[str, int] = {}
        for users in self._states:
            names = [access.name for access in users]
            placed = [name for name in names if name in self.traced.where]
            if placed and len(placed) < len(users):
                forward = [targets[name] for name in placed if self._kind(name) == "F"]
                moved.update(dict.fromkeys(names, min(forward, default=0)))
        return moved

    def _with_the_last_write(self, at: Mapping[str, int]) -> dict[str, int]:
        """Move accesses to a state to the round of its last write, so that they see their own batch's."""
        moved: dict[str, int] = {}
        for users in self._states:
            last = max((at[access.name] for access in users if access.writes), default=None)
            if last is not None:
                moved.update((access.name, last) for access in users if at[access.name] != last)
        return moved

    def _after_their_reads(self, at: Mapping[str, int]) -> dict[str, int]:
        """Delay updates that would come too early, as their weight is read late (an embedding)."""
        early: dict[int, int] = {}
        for handle, delay in self._delays_of_weights(at).items():
            layer = self.weights[handle]
            early[layer] = max(early.get(layer, 0), self.stages.delay_steps(layer) - delay)
        return {
            name: at[name] + early[layer]
            for name, (kind, layer) in self.traced.where.items()
            if kind == "U" and name in at and early.get(layer, 0) > 0
        }

    def _delays_of_weights(self, at: Mapping[str, int]) -> dict[str, int]:
        reads: dict[str, int] = {}
        writes: dict[str, int] = {}
        for access in self._accesses:
            for handle in access.states & self.weights.keys():
                now = at[access.name]
                if access.writes:
                    writes[handle] = max(now, writes.get(handle, now))
                elif self._kind(access.name) == "F":
                    reads[handle] = min(now, reads.get(handle, now))
        return {handle: writes[handle] - reads[handle] for handle in writes.keys() & reads.keys()}

    def _settled(self, targets: Mapping[str, int]) -> dict[str, int]:
        """Return rounds in which no op precedes its inputs; shapes come when they are needed."""
        index = self.traced.index
        latest: dict[str, int] = {}
        for name, i in reversed(self._order.items()):
            readers = [index.names[s] for s in index.succs[i] if any(p == i for p, _ in index.data_preds[s])]
            wishes = [latest[reader] for reader in readers if reader in latest]
            if name in targets:
                wishes = [targets[name], *wishes] if name in self._shapes else [targets[name]]
            if wishes:
                latest[name] = min(wishes)
        settled: dict[str, int] = {}
        for name, i in self._order.items():
            above = [settled[index.names[p]] for p, _ in index.data_preds[i] if index.names[p] in settled]
            if name in targets:
                wish = min(targets[name], latest[name]) if name in self._shapes else targets[name]
                settled[name] = max([wish, *above])
            else:
                settled[name] = max(above, default=latest.get(name, 0))
        return settled

    def _check(self, at: Mapping[str, int], delay_steps: Mapping[str, int]) -> None:
        """Check that updates come 2 S(l) rounds after the read, and other states are read where written."""
        for handle, delay in delay_steps.items():
            if delay != self.stages.delay_steps(self.weights[handle]):
                names = {each.handle: each.name for each in self.traced.graph.variables}
                raise GraphError(
                    f"the update of {names.get(handle, handle)} would be {delay} steps late: it needs "
                    "gradients of other layers, or shares a state with them; in this mode layers are updated "
                    "at different times: train without what needs those together, or with another mode"
                )
        for name in self._with_the_last_write(at):  # it would see other batches' values
            raise GraphError(
                f"{name!r} uses a variable that the step writes in another round of the batch; "
                "such a state cannot be spread over devices"
            )

    # -- devices, and orders -------------------------------------------------------------------------

    def _placed(self) -> dict[str, str]:
        """Place ops on variables with these, tasks on their processor, other ops beside their neighbours."""
        index = self.traced.index
        placed: dict[str, str] = {}
        homes = {a.name: [self._home[s] for s in a.states if s in self._home] for a in self._accesses}
        order = [(name, i) for name, i in self._order.items() if name not in self.given]
        for name, i in order:
            above = [placed[index.names[p]] for p, _ in index.data_preds[i] if index.names[p] in placed]
            if homes.get(name):
                placed[name] = homes[name][0]
            elif name in self.traced.where:
                kind, layer = self.traced.where[name]
                placed[name] = self.devices[self.stages.of["dW" if kind == "U" else kind, layer]]
            elif above:
                placed[name] = above[0]
        for name, i in reversed(order):
            below = (placed[index.names[s]] for s in index.succs[i] if index.names[s] in placed)
            placed.setdefault(name, next(below, self.devices[-1]))
        return placed

    def _in_order(self) -> list[tuple[str, str]]:
        """Return neighbouring ops on each variable, of which one writes."""
        pairs: dict[tuple[str, str], None] = {}
        for users in self._users.values():
            reads: list[str] = []
            write: list[str] = []  # the last one, if there was any
            for access in users:
                earlier = reads if access.writes and reads else write
                pairs |= dict.fromkeys((before, access.name) for before in earlier)
                if access.writes:
                    reads, write = [], [access.name]
                else:
                    reads.append(access.name)
        return list(pairs)
