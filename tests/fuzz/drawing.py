"""A set-up from a number: every kind of layer, optimizer and loss has its turn, all else is chance."""

from __future__ import annotations

import functools

from tests.fuzz.catalogue import (
    AVERAGES,
    CLIPPING,
    JOINS,
    LAYERS,
    LOSS_ARGUMENTS,
    LOSSES,
    METRICS,
    OPTIMIZERS,
    POLICIES,
    RATE_SCHEDULES,
    SCHEDULES,
)
from tests.fuzz.models import Body, arguments_of, text_of
from tests.fuzz.setups import Output, Setup
from tests.fuzz.several import as_compiled, as_compiled_ranks, as_pipelines, as_ranks
from tests.harness.drawing import Cases, Draw

# Each mode draws this beside the model.
MODES = {
    "single": lambda setup, _: setup,
    "pipeline": as_pipelines,
    "data_parallel": as_ranks,
    "compiled_pipeline": as_compiled,
    "compiled_data_parallel": as_compiled_ranks,
}
UNITS = 3
TARGETS = {
    "classes": f"random.integers(0, {UNITS}, rows)",
    "one_hot": f'np.eye({UNITS}, dtype="float32")[random.integers(0, {UNITS}, rows)]',
    "binary": f'random.integers(0, 2, (rows, {UNITS})).astype("float32")',
    "values": f'random.normal(size=(rows, {UNITS})).astype("float32")',
}


@functools.cache
def cases(mode: str) -> Cases[Setup]:
    """The model of a number is the same in all modes."""
    return Cases(lambda draw: MODES[mode](setup_of(draw), draw))


@functools.cache
def drawn(number: int, mode: str = "single") -> Setup:
    return cases(mode).drawn(number)


def setup_of(draw: Draw) -> Setup:
    wanted, optimizer = draw.in_turn(tuple(LAYERS)), draw.in_turn(tuple(OPTIMIZERS))
    policy = draw.choice(POLICIES)
    policy = "float32" if _fails_in(policy, wanted, optimizer) else policy
    body = Body(draw, policy)
    body.branches(wanted, draw.in_turn(JOINS))
    return Setup(
        number=draw.number,
        model=tuple(body.lines),
        inputs=tuple(body.inputs),
        outputs=outputs_of(draw),
        optimizer=optimizer_of(draw, optimizer, body.sparse),
        trained_layers=body.trained,
        moves=body.moves,
        policy=policy,
        schedule=draw.choice(SCHEDULES),
        profile_steps=2 if draw.chance(0.05) else 0,
        steps_per_execution=draw.choice((1, 1, 2, 3)),
        rows=draw.choice((16, 14)),
        epochs=draw.choice((1, 1, 1, 2)),
        sample_weights=draw.chance(0.2),
    )


def _fails_in(policy: str, layer: str, optimizer: str) -> bool:
    """Return whether stock TensorFlow 2.21 or Keras 3.15 fails at it."""
    if optimizer == "Nadam" and policy == "mixed_float16":
        return True  # its product of decays is no variable behind a scaled loss: it is not set back
    if optimizer == "Muon" and policy == "float64":
        return True  # it multiplies with a float32 square root
    return policy in LAYERS[layer].not_in


def outputs_of(draw: Draw) -> tuple[Output, ...]:
    first = output_of(draw, draw.in_turn(tuple(LOSSES)), several := draw.chance(0.2))
    return (first, output_of(draw, draw.choice(tuple(LOSSES)), several)) if several else (first,)


def output_of(draw: Draw, name: str, several: bool) -> Output:
    loss = text_of(f"keras.losses.{name}", arguments_of(draw, LOSS_ARGUMENTS.get(name, {})))
    metrics = [metric for metric in METRICS[LOSSES[name]] if draw.chance(0.2)]
    weight = draw.choice((None, 0.3, 1.5)) if several else None
    return Output(loss, TARGETS[LOSSES[name]], weight, tuple(metrics))


def optimizer_of(draw: Draw, name: str, sparse: bool) -> str:
    # A scale divides gradients, which those of an Embedding (IndexedSlices) do not support.
    without = ("loss_scale_factor",) if sparse else ()
    arguments = arguments_of(draw, {**OPTIMIZERS[name], **CLIPPING, **AVERAGES}, without)
    for clipping in [clipping for clipping in CLIPPING if clipping in arguments][1:]:
        del arguments[clipping]
    rate = "0.02"
    if draw.chance(0.15) and name != "ScheduleFreeAdamW":
        kind = draw.choice(tuple(RATE_SCHEDULES))
        rate = text_of(f"keras.optimizers.schedules.{kind}", arguments_of(draw, RATE_SCHEDULES[kind]))
    return text_of(f"keras.optimizers.{name}", arguments, learning_rate=rate)
