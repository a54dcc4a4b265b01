"""Simulates, event by event, how long a schedule takes and how much memory it needs, if it can run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tf_ooo.costs.layer_costs import SECONDS, LayerCosts, Link, check_layers
from tf_ooo.errors import CostError, OptionsError, ScheduleError
from tf_ooo.planning.model.memory import MemoryUse
from tf_ooo.planning.model.problem import with_recomputed
from tf_ooo.planning.model.relation import Edges, Layers, Relation, stage_sums
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.model.task import KIND_NUMBER, KINDS, Bools, Floats, Ints
from tf_ooo.planning.simulation.clock import LaneKind, LaneWork
from tf_ooo.planning.simulation.timeline import MessageColumns, Timeline

if TYPE_CHECKING:
    from tf_ooo.costs.table import CostTable

_SHOWN = 12
# (sources, targets, bytes of each message, number of its tensor) of edges.
_Sent = list[tuple[Ints, Ints, Floats, Ints]]
Values = TypeVar("Values", Ints, Floats)


def check_complete(relation: Relation, layers: Layers | None) -> None:
    """Raise ScheduleError or CostError unless every task that costs something is there, for all layers."""
    schedule = relation.schedule
    needed = schedule.stages[-1][1] + 1 if schedule.stages else relation.stages
    if layers is not None and needed > len(layers):
        raise CostError(f"costs are missing for layer {len(layers)}: the schedule has {needed} layers")
    if layers is not None and needed < len(layers):
        raise ScheduleError(f"missing: layer {needed} has costs and is in no stage of the schedule")
    for kind, stage in schedule.parts:
        if stage >= relation.stages:
            raise ScheduleError(f"parts {kind}:{stage}: the schedule has {relation.stages} stages")
    for kind in ("F", "dO", "dW", "U"):
        there = [relation.has(kind, stage) for stage in range(relation.stages)]
        if kind in ("F", "U") and not any(there):
            continue  # the plan for a graph orders the backward pass alone
        takes_s = None if layers is None else stage_sums(schedule, layers, SECONDS[kind], relation.stages)
        for stage in range(relation.stages):
            if there[stage]:
                _check_all_there(relation, kind, stage)
            elif takes_s is not None and takes_s[stage]:
                raise ScheduleError(f"missing: {kind}:{stage} has costs and is not in the schedule")


def _check_all_there(relation: Relation, kind: str, stage: int) -> None:
    once = kind == "U" and not relation.schedule.asynchronous
    parts = len(relation.schedule.parts.get((kind, stage), (1.0,)))
    nodes = relation.nodes(kind, stage)
    beyond = np.flatnonzero((nodes[parts:] >= 0).any(axis=1))
    if len(beyond):
        slot = f"{kind}:{stage}.{parts + beyond[0]}"
        given = f"there are {parts} parts" if parts > 1 else f"there is no line 'parts {kind}:{stage}: ...'"
        raise ScheduleError(f"unknown op {slot}: {given}")
    for part in range(parts):
        slot = f".{part}" if part else ""
        absent = np.flatnonzero(nodes[part] < 0).tolist() if part < len(nodes) else [0]
        if absent and not (once and absent == list(range(1, nodes.shape[1]))):
            raise ScheduleError(f"missing: {kind}:{stage}{slot}@{absent[0]} is not in the schedule")


def never_start(relation: Relation) -> Bools:
    """Return which tasks are in or behind a deadlock: they never start even if no task takes any time."""
    source, target, no_lag = relation.within_step(Link())
    no_time = np.zeros(len(relation))
    start, _ = LaneWork(no_time, relation.bases, lane_kinds(relation), source, target, no_lag).times()
    return np.isnan(start)


def lane_kinds(relation: Relation) -> Ints:
    """Return for each lane of the schedule whether its order is fixed or its tasks run by priority."""
    return np.where(relation.by_priority, LaneKind.PRIORITY, LaneKind.ORDERED).astype(np.int8)


def deadlock(relation: Relation) -> ScheduleError:
    """Return the error that shows one cycle of tasks that wait for each other."""
    waits = _waits(relation, never_start(relation))
    if not waits:  # within one step all is well
        tasks = "; ".join(f"{a} waits for {b} of {n} steps later" for a, b, n in relation.schedule.after if n)
        return ScheduleError(f"cycle: over several steps: {tasks}")
    node, path = next(iter(waits)), dict[int, str]()
    while node not in path:
        before, path[node] = waits[node]
        node = before
    circle = list(itertools.dropwhile(lambda step: step[0] != node, path.items()))
    shown = [f"{_named(relation, node)} waits for {why}" for node, why in circle[:_SHOWN]]
    more = f"; and {len(circle) - _SHOWN} more" if len(circle) > _SHOWN else ""
    return ScheduleError(f"cycle: {'; '.join(shown)}{more}")


def _waits(relation: Relation, stuck: Bools) -> dict[int, tuple[int, str]]:
    """Return for each stuck node one that it waits for and why: data before lanes' order."""
    waits: dict[int, tuple[int, str]] = {}
    for node in np.flatnonzero(stuck).tolist():
        lane = relation.lane[node]
        if not relation.by_priority[lane] and node > relation.bases[lane] and stuck[node - 1]:
            waits[node] = node - 1, f"{relation.task(node - 1)}, which stands before it"
    for edges in (edges for edges in relation.edges if not edges.steps):
        both = stuck[edges.source] & stuck[edges.target]
        for source, target in np.stack((edges.source, edges.target), axis=1)[both].tolist():
            waits[target] = source, f"{_named(relation, source)} ({edges.why})"
    return waits


