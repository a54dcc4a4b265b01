"""Finds costs of layers from a profiled step, on one device or spread over several."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from grappler_passes.graph.training_graph import Tasks
from tf_ooo.compat.tf_profiler import TracedEvent
from tf_ooo.costs.devices import DeviceModel
from tf_ooo.costs.from_graph import unknown_activations, with_cores
from tf_ooo.costs.layer_costs import SECONDS, LayerCosts, Link
from tf_ooo.costs.profile import MOST_STEPS, OpProfile, medians, read_side_by_side, step_costs, usable_cores
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import CostError, OptionsError
from tf_ooo.fit import timing
from tf_ooo.fit.recorder import run_traced
from tf_ooo.hosts.cluster import Cluster, Target
from tf_ooo.hosts.speeds import sharing_cores
from tf_ooo.rewriting.loops import ops_of_data
from tf_ooo.rewriting.parts import is_part, layer_of_part
from tf_ooo.rewriting.step_graph import StepGraph, general_names
from tf_ooo.rewriting.tasks import tasks_for_costs

# A step of very small ops takes many times as long as they do: most of that is the call of the function.
_MOST_BETWEEN = 4.0


def measured_costs(
    step: StepGraph,
    profile: OpProfile | None,
    timed_s: Sequence[float] = (),
    general: Mapping[str, str] | None = None,
    on: DeviceModel | None = None,
) -> CostTable:
    """Return costs of the layers for one micro-batch: the mean over all micro-batches of the profiled step.

    Without a profile seconds are calculated from shapes, for the device ``on``.  ``timed_s``: seconds of
    equal steps without the profiler.  ``general``: maps ops of the profiled step to general names, if it is
    another trace.
    """
    graph, tasks = step.graph, _tasks(step)
    mean, factor = profile, 1.0
    if profile is not None:
        mean = dataclasses.replace(profile, seconds=step.averaged(profile.seconds, general))
        factor = _between_ops(step, profile, timed_s)
    costs = step_costs(step.known.alone, graph, mean, *tasks, factor, on)
    copies, gradients, tied = tied_bytes(step)
    seconds = costs.op_seconds
    layers = tuple(map(_with_tied, itertools.count(), costs.layers, copies, gradients, tied))
    if profile is not None and profile.core_s:
        core_s = step.averaged(profile.core_s, general)
        # The time that ``factor`` adds to an op is one thread looking for the next.
        kept, added = min(factor, 1.0), max(0.0, 1 - 1 / factor)
        cores_s = {name: core_s[name] * kept + seconds[name] * added for name in core_s if name in seconds}
        layers = with_cores(layers, graph, seconds, cores_s, usable_cores(), *tasks)
    return dataclasses.replace(costs, layers=layers)


def tied_bytes(step: StepGraph) -> tuple[list[float], list[float], list[dict[int, float]]]:
    """Return the bytes that weights shared by several layers add to each layer, for one micro-batch.

    The three lists are: copies of a lower layer's weights, which are sent for F and stay until dO; gradients
    of the layer's own weights that other layers have computed, which wait for its dW; gradients of other
    layers' weights, by layer, that its own dW computes, which exist while it runs.
    """
    graph = step.graph
    copies, gradients = ([0.0] * len(graph.layers) for _ in range(2))
    made_here: list[dict[int, float]] = [{} for _ in graph.layers]
    of_data = ops_of_data(graph)
    at = {name: step.classified.get(name, ("", 0)) for name in graph.ops}
    sent: set[tuple[str, int]] = set()
    for name, op in graph.ops.items():
        kind, layer = at[name]
        for producer in {producer for producer, _ in op.inputs if producer in at}:
            kind_there, other = at[producer]
            if kind_there != kind or other == layer or (producer, layer) in sent:
                continue
            size_bytes = graph.ops[producer].output_bytes or 0
            if kind == "dW" and name in step.joined:
                gradients[layer] += size_bytes
                made_here[other][layer] = made_here[other].get(layer, 0.0) + size_bytes
            elif kind == "F" and producer not in of_data:
                copies[layer] += size_bytes
            sent.add((producer, layer))
    return copies, gradients, made_here


def _with_tied(
    number: int,
    layer: LayerCosts,
    copies_bytes: float,
    gradients_bytes: float,
    made_here_bytes: dict[int, float],
) -> LayerCosts:
    """Return the layer with these bytes added; gradients count from F on, a slight overestimate.

    It is tied to lower layers alone: what a gradient penalty's dW sends to layers above is left out.
    """
    return dataclasses.replace(
        layer,
        activation_bytes=layer.activation_bytes + copies_bytes + gradients_bytes,
        forward_bytes=layer.activation_bytes if layer.forward_bytes is None else layer.forward_bytes,
        weight_grad_bytes=layer.kept_bytes + gradients_bytes,
        summand_bytes=layer.summand_bytes + sum(made_here_bytes.values()),
        tied=tuple(pair for pair in sorted(made_here_bytes.items()) if pair[0] < number),
    )


def unknown_sizes(step: StepGraph) -> tuple[str, ...]:
    """Return the tensors that the backward pass needs and whose size is not known before the step runs."""
    return unknown_activations(step.graph, *_tasks(step))


def layers_of(step: StepGraph, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the layers to which the ops of a micro-batch belong."""
    numbers = sorted({step.classified[name][1] for name in names if name in step.classified})
    return tuple(step.graph.layers[number].name for number in numbers)


