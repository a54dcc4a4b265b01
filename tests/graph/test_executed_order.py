"""Compares what TensorFlow ran, and when, with the schedule: by the profiler's events, on real steps."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict

import pytest

from grappler_passes.graph.dependencies import GraphIndex
from tests import zoo
from tests.same_bits import Training, assert_ordered
from tests.zoo import keras
from tf_ooo.compat import tf_profiler
from tf_ooo.rewriting.lowering import task_ops

pytestmark = pytest.mark.takes(25)
NAMES = ("mlp", "convolutions", "lstm_gru", "attention")


class OneProfiledStep(keras.callbacks.Callback):
    """Begin and end of every op in the first step of the second epoch: nothing is traced any more then."""

    def __init__(self):
        super().__init__()
        self.events, self._epoch, self._stack = [], 0, contextlib.ExitStack()

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self._epoch, batch) == (1, 0):
            self._stack.enter_context(tf_profiler.traced_events(self.events))

    def on_train_batch_end(self, batch, logs=None):
        self._stack.close()

    def spans(self):
        """{node: (when it first began, when it last ended)}; a node in a loop runs several times."""
        times = defaultdict(list)
        for event in self.events:
            node, colon, op_type = event.label.rpartition(":")
            if colon and re.fullmatch(r"_?[A-Z]\w*", op_type) and not event.line.startswith("tf_data"):
                times[node].append((event.begin_s, event.begin_s + event.duration_s))
        return {node: (min(b for b, _ in runs), max(e for _, e in runs)) for node, runs in times.items()}


@pytest.fixture(scope="module")
def training(request):
    return Training(lambda: zoo.compiled(zoo.SMALL[request.param]), request.param, epochs=2)


def scheduled_pairs(rewrite):
    """(op, op of a later task) as the schedule has them: outside of loops, not in one block of dO tasks.

    What an earlier task needs runs before it, whatever task it counts to.
    """
    tasks, index = task_ops(rewrite.training_graph), GraphIndex(rewrite.graph_def)
    (lane,) = rewrite.schedule.lanes.values()
    earlier, needed, block = [], set(), 0
    for task, previous in zip(lane, [None, *lane], strict=False):
        block += previous is None or not previous.kind == task.kind == "dO"
        names = [name for name in tasks.ops[task] if not index.contexts[index.of(name)].frame]
        for after in (name for name in names if name not in needed):
            yield from ((before, after) for before, of_block in earlier if of_block != block)
        earlier += [(name, block) for name in names]
        needed = needed.union(*(ancestors(rewrite.training_graph.ops, name) for name in tasks.ops[task]))


def ancestors(ops, name):
    """Return what an op needs for its data, and itself."""
    return reached(name, lambda op: [*(source for source, _ in ops[op].inputs), *ops[op].control_inputs])


def inputs_of(graph_def):
    """{node: nodes that it waits for}; the edge that closes a loop left out."""
    ops = {node.name: node.op for node in graph_def.node}
    names = {
        node.name: [text.lstrip("^").partition(":")[0] for text in node.input] for node in graph_def.node
    }
    return {
        name: [source for source in sources if ops[name] != "Merge" or ops[source] != "NextIteration"]
        for name, sources in names.items()
    }


def reached(start, sources_of):
    seen, stack = {start}, [start]
    while stack:
        new = set(sources_of(stack.pop())) - seen
        seen |= new
        stack += new
    return seen


def waiting_pairs(pairs, graph_def):
    """Return the pairs of which the graph has the second wait for the first."""
    inputs, pairs = inputs_of(graph_def), list(pairs)
    needs = {after: reached(after, inputs.__getitem__) for after in {a for _, a in pairs} & inputs.keys()}
    return {(before, after) for before, after in pairs if before in needs.get(after, ())}


@pytest.mark.parametrize("schedule", ["fast_forward", "in_order"])
@pytest.mark.parametrize("training", NAMES, indirect=True)
def test_ops_run_in_the_order_of_the_schedule(training, schedule):
    profiled = OneProfiledStep()
    ours = training.ours(profiled, schedule=schedule)
    assert_ordered(ours.report)
    ((stock_graph, rewrite),) = ours.rewrites
    spans = profiled.spans()
    assert all(spans.keys() & set(names) for names in task_ops(rewrite.training_graph).ops.values())
    wanted = {(a, b) for a, b in scheduled_pairs(rewrite) if a in spans and b in spans}
    held = waiting_pairs(wanted, rewrite.graph_def)
    # Gradients that come out of one loop cannot wait for each other.
    assert held == wanted or training.name == "lstm_gru"
    assert not [pair for pair in held if spans[pair[0]][1] > spans[pair[1]][0]]
    assert held - waiting_pairs(held, stock_graph), "TensorFlow's own order would pass as well"
