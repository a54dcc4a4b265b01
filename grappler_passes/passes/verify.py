"""Compares a rewritten graph with the original and raises at the first broken rule.

Rules, by name: ``structure`` (unique names, no dangling inputs, control inputs last), ``acyclic``,
``frames``, ``kept``, ``op``, ``attributes``, ``data inputs``, ``control edge``, ``side effects``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import graph_pb2

from grappler_passes.errors import GraphError, VerifyError
from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.effects import conflicts, has_side_effects
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Pass, PassResult

_COPIES = frozenset({"Identity", "IdentityN"})
_MAY_GO = frozenset({"Identity", "IdentityN", "NoOp"})
_ENDS = frozenset({"_Arg", "_Retval", "Placeholder"})


def verify(
    before: graph_pb2.GraphDef,
    after: graph_pb2.GraphDef,
    training_graph: TrainingGraph | None = None,
    replaced: Collection[str] = (),
    fetches: Collection[str] = (),
) -> None:
    """Raise VerifyError, naming node and rule, unless ``after`` computes what ``before`` does.

    ``replaced`` are nodes that a pass says it took apart (they may go, or read other tensors);
    nodes with side effects and the graph's ends may not be among them.  ``fetches`` must be kept.
    With a ``training_graph``, its update and communication ops must be kept as well.
    """
    _control_inputs_last(after)
    old = GraphIndex(before)
    new = _index(after)
    _frames(new)
    keep = set(fetches)
    if training_graph is not None:
        keep |= {name for name, op in training_graph.ops.items() if op.kind.value in ("U", "comm")}
    _kept(old, new, set(replaced), keep)
    _same_attributes(before, after, set(replaced))
    _same_inputs(old, new, set(replaced))
    _added_edges(old, new)
    _side_effects(old, new)


@dataclass(frozen=True)
class VerifyPass(Pass):
    """Checks the graph it is given against ``original`` and changes nothing."""

    original: graph_pb2.GraphDef
    replaced: frozenset[str] = frozenset()
    name: ClassVar[str] = "verify"

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        """Raise VerifyError or hand the graph on."""
        verify(self.original, graph_def, training_graph, self.replaced)
        return PassResult(graph_def, modified=False)


def _control_inputs_last(after: graph_pb2.GraphDef) -> None:
    for node in after.node:
        control = False
        for text in node.input:
            if text[0] == "^":
                control = True
            elif control:
                raise VerifyError(node.name, "structure", f"data input {text!r} after a control input")


def _index(after: graph_pb2.GraphDef) -> GraphIndex:
    try:
        return GraphIndex(after)
    except GraphError as error:
        rule = "acyclic" if "cycle" in str(error) else "structure"
        raise VerifyError(error.node or "?", rule, str(error)) from error


def _frames(new: GraphIndex) -> None:
    """All inputs of a node must arrive in one frame; the executor would wait for ever otherwise."""
    if not new.frame_names:
        return
    for i in range(len(new)):
        arriving = {new.arrival_frame(p) for p in new.preds(i)}
        if len(arriving) > 1:
            raise VerifyError(new.names[i], "frames", f"inputs arrive in frames {sorted(arriving)}")


def _kept(old: GraphIndex, new: GraphIndex, replaced: set[str], keep: set[str]) -> None:
    for name, op in zip(old.names, old.ops, strict=True):
        if name in new.index:
            if new.ops[new.index[name]] != op:
                raise VerifyError(name, "op", f"was {op}, is {new.ops[new.index[name]]}")
        elif op in _ENDS or name in keep or has_side_effects(op):
            raise VerifyError(name, "kept", f"a {op} may not be dropped")
        elif op not in _MAY_GO and name not in replaced:
            raise VerifyError(name, "kept", f"a {op} was dropped and no pass says it replaced it")


def _same_attributes(before: graph_pb2.GraphDef, after: graph_pb2.GraphDef, replaced: set[str]) -> None:
    """Those that say what a node computes; with an underscore they are notes, or wishes where to run it."""
    old = {node.name: node for node in before.node}
    for node in after.node:
        was = old.get(node.name)
        if was is None or was == node or node.name in replaced:
            continue
        for key in sorted({*was.attr, *node.attr}):
            there = key in was.attr and key in node.attr
            if not key.startswith("_") and not (there and was.attr[key] == node.attr[key]):
                raise VerifyError(node.name, "attributes", f"{key} is not what it was")


def _same_inputs(old: GraphIndex, new: GraphIndex, replaced: set[str]) -> None:
    for i, name in enumerate(old.names):
        j = new.index.get(name)
        if j is None:
            continue
        was = [(old.names[p], port) for p, port in old.data_preds[i]]
        now = [(new.names[p], port) for p, port in new.data_preds[j]]
        if was == now or (name in replaced and not has_side_effects(old.ops[i])):
            continue
        if [_source(old, *x) for x in was] != [_source(new, *x) for x in now]:
            raise VerifyError(name, "data inputs", f"read {was}, reads {now}")


def _source(index: GraphIndex, name: str, port: int) -> tuple[str, int]:
    """The tensor seen through copies."""
    i = index.index[name]
    while index.ops[i] in _COPIES:
        i, port = index.data_preds[i][port]
    return index.names[i], port


def _added_edges(old: GraphIndex, new: GraphIndex) -> None:
    """Each control edge that is new must be legal in the original graph's contexts.

    The new graph's own contexts would justify any edge: a node takes on the branches of its inputs.
    """
    for j, name in enumerate(new.names):
        controls = new.control_preds[j]
        i = old.index.get(name)
        if not controls or i is None:
            continue
        was = {old.names[p] for p in old.control_preds[i]}
        for producer in (new.names[p] for p in controls):
            source = old.index.get(producer)
            if producer in was or source is None:
                continue
            reason = old.context_conflict(source, i)
            if reason:
                raise VerifyError(name, "control edge", f"from {producer!r}: {reason}")


def _side_effects(old: GraphIndex, new: GraphIndex) -> None:
    """Ops on the same state run in the order in which they did; only taking edges away can lose it."""
    if _only_grew(old, new):
        return
    for first, then in conflicts(old):
        one, two = old.names[first], old.names[then]
        if not new.implied(one, two):
            raise VerifyError(two, "side effects", f"no longer runs after {one!r}")


def _only_grew(old: GraphIndex, new: GraphIndex) -> bool:
    for i, name in enumerate(old.names):
        j = new.index.get(name)
        if j is None:
            return False
        if not {old.names[p] for p in old.preds(i)} <= {new.names[p] for p in new.preds(j)}:
            return False
    return True