def _tasks(step: StepGraph) -> tuple[Tasks, dict[str, int]]:
    """Return the tasks of the classified micro-batch, and the layers of its forward ops."""
    forward = {name: layer for name, (kind, layer) in step.classified.items() if kind == "F"}
    return tasks_for_costs(step.classified), forward


def check_costs(costs: CostTable, names: Sequence[str]) -> None:
    """Raise OptionsError: the costs are of another model, or its layers were divided otherwise."""
    other = "of batches of another size, by which layers that take long are cut; measure them again"
    if (count := len(costs.layers)) != len(names):
        raise OptionsError(f"costs= has {count} layers, the model {len(names)}: not its costs, or {other}")
    for number, (own, name) in enumerate(zip(costs.layers, names, strict=True)):
        if is_part(own.name) != is_part(name):
            raise OptionsError(
                f"costs= has {own.name!r} as layer {number}, the model {name!r}: they are {other}"
            )


def _between_ops(step: StepGraph, profile: OpProfile, timed_s: Sequence[float]) -> float:
    """Return the step's seconds over the sum of its ops' seconds: the rest is time between ops.

    A ratio below 1, from ops side by side, counts as 1, unless steps were timed without the profiler, which
    delays small ops most.  The shortest step counts: other work on the machine only makes steps longer.
    """
    ops_s = sum(value for name, value in profile.seconds.items() if name in step.index.index)
    step_s = min([profile.step_s, *timed_s])
    return min(max(step_s / ops_s, 0.0 if timed_s else 1.0), _MOST_BETWEEN) if ops_s else 1.0


def with_shared_link(costs: CostTable, target: Target) -> CostTable:
    """Add the link between the devices and the speed of each; costs that have a link keep it."""
    if costs.link != Link():
        return costs
    with timing.said("measuring the link between the devices, and how fast each is"):
        link = sharing_cores(target.link_between(), target.devices, target.hosts())
        return dataclasses.replace(costs, link=dataclasses.replace(link, speeds=target.speeds()))


def costs_of_parts(costs: CostTable, step: StepGraph) -> CostTable:
    """Return the table if it has the step's layers; else divide each layer's seconds among its parts.

    Seconds are shared in proportion to calculated ones; bytes of the parts follow from the step's shapes.
    The table may have whole layers, or parts of other sizes.  OptionsError: it is another model's.
    """
    names = [layer.name for layer in step.graph.layers]
    given, own = _groups([layer.name for layer in costs.layers]), _groups(names)
    if len(given) != len(own):
        raise OptionsError(
            f"costs= has {len(given)} layers, the model {len(own)}: not its costs; measure them again"
        )
    if [len(group) for group in given] == [len(group) for group in own]:
        return costs
    calculated = measured_costs(step, None).layers
    layers: list[LayerCosts] = []
    for there, here in zip(given, own, strict=True):
        measured = [costs.layers[layer] for layer in there]
        parts = [calculated[layer] for layer in here]
        if len(measured) == len(parts):
            pairs = zip(measured, parts, strict=True)
            layers += [
                dataclasses.replace(layer, inputs=part.inputs, tied=part.tied) for layer, part in pairs
            ]
        else:
            layers += _shared(measured, parts)
    return dataclasses.replace(costs, layers=tuple(layers))


def _groups(names: Sequence[str]) -> list[list[int]]:
    """Return the numbers of the parts of each layer, in order; an undivided layer is its only part."""
    groups: list[list[int]] = []
    before, weights_there = "", False
    for number, name in enumerate(names):
        layer, of_weights = layer_of_part(name) or name, layer_of_part(name) is None
        if not groups or layer != before or of_weights and weights_there:
            groups.append([])
            weights_there = False
        groups[-1].append(number)
        before, weights_there = layer, weights_there or of_weights
    return groups


