"""Draws set-ups for several devices: what is drawn beside the model, and what a model needs for it."""

from __future__ import annotations

from dataclasses import replace

from tests.fuzz.catalogue import BATCH_SIZE
from tests.fuzz.setups import Pipeline, Ranks, Setup
from tests.harness.children import Setting
from tests.harness.drawing import Draw
from tf_ooo.planning.policies import schedules_of

MOST_DEVICES = 4
# Compiled tasks are compared with these, whose updates are small where gradients are: one that is nothing
# but rounding has any sign.
SMOOTH = ("SGD", "Adam", "AdamW", "Adamax", "Nadam", "Adagrad", "Adadelta", "RMSprop", "Ftrl")
EPSILON = 1e-3
PLAIN = "keras.optimizers.SGD(learning_rate=0.02)"
SCHEDULES = ("gpipe", *sorted({"auto", *schedules_of("pipeline")} - {"gpipe"}))
# Cases of tests/graph/test_random_pipelines.py.
_IN_THE_SUITE = 12
# Two ranks are started like this, with variables that say more of it; so many numbers in a row by each.
LAUNCHES = {"horovod": {}, "unfused": {"HOROVOD_FUSION_THRESHOLD": "0"}, "collectives": {}}
IN_A_ROW = 10
ORDERS = ("fast_forward", "fast_forward", "reverse_first_k", "reverse_first_k", "in_order", "search", "auto")
# Single steps before a plan that needs costs, at most.
MEASURED = 6


def setting_of(ranks: Ranks | None, devices: int) -> Setting:
    """Says what process a set-up needs, or that it needs two ranks."""
    if not ranks:
        return Setting(devices)
    return Setting(engine=ranks.engine, variables=tuple(LAUNCHES[ranks.launch].items()))


def launch_of(number: int) -> str:
    return tuple(LAUNCHES)[number // IN_A_ROW % len(LAUNCHES)]


def as_pipelines(setup: Setup, draw: Draw) -> Setup:
    """Two schedules, each on devices of its own number; with layers enough for both."""
    first = draw.in_turn(SCHEDULES)
    second = draw.in_turn(SCHEDULES, draw.number + _IN_THE_SUITE)  # so the suite's few cases have all
    if second == first:
        second = draw.choice([name for name in SCHEDULES if name != first])
    pipelines = (_pipeline(first, draw), _pipeline(second, draw))
    microbatches = draw.choice((2, 2, 1, 3, 4))
    if draw.chance(1 / 3):  # the same number, or gradients are added up in another order
        pipelines = tuple(
            replace(each, replicas=2, devices=2 if each.devices == 2 else MOST_DEVICES) for each in pipelines
        )
        microbatches = max(2, microbatches)
    setup = replace(setup, pipelines=pipelines, microbatches=microbatches)
    missing = max(pipeline.layers for pipeline in pipelines) - setup.trained_layers - len(setup.outputs)
    dense = 'h = layers.Dense(units=5, activation="tanh")(h)'
    return replace(setup, model=(*setup.model, *[dense] * missing))


def as_compiled(setup: Setup, draw: Draw) -> Setup:
    """A pipeline op by op, and another one whose tasks XLA compiles."""
    setup = _smooth(as_pipelines(setup, draw), draw)
    first, second = setup.pipelines
    epochs = 2 if not second.profile_steps else 3  # the first steps run op by op
    return replace(setup, pipelines=(first, replace(second, compile_tasks=True)), epochs=epochs)


def as_compiled_ranks(setup: Setup, draw: Draw) -> Setup:
    """Ranks whose steps run op by op, and the same with tasks that XLA compiles, in an order of a name."""
    setup = _smooth(as_ranks(setup, draw), draw)
    assert setup.ranks is not None
    schedule = "fast_forward" if setup.ranks.schedule == "auto" else setup.ranks.schedule
    return replace(setup, ranks=replace(setup.ranks, schedule=schedule, compile_tasks=True))


def _smooth(setup: Setup, draw: Draw) -> Setup:
    """With plain steps or momentum, mostly, or with one of the optimizers in which rounding stays small."""
    momentum = PLAIN.replace(")", ", momentum=0.9)")
    optimizer = draw.choice((PLAIN, momentum, ""))
    name = setup.optimizer.partition("(")[0].rpartition(".")[2]
    if not optimizer and name in SMOOTH:
        more = "" if name in ("SGD", "Ftrl") else f", epsilon={EPSILON}"
        optimizer = f"{setup.optimizer.removesuffix(')')}{more})"
    return replace(setup, optimizer=optimizer or momentum)


def _pipeline(schedule: str, draw: Draw) -> Pipeline:
    devices = draw.choice((2, 2, 3, MOST_DEVICES))
    chunks = draw.choice((None, 2, 3) if devices == 2 else (None, 2))
    group = draw.choice((None, 1, 2))
    return Pipeline(
        schedule,
        devices,
        profile_steps=draw.choice((0, 0, 0, 0, 0, 1, 2)),
        chunks=chunks if schedule == "interleaved_1f1b" else None,
        group=group if schedule == "modulo" else None,
        recompute=draw.choice(("none", "none", "all")),
    )


def as_ranks(setup: Setup, draw: Draw) -> Setup:
    """With options of data parallel, and steps enough for a plan and for some in its order."""
    launch, schedule = launch_of(setup.number), draw.choice(ORDERS)
    op = draw.choice(("Average", "Average", "Average", "Sum"))
    ranks = Ranks(
        launch,
        schedule,
        k=draw.choice((None, 0, 1, 2, 3)) if schedule == "reverse_first_k" else None,
        unroll=draw.choice((None, None, 1, 2)),
        op=op,
        # Horovod adds and divides in 16 bits, TensorFlow's collectives add in 16 and divide in 32.
        compression=draw.choice(("none", "fp16")) if launch != "collectives" else "none",
        weighting=draw.choice(("ranks", "samples")) if op == "Average" else "ranks",
        lockstep=draw.choice(("auto", "epoch", "execution")),
    )
    per_execution, profile_steps = draw.choice((1, 2, 2, 3, 4)), draw.choice((0, 0, 1))
    by_costs = schedule in ("search", "auto", "reverse_first_k") and ranks.k is None
    epochs = max(
        setup.epochs, epochs_after(MEASURED if by_costs else 1, setup.rows, BATCH_SIZE, per_execution)
    )
    return replace(
        setup, ranks=ranks, steps_per_execution=per_execution, profile_steps=profile_steps, epochs=epochs
    )


def epochs_after(measured: int, rows: int, batch_size: int, steps_per_execution: int) -> int:
    """So many that four executions are left after those before a plan: two in either order, one is timed."""
    of_epoch = -(-rows // (batch_size * steps_per_execution))
    return -(-(-(-measured // steps_per_execution) + 4) // of_epoch)
