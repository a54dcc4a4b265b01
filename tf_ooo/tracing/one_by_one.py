"""Runs the micro-batches of a step one after the other, before its updates or in turns with them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from grappler_passes.analysis.steps import STEP_ATTR, STEP_SCOPE
from grappler_passes.compat import graph_protos
from grappler_passes.compat.graph_protos import split_input
from grappler_passes.graph.dependencies import has_side_effects, only_reads, reached
from tf_ooo.compat import func_graphs, keras_compiled, nests, tf_functions, train_function
from tf_ooo.tracing.assigned import Writes, read_after
from tf_ooo.tracing.collecting import Collecting
from tf_ooo.tracing.intercepting import CopiesNeeded, TurnsNeeded, ops_so_far
from tf_ooo.tracing.micro_batches import DRAWN, Split, StepRefused, upstream
from tf_ooo.tracing.states import States
from tf_ooo.tracing.variables import names_by_handle

if TYPE_CHECKING:
    import keras


# Other processes know each of these by a name or a number of its own.
_SENDS = ("Collective", "Horovod", "Nccl")
# TensorFlow seeds the ops of a graph by their number, which stays below this.
_BETWEEN_SEEDS = 10_000_019


class TracedPart:
    """Holds the ops of a micro-batch's train step in the graph being traced: all that are made from here on.

    Copies get the names that another trace would give them, so that graph optimizers, which sort by name,
    treat all micro-batches alike.  What the function captures, and the ops ``left_out``, are not copied.

    It may be traced in several parts, with other ops between: :meth:`go_on`.

    Args:
        number: the micro-batch's number; names have its scope, and attributes its mark.
        part: the micro-batch's rows, a nest.
        draws_anew: whether copies may draw other random numbers, by other seeds; else they may draw none.
    """

    def __init__(self, number: int, part: object, draws_anew: bool = False) -> None:
        self._number, self.part, self._draws_anew = number, part, draws_anew
        self._nodes: dict[str, Any] = {}
        self._earlier: set[str] = set()  # ops of earlier parts
        self._versions: Any = None
        self.why_not = ""
        self.go_on()

    def go_on(self) -> None:
        """Begin the next part, made from here on, which reads the parts before."""
        self._earlier.update(self._nodes)
        self._nodes, self.begin = {}, ops_so_far()  # the number of its first op

    def end(self, left_out: Collection[int], wanted: Sequence[Any] | None = None) -> None:
        """End the micro-batch, or its present part: its last op was made.

        ``left_out`` are numbers of ops that are made anew.  Only what ``wanted`` tensors and effects need is
        copied: TensorFlow would remove the rest from each copy.  None: later parts may read anything.  Sets
        ``why_not`` if it has to be traced again.
        """
        graph = tf.compat.v1.get_default_graph()
        captures, graph_def = func_graphs.captures_so_far(graph), graph.as_graph_def()
        inside = {
            op.name
            for number, op in enumerate(graph.get_operations()[self.begin :], self.begin)
            if op.type != "Placeholder" and number not in left_out and op.name not in captures
        }
        self._versions = graph_def.versions
        self._nodes = {node.name: node for node in graph_def.node if node.name in inside}
        if wanted is not None:
            needed = _needed(self._nodes, wanted)
            self._nodes = {name: node for name, node in self._nodes.items() if name in needed}
        self.why_not = self._why_no_copies(graph)

    def _why_no_copies(self, graph: Any) -> str:
        """Say why copies of these ops would differ from new traces; empty if they would not."""
        called = {kind for _, kind in func_graphs.ops_called_from(graph)}
        for kind in sorted({node.op for node in self._nodes.values()} | called):
            if graph_protos.keeps_random_state(kind) and not (self._draws_anew and kind not in called):
                return f"{kind} draws random numbers from a state of its own"
            if kind.startswith(_SENDS):
                return f"{kind} has a name that other processes know"
        for node in self._nodes.values():
            if "shared_name" in node.attr and node.attr["shared_name"].s:
                return f"{node.name} has a state that is known by a name"
            if any(text[0] == "^" and text[1:] not in self._nodes for text in node.input):
                return f"{node.name} waits for what was made before its micro-batch"
        return ""

    def copy(self, number: int, part: object, wanted: Sequence[Any]) -> list[Any]:
        """Copy the micro-batch, or its latest part, for other rows; return the ``wanted`` copies.

        ``part`` has the structure and shapes of the first one's rows.  Tensors from outside stay themselves.
        """
        graph = tf.compat.v1.get_default_graph()
        graph_def = graph_pb2.GraphDef(versions=self._versions)
        graph_def.node.extend(self._nodes.values())
        renamed = _Renamed(self._number, number, self._nodes)
        for node in graph_def.node:
            renamed.change(node)
        inside = [tensor for tensor in wanted if tf.is_tensor(tensor) and tensor.op.name in self._nodes]
        copies = tf.graph_util.import_graph_def(
            graph_def,
            self._given(graph, part, renamed),
            [renamed.tensor(tensor.name) for tensor in inside],
            name="",
        )
        by_id = {id(tensor): copied for tensor, copied in zip(inside, copies, strict=True)}
        for tensor in inside:
            by_id[id(tensor)].set_shape(tensor.shape)  # Python code may have set it
        for tensor in wanted:
            if tf.is_tensor(tensor) and tensor.op.name in self._earlier:
                by_id[id(tensor)] = graph.get_tensor_by_name(renamed.tensor(tensor.name))
        return [by_id.get(id(tensor), tensor) for tensor in wanted]

    def _given(self, graph: Any, part: Any, renamed: _Renamed) -> dict[str, Any]:
        """Return what the copied ops read from other ops: the new rows, and what all micro-batches read."""
        flat = (tf.nest.flatten(each, expand_composites=True) for each in (self.part, part))
        rows = {first.name: other for first, other in zip(*flat, strict=True) if tf.is_tensor(first)}
        given = {}
        for node in self._nodes.values():
            for text in node.input:
                name, port = split_input(text)
                if name not in self._nodes:
                    tensor = f"{name}:{port}"
                    there = renamed.tensor(tensor) if name in self._earlier else tensor
                    given[tensor] = rows[tensor] if tensor in rows else graph.get_tensor_by_name(there)
        return given


def _needed(nodes: Mapping[str, Any], wanted: Iterable[Any]) -> set[str]:
    """Return the names of the nodes that some effect, or a wanted tensor, comes from."""
    effects = (name for name, node in nodes.items() if has_side_effects(node.op))
    names = {tensor.op.name for tensor in wanted if tf.is_tensor(tensor)}.union(effects)
    return reached(
        names & nodes.keys(),
        lambda name: [read for text in nodes[name].input if (read := split_input(text)[0]) in nodes],
    )


class _Renamed:
    """Renames the nodes of one micro-batch to those of another."""

    def __init__(self, number: int, other: int, names: Collection[str]) -> None:
        self._scope = re.compile(rf"(^|[/@]){STEP_SCOPE}{number}(?=/|$)")
        self._by, self._other, self._names = rf"\g<1>{STEP_SCOPE}{other}", other, names
        self._more_seed = _BETWEEN_SEEDS * (other - number)

    def name(self, name: str) -> str:
        return self._scope.sub(self._by, name)

    def tensor(self, name: str) -> str:
        op, _, port = name.partition(":")
        return f"{self.name(op)}:{port}"

    def change(self, node: Any) -> None:
        """Change names, inputs from inside, colocations, the mark, and seeds that are not drawn."""
        node.name = self.name(node.name)
        if graph_protos.keeps_random_state(node.op) and (node.attr["seed"].i or node.attr["seed2"].i):
            node.attr["seed2"].i += self._more_seed
        for place, text in enumerate(node.input):
            name, _ = split_input(text)
            if name in self._names:
                node.input[place] = text.replace(name, self.name(name), 1)
        if STEP_ATTR in node.attr:
            node.attr[STEP_ATTR].i = self._other
        graph_protos.keep_colocations(node, self._names.__contains__)
        if "_class" in node.attr:
            beside = node.attr["_class"].list.s
            beside[:] = [self._scope.sub(self._by, wish.decode()).encode() for wish in beside]


@dataclass(frozen=True)
class MicroBatches:
    """Holds what the micro-batches of a step are traced with; ``scope`` stands before the number in names."""

    model: keras.Model
    split: Split
    collecting: Collecting
    states: States
    scope: str

    def numbered(self, number: int) -> AbstractContextManager[None]:
        return func_graphs.numbered_step(number, STEP_ATTR, self.scope)

    def trace(self, number: int, given: list[Any], counts: bool = True) -> Any:
        """Return the logs of a micro-batch, whose gradients and states are collected.

        ``given``: its rows, and their share of the batch's; ``counts``: whether Keras 2 counts the step.
        """
        rows, share = given
        # The step is traced within: gradients of a function of its own could not be added up outside.
        train_step = tf_functions.undecorated(self.model.train_step)
        with (
            self.states.micro_batch(given),
            self.collecting.micro_batch(number, share),
            keras_compiled.weighted_means(self.model, share),
        ):
            logs = train_function.step_on_data(self.model, train_step, counts)(rows)
            return nests.with_variables_held(logs)


class OneByOne:
    """Traces the train step of each micro-batch in the function being traced.

    Only the first micro-batch of each size is traced; the others are copies of it, unless copies would
    differ. Raises CopiesNeeded if they are no copies, but should be and ``may_be_copies`` in another trace.

    Attributes:
        changed: names of the states that each micro-batch assigns.
    """

    def __init__(self, parts: MicroBatches, may_be_copies: bool) -> None:
        self._parts, self._may_be_copies = parts, may_be_copies
        self._traced: dict[Any, tuple[TracedPart, nests.Packed]] = {}
        self.changed: list[str] = []

    def run(self, batch: object) -> list[Any]:
        """Return the logs of each micro-batch; TurnsNeeded if weights are read after their update."""
        logs, split = [], self._parts.split
        for number in range(split.count):
            with self._parts.numbered(number):
                logs.append(self._run(number, split.part(batch, number)))
            for applied in () if number else self._parts.collecting.applied:
                variables = [*applied.update.variables, *keras_compiled.state_of(applied.update.optimizer)]
                if again := read_after([(variables, applied.collected_at)]):
                    raise TurnsNeeded(again)
        return logs

    def _run(self, number: int, part: object) -> Any:
        parts, count = self._parts, self._parts.split.count
        given = [part, parts.split.share(number)]
        if self._kind(number) in self._traced:
            ops, results = self._traced[self._kind(number)]
            logs, states, *grads = results.unpack(ops.copy(number, given, results.tensors))
            parts.collecting.add_copied(number, grads)
            parts.states.add(number, states)
            return logs
        ops = TracedPart(number, given)
        logs = parts.trace(number, given, counts=number == count - 1)
        if number or count == 1:
            self._kept_for_copies(number, ops, logs, set())
        else:
            writes = Writes(parts.model, given, ops.begin)
            once = writes.once(parts.states.each)
            if once and not parts.states.may_be_copies and self._may_be_copies:
                raise CopiesNeeded("a state that depends on no data changes")
            once = once if parts.states.may_be_copies else set()
            kept = self._kept_for_copies(number, ops, logs, once)
            self.changed = writes.by_each(once if kept else ())
        parts.states.add(number, parts.states.values)
        return logs

    def _kept_for_copies(self, number: int, ops: TracedPart, logs: object, once: set[int]) -> bool:
        """Keep a micro-batch, without the ops ``once``, for others to copy; False if it cannot be copied."""
        if self._kind(number) not in map(self._kind, range(number + 1, self._parts.split.count)):
            return False
        given = self._parts.collecting.given
        results = nests.Packed([logs, self._parts.states.values, *(each.grads for each in given)])
        ops.end(once.union(*(each.ops for each in given)), results.tensors)
        if ops.why_not:
            return False
        self._traced[self._kind(number)] = ops, results
        return True

    def _kind(self, number: int) -> tuple[Hashable, int]:
        """Return equal keys for micro-batches that copy one another; with Keras 2 all keys differ.

        There the last one counts the step, and TensorFlow's optimizers treat copies in another way: sums of
        gradients were taken to be another layer's (2.15).
        """
        alone = train_function.counts_steps(self._parts.model)
        return self._parts.split.kind(number), number if alone else 0


# Traces a step whose updates come in turns: one's gradients are at weights that another has just changed. A
# critic is updated, then the generator by what the critic says now (Goodfellow et al. 2014, algorithm 1). All
# micro-batches take each turn before its update, so that the update is the batch's and the next turn sees it.


class InTurns:
    """Traces a step; its first micro-batch is traced, the others are copies of it, turn by turn.

    ``applying`` is entered around each update.  Raises StepRefused if others cannot be copies of the first.
    """

    def __init__(self, parts: MicroBatches, applying: Callable[[], AbstractContextManager[Any]]) -> None:
        self._parts, self._applying = parts, applying
        self._turn = 0
        self.changed: list[str] = []  # names of the states that each micro-batch assigns
        if parts.split.count > 1 and not parts.states.may_be_copies:
            keras_2 = train_function.counts_steps(parts.model)
            raise _no_copies("Keras 2" if keras_2 else "micro-batches of different numbers of rows")

    def run(self, batch: object) -> list[Any]:
        parts, split = self._parts, self._parts.split
        shares = [split.share(number) for number in range(split.count)]
        self._given = [[split.part(batch, number), share] for number, share in enumerate(shares)]
        parts.collecting.on_given = self._end_turn
        with contextlib.ExitStack() as self._mark:
            self._mark.enter_context(func_graphs.numbered_turn(0))
            with parts.numbered(0):
                self._traced = TracedPart(0, self._given[0], draws_anew=True)
                logs = parts.trace(0, self._given[0])
                self._end_part(())
            first = logs, parts.states.values
            results = [first, *self._copies(first)]
            for number, (_, states) in enumerate(results):
                with parts.numbered(number):
                    parts.states.add(number, states)
            return [logs for logs, _ in results]

    def _end_turn(self) -> None:
        """End a turn: the other micro-batches give the optimizer their gradients too, then it updates."""
        parts, collecting = self._parts, self._parts.collecting
        given = collecting.given[-1]
        self._end_part(given.ops)
        for number, grads in enumerate(self._copies(given.grads), 1):
            with parts.numbered(number):
                collecting.add_copied(number, [grads], self._turn)
        with parts.numbered(parts.split.count), self._applying():
            collecting.apply(self._turn)
        self._turn += 1
        self._mark.close()
        self._mark.enter_context(func_graphs.numbered_turn(self._turn))
        self._traced.go_on()

    def _end_part(self, left_out: Collection[int]) -> None:
        parts, traced = self._parts, self._traced
        if parts.split.count == 1:
            return
        writes = Writes(parts.model, traced.part, traced.begin)
        once = writes.once(parts.states.each)
        if self._turn:  # nothing is updated before the first turn
            once.update(self._of_updated_weights())
        self.changed.extend(name for name in writes.by_each(once) if name not in self.changed)
        traced.end(once.union(left_out))
        if traced.why_not:
            raise _no_copies(traced.why_not)

    def _of_updated_weights(self) -> Iterator[int]:
        """Yield the numbers of this part's ops that change a state by updated weights alone.

        They may be a moving average of weights, or a clipping: no other micro-batch repeats them.
        """
        updated = {
            handle
            for applied in self._parts.collecting.applied[: self._turn]
            for handle in names_by_handle(applied.update.variables)
        }
        data = {id(tensor) for tensor in nests.Packed(self._given[0][0]).tensors}
        operations = tf.compat.v1.get_default_graph().get_operations()
        for number, op in enumerate(operations[self._traced.begin :], self._traced.begin):
            writes = has_side_effects(op.type) and not only_reads(op.type)
            if writes and _is_of_weights_alone(op, updated, data):
                yield number

    def _copies(self, values: object) -> list[Any]:
        """Return the counterparts in the other micro-batches, whose latest parts are copied."""
        packed = nests.Packed(values)
        copies = []
        for number, given in enumerate(self._given[1:], 1):
            with self._parts.numbered(number):
                copies.append(packed.unpack(self._traced.copy(number, given, packed.tensors)))
        return copies


def _no_copies(why: str) -> StepRefused:
    return StepRefused(
        "train_step reads weights again after it has applied their gradients, so all micro-batches take each "
        f"turn before the next, as copies of the first one; they cannot be ({why}): use batches that are a "
        "multiple of microbatches= (drop_remainder=True), microbatches=1, or one device"
    )


def _is_of_weights_alone(op: tf.Operation, updated: Collection[int], data: Collection[int]) -> bool:
    tensors = list(upstream(op.inputs))
    if any(id(tensor) in data or DRAWN.search(tensor.op.type) for tensor in tensors):
        return False
    reads = (tensor.op for tensor in tensors if tensor.op.type == "ReadVariableOp")
    return any(id(read.inputs[0]) in updated for read in reads)
