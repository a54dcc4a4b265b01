"""Set-ups changed: without what Keras does not support, and simpler ones, down to a minimal one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.fuzz.catalogue import LEFT_OUT
from tests.fuzz.setups import Branch, Output, Part, Pipeline, Ranks, Setup, Shared, Skip, Step, is_valid

PLAIN_OPTIMIZER = Part("keras.optimizers.SGD", (("learning_rate", 0.02),))
PLAIN_LOSS = Part("keras.losses.MeanSquaredError")
PLAIN = {
    "policy": "float32",
    "schedule": "fast_forward",
    "profile_steps": 0,
    "steps_per_execution": 1,
    "rows": 16,
    "epochs": 1,
    "sample_weights": False,
    "join": "Concatenate",
    "optimizer": PLAIN_OPTIMIZER,
    "microbatches": 2,
}


def with_arguments(part: Part, **changes: Callable[[Any], Any]) -> Part:
    """Arguments of these names changed, in the part and those inside; LEFT_OUT takes one away."""

    def changed(name: str, value: Any) -> Any:
        if isinstance(value, Part):
            value = with_arguments(value, **changes)
        elif isinstance(value, tuple):
            value = tuple(with_arguments(v, **changes) if isinstance(v, Part) else v for v in value)
        return changes[name](value) if name in changes else value

    arguments = ((name, changed(name, value)) for name, value in part.arguments)
    return Part(part.kind, tuple((name, value) for name, value in arguments if value is not LEFT_OUT))


def with_parts(setup: Setup, change: Callable[[Part], Part]) -> Setup:
    """The same change to all layers."""
    of_step = functools.partial(_of_step, change)
    branches = tuple(
        replace(
            branch,
            steps=tuple(map(of_step, branch.steps)),
            embedding=branch.embedding and change(branch.embedding),
        )
        for branch in setup.branches
    )
    return replace(setup, branches=branches, trunk=tuple(map(of_step, setup.trunk)))


def _of_step(change: Callable[[Part], Part], step: Step) -> Step:
    if isinstance(step, Skip):
        return replace(step, steps=tuple(map(change, step.steps)))
    return replace(step, layer=change(step.layer)) if isinstance(step, Shared) else change(step)


def minimal(setup: Setup, same_fault: Callable[[Setup], bool]) -> Setup:
    """The simplest set-up that still has the fault: none of those one change simpler has it.

    Plain trials, boldest first, rather than the shrinking of a property test's library: a trial takes a
    second, and what is simpler is known here, so that some tens of them do.
    """
    tried: set[str] = set()
    while True:
        for candidate in simpler(setup):
            if repr(candidate) in tried or not is_valid(candidate):
                continue
            tried.add(repr(candidate))
            if same_fault(candidate):
                setup = candidate
                break
        else:
            return setup


def simpler(setup: Setup) -> Iterator[Setup]:
    """Set-ups that are one change simpler, the boldest change first."""
    yield from _shorter(setup, "branches")
    yield from _shorter(setup, "outputs")
    yield replace(setup, trunk=())
    for name, value in PLAIN.items():
        if getattr(setup, name) != value:
            yield replace(setup, **{name: value})
    for place, pipeline in enumerate(setup.pipelines):
        for plainer in _plainer(pipeline, Pipeline()):
            yield replace(setup, pipelines=_replaced(setup.pipelines, place, plainer))
    for ranks in _plainer(setup.ranks, Ranks()) if setup.ranks else ():
        yield replace(setup, ranks=ranks)
    for place, branch in enumerate(setup.branches):
        for simple in _simpler_branches(branch):
            yield replace(setup, branches=_replaced(setup.branches, place, simple))
    for trunk in _simpler_steps(setup.trunk):
        yield replace(setup, trunk=trunk)
    for optimizer in _simpler_parts(setup.optimizer):
        yield replace(setup, optimizer=optimizer)
    for place, output in enumerate(setup.outputs):
        for plain in _simpler_outputs(output):
            yield replace(setup, outputs=_replaced(setup.outputs, place, plain))


def _plainer(value: Any, plain: Any) -> Iterator[Any]:
    """With one field as in the plain value of the same class."""
    for name in (field.name for field in fields(plain)):
        if getattr(value, name) != getattr(plain, name):
            yield replace(value, **{name: getattr(plain, name)})


def _replaced(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _without_each(values: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    for place in range(len(values)):
        yield (*values[:place], *values[place + 1 :])


def _shorter(setup: Setup, name: str) -> Iterator[Setup]:
    for values in _without_each(getattr(setup, name)):
        yield replace(setup, **{name: values})


def _simpler_branches(branch: Branch) -> Iterator[Branch]:
    if branch != Branch("features", (7,)):
        yield Branch("features", (7,))
        yield Branch("features", (7,), branch.steps)
    if branch.kind == "tokens":
        yield replace(branch, kind="sequence", shape=(*branch.shape, 5), embedding=None)
    if branch.reduced_by != "Flatten":
        yield replace(branch, reduced_by="Flatten")
    for steps in _simpler_steps(branch.steps):
        yield replace(branch, steps=steps)
    for embedding in _simpler_parts(branch.embedding) if branch.embedding else ():
        yield replace(branch, embedding=embedding)


def _simpler_steps(steps: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
    if len(steps) > 1:
        yield ()
    yield from _without_each(steps)
    for place, step in enumerate(steps):
        if isinstance(step, Skip):
            yield (*steps[:place], *step.steps, *steps[place + 1 :])
            if step.join != "Concatenate":
                yield _replaced(steps, place, replace(step, join="Concatenate"))
            for inner in step.steps:
                yield from (_replaced(steps, place, Skip(step.join, (p,))) for p in _simpler_parts(inner))
        elif isinstance(step, Shared):
            yield _replaced(steps, place, step.layer)
            yield from (_replaced(steps, place, Shared(part)) for part in _simpler_parts(step.layer))
        else:
            yield from (_replaced(steps, place, part) for part in _simpler_parts(step))


def _simpler_parts(part: Part) -> Iterator[Part]:
    """Without each argument (those that are needed come back by themselves: the program fails otherwise)."""
    for arguments in _without_each(part.arguments):
        yield Part(part.kind, arguments)
    for place, (name, value) in enumerate(part.arguments):
        for inner in _simpler_parts(value) if isinstance(value, Part) else ():
            yield Part(part.kind, _replaced(part.arguments, place, (name, inner)))


def _simpler_outputs(output: Output) -> Iterator[Output]:
    plain = Output(output.units, PLAIN_LOSS)
    if output != plain:
        yield plain
    for name in (field.name for field in fields(output) if field.name in ("loss_weight", "metrics")):
        if getattr(output, name) != getattr(plain, name):
            yield replace(output, **{name: getattr(plain, name)})
    for loss in _simpler_parts(output.loss):
        yield replace(output, loss=loss)
