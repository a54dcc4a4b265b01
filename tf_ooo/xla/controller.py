"""The controller of a compiled step: stock beside one or several rewritten ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from tf_ooo import compat
from tf_ooo.controller import StepController
from tf_ooo.data_parallel.unrolled import steps_together
from tf_ooo.errors import GraphError, OptionsError
from tf_ooo.options import COMPILED_SCHEDULES, Options
from tf_ooo.report import Report
from tf_ooo.step_times import REWRITTEN
from tf_ooo.xla import plans
from tf_ooo.xla.fit import FitSteps
from tf_ooo.xla.gains import GainTable
from tf_ooo.xla.session import StreamSession
from tf_ooo.xla.step import Rewriter, StreamStep, default_rewriter

# What auto measures beside "rewritten", which moves every dW as early as it can.
JOINT = "joint schedule"
DELAYED = "several steps in one function, dW beside the next forward pass"
RECOMPUTED = "activations recomputed in the forward pass"


def for_model(model: Any, stock: Callable[..., Any], options: Options, report: Report) -> StepController:
    """The controller for ``fit`` of a model compiled with ``jit_compile=True``.

    Raises:
        OOOError: why it cannot be rewritten.
    """
    if model.distribute_strategy.num_replicas_in_sync > 1:
        raise GraphError("jit_compile=True: steps of several replicas are not rewritten")

    together = steps_together(compat.steps_per_execution(model), options.unroll)

    def make(session: StreamSession, name: str, rewriter: Rewriter) -> Callable[..., Any]:
        unrolled = name == DELAYED or not (options.may_fall_back and options.profile_steps)
        return FitSteps(model, stock, session, rewriter, together if unrolled else 1)

    return _controller(stock, make, options, report, together)


def for_function(
    function: Callable[..., Any],
    stock: Callable[..., Any],
    options: Options,
    report: Report,
    on_decided: Callable[[], None] | None = None,
) -> StepController:
    """The controller of a ``tf.function(jit_compile=True)``.  Raises OOOError: why it cannot be rewritten."""

    def make(session: StreamSession, _: str, rewriter: Rewriter) -> Callable[..., Any]:
        return StreamStep(function, stock, session, rewriter)

    return _controller(stock, make, options, report, 1, on_decided)


def _controller(
    stock: Callable[..., Any],
    make: Callable[[StreamSession, str, Rewriter], Callable[..., Any]],
    options: Options,
    report: Report,
    steps: int,
    on_decided: Callable[[], None] | None = None,
) -> StepController:
    _check(options)
    session = StreamSession(options)
    made_of = rewriters(options, steps).items()
    others = {name: make(session, name, rewriter) for name, rewriter in made_of}
    first = others.pop(REWRITTEN)
    made = StepController(stock, first, session, options, report, None, on_decided, others)
    made.prediction.due = False  # the profiler sees XLA's kernels, not the graph's ops
    return made


def _check(options: Options) -> None:
    if options.schedule not in ("auto", *COMPILED_SCHEDULES):
        raise OptionsError(
            f"schedule={options.schedule!r} orders the graph executor; jit_compile=True takes 'auto' or "
            f"{', '.join(map(repr, COMPILED_SCHEDULES))}"
        )
    if options.memory_limit_bytes is not None:
        raise OptionsError(
            f"memory_limit_bytes={options.memory_limit_bytes} cannot be kept with jit_compile=True: XLA "
            "decides what is in memory; leave it out, or compile with jit_compile=False"
        )


def rewriters(options: Options, steps: int = 1) -> Mapping[str, Rewriter]:
    """The rewrites to compare, by name; the first is REWRITTEN.

    ``steps``: so many steps go into one function for the rewrite DELAYED, or for the one that is asked for.
    """
    early = functools.partial(plans.every_layer, streams=options.streams)
    table = None if options.gains is None else GainTable.load(options.gains).saved_s
    joint = functools.partial(plans.joint, streams=options.streams, gains=table)
    delayed = functools.partial(joint, delay=True)
    auto_store = options.store_activations == "auto"
    store = "all" if auto_store else options.store_activations
    if not (options.may_fall_back and options.profile_steps):
        asked = delayed if steps > 1 else early if table is None else joint
        return {REWRITTEN: default_rewriter(asked, store)}
    found = {REWRITTEN: default_rewriter(early, store), JOINT: default_rewriter(joint, store)}
    if auto_store:
        found[RECOMPUTED] = default_rewriter(early, "backward")
    if steps > 1:
        found[DELAYED] = default_rewriter(delayed, store)
    return found
