"""Compares a rewritten graph with the original and raises at the first broken rule.

Rules, by name: ``structure`` (unique names, no dangling inputs, control inputs last), ``acyclic``,
``frames``, ``kept``, ``op``, ``attributes``, ``data inputs``, ``control edge``, ``side effects``; and those
that hold unless a pass declares the relaxation of that name: ``new nodes``, ``more waits``,
``fewer waits``, ``devices``, ``functions``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from tensorflow.core.framework import graph_pb2

from grappler_passes.errors import GraphError, VerifyError
from grappler_passes.graph.dependencies import GraphIndex, conflicts, has_side_effects
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import REORDERING, Pass, PassResult, Relaxation

_COPIES = frozenset({"Identity", "IdentityN"})
_MAY_GO = _COPIES | {"NoOp"}
_ENDS = frozenset({"_Arg", "_Retval", "Placeholder"})


def verify(
    before: graph_pb2.GraphDef,
    after: graph_pb2.GraphDef,
    training_graph: TrainingGraph | None = None,
    replaced: Collection[str] = (),
    fetches: Collection[str] = (),
    relaxes: Collection[Relaxation] = REORDERING,
    known: GraphIndex | None = None,
) -> None:
    """Raise VerifyError, naming node and rule, where the graphs differ in more than ``relaxes`` allows.

    ``training_graph``: its update and communication ops must be kept, and so must ``fetches`` (names).
    ``replaced`` nodes may go or read other tensors; one with side effects only with
    ``Relaxation.SIDE_EFFECTS``, and the graph's arguments and results never.  ``known`` is the index of
    ``before``, if there is one.
    """
    _control_inputs_last(after)
    old = known or GraphIndex(before)
    try:
        new = GraphIndex(after)
    except GraphError as error:
        rule = "acyclic" if "cycle" in str(error) else "structure"
        raise VerifyError(error.node or "?", rule, str(error)) from error
    _frames(new)
    keep = set(fetches)
    if training_graph is not None:
        keep |= {name for name, op in training_graph.ops.items() if op.kind.value in ("U", "comm")}
    allowed = _Allowed(frozenset(relaxes), frozenset(replaced))
    _kept(old, new, allowed, keep)
    _same_attributes(before, after, allowed)
    _same_inputs(old, new, allowed)
    _added_edges(old, new)
    _side_effects(old, new)
    _nothing_new(old, new, allowed)
    _same_waits(old, new, allowed)
    _same_devices(before, after, allowed)
    _same_functions(before, after, allowed)


@dataclass(frozen=True)
class VerifiedPass(Pass):
    """Verifies its result at once: only what the pass relaxes may have changed."""

    def postconditions(
        self, before: graph_pb2.GraphDef, result: PassResult, training_graph: TrainingGraph | None
    ) -> None:
        if result.modified:
            verify(before, result.graph_def, replaced=result.replaced, relaxes=self.relaxes)


@dataclass(frozen=True)
class VerifyPass(Pass):
    """Checks the given graph against ``original``, whose index may be ``known``; see :func:`verify`."""

    original: graph_pb2.GraphDef
    replaced: frozenset[str] = frozenset()
    allowed: frozenset[Relaxation] = REORDERING
    known: GraphIndex | None = None
    name: ClassVar[str] = "verify"

    def knowing(self, replaced: frozenset[str]) -> VerifyPass:
        return replace(self, replaced=self.replaced | replaced)

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        allowed, known = self.allowed, self.known
        verify(self.original, graph_def, training_graph, self.replaced, relaxes=allowed, known=known)
        return PassResult(graph_def, modified=False)


@dataclass(frozen=True)
class _Allowed:
    """Holds the kinds of change that are allowed, and the names of the replaced nodes."""

    kinds: frozenset[Relaxation]
    names: frozenset[str]

    def replaces(self, name: str) -> bool:
        """Return whether a node may have other attributes."""
        return name in self.names and Relaxation.REPLACED_NODES in self.kinds

    def takes_apart(self, name: str, op: str) -> bool:
        """Return whether a node may also be removed, or read other tensors."""
        return self.replaces(name) and (Relaxation.SIDE_EFFECTS in self.kinds or not has_side_effects(op))


def _control_inputs_last(after: graph_pb2.GraphDef) -> None:
    for node in after.node:
        control = False
        for text in node.input:
            if text[0] == "^":
                control = True
            elif control:
                raise VerifyError(node.name, "structure", f"data input {text!r} after a control input")


def _frames(new: GraphIndex) -> None:
    """Check that all inputs of a node arrive in one frame; else the executor would wait for ever."""
    if not new.frame_names:
        return
    frames = [new.arrival_frame(i) for i in range(len(new))]
    for i in range(len(new)):
        arriving = {frames[p] for p in new.preds(i)}
        if len(arriving) > 1:
            raise VerifyError(new.names[i], "frames", f"inputs arrive in frames {sorted(arriving)}")


def _kept(old: GraphIndex, new: GraphIndex, allowed: _Allowed, keep: set[str]) -> None:
    for name, op in zip(old.names, old.ops, strict=True):
        taken_apart = allowed.takes_apart(name, op)
        if name in new.index:
            now = new.ops[new.index[name]]
            if now != op and not (taken_apart and Relaxation.OPS in allowed.kinds):
                raise VerifyError(name, "op", f"was {op}, is {now}")
        elif op in _ENDS or name in keep or (has_side_effects(op) and not taken_apart):
            raise VerifyError(name, "kept", f"a {op} may not be dropped")
        elif not taken_apart and not (op in _MAY_GO and Relaxation.COPIES in allowed.kinds):
            raise VerifyError(name, "kept", f"a {op} was dropped and no pass says it replaced it")


def _same_attributes(before: graph_pb2.GraphDef, after: graph_pb2.GraphDef, allowed: _Allowed) -> None:
    """Check the attributes that say what a node computes; ``_...`` are notes or device wishes."""
    old = {node.name: node for node in before.node}
    notes_may_differ = Relaxation.NOTES in allowed.kinds
    for node in after.node:
        was = old.get(node.name)
        if was is None or was == node or allowed.replaces(node.name):
            continue
        for key in sorted({*was.attr, *node.attr}):
            if notes_may_differ and key.startswith("_"):
                continue
            if was.attr.get(key) != node.attr.get(key):
                raise VerifyError(node.name, "attributes", f"{key} is not what it was")


def _same_inputs(old: GraphIndex, new: GraphIndex, allowed: _Allowed) -> None:
    for name, i, j in _in_both(old, new):
        was = [(old.names[p], port) for p, port in old.data_preds[i]]
        now = [(new.names[p], port) for p, port in new.data_preds[j]]
        if was == now or allowed.takes_apart(name, old.ops[i]):
            continue
        through_copies = [_source(old, *x) for x in was] == [_source(new, *x) for x in now]
        if not (through_copies and Relaxation.COPIES in allowed.kinds):
            raise VerifyError(name, "data inputs", f"read {was}, reads {now}")


def _source(index: GraphIndex, name: str, port: int) -> tuple[str, int]:
    """Return the producer and port of a tensor, seen through copies."""
    i = index.index[name]
    while index.ops[i] in _COPIES:
        i, port = index.data_preds[i][port]
    return index.names[i], port


def _added_edges(old: GraphIndex, new: GraphIndex) -> None:
    """Check that each new control edge is legal in the original graph's contexts.

    The new graph's contexts would justify any edge: a node takes on the branches of its inputs.
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
            if reason := old.context_conflict(source, i):
                raise VerifyError(name, "control edge", f"from {producer!r}: {reason}")


