"""Optimization barriers: the only order that XLA's own scheduler has to keep.

A tensor behind a barrier is there only when all that went into the barrier is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from grappler_passes.graph.training_graph import Op, OpKind, TrainingGraph
from grappler_passes.passes.base import Pass, PassResult
from grappler_passes.passes.edit import GraphEditor, tensor
from grappler_passes.passes.relaxations import Relaxation
from tf_ooo.compat import xla_nodes
from tf_ooo.modes.compiled.barrier_costs import is_worth_it
from tf_ooo.modes.compiled.outline import Call
from tf_ooo.modes.compiled.regions import FlatStep, GraphDef, Port

STORES = ("cost", "all", "backward", "none")
_STORED = (OpKind.FORWARD, OpKind.OUTPUT_GRAD)
_BACKWARD = (OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD)
# Arguments and variables are in memory already.
_THERE_ANYWAY = frozenset({"_Arg", "Placeholder", "ReadVariableOp", "Const"})
# Whoever reads a tensor behind a barrier reads another one, updates among them.
_READS_BEHIND = frozenset({Relaxation.NEW_NODES, Relaxation.REPLACED_NODES, Relaxation.SIDE_EFFECTS})


@dataclass(frozen=True)
class StoredActivation:
    """A tensor that a call reads behind the barrier ``name``, and the ops that do so beside the call."""

    port: Port
    name: str
    readers: tuple[str, ...]


def activations_to_store(
    step: FlatStep, ops: Mapping[str, Op], calls: Sequence[Call], readers: str
) -> list[StoredActivation]:
    """Each tensor that a call reads: behind a barrier it is computed once and kept.

    XLA would rather compute it again where somebody else reads it, merged into a kernel that
    comes later, and the call would have to wait for that.

    Args:
        step, ops: the step, and its classified ops by name.
        calls: whose inputs are looked at.
        readers: of activations; ``"all"``: the forward pass reads the stored tensor too, ``"backward"``:
            it may merge its own copy into what comes next, ``"cost"``: of these two what costs less, for
            each tensor, ``"none"``: nothing is stored.
    """
    stored: list[StoredActivation] = []
    inputs = dict.fromkeys(port for call in calls for port in call.region.inputs)
    for port in inputs if readers != "none" else ():
        op = ops.get(port[0])
        if op is None or op.kind not in _STORED or op.type in _THERE_ANYWAY:
            continue
        if not step.known(port).dtype.startswith(("float", "bfloat", "complex")):
            continue  # XLA may have to know a count or an index; behind a barrier it would not
        everyone = _readers(step, ops, port, False)
        keep = readers == "all" or (
            readers == "cost" and is_worth_it(step, port, _main(everyone, calls), calls)
        )
        behind = everyone if keep else _readers(step, ops, port, True)
        stored.append(StoredActivation(port, f"ooo_stored_{len(stored)}", tuple(behind)))
    return stored


def _main(readers: Sequence[str], calls: Sequence[Call]) -> list[str]:
    """The readers on the main stream: those that are in no call."""
    inside = {name for call in calls for name in call.region.own}
    return [name for name in readers if name not in inside]


def _readers(step: FlatStep, ops: Mapping[str, Op], port: Port, backward_only: bool) -> list[str]:
    names = {reader for reader, number in step.readers[port[0]] if number == port[1]}
    if backward_only:
        names = {name for name in names if name in ops and ops[name].kind in _BACKWARD}
    return sorted(names)


@dataclass(frozen=True)
class StorePass(Pass):
    """Adds the barriers of stored activations, behind which their ``readers`` read them."""

    step: FlatStep
    stored: Sequence[StoredActivation]
    name: ClassVar[str] = "store"
    relaxes = _READS_BEHIND

    def run(self, graph_def: GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        """Calls come later: they read behind the barriers from the start."""
        editor = GraphEditor(graph_def)
        for activation in self.stored:
            _add_barrier(editor, activation.name, [activation.port], [self.step.known(activation.port).dtype])
            for reader in activation.readers:
                _read_behind(editor, reader, {activation.port: (activation.name, 0)})
        rewired = frozenset(reader for activation in self.stored for reader in activation.readers)
        return PassResult(editor.graph_def, editor.modified, replaced=rewired)


@dataclass(frozen=True)
class HoldBackPass(Pass):
    """Each call's first input goes through a barrier with what the call waits for.

    ``moved``: where tensors are that are no longer where the step had them.
    """

    step: FlatStep
    calls: Sequence[Call]
    moved: Mapping[Port, Port]
    name: ClassVar[str] = "hold_back"
    relaxes = _READS_BEHIND

    def run(self, graph_def: GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        """The other inputs stay."""
        editor = GraphEditor(graph_def)
        held = [call for call in self.calls if is_held(call)]
        for call in held:
            waited = (call.region.inputs[0], *call.waits_for)
            name = f"{call.name}_after"
            types = [self.step.known(port).dtype for port in waited]
            _add_barrier(editor, name, [self.moved.get(port, port) for port in waited], types)
            editor.set_inputs(call.name, [name, *list(editor.nodes[call.name].input)[1:]])
        return PassResult(editor.graph_def, editor.modified, replaced=frozenset(call.name for call in held))


def is_held(call: Call) -> bool:
    """Whether a call has to wait for more than its inputs."""
    return bool(call.waits_for and call.region.inputs)


@dataclass(frozen=True)
class Join:
    """One barrier over everything that some calls return and ``last``, tensors of the main stream.

    Whoever reads a gradient reads it behind the barrier, so that no update makes the main stream
    wait for a call while there is other work.
    """

    name: str
    results: tuple[Port, ...]
    last: tuple[Port, ...]

    @property
    def behind(self) -> dict[Port, Port]:
        """Where the calls' results are."""
        return {port: (self.name, number) for number, port in enumerate(self.results)}


