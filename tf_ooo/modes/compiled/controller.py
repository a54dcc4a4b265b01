"""Defines the controller of a compiled step: stock beside one or several rewritten ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import keras_fits, train_function, xla
from tf_ooo.costs.table import GainTable
from tf_ooo.errors import GraphError, MemoryLimitError, OptionsError
from tf_ooo.fit.comparison import REWRITTEN, STOCK
from tf_ooo.fit.controller import StepController
from tf_ooo.modes.compiled import planning
from tf_ooo.modes.compiled.calls import StepToPlan
from tf_ooo.modes.compiled.measuring import MeasuredGains
from tf_ooo.modes.compiled.rewrite import Plan, rewrite_step, unchanged
from tf_ooo.modes.compiled.session import CONCURRENT, CONCURRENT_FLAGS, StreamSession
from tf_ooo.modes.compiled.step import Rewriter, StreamStep, Way
from tf_ooo.options import OneDeviceOptions
from tf_ooo.planning.building.regions import Capture
from tf_ooo.planning.policies import POLICIES, schedules_of
from tf_ooo.report.report import Report
from tf_ooo.tracing.flat import numbered_steps, steps_together

if TYPE_CHECKING:
    import keras

# Steps of one compiled function, where ``unroll`` does not say.
_TOGETHER = 8
# Seconds for measuring gains on a GPU, where ``measure_gains_s`` does not say.
_MEASURE_S = 60.0
# Auto measures these beside "rewritten", which moves every dW as early as it can.
JOINT = "joint schedule"
DELAYED = "several steps in one function, dW beside the next forward pass"
RECOMPUTED = "activations recomputed in the forward pass"


def for_model(
    model: keras.Model, stock: Callable[..., Any], options: OneDeviceOptions, report: Report
) -> StepController:
    """Return the controller for ``fit`` of a model that XLA compiles. OOOError: no rewrite is possible."""
    if model.distribute_strategy.num_replicas_in_sync > 1:
        raise GraphError("jit_compile=True: steps of several replicas are not rewritten")
    together = steps_together(train_function.steps_per_execution(model), options.unroll or _TOGETHER)

    def make(session: StreamSession, way: Way) -> Callable[..., Any]:
        unrolled = way.name == DELAYED or not _compares(options)
        return FitSteps(model, stock, session, way, together if unrolled else 1)

    seen = functools.partial(keras_fits.samples_seen, model)
    return _controller(stock, make, options, report, together, samples_seen=seen)


def for_function(
    function: Callable[..., Any],
    stock: Callable[..., Any],
    options: OneDeviceOptions,
    report: Report,
    on_decided: Callable[[], None] | None = None,
) -> StepController:
    """Return the controller of a ``tf.function(jit_compile=True)``. OOOError: no rewrite is possible."""
    make = functools.partial(StreamStep, function, stock)
    return _controller(stock, make, options, report, 1, on_decided)


def _controller(
    stock: Callable[..., Any],
    make: Callable[[StreamSession, Way], Callable[..., Any]],
    options: OneDeviceOptions,
    report: Report,
    steps: int,
    on_decided: Callable[[], None] | None = None,
    samples_seen: Callable[[], float] | None = None,
) -> StepController:
    _check(options)
    session = StreamSession(options, report)
    if options.batch_size is not None:
        session.said.append(
            "batch_size= has no effect with jit_compile=True: a step is compiled for the size of each batch"
        )
    functions = {way.name: make(session, way) for way in ways(options, steps, session)}
    if CONCURRENT not in functions and _compares(options):
        session.said.append(f"{CONCURRENT}: not compared: {_why_not_concurrent()}")
    rewritten = functions.pop(REWRITTEN)
    session.several = bool(functions)
    return StepController(
        stock, rewritten, session, options, report, None, on_decided, functions, samples_seen
    )


def _check(options: OneDeviceOptions) -> None:
    compiled = schedules_of("single_device", streams=True)
    if options.schedule not in ("auto", *compiled):
        raise OptionsError(
            f"schedule={options.schedule!r} orders the graph executor; jit_compile=True takes 'auto' or "
            f"{', '.join(map(repr, compiled))}"
        )
    fixed = xla.why_flags_are_fixed()
    if options.memory_limit_bytes is not None and fixed is not None:
        raise OptionsError(
            f"memory_limit_bytes={options.memory_limit_bytes} cannot be kept with jit_compile=True: {fixed}, "
            "so it cannot be asked what a step needs; leave it out, or compile with jit_compile=False"
        )


def _compares(options: OneDeviceOptions) -> bool:
    return options.may_fall_back and options.profile_steps > 0


def _why_not_concurrent() -> str | None:
    """Say why stock XLA with concurrent command buffers is not compared; None if it is."""
    if CONCURRENT_FLAGS[0] in xla.flags_of_process():
        return "XLA_FLAGS of this process ask for it: the stock step runs that way"
    fixed = xla.why_flags_are_fixed()
    return None if fixed is None else f"{fixed}; start Python with XLA_FLAGS={' '.join(CONCURRENT_FLAGS)!r}"


def _gains(
    options: OneDeviceOptions, session: StreamSession | None, delay: bool
) -> GainTable | MeasuredGains | None:
    """Return the gains of a file, or an object that measures them; None: gains are calculated."""
    if options.gains is not None:
        return GainTable.load(options.gains)
    budget_s = options.measure_gains_s
    if budget_s is None:
        budget_s = _MEASURE_S if xla.platform() == "CUDA" else 0.0
    told = None if session is None else session.measured
    return MeasuredGains(budget_s, told, delay) if budget_s else None


def ways(options: OneDeviceOptions, steps: int = 1, session: StreamSession | None = None) -> list[Way]:
    """Return the ways to compile a step that are compared; the first is REWRITTEN.

    ``steps`` steps go into one function for the way DELAYED, or for the one that is asked for.  The session
    is told measured gains, and knows the module that XLA made of the stock step.
    """
    policy = planning.USUAL if options.schedule == "auto" else POLICIES[options.schedule]
    early = functools.partial(planning.every_layer, policy=policy, streams=options.streams)
    table = _gains(options, session, delay=steps > 1)

    def capture(what: StepToPlan) -> Capture | None:
        return planning.capture_of(what, None if session is None else session.modules.get(STOCK))

    limit_bytes = options.memory_limit_bytes
    # With a limit a plan may move nothing for want of memory: XLA is asked what that step needs, too.
    joint = functools.partial(
        planning.joint, policy=policy, streams=options.streams, gains=table, memory_limit_bytes=limit_bytes,
        capture=capture if xla.platform() == "CUDA" else None,
        must_gain=_compares(options) and limit_bytes is None,
    )  # fmt: skip
    delayed = functools.partial(joint, delay=True)
    auto_store = options.store_activations == "auto"
    store = "cost" if auto_store else options.store_activations

    def rewrite(plan: Plan, stored: str = store) -> Rewriter:
        return functools.partial(rewrite_step, plan=plan, store=stored, side_updates=options.side_updates)

    if not _compares(options):
        return [Way(rewrite(delayed if steps > 1 else early if table is None else joint))]
    compared = [Way(rewrite(early)), Way(rewrite(joint), JOINT)]
    if auto_store:
        compared.append(Way(rewrite(early, "backward"), RECOMPUTED))
    if steps > 1:
        compared.append(Way(rewrite(delayed), DELAYED))
    if _why_not_concurrent() is None:
        compared.append(Way(unchanged, CONCURRENT, CONCURRENT_FLAGS))
    return compared


class FitSteps:
    """Takes the place of Keras' train function, which runs the batches whose step cannot be rewritten.

    Batches are taken one by one, so that their sizes are known when the step is traced: Keras' own iterators
    leave the batch size open.  ``together`` steps go into one compiled function; the remaining steps run one
    by one.
    """

    def __init__(
        self,
        model: keras.Model,
        stock: Callable[..., Any],
        session: StreamSession,
        way: Way,
        together: int = 1,
    ) -> None:
        self.model, self.together, self.session = model, together, session
        on_batch = train_function.step_on_data(model, model.train_step)

        def stock_steps(batches: list[Any]) -> list[Any]:
            return [stock([batch]) for batch in batches]

        self.step = StreamStep(on_batch, lambda batch: stock([batch]), session, way)
        self.steps = StreamStep(numbered_steps(on_batch), stock_steps, session, way)

    def __call__(self, iterator: object) -> Any:
        """Run ``steps_per_execution`` steps; return the logs of the last. StopIteration: the data ended."""
        count = train_function.steps_per_execution(self.model)
        batches = self.session.waiting or train_function.take(iterator, count)
        self.session.waiting = []
        if not batches:
            raise StopIteration
        logs = None
        while batches:
            count = self.together if 1 < self.together <= len(batches) else 1
            try:
                logs = self.step(batches[0]) if count == 1 else self.steps(batches[:count])[-1]
            except MemoryLimitError:  # nothing has run: another way may take these
                self.session.waiting = batches
                raise
            batches = batches[count:]
        return logs

    def experimental_get_tracing_count(self) -> int:
        return sum(step.experimental_get_tracing_count() for step in (self.step, self.steps))
