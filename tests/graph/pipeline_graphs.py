"""Judges a graph that a pipeline has rewritten by the graph alone."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cached_property

from grappler_passes.analysis.steps import is_sum
from grappler_passes.graph.dependencies import GraphIndex
from tests.zoo import KERAS_3
from tf_ooo.modes.pipeline import tasks_of

_ORDERED = ("F", "dO", "dW")


class Rewritten:
    """The rewritten graph of a report, with the tasks of its ops."""

    def __init__(self, report):
        self.graph, self.planned = report.rewritten_graph, report.planned
        self.index, self.tasks = GraphIndex(self.graph), tasks_of(self.graph)

    @cached_property
    def _ops_and_loops(self):
        """Ops of each task, and its ops in loops."""
        ops, loops = {}, {}
        for name, task in self.tasks.items():
            i = self.index.index[name]
            if self.index.contexts[i].frame:
                loops.setdefault(task, []).append(i)
            elif self.index.ops[i] not in ("Const", "NoOp"):
                ops.setdefault(task, []).append(i)
        return ops, loops

    def kinds_by_device(self):
        """Kinds of ops by device, as "CPU:1"."""
        kinds = {}
        for node in self.graph.node:
            kinds.setdefault(node.device[-5:], set()).add(node.attr["_ooo_kind"].s.decode())
        return {device: of_device - {""} for device, of_device in kinds.items()}

    def loops_by_device(self):
        """On how many devices each while loop has ops, counted by the device it starts on."""
        places = {}
        for node in self.graph.node:
            if node.op == "Enter":
                places.setdefault(node.attr["frame_name"].s, set()).add(node.device[-5:])
        started = {}
        for devices in places.values():
            assert len(devices) == 1, f"a loop is on {sorted(devices)}"
            started[min(devices)] = started.get(min(devices), 0) + 1
        return started

    def uphill(self):
        """Gradients that a later stage takes from an earlier one: backward only goes down."""
        nodes = {node.name: node for node in self.graph.node}

        def stage(name):
            node = nodes.get(name)
            backward = node is not None and node.attr["_ooo_kind"].s in (b"dO", b"dW")
            return node.attr["_ooo_stage"].i if backward else None

        up = []
        for name, node in nodes.items():
            for source in (text.partition(":")[0] for text in node.input if text[0] != "^"):
                if None not in (stage(source), stage(name)) and stage(source) < stage(name):
                    up.append(f"{source} -> {name}")
        return up

    def unplanned(self, upstream=None):
        """Return what ordered ops read of other tasks, though no schedule makes them wait for those.

        ``upstream``: for each stage the stages that it depends on; all before it where None.
        Schedules know that F comes after F below, dO after F and after dO above, dW after F, dO and dO
        above.  What adds up the gradients of a tied weight, and what follows, is no part of any order.  A
        loop computes a stage's dO and dW, and begins with zeros for its dW.
        """
        index, messages, adds = self.index, set(), set()
        controls = [
            (text[1:], node.name) for node in self.graph.node for text in node.input if text[0] == "^"
        ]
        ordered = {name for pair in controls for name in pair}
        for i in index.order:
            name, reader = index.names[i], self.tasks.get(index.names[i])
            for source in (index.names[p] for p, _ in index.data_preds[i]):
                task = self.tasks.get(source)
                if _not_of_one_micro_batch(task, reader) or (
                    _expected(task, reader, upstream) and source not in adds
                ):
                    continue
                if index.ops[i] == "Enter" and task.stage == reader.stage:
                    continue
                both_dw = {task.kind, reader.kind} == {"dW"}
                if both_dw:
                    adds.add(name)
                if not both_dw or name in ordered:
                    messages.add(f"{reader.kind}:{reader.stage} reads {task.kind}:{task.stage} ({name})")
        return sorted(messages)

    def unordered(self):
        """Tasks of a lane that do not wait for the one before, though most of their ops should.

        A stage's dO and dW of a micro-batch run in any order where backward is one task, and where one loop
        computes both: what of the dW feeds that loop does not wait for later tasks either.  Nor do reads of
        weights, where one stands for those of all micro-batches, and sums over these.
        """
        index, fused = self.index, self.planned.fused_backward
        ops, loops = self._ops_and_loops
        pairs = []
        for lane in self.planned.lanes.values():
            tasks = [task for task in lane if task.kind in _ORDERED and ops.get(task)]
            for before, after in itertools.pairwise(tasks):
                looped = loops.get(dataclasses.replace(after, kind="dO"), []) if after.kind == "dW" else []
                if is_backward_pair(before, after) and (fused or looped):
                    continue
                work = [i for i in ops[after] if not self._is_shared(i)]
                able = [i for i in work if not any(index.implied(i, j) for j in looped)]
                free = [i for i in able if not any(index.implied(j, i) for j in ops[before])]
                if len(free) > len(able) / 2:
                    pairs.append(f"{before} {after}")
        return pairs

    def _is_shared(self, i):
        """Return whether an op is there for more than one micro-batch."""
        return self.index.ops[i] == "ReadVariableOp" or is_sum(self.graph.node[i])

    def sent_early(self):
        """Return, for each dO that is one task with its dW, how many ops of dW its messages wait for, and
        which not.

        Messages are results that other tasks read.  What of dW is computed from one of them cannot be waited
        for, and the sums over micro-batches belong to no task.
        """
        index, (ops, _) = self.index, self._ops_and_loops
        waited_for, early = 0, []
        for lane in self.planned.lanes.values():
            for before, after in itertools.pairwise(task for task in lane if task.kind in _ORDERED):
                if not is_backward_pair(before, after):
                    continue
                own = [i for i in ops.get(after, ()) if not is_sum(self.graph.node[i])]
                leaving = [i for i in ops.get(before, ()) if self._readers(i) - {*ops[before], *own}]
                own = [j for j in own if not any(index.implied(i, j) for i in leaving)]
                for i, j in itertools.product(leaving, own):
                    waited_for += index.implied(j, i)
                    if not index.implied(j, i):
                        early.append(f"{index.names[i]} before {index.names[j]}")
        return waited_for, early

    def _readers(self, i):
        """Return the ops that read an op's results."""
        return {s for s in self.index.succs[i] if any(p == i for p, _ in self.index.data_preds[s])}

    def redundant(self):
        """Control edges between tasks, or from and to a join, that follow from all others."""
        index = self.index
        edges = []
        for node in self.graph.node:
            inputs = [text.lstrip("^").partition(":")[0] for text in node.input]
            for name in (text[1:] for text in node.input if text[0] == "^"):
                if not self._is_ours(name, node.name):
                    continue
                i = index.index[name]
                rest = [index.index[other] for other in inputs if other != name]
                if inputs.count(name) > 1 or any(index.implied(i, other) for other in rest):
                    edges.append(f"{name} -> {node.name}")
        return edges

    def _is_ours(self, name, reader):
        if "tf_ooo_join" in name + reader:
            return True
        index, tasks = self.index, self.tasks
        if all("Variable" in index.ops[index.index[end]] for end in (name, reader)):
            return False  # TensorFlow's own, between accesses to one variable
        kinds = {tasks[end].kind for end in (name, reader) if end in tasks}
        return kinds <= set(_ORDERED) and len({tasks.get(name), tasks.get(reader)} - {None}) == 2