def join_of(
    name: str, calls: Sequence[Call], last: Sequence[Port], moved: Mapping[Port, Port]
) -> Join | None:
    """The join of these calls, or None if there is nothing to join.

    Results of the main stream that have ``moved`` are not waited for.
    """
    results = tuple(port for call in calls for port in call.region.outputs)
    waited = tuple(port for port in dict.fromkeys(last) if port not in moved)
    return Join(name, results, waited) if results and waited else None


@dataclass(frozen=True)
class JoinPass(Pass):
    """Adds the barriers of joins.

    ``moved`` is ``{tensor of the original step: the tensor that holds it now}``.
    """

    step: FlatStep
    joins: Sequence[Join]
    moved: Mapping[Port, Port]
    name: ClassVar[str] = "join"
    relaxes = _READS_BEHIND

    def run(self, graph_def: GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        """Whoever reads a result reads it behind its join."""
        editor = GraphEditor(graph_def)
        rewired: set[str] = set()
        for join in self.joins:
            from_calls = [self.moved[port] for port in join.results]
            types = [self.step.known(port).dtype for port in (*join.results, *join.last)]
            _add_barrier(editor, join.name, [*from_calls, *join.last], types)
            behind = {self.moved[port]: where for port, where in join.behind.items()}
            for port in join.results:
                for reader, number in self.step.readers[port[0]]:
                    if number == port[1] and reader in editor.nodes:
                        _read_behind(editor, reader, behind)
                        rewired.add(reader)
        return PassResult(editor.graph_def, editor.modified, replaced=frozenset(rewired))


def _add_barrier(editor: GraphEditor, name: str, ports: Sequence[Port], types: Sequence[str]) -> None:
    """Its output i is tensor i."""
    node = xla_nodes.barrier_node(name, [tensor(*port) for port in ports], types)
    editor.add(name, node.op, node.input).CopyFrom(node)


def _read_behind(editor: GraphEditor, reader: str, behind: Mapping[Port, Port]) -> None:
    editor.map_inputs(reader, lambda name, port: [tensor(*behind.get((name, port), (name, port)))])
