"""Optimization barriers: the only order that XLA's own scheduler has to keep.

A tensor behind a barrier is there only when all that went into the barrier is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grappler_passes.graph.training_graph import Op, OpKind
from grappler_passes.passes.edit import GraphEditor, tensor
from tf_ooo.compat import xla_nodes
from tf_ooo.modes.compiled.barrier_costs import is_worth_it
from tf_ooo.modes.compiled.outline import Call
from tf_ooo.modes.compiled.regions import FlatStep, Port

STORES = ("cost", "all", "backward", "none")
_STORED = (OpKind.FORWARD, OpKind.OUTPUT_GRAD)
_BACKWARD = (OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD)
# Arguments and variables are in memory already.
_THERE_ANYWAY = frozenset({"_Arg", "Placeholder", "ReadVariableOp", "Const"})


def add_barrier(
    editor: GraphEditor, step: FlatStep, name: str, ports: Sequence[Port], types: Sequence[str]
) -> None:
    """A barrier over tensors; its output i is tensor i."""
    node = xla_nodes.barrier_node(name, [tensor(*port) for port in ports], types)
    editor.add(name, node.op, node.input).CopyFrom(node)


def store_activations(
    editor: GraphEditor, step: FlatStep, ops: Mapping[str, Op], calls: Sequence[Call], readers: str
) -> dict[Port, Port]:
    """Puts each tensor that a call reads behind a barrier: it is computed once and kept.

    XLA would rather compute it again where somebody else reads it, merged into a kernel that
    comes later, and the call would have to wait for that.

    Args:
        editor, step, ops: the step, and its classified ops by name.
        calls: whose inputs are looked at; made afterwards, from what this returns.
        readers: of activations; ``"all"``: the forward pass reads the stored tensor too, ``"backward"``:
            it may merge its own copy into what comes next, ``"cost"``: of these two what costs less, for
            each tensor, ``"none"``: nothing is done.

    Returns:
        Where the tensors are now.
    """
    if readers == "none":
        return {}
    found = dict.fromkeys(port for call in calls for port in call.region.inputs)
    stored: dict[Port, Port] = {}
    for port in found:
        op = ops.get(port[0])
        if op is None or op.kind not in _STORED or op.type in _THERE_ANYWAY:
            continue
        if not _dtype(step, port).startswith(("float", "bfloat", "complex")):
            continue  # XLA may have to know a count or an index; behind a barrier it would not
        name = f"ooo_stored_{len(stored)}"
        add_barrier(editor, step, name, [port], [_dtype(step, port)])
        stored[port] = (name, 0)
        everyone = _readers(step, ops, port, False)
        keep = readers == "all" or (
            readers == "cost" and is_worth_it(step, port, _main(everyone, calls), calls)
        )
        for reader in everyone if keep else _readers(step, ops, port, True):
            _read_behind(editor, reader, port, stored[port])
    return stored


def _main(readers: Sequence[str], calls: Sequence[Call]) -> list[str]:
    """Those that no call takes along."""
    inside = {name for call in calls for name in call.region.own}
    return [name for name in readers if name not in inside]


def _readers(step: FlatStep, ops: Mapping[str, Op], port: Port, backward_only: bool) -> list[str]:
    names = {reader for reader, number in step.readers[port[0]] if number == port[1]}
    if backward_only:
        names = {name for name in names if name in ops and ops[name].kind in _BACKWARD}
    return sorted(names)


def _read_behind(editor: GraphEditor, reader: str, port: Port, behind: Port) -> None:
    editor.map_inputs(reader, lambda p, n: [tensor(*(behind if (p, n) == port else (p, n)))])


def hold_back(editor: GraphEditor, step: FlatStep, calls: Sequence[Call], moved: Mapping[Port, Port]) -> int:
    """Each call's first input goes through a barrier with what the call waits for; returns how many."""
    held = [call for call in calls if call.waits_for and call.region.inputs]
    for call in held:
        first = call.region.inputs[0]
        ports = [moved.get(port, port) for port in (first, *call.waits_for)]
        name = f"{call.name}_after"
        add_barrier(editor, step, name, ports, [_dtype(step, p) for p in (first, *call.waits_for)])
        inputs = [name, *list(editor.nodes[call.name].input)[1:]]
        editor.set_inputs(call.name, inputs)
    return len(held)


def join(
    editor: GraphEditor,
    step: FlatStep,
    name: str,
    calls: Sequence[Call],
    moved: Mapping[Port, Port],
    last: Sequence[Port],
) -> dict[Port, Port]:
    """One barrier over everything that the calls return and ``last`` of the main stream.

    Whoever reads a gradient reads it behind the barrier, so that no update makes the main stream
    wait for a call while there is other work.  Returns where the calls' results are now; nothing
    where there is no call, or nothing to wait for.
    """
    from_calls = [(old, moved[old]) for call in calls for old in call.region.outputs]
    ports = [(old, old) for old in dict.fromkeys(last) if old not in moved]
    if not from_calls or not ports:
        return {}
    everything = [*from_calls, *ports]
    add_barrier(
        editor, step, name, [new for _, new in everything], [_dtype(step, old) for old, _ in everything]
    )
    behind = {new: (name, number) for number, (_, new) in enumerate(from_calls)}
    names = {call.name for call in calls}

    def replace(producer: str, port: int) -> list[str]:
        return [tensor(*behind.get((producer, port), (producer, port)))]

    for old in dict.fromkeys(old for old, _ in from_calls):
        for reader, port in step.readers[old[0]]:
            if port == old[1] and reader not in editor.removed and reader not in names:
                editor.map_inputs(reader, replace)
    return {old: behind[new] for old, new in from_calls}


def _dtype(step: FlatStep, port: Port) -> str:
    info = step.info(port)
    assert info is not None  # for mypy: only tensors with known types come here
    return info.dtype