def is_backward_pair(before, after):
    """Return whether these are the dO and the dW of one stage and micro-batch."""
    same = (before.stage, before.microbatch) == (after.stage, after.microbatch)
    return same and (before.kind, after.kind) == ("dO", "dW")


def _not_of_one_micro_batch(task, reader):
    if task is None or reader is None or "U" in (task.kind, reader.kind):
        return True
    return task.microbatch != reader.microbatch


def _expected(source, reader, upstream=None):
    def is_below(stage, other):
        return stage == other or (stage < other if upstream is None else stage in upstream[other])

    if reader.kind not in ("dO", "dW"):
        return source.kind == "F" and is_below(source.stage, reader.stage)
    if source.kind == "F":
        return (
            upstream is None or is_below(source.stage, reader.stage) or is_below(reader.stage, source.stage)
        )
    return source == reader or (source.kind == "dO" and is_below(reader.stage, source.stage))


def assert_in_order(report, devices, weights_everywhere=True):
    """Tasks are on all devices, in the order of their lanes, by no more edges than that takes.

    Not ``weights_everywhere``: a stage may be a part of a long layer, without weights.
    """
    rewritten = Rewritten(report)
    kinds = rewritten.kinds_by_device()
    assert set(kinds) == {f"CPU:{number}" for number in range(devices)}
    assert {"F", "dO", "dW", "U"} <= set().union(*kinds.values())
    everywhere = {"F", "dW", "U"} if weights_everywhere else {"F"}
    assert all(everywhere <= of_device for of_device in kinds.values())
    assert report.added_edges > (20 if KERAS_3 else 15)  # a recurrent layer of Keras 2 is one call
    assert report.moved_ops > 20
    assert [note for note in report.notes if note.startswith("skipped")] == []
    assert rewritten.unordered() == []
    assert rewritten.uphill() == []
    assert rewritten.unplanned() == []
    assert rewritten.redundant() == []
    return rewritten