def _shared(measured: Sequence[LayerCosts], parts: Sequence[LayerCosts]) -> list[LayerCosts]:
    """Return the parts, with measured seconds in proportion to the calculated ones."""
    longest = max(measured, key=lambda layer: layer.busy_s)

    def seconds(field: str, part: LayerCosts) -> Any:
        calculated_s = sum(getattr(each, field) for each in parts)
        # If nothing is calculated to take time all parts are alike.
        share = getattr(part, field) / calculated_s if calculated_s else 1 / len(parts)
        return float(sum(getattr(layer, field) for layer in measured)) * share

    return [
        dataclasses.replace(
            part, **{field: seconds(field, part) for field in SECONDS.values()}, occupancy=longest.occupancy
        )
        for part in parts
    ]


class InPlace:
    """Profiles the steps that are run through it, at most three; only one where workers have to be asked.

    ``count``: micro-batches in each step; ``signature``: that of the batches on which steps are measured;
    ``why_not``: why there are no costs.
    """

    def __init__(self, step: StepGraph, count: int, target: Target, steps: int, signature: object) -> None:
        self.why_not, self.signature = "", signature
        self._step, self._count = step, count
        self._addresses = target.addresses if isinstance(target, Cluster) else ()
        self._left = min(steps, 1 if self._addresses else MOST_STEPS)
        self._profiles: list[OpProfile] = []

    @property
    def done(self) -> bool:
        return not self._left or bool(self.why_not)

    def run(self, step: Callable[[], Any], expected_s: float) -> Any:
        """Return one step, which traces nothing; its outputs.  Raises what it raises."""
        traced = run_traced(step, self._addresses, expected_s)
        self._left -= 1
        self.why_not = traced.failed
        try:
            if not traced.failed:
                self._profiles.append(_joined(list(map(read_side_by_side, _by_host(traced.events)))))
        except CostError as error:
            self.why_not = str(error)
        return traced.outputs

    def costs(self, names: Iterable[str]) -> CostTable | None:
        """Return the layers' costs for one micro-batch; None: nothing was measured.

        ``names``: the names of all nodes that ran; a profile may lack some.
        """
        if not self._profiles:
            return None
        # Other work on the machine makes single steps long. The rest of a step, besides its ops, does not
        # show where devices wait for each other.
        seconds = medians([profile.seconds for profile in self._profiles])
        core_s = medians([profile.core_s for profile in self._profiles])
        count = len(self._profiles)
        profile = dataclasses.replace(
            self._profiles[-1], seconds=seconds, core_s=core_s, steps=count, step_s=0.0
        )
        return measured_costs(self._step, profile, general=general_names(names, self._count))


def costs_of_calls(
    step: StepGraph, calls: Mapping[str, Sequence[str]], call_s: Mapping[str, float], costs: CostTable
) -> CostTable:
    """Return the costs of layers whose tasks run as compiled calls.

    A call's seconds are divided among its ops in proportion to their seconds in ``costs``; ops in no call
    keep theirs.  ``calls``: the ops of each call, ``call_s``: its seconds, both by its name.
    """
    by_general = {step.general[name]: seconds for name, seconds in costs.op_seconds.items()}
    seconds = {name: by_general.get(general, 0.0) for name, general in step.general.items()}
    for call, ops in calls.items():
        total_s = sum(seconds.get(name, 0.0) for name in ops)
        for name in ops:
            share = seconds.get(name, 0.0) / total_s if total_s else 1 / len(ops)
            seconds[name] = call_s[call] * share
    return measured_costs(step, OpProfile(seconds, {}, steps=1, step_s=0.0, overhead_s=0.0))


def _by_host(events: Mapping[str, Sequence[TracedEvent]]) -> list[list[TracedEvent]]:
    """Return the events of each host, which shares cores; thread names differ only within a process."""
    hosts: defaultdict[str, list[TracedEvent]] = defaultdict(list)
    for address, seen in events.items():
        own = (dataclasses.replace(event, line=f"{event.line} of {address}") for event in seen)
        hosts[address.rpartition(":")[0]] += own
    return list(hosts.values())


def _joined(profiles: Sequence[OpProfile]) -> OpProfile:
    """Join the profiles of one execution on several hosts, each of which ran other ops."""
    return dataclasses.replace(
        profiles[0],
        seconds={name: value for profile in profiles for name, value in profile.seconds.items()},
        types={name: value for profile in profiles for name, value in profile.types.items()},
        core_s={name: value for profile in profiles for name, value in profile.core_s.items()},
    )