def _named(relation: Relation, node: int) -> str:
    device, stream = relation.lanes[int(relation.lane[node])]
    return f"{relation.task(node)} on lane {device} {stream}"


def simulate(
    schedule: Schedule, costs: Sequence[LayerCosts] | CostTable, link: Link | None = None, steps: int = 1
) -> Timeline:
    """Run a schedule on paper.

    Tasks are not interrupted; a lane runs one at a time; each pair of devices has a link for each
    direction, which sends one message at a time in the order in which they become ready.  If devices share
    the cores of a machine, all tasks there slow down alike while they need more cores than there are.

    Args:
        schedule: from :func:`tf_ooo.plan` or :meth:`Schedule.from_text`.
        costs: a LayerCosts for each layer, seconds and bytes of one micro-batch, or a CostTable.
        link: between two devices; None: the table's, or one that takes no time.
        steps: how often the schedule is repeated; 3 or more show the steady state.

    Raises:
        CostError: costs are missing or no numbers.
        ScheduleError: a task is missing, unknown, or waits for itself (a deadlock); names the tasks.
    """
    if not isinstance(steps, int) or steps < 1:
        raise OptionsError(f"steps must be a whole number of at least 1, got {steps!r}")
    plain = check_layers(getattr(costs, "layers", costs))
    if schedule.recompute and schedule.recompute[-1] >= len(plain):
        raise ScheduleError(f"recompute {schedule.recompute[-1]}: there are {len(plain)} layers")
    layers = with_recomputed(plain, schedule.recompute)
    between: Link = link if link is not None else getattr(costs, "link", Link())
    relation = Relation(schedule, layers)
    check_complete(relation, layers)
    seconds = task_seconds(relation, layers, between)
    repeated = _Repeated(relation, steps)
    work, links = _work(repeated, layers, between, seconds + _new_weights_s(relation, layers, between))
    start, end = work.times()
    if np.isnan(start).any():
        raise deadlock(relation)
    start_s, end_s = repeated.order(start), repeated.order(end)
    memory = MemoryUse(relation, layers, start_s, end_s).curves()
    # A timeline with a function of this module can be pickled.
    repeat = functools.partial(simulate, schedule, layers, between)
    messages = links.messages(start, end)
    return Timeline(schedule, start_s, end_s, memory, messages, repeat, fullest_s=work.fullest_s())


