"""Uses optimization barriers: the only order that XLA's own scheduler has to keep.

A tensor behind a barrier exists only once all inputs of the barrier do.  It is computed once and kept, and
its readers read memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from grappler_passes.graph.training_graph import Op, OpKind, TrainingGraph
from grappler_passes.passes.base import GraphEditor, Pass, PassResult, Relaxation, tensor
from tf_ooo.compat import xla
from tf_ooo.costs.analytic import op_work
from tf_ooo.costs.devices import DeviceModel, device
from tf_ooo.errors import CostError
from tf_ooo.modes.compiled.outline import Call
from tf_ooo.modes.compiled.regions import CONTRACTIONS, VIEWS, FlatStep, GraphDef, Port

DEVICE = "h100"  # a published one, for costs
_STORED = (OpKind.FORWARD, OpKind.OUTPUT_GRAD)
_BACKWARD = (OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD)
# Arguments and variables are in memory already.
_THERE_ANYWAY = frozenset({"_Arg", "Placeholder", "ReadVariableOp", "Const"})


@dataclass(frozen=True)
class Barrier:
    """Describes a barrier over some tensors; ``readers`` read the first ``held`` of them behind it."""

    name: str
    ports: tuple[Port, ...]
    readers: tuple[str, ...]
    held: int = 1

    @property
    def behind(self) -> dict[Port, Port]:
        """Map each tensor to its port behind the barrier."""
        return {port: (self.name, number) for number, port in enumerate(self.ports[: self.held])}


def activations_to_store(
    step: FlatStep, ops: Mapping[str, Op], calls: Sequence[Call], readers: str
) -> list[Barrier]:
    """Return each tensor that a call reads: behind a barrier it is computed once and kept.

    Otherwise XLA computes it again for another reader, merged into a later kernel, and the call would have to
    wait for that kernel.

    Args:
        step, ops: the step, and its classified ops by name.
        calls: the calls whose inputs may be stored.
        readers: who reads activations; ``"all"``: the forward pass reads the stored tensor too,
            ``"backward"``: it may merge its own copy into what comes next, ``"cost"``: whichever of these two
            costs less, for each tensor, ``"none"``: nothing is stored.
    """
    stored: list[Barrier] = []
    in_calls = {name for call in calls for name in call.region.own}
    inputs = dict.fromkeys(port for call in calls for port in call.region.inputs)
    for port in inputs if readers != "none" else ():
        op = ops.get(port[0])
        if op is None or op.kind not in _STORED or op.type in _THERE_ANYWAY:
            continue
        if not step.known(port).dtype.startswith(("float", "bfloat", "complex")):
            continue  # XLA may have to know a count or an index; behind a barrier it would not
        behind = sorted(set(step.readers_of(port)))
        on_main = [name for name in behind if name not in in_calls]
        if readers == "backward" or (readers == "cost" and not is_worth_it(step, port, on_main, calls)):
            behind = [name for name in behind if name in ops and ops[name].kind in _BACKWARD]
        stored.append(Barrier(f"ooo_stored_{len(stored)}", (port,), tuple(behind)))
    return stored


def holds_of(calls: Sequence[Call]) -> list[Barrier]:
    """Return a barrier, through its first input, for each call that waits for more than its inputs."""
    return [
        Barrier(f"{call.name}_after", (call.region.inputs[0], *call.waits_for), (call.name,))
        for call in calls
        if call.waits_for and call.region.inputs
    ]


def join_of(
    step: FlatStep, name: str, calls: Sequence[Call], last: Sequence[Port], moved: Mapping[Port, Port]
) -> Barrier | None:
    """Return a barrier over the results of some calls and the ``last`` tensors of the main stream.

    Tensors that have moved are left out.  Gradients are read behind the barrier, so that no update makes the
    main stream wait for a call while there is other work.  None if there is nothing to join.
    """
    results = [port for call in calls for port in call.region.outputs]
    waited = [port for port in dict.fromkeys(last) if port not in moved]
    readers = dict.fromkeys(reader for port in results for reader in step.readers_of(port))
    return Barrier(name, (*results, *waited), tuple(readers), len(results)) if results and waited else None


@dataclass(frozen=True)
class _BarriersPass(Pass):
    """Adds barriers; ``moved``: the present ports of tensors that the step had elsewhere."""

    step: FlatStep
    barriers: Sequence[Barrier]
    moved: Mapping[Port, Port]
    # Whoever reads a tensor behind a barrier reads another one, updates among them.
    relaxes = frozenset({Relaxation.NEW_NODES, Relaxation.REPLACED_NODES, Relaxation.SIDE_EFFECTS})

    def run(self, graph_def: GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        editor = GraphEditor(graph_def)
        rewired: set[str] = set()
        for barrier in self.barriers:
            types = [self.step.known(port).dtype for port in barrier.ports]
            inputs = [tensor(*self.moved.get(port, port)) for port in barrier.ports]
            node = xla.barrier_node(barrier.name, inputs, types)
            editor.add(barrier.name, node.op, node.input).CopyFrom(node)
            behind = {self.moved.get(port, port): place for port, place in barrier.behind.items()}

            def read(name: str, port: int, behind: Mapping[Port, Port] = behind) -> list[str]:
                return [tensor(*behind.get((name, port), (name, port)))]

            readers = editor.nodes.keys() & barrier.readers  # those in calls are gone
            for reader in readers:
                editor.map_inputs(reader, read)
            rewired |= readers
        return PassResult(editor.graph_def, editor.modified, replaced=frozenset(rewired))


class StorePass(_BarriersPass):
    """Stores activations before calls are made: these read them behind the barriers from the start."""

    name: ClassVar[str] = "store"


class HoldBackPass(_BarriersPass):
    """Sends each call's first input through a barrier with the tensors that the call waits for."""

    name: ClassVar[str] = "hold_back"


