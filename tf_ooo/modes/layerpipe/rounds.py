"""The round and the device of every op of a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.effects import has_side_effects, only_reads, states_of
from tf_ooo.errors import GraphError
from tf_ooo.modes.layerpipe.stages import Stages

# Moving one state's accesses may move another's.
_TRIES = 4
_GIVEN = ("Placeholder", "_Arg")


@dataclass(frozen=True)
class ClassifiedStep:
    """A classified step.

    Attributes:
        index: of its flat graph.
        where: ``{op: (kind, layer)}``.
        weights: ``{handle: layer}`` of trainable variables.
        arguments: names of the placeholders of the batch.
        handles: names of the placeholders of variables; other placeholders are constants.
        home: ``{handle: device}`` of variables.
        devices: of the processors.
        shapes: ops that compute whole numbers, such as shapes: they belong to nobody.
        frozen: placeholders of weights that no step changes.
        count_round: in which round of a batch the optimizers' counts of steps go on.
    """

    index: GraphIndex
    where: Mapping[str, tuple[str, int]]
    weights: Mapping[str, int]
    arguments: frozenset[str]
    handles: frozenset[str]
    home: Mapping[str, str]
    devices: Sequence[str]
    shapes: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    count_round: int = 0


@dataclass(frozen=True)
class Rounds:
    """When and where ops run.

    Attributes:
        of: ``{op: round}``, 0 or more, without constants.
        device_of: full names.
        batch: the round in which a batch comes in.
        before: ``(first, then)`` ops on one variable, in the order that they have within a round.
        delay_steps: ``{handle: rounds}`` from the first forward reading of a weight to its update.
        frozen: what depends on frozen weights and on nothing else but constants; it is in no round.
    """

    of: Mapping[str, int]
    device_of: Mapping[str, str]
    batch: int
    before: tuple[tuple[str, str], ...]
    delay_steps: Mapping[str, int]
    frozen: frozenset[str] = frozenset()

    @property
    def last(self) -> int:
        """The last round of a batch."""
        return max(self.of.values(), default=0)


def rounds_of(facts: ClassifiedStep, stages: Stages, wanted: Mapping[str, int]) -> Rounds:
    """When and where each op runs.

    Args:
        facts: of the step.
        stages: where tasks run.
        wanted: rounds of ops that are not those of their task.

    Raises:
        GraphError: an update needs a gradient that is made later.
    """
    constant = _constant(facts, facts.frozen)
    targets = _targets(facts, stages, constant) | dict(wanted)
    at = _settled(facts, targets, constant)
    for _ in range(_TRIES):
        moved = _with_the_last_write(facts, at) | _after_their_reads(facts, stages, at)
        if not moved:
            break
        targets |= moved
        at = _settled(facts, targets, constant)
    delay_steps = _delays_of_weights(facts, at)
    _check_updates(facts, stages, delay_steps)
    _check_states(facts, at)
    first = min(at.values(), default=0)
    return Rounds(
        {name: value - first for name, value in at.items()},
        _devices(facts, stages, constant),
        -first,
        tuple(_in_order(facts)),
        delay_steps,
        frozenset(constant - _constant(facts)),
    )


def _delays_of_weights(facts: ClassifiedStep, at: Mapping[str, int]) -> dict[str, int]:
    index = facts.index
    reads: dict[str, int] = {}
    writes: dict[str, int] = {}
    for i in index.order:
        name = index.names[i]
        for handle in _states(index, i) & facts.weights.keys():
            if not only_reads(index.ops[i]):
                writes[handle] = max(at[name], writes.get(handle, at[name]))
            elif facts.where.get(name, ("",))[0] == "F":
                reads[handle] = min(at[name], reads.get(handle, at[name]))
    return {handle: writes[handle] - reads[handle] for handle in writes.keys() & reads.keys()}


def _after_their_reads(facts: ClassifiedStep, stages: Stages, at: Mapping[str, int]) -> dict[str, int]:
    """Updates that would come too early, as their weight is read later than planned (an embedding)."""
    early: dict[int, int] = {}
    for handle, delay in _delays_of_weights(facts, at).items():
        layer = facts.weights[handle]
        early[layer] = max(early.get(layer, 0), stages.delay_steps(layer) - delay)
    return {
        name: at[name] + early[layer]
        for name, (kind, layer) in facts.where.items()
        if kind == "U" and name in at and early.get(layer, 0) > 0
    }


def _check_updates(facts: ClassifiedStep, stages: Stages, delay_steps: Mapping[str, int]) -> None:
    """Each weight's update comes 2 S(l) rounds after it was read."""
    for handle, delay in delay_steps.items():
        if delay != stages.delay_steps(facts.weights[handle]):
            raise GraphError(
                f"the update of {handle!r} would be {delay} steps late: it needs gradients of other layers, "
                "or shares a state with them; in this mode layers are updated at different times: train "
                "without clipping by global norm and loss scaling, or with another mode"
            )