def task_seconds(relation: Relation, layers: Layers, link: Link) -> Floats:
    """Return seconds of each node of one step, float64."""
    schedule, fields = relation.schedule, relation.fields
    seconds = np.zeros(len(relation))
    for kind in KINDS:
        per_stage = stage_sums(schedule, layers, SECONDS.get(kind, "weight_bytes"), relation.stages)
        if kind == "comm":
            per_stage = np.array([link.allreduce_s(size, schedule.workers) for size in per_stage.tolist()])
        chosen = fields.kind == KIND_NUMBER[kind]
        seconds[chosen] = per_stage[fields.stage[chosen]]
    for (kind, stage), shares in schedule.parts.items():
        for share, nodes in zip(shares, relation.nodes(kind, stage), strict=False):
            there = nodes[nodes >= 0]
            if kind == "comm":  # every slice pays the latency
                sizes = [layers[i].weight_bytes * share for i in schedule.layers_of(stage)]
                seconds[there] = sum(link.allreduce_s(size, schedule.workers) for size in sizes)
            else:
                seconds[there] *= share
    computing = fields.kind != KIND_NUMBER["comm"]
    if link.speeds:
        speeds = np.array(link.speeds_of([device for device, _ in relation.lanes]))
        seconds[computing] /= speeds[relation.lane[computing]]
    seconds[computing & (seconds > 0)] += link.task_s
    return seconds


class _Repeated:
    """Holds the nodes of all steps; a lane's nodes stand together, step after step."""

    def __init__(self, relation: Relation, steps: int) -> None:
        self.relation, self.steps = relation, steps
        self.starts: Ints = relation.bases * steps
        self.lane = np.repeat(np.arange(len(relation.lengths), dtype=np.int32), relation.lengths * steps)

    def at(self, nodes: Ints, step: int) -> Ints:
        if self.steps == 1:
            return nodes
        lane = self.relation.lane[nodes]
        place = nodes - self.relation.bases[lane]
        return self.starts[lane] + step * self.relation.lengths[lane] + place

    def tile(self, per_node: Values) -> Values:
        bases = self.relation.bases.tolist()
        blocks: list[Values] = [np.tile(per_node[a:b], self.steps) for a, b in itertools.pairwise(bases)]
        return np.concatenate([per_node[:0], *blocks])

    def order(self, values: Floats) -> Floats:
        """Return values by (step, node), shape (steps, nodes)."""
        nodes = np.arange(len(self.relation))
        return np.stack([values[self.at(nodes, step)] for step in range(self.steps)])

    def pairs(self, edges: Edges) -> tuple[Ints, Ints]:
        steps = range(max(0, edges.steps), min(self.steps, self.steps + edges.steps))
        source = [edges.source[:0], *(self.at(edges.source, step - edges.steps) for step in steps)]
        target = [edges.target[:0], *(self.at(edges.target, step) for step in steps)]
        return np.concatenate(source), np.concatenate(target)


def _work(repeated: _Repeated, layers: Layers, link: Link, seconds: Floats) -> tuple[LaneWork, _Links]:
    device = repeated.tile(repeated.relation.device)
    sources, targets, sent = _edges(repeated, device)
    links = _Links(repeated, device, sent, link)
    lags = [np.zeros(sum(map(len, sources))), links.of_each("latency_s")[links.message_of]]
    sources.append(links.nodes[links.message_of])
    targets.append(links.consumer)
    if not links.instant:
        sources.append(links.producer)
        targets.append(links.nodes)
        lags.append(np.zeros(len(links.nodes)))
    seconds = repeated.tile(seconds) + _overheads_s(links, len(device))
    work = LaneWork(
        duration_s=np.concatenate([seconds, links.transfer_s]),
        lane_starts=np.concatenate([repeated.starts, links.starts[1:] + len(device)]),
        lane_kinds=np.concatenate([lane_kinds(repeated.relation), links.kinds]),
        source=np.concatenate(sources),
        target=np.concatenate(targets),
        lag_s=np.concatenate(lags),
        shared=_shared(repeated, layers, link, links),
    )
    return work, links