class JoinPass(_BarriersPass):
    """Has all readers of a call's result read it behind the call's join."""

    name: ClassVar[str] = "join"


def is_worth_it(
    step: FlatStep, port: Port, readers: Iterable[str], calls: Sequence[Call], on: DeviceModel | None = None
) -> bool:
    """Return whether these readers on the main stream should read a stored tensor behind the barrier, too.

    That costs nothing if it is in memory anyway: a matrix product or convolution made it or reads it.
    Otherwise XLA would have merged its computation into its readers' kernels; now one more kernel makes it,
    and each of them reads it.  The gain is that dW that read it can start when their dO is there, not only
    after the last kernel in which XLA computes the tensor again.
    """
    on = on or device(DEVICE)
    return cost_s(step, port, readers, on) <= gain_s(step, port, calls, on)


def cost_s(step: FlatStep, port: Port, readers: Iterable[str], on: DeviceModel) -> float:
    """Return the seconds of one more read in each reader, and of the kernel that writes the tensor."""
    maker = port[0]
    while step.nodes[maker].op in VIEWS and (made_of := step.data_inputs(maker)):
        maker = made_of[0][0]
    types, info = [step.nodes[name].op for name in readers], step.info(port)
    in_memory = not CONTRACTIONS.isdisjoint([step.nodes[maker].op, *types])
    if in_memory or not types or info is None or info.shape is None:
        return 0.0
    element_bytes = 2 if info.dtype == "bfloat16" else np.dtype(info.dtype).itemsize
    size_bytes = math.prod(dim or 0 for dim in info.shape) * element_bytes
    return (len(types) + 1) * size_bytes / on.bytes_per_s + on.launch_s


def gain_s(step: FlatStep, port: Port, calls: Sequence[Call], on: DeviceModel) -> float:
    """Return the seconds of the dW that wait for the tensor, which may run beside the main stream."""
    names = [name for call in calls if port in call.region.inputs for name in call.region.own]
    return sum(_seconds(step, name, on) for name in names if step.nodes[name].op in CONTRACTIONS)


def _seconds(step: FlatStep, name: str, on: DeviceModel) -> float:
    inputs = [step.info(port) for port in step.data_inputs(name)]
    try:
        return on.seconds(op_work(step.nodes[name], inputs, step.outputs[name]))
    except CostError:
        return math.inf  # nothing is known of it: as before there were costs
