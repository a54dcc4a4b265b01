"""A step that is spread over rounds without ``fit``, and whether it is: what tests of LayerPipe share."""

from __future__ import annotations

import contextlib
import itertools
import re
from unittest import mock

import tensorflow as tf

from grappler_passes.graph.dependencies import GraphIndex
from tests.graph.layerpipe_by_hand import BATCHES, data, perceptron
from tf_ooo.compat.keras_variables import named
from tf_ooo.modes.layerpipe import fit as layerpipe_fit
from tf_ooo.modes.layerpipe.options import LayerPipe
from tf_ooo.modes.layerpipe.rounds import HIGH, Stages
from tf_ooo.modes.layerpipe.spread import SpreadPlan, spread
from tf_ooo.modes.layerpipe.ticks import Epoch
from tf_ooo.modes.layerpipe.turns import with_given
from tf_ooo.tracing.variables import Moved, all_variables, build

DEVICES = [f"/job:localhost/replica:0/task:0/device:CPU:{number}" for number in range(4)]
# Three of the nine batches are left when the rounds of four devices are full.
TOGETHER = 3
_KINDS = ("F", "dO", "dW")
_ROUND = re.compile(r"^round_\d+/")


def placed(forward, output_grads, weight_grads, shares=None):
    """Stages from the processors of each layer's F, dO and dW."""
    of = {}
    for layer, processors in enumerate(zip(forward, output_grads, weight_grads, strict=True)):
        of.update({(kind, layer): at for kind, at in zip(_KINDS, processors, strict=True)})
    shares = shares or {}
    of.update({(HIGH, layer): high for layer, (_, high) in shares.items()})
    return Stages(1 + max(of.values()), of, shares)


STAGES = {
    "one": placed([0] * 4, [0] * 4, [0] * 4),
    "two": placed([0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]),
    "four": placed(range(4), range(4), range(4)),
    "dW apart": placed([0, 1, 1, 2], [0, 1, 1, 2], [1, 1, 2, 2]),
    "F apart": placed([0, 1, 2, 2], [0, 1, 1, 2], [0, 0, 1, 2]),
    "lowest dO in two parts": placed([0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1], {1: (0.4, 1)}),
    "dO in two parts": placed([0, 1, 2, 2], [0, 1, 1, 2], [0, 1, 2, 2], {2: (0.4, 2)}),
    "dO in two parts below dW": placed([0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 3, 3], {2: (0.4, 2)}),
}


def _layer_in(path):
    return path.rpartition("/")[0].rpartition("/")[2]


def spread_over(stages, weights, count=BATCHES, frozen=None):
    """Trains the perceptron for an epoch: its weights, the losses after each batch, and the Spread."""
    model = perceptron()
    if frozen is not None:
        model.layers[frozen].trainable = False
        model.compile(model.optimizer, "mse", jit_compile=False)
    x, y = data(count)
    build(model, [model.optimizer], model.train_step, iter(tf.data.Dataset.from_tensors((x[0], y[0]))))
    moved = Moved(model)
    _move(moved, model, stages, frozen)
    plan = SpreadPlan(stages, DEVICES[: stages.processors])
    retimed = spread(model, (x[0], y[0]), plan, LayerPipe(weights=weights))
    retimed.ticks.reset()
    feed = iter(zip(x, y, strict=True))

    def batches():
        batch = next(feed, None)
        return None if batch is None else [tf.constant(part) for part in batch]

    epoch = Epoch(retimed.ticks, batches, TOGETHER)
    losses = []
    while (logs := epoch.step()) is not None:
        losses.append(float(logs["loss"]))
    moved.restore()
    assert_spread(retimed, stages.processors)
    return model.get_weights(), losses, retimed


def _move(moved, model, stages, frozen):
    """Weights to the processor of their dW, those of a frozen layer with the layer before it."""
    trained = [layer.name for layer in model.layers if layer.trainable]
    names = named(all_variables(model))
    homes = {
        id(variable): DEVICES[stages.of["dW", trained.index(_layer_in(name))]]
        for name, variable in names.items()
        if _layer_in(name) in trained
    }
    if frozen is not None:
        homes |= {id(v): DEVICES[stages.of["F", frozen - 1]] for v in model.layers[frozen].variables}
    moved.move(homes, names.values())


# -- is it spread? ---------------------------------------------------------------------------------


def assert_spread(made, processors):
    """In the functions that ran, every processor has ops of its own, which wait for the task before.

    Returns how many do so for no other reason than that order.
    """
    graphs = [function.get_concrete_function().graph for function in made.ticks._functions.values()]
    ops = [op for graph in graphs for op in graph.get_operations()]
    used = {op.device[-5:] for op in ops if _ROUND.sub("", op.name) in made.traced.where and op.device}
    assert used == {f"CPU:{number}" for number in range(processors)}
    assert bool(made.delays.registers) == (processors > 1)
    full = [key for key in made.ticks._functions if key[:2] == (0, made.ticks.last)]
    if not full:  # there were fewer batches than rounds
        return 0
    ordered, late = _in_turn(made, max(full, key=lambda key: key[2]))
    assert late == [], "they do not wait for the task before"
    assert len(ordered) > 0
    return len(ordered)


def _in_turn(made, key):
    """Return the ops in no order of data that wait for their processor's task before, and the others.

    What the tasks before need themselves cannot wait, and is neither.
    """
    index, ordered, late = _index_of(made, key), [], []
    for tasks in _lanes(made, index, key[2]):
        earlier = []
        for before, after in itertools.pairwise(tasks):
            earlier += before
            for i in after:
                if any(index.implied(i, j) for j in earlier):
                    continue
                waits = all(index.implied(j, i) for j in before)
                (ordered if waits else late).append(index.names[i])
    return ordered, late


def _index_of(made, key):
    """Index a function, or a single round, whose ops are in no scope, before other ops took their names."""
    if key[2] == 1:
        return GraphIndex(with_given(made.ticks._parts[key[:2]].turns.graph_def))
    return GraphIndex(made.ticks._functions[key].get_concrete_function().graph.as_graph_def())


def _lanes(made, index, rounds):
    """The ops of each processor's tasks, in the order that these are to have."""
    lanes = {}
    for number, kind in itertools.product(range(rounds), _KINDS):
        for name, (own, _) in made.traced.where.items():
            i = index.index.get(f"round_{number}/{name}" if rounds > 1 else name)
            if (
                own.removesuffix("/high") != kind
                or i is None
                or name not in made.rounds.device_of
                or index.ops[i] == "Const"
            ):
                continue
            lane = lanes.setdefault(made.rounds.device_of[name], {})
            lane.setdefault((number, kind), []).append(i)
    return [list(lane.values()) for lane in lanes.values()]


@contextlib.contextmanager
def recorded():
    """Yield a list of each Spread that ``fit`` makes in the block."""
    spreads = []

    def recording(*arguments, **options):
        spreads.append(spread(*arguments, **options))
        return spreads[-1]

    with mock.patch.object(layerpipe_fit, "spread", recording):
        yield spreads


def fit_spread(model, callback, *data, first=(), callbacks=(), **arguments):
    """The history of a fit in whose rounds every device has had its part, in order.

    Args:
        first, callbacks: others, before ours and behind it.
    """
    with recorded() as spreads:
        history = model.fit(*data, verbose=0, callbacks=[*first, callback, *callbacks], **arguments)
    assert len(spreads) == 1
    assert_spread(spreads[0], len(callback.report.layerpipe["devices"]))
    return history.history