def _overheads_s(links: _Links, nodes: int) -> Floats:
    """Return the seconds that messages take from their senders, and from the first task that reads each."""
    taken_s = np.zeros(nodes)
    if len(links.producer) and links.link.busies_ends:
        each_s = links.size_bytes * links.of_each("overhead_s_per_byte")
        reader = np.full(len(each_s), nodes)
        np.minimum.at(reader, links.message_of, links.consumer)
        np.add.at(taken_s, links.producer, each_s + links.of_each("send_s"))
        np.add.at(taken_s, reader, each_s + links.of_each("receive_s"))
    return taken_s


def _new_weights_s(relation: Relation, layers: Layers, link: Link) -> Floats:
    """Return seconds in which an asynchronous U sends weights, and F and dO elsewhere receive them."""
    taken_s = np.zeros(len(relation))
    if not (relation.schedule.asynchronous and link.busies_ends):
        return taken_s
    for stage in range(relation.stages):
        weights = sum(layers[layer].weight_bytes for layer in relation.schedule.layers_of(stage))
        if not weights:
            continue
        updates, sent_to = relation.nodes("U", stage)[0], np.full(relation.schedule.microbatches, -1)
        for readers in (*relation.nodes("F", stage), *relation.nodes("dO", stage)):
            both = (updates >= 0) & (readers >= 0)
            to = np.where(both, relation.device[readers], -1)
            both &= (to != relation.device[updates]) & (to != sent_to)
            pairs = relation.device[updates[both]], relation.device[readers[both]]
            each_s = weights * link.of_pairs("overhead_s_per_byte", *pairs)
            taken_s[updates[both]] += each_s + link.of_pairs("send_s", *pairs)
            taken_s[readers[both]] += each_s + link.of_pairs("receive_s", *pairs)
            sent_to = np.where(both, to, sent_to)
    return taken_s


def _edges(repeated: _Repeated, device: Ints) -> tuple[list[Ints], list[Ints], _Sent]:
    """Return edges without a message (sources, targets), and with one: (source, target, bytes, tensor)."""
    sources, targets, sent = [], [], []
    for edges in repeated.relation.edges:
        source, target = repeated.pairs(edges)
        if edges.message_bytes is not None:
            crossing = device[source] != device[target]
            if crossing.any():
                size_bytes = np.full(int(crossing.sum()), edges.message_bytes)
                tensor = np.full(len(size_bytes), edges.tensor)
                sent.append((source[crossing], target[crossing], size_bytes, tensor))
                source, target = source[~crossing], target[~crossing]
        sources.append(source)
        targets.append(target)
    return sources, targets, sent


class _Links:
    """Holds messages as nodes on a lane per pair of devices; each is sent once, however many tasks read it.

    If all messages of a link come from one ordered lane, they become ready in its order.
    """

    def __init__(self, repeated: _Repeated, device: Ints, sent: _Sent, link: Link) -> None:
        whole = np.zeros(0, np.int64)
        columns = zip((whole, whole, np.zeros(0), whole), *sent, strict=True)
        source, self.consumer, size, tensor = map(np.concatenate, columns)
        self.link, devices = link, int(device.max(initial=0)) + 1
        pair = device[source].astype(np.int64) * devices + device[self.consumer]
        # Messages sorted by link, then by producer, which is the order of the lane.
        key = (pair * len(device) + source) * (1 + tensor.max(initial=0)) + tensor
        unique, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        self.producer, self.message_of = source[first], inverse
        self.size_bytes = np.zeros(len(unique))
        np.maximum.at(self.size_bytes, inverse, size)
        pair = pair[first]
        self.source_device, self.target_device = np.divmod(pair, devices)
        self.transfer_s = self.size_bytes / self.of_each("bytes_per_s")
        # Transfers that take no time need no nodes: what is sent is there at once, or a latency later.
        self.instant = not self.transfer_s.any()
        if self.instant:
            self.transfer_s, pair = self.transfer_s[:0], pair[:0]
        _, link_starts = np.unique(pair, return_index=True)
        self.starts = np.concatenate([link_starts, [len(self.transfer_s)]]).astype(np.int64)
        self.kinds = self._kinds(repeated)
        self.nodes = self.producer if self.instant else np.arange(len(unique)) + len(device)

    def of_each(self, name: str) -> Floats:
        """Return a field of each message's link, float64."""
        values: Floats = self.link.of_pairs(name, self.source_device, self.target_device)
        return values

    def messages(self, start: Floats, end: Floats) -> MessageColumns:
        """Return when each message occupies its link; at its sender's end if it takes no time."""
        begin_s, end_s = (end if self.instant else start)[self.nodes], end[self.nodes]
        return MessageColumns(self.source_device, self.target_device, self.size_bytes, begin_s, end_s)

    def _kinds(self, repeated: _Repeated) -> Ints:
        lanes = repeated.lane[self.producer]
        ordered = lane_kinds(repeated.relation)[lanes] == LaneKind.ORDERED
        kinds = [
            LaneKind.ORDERED if ordered[a:b].all() and (lanes[a:b] == lanes[a]).all() else LaneKind.FIFO
            for a, b in itertools.pairwise(self.starts)
        ]
        return np.array(kinds, np.int8)