def _users(facts: ClassifiedStep) -> dict[str, list[str]]:
    """The ops on each variable that is not frozen, in the step's order."""
    index = facts.index
    users: dict[str, list[str]] = {}
    for i in index.order:
        for state in _states(index, i):
            if state in facts.handles and state not in facts.frozen:
                users.setdefault(state, []).append(index.names[i])
    return users


def _with_the_last_write(facts: ClassifiedStep, at: Mapping[str, int]) -> dict[str, int]:
    """Accesses to a state in other rounds than its last write: they go there, to see their own batch's."""
    index = facts.index
    moved: dict[str, int] = {}
    for state, users in _users(facts).items():
        if state in facts.weights:
            continue
        writes = [at[name] for name in users if not only_reads(index.ops[index.index[name]])]
        if writes:
            moved.update((name, max(writes)) for name in users if at[name] != max(writes))
    return moved


def _check_states(facts: ClassifiedStep, at: Mapping[str, int]) -> None:
    """What a step writes it reads in the same round: else it would see other batches' values."""
    moved = _with_the_last_write(facts, at)
    if moved:
        raise GraphError(
            f"{next(iter(moved))!r} uses a variable that the step writes in another round of the batch; "
            "such a state cannot be spread over devices"
        )


def _constant(facts: ClassifiedStep, frozen: Collection[str] = ()) -> set[str]:
    """Ops that depend on no batch, and on no variable but those that are ``frozen``."""
    index, constant = facts.index, set()
    for i in index.order:
        name, op = index.names[i], index.ops[i]
        if op in _GIVEN:
            if name not in facts.arguments and name not in facts.handles:
                constant.add(name)
        elif op == "ReadVariableOp":
            constant |= {name} if states_of(index, i) <= set(frozen) else set()
        elif not has_side_effects(op) and all(index.names[p] in constant for p, _ in index.data_preds[i]):
            constant.add(name)
    return constant


def _targets(facts: ClassifiedStep, stages: Stages, constant: set[str]) -> dict[str, int]:
    targets: dict[str, int] = dict.fromkeys(facts.arguments, 0)
    for name, (kind, layer) in facts.where.items():
        if name in constant or name in facts.arguments or name in facts.handles:
            continue
        if kind == "F":
            targets[name] = stages.forward_round(layer)
        elif kind == "U":
            targets[name] = stages.update_round(layer)
        else:
            targets[name] = stages.backward_round(kind, layer)
    index = facts.index
    for i, op in enumerate(index.ops):
        name = index.names[i]
        if facts.where.get(name, ("", 0))[0] == "F" and only_reads(op):
            layers = {facts.weights[handle] for handle in states_of(index, i) if handle in facts.weights}
            if layers:
                home = facts.home.get(next(iter(states_of(index, i))))
                reader = stages.of["F", facts.where[name][1]]
                targets[name] = reader - (home is not None and home != facts.devices[reader])
    for name, layer in _read_after_update(facts):
        targets[name] = stages.update_round(layer)
    return targets | _with_their_writes(facts, targets)


def _read_after_update(facts: ClassifiedStep) -> list[tuple[str, int]]:
    """Reads of weights that see the step's update, such as those of an average of weights; their layers."""
    index = facts.index
    readings: list[tuple[str, int]] = []
    updated: set[str] = set()
    for i in index.order:
        for state in _states(index, i) & facts.weights.keys():
            if not only_reads(index.ops[i]):
                updated.add(state)
            elif state in updated and index.names[i] not in facts.where:
                readings.append((index.names[i], facts.weights[state]))
    return readings