def _side_effects(old: GraphIndex, new: GraphIndex) -> None:
    """Check that ops on the same state run in their old order; only removed edges can lose it."""
    if _only_grew(old, new):
        return
    for first, then in conflicts(old):
        earlier, later = old.names[first], old.names[then]
        both_stayed = earlier in new.index and later in new.index
        if both_stayed and not new.implied(earlier, later):
            raise VerifyError(later, "side effects", f"no longer runs after {earlier!r}")


def _only_grew(old: GraphIndex, new: GraphIndex) -> bool:
    kept = ((old.preds(i), new.preds(j)) for _, i, j in _in_both(old, new))
    return old.index.keys() <= new.index.keys() and all(
        {old.names[p] for p in was} <= {new.names[p] for p in now} for was, now in kept
    )


def _in_both(old: GraphIndex, new: GraphIndex) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each node that stayed, and its number in both graphs."""
    for i, name in enumerate(old.names):
        if name in new.index:
            yield name, i, new.index[name]


def _nothing_new(old: GraphIndex, new: GraphIndex, allowed: _Allowed) -> None:
    if Relaxation.NEW_NODES in allowed.kinds:
        return
    for name, op in zip(new.names, new.ops, strict=True):
        if name not in old.index:
            raise VerifyError(name, "new nodes", f"a {op} was added and no pass declares that")


def _same_devices(before: graph_pb2.GraphDef, after: graph_pb2.GraphDef, allowed: _Allowed) -> None:
    if Relaxation.DEVICES in allowed.kinds:
        return
    devices = {node.name: node.device for node in before.node}
    for node in after.node:
        was = devices.get(node.name, node.device)
        if node.device != was:
            detail = f"was on {was!r}, is on {node.device!r}, and no pass declares that"
            raise VerifyError(node.name, "devices", detail)


def _same_waits(old: GraphIndex, new: GraphIndex, allowed: _Allowed) -> None:
    """Check that nodes that were not replaced wait for no more and no fewer than is declared."""
    more, fewer = Relaxation.MORE_WAITS in allowed.kinds, Relaxation.FEWER_WAITS in allowed.kinds
    if more and fewer:
        return
    for name, i, j in _in_both(old, new):
        if allowed.replaces(name):
            continue
        was, now = ({x.names[p] for p in x.control_preds[n]} for x, n in ((old, i), (new, j)))
        if not more and now - was:
            detail = f"now waits for {sorted(now - was)} and no pass declares that"
            raise VerifyError(name, "more waits", detail)
        if not fewer and was - now:
            detail = f"no longer waits for {sorted(was - now)} and no pass declares that"
            raise VerifyError(name, "fewer waits", detail)


def _same_functions(before: graph_pb2.GraphDef, after: graph_pb2.GraphDef, allowed: _Allowed) -> None:
    if Relaxation.FUNCTIONS in allowed.kinds or before.library == after.library:
        return
    was, now = ({f.signature.name: f for f in graph_def.library.function} for graph_def in (before, after))
    name = min((name for name in {*was, *now} if was.get(name) != now.get(name)), default="?")
    raise VerifyError(name, "functions", "the library differs and no pass declares that")