def _shared(repeated: _Repeated, layers: Layers, link: Link, links: _Links) -> tuple[Floats, Ints] | None:
    """Return shares of a device with several streams, if costs tell them, or of one machine's cores."""
    relation = repeated.relation
    devices = [device for device, _ in relation.lanes]

    def place(device: int) -> int:
        """Return a number that devices which share cores have in common: no machine's for one by itself."""
        return link.machines[device] if device < len(link.machines) else sum(link.machines) + device

    places = list(map(place, devices))
    told = bool(link.machines) or any(layer.occupancy for layer in layers)
    if len(set(places)) == len(places) or not told:
        return None
    share, unknown = np.zeros(len(relation)), 1 / link.cores if link.machines else 1.0
    for column, kind in enumerate(("F", "dO", "dW")):
        for stage in range(relation.stages):
            group = [layers[i] for i in relation.schedule.layers_of(stage)]
            shares = [(layer.occupancy or (unknown,) * 3)[column] for layer in group]
            # Layers of one stage run one after the other: on a stream the largest share counts.  For a
            # machine's cores the mean counts, as in merged stages; else schedules of stages would look slower
            # than those of single layers.
            seconds = [getattr(layer, SECONDS[kind]) for layer in group]
            mean = bool(link.machines) and sum(seconds) > 0
            share[relation.there(kind, stage)] = np.average(shares, weights=seconds) if mean else max(shares)
    share[relation.fields.kind == KIND_NUMBER["U"]] = 1.0
    if link.machines and link.speeds:
        # All cores of a machine are alike: a device of it that is slow computes with fewer of them.
        share *= np.minimum(1.0, link.speeds_of(devices))[relation.lane]
    if links.instant:
        return repeated.tile(share), np.array(places, np.int32)
    first = links.starts[:-1]
    pairs = zip(links.source_device[first].tolist(), links.target_device[first].tolist(), strict=True)
    within = [place(a) if place(a) == place(b) else -1 for a, b in pairs]
    # A message between processes of one machine is copied by both of them.
    sending = min(1.0, 2 / link.cores) if link.machines else 0.0
    sent = np.full(len(links.nodes), sending)
    return np.concatenate([repeated.tile(share), sent]), np.array([*places, *within], np.int32)


def validate(schedule: Schedule, layers: Sequence[LayerCosts] | None = None) -> None:
    """Raise ScheduleError, which names a task that is missing or unknown, or waits for itself.

    Without ``layers`` a chain is assumed, in which each stage needs every kind of task that any stage has.
    """
    checked = None if layers is None else check_layers(layers)
    relation = Relation(schedule, checked)
    check_complete(relation, checked)
    if never_start(relation).any():
        raise deadlock(relation)
    if schedule.steps_ahead:
        count = schedule.stages[-1][1] + 1 if schedule.stages else relation.stages
        simulate(schedule, checked or [LayerCosts(0, 0, 0)] * count, steps=schedule.steps_ahead + 2)