def _with_their_writes(facts: ClassifiedStep, targets: Mapping[str, int]) -> dict[str, int]:
    """Accesses to a state that a step reads and writes in several places: seeds, the count of steps.

    All are in the round of the earliest, so that what a batch reads is what the batches before it have
    written.  The count of steps goes on when a batch comes in: updates read the number of their batch.
    """
    moved: dict[str, int] = {}
    for state, users in _users(facts).items():
        placed = [facts.where[name] for name in users if name in facts.where]
        if state in facts.weights or len(placed) == len(users) or not placed:
            continue
        forward = [targets[name] for name in users if facts.where.get(name, ("",))[0] == "F"]
        moved.update(dict.fromkeys(users, min(forward, default=facts.count_round)))
    return moved


def _settled(facts: ClassifiedStep, targets: Mapping[str, int], constant: set[str]) -> dict[str, int]:
    """No op before what it reads: later than it should be where it has to; shapes when they are wanted."""
    index = facts.index
    latest: dict[str, int] = {}
    for i in reversed(index.order):
        name = index.names[i]
        readers = [
            latest[index.names[s]] for s in index.succs[i] if index.names[s] in latest and _reads(index, s, i)
        ]
        known = [targets[name]] if name in targets else []
        if name in constant or name in facts.handles:
            continue
        if known or readers:
            latest[name] = min([*known, *readers] if name in facts.shapes or not known else known)
    settled: dict[str, int] = {}
    for i in index.order:
        name = index.names[i]
        if name in constant or name in facts.handles:
            continue
        above = [settled[index.names[p]] for p, _ in index.data_preds[i] if index.names[p] in settled]
        floor = max(above, default=None) if above else None
        if name in targets:
            wish = min(targets[name], latest[name]) if name in facts.shapes else targets[name]
            settled[name] = wish if floor is None else max(wish, floor)
        elif floor is not None:
            settled[name] = floor
        else:
            settled[name] = latest.get(name, 0)
    return settled


def _reads(index: GraphIndex, reader: int, producer: int) -> bool:
    return any(p == producer for p, _ in index.data_preds[reader])


def _devices(facts: ClassifiedStep, stages: Stages, constant: set[str]) -> dict[str, str]:
    index, placed = facts.index, {}
    for i in index.order:
        name = index.names[i]
        if name in constant or name in facts.handles or name in facts.arguments:
            continue
        homes = [facts.home[s] for s in _states(index, i) if s in facts.home]
        if homes:
            placed[name] = homes[0]
        elif name in facts.where:
            kind, layer = facts.where[name]
            placed[name] = facts.devices[stages.of["dW" if kind == "U" else kind, layer]]
        else:
            above = [placed[index.names[p]] for p, _ in index.data_preds[i] if index.names[p] in placed]
            if above:
                placed[name] = above[0]
    for i in reversed(index.order):
        name = index.names[i]
        if name in placed or name in constant or name in facts.handles or name in facts.arguments:
            continue
        below = [placed[index.names[s]] for s in index.succs[i] if index.names[s] in placed]
        placed[name] = below[0] if below else facts.devices[-1]
    return placed


def _states(index: GraphIndex, i: int) -> set[str]:
    return states_of(index, i) if has_side_effects(index.ops[i]) else set()


def _in_order(facts: ClassifiedStep) -> list[tuple[str, str]]:
    """Neighbours among the ops on each variable, one of which writes."""
    index = facts.index
    pairs: list[tuple[str, str]] = []
    for members in _users(facts).values():
        reads: list[str] = []
        write: str | None = None
        for name in members:
            if only_reads(index.ops[index.index[name]]):
                reads.append(name)
                pairs += [] if write is None else [(write, name)]
                continue
            pairs += [(r, name) for r in reads] or ([] if write is None else [(write, name)])
            reads, write = [], name
    return list(dict.fromkeys(pairs))
