"""Checks batches before a model is cut: is a step the mean of the steps on its micro-batches?"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tf_ooo.compat import keras_compiled, keras_layers, keras_variables, nests
from tf_ooo.errors import BackendError
from tf_ooo.fit import timing
from tf_ooo.hosts.devices import home_device
from tf_ooo.hosts.memory import host_memory, in_host_memory
from tf_ooo.modes.pipeline.comparing import ROUNDING, Compared, Comparison, off
from tf_ooo.modes.pipeline.looked_at import LookedAt, forward_tensors
from tf_ooo.modes.pipeline.options import WHOLE_BATCH, Pipeline
from tf_ooo.modes.pipeline.plans import PipelinePlans
from tf_ooo.options.base import is_file
from tf_ooo.planning.choosing.on_paper import MICROBATCHES
from tf_ooo.tracing.micro_batches import Division, StepRefused, parts_of, rows_of, split_rows
from tf_ooo.tracing.states import StateKinds, set_to
from tf_ooo.tracing.traces import traced_anew
from tf_ooo.tracing.variables import all_variables, build, bytes_of, optimizers_of, values_of
from tf_ooo.units import first_of

if TYPE_CHECKING:
    import keras

# With fewer rows statistics are so rough that models train visibly worse (Wu and He 2018, figure 1).
LEAST_ROWS = 8
_WHY_ONE = (
    "its statistics are sums over all rows before any row is normalized, so at each such layer every "
    "micro-batch would wait for all others, forward and backward"
)
_STAYS_WHOLE = (
    f"batch_norm={WHOLE_BATCH!r}: the batch stays in one micro-batch, as {{}} normalizes over it: {_WHY_ONE}"
    "; the result is stock's, and devices mostly work one after another, so that memory is shared out and "
    "little time is saved"
)
_LOG = logging.getLogger("tf_ooo")
# A weight whose elements are all alike (a gate or a kernel of zeros) is moved by this while it is looked at.
_MOVED = 0.05
# Later batches are compared so far whatever it takes, then for this share of the time at most.
_ALWAYS = 16
_MOST = 0.02


def division_of(model: keras.Model, options: Pipeline) -> Division:
    """Return how batches are divided. BackendError: the asked number cannot keep batch statistics."""
    names, from_file = keras_layers.normalizing_in_training(model), is_file(options.schedule)
    microbatches = options.microbatches
    replicas = options.replicas if isinstance(options.replicas, int) else 1
    if not names or options.batch_norm != WHOLE_BATCH:
        if microbatches is not None:
            return Division(microbatches)
        if not names or from_file:  # a file says itself how many there are
            return Division(MICROBATCHES)
        return Division(MICROBATCHES, LEAST_ROWS, replicas)
    asked = "a schedule of a file" if from_file and microbatches is None else ""
    if microbatches not in (None, 1):
        asked = f"microbatches={microbatches}"
    if replicas > 1:
        asked = f"replicas={replicas}, which share a batch's micro-batches,"
    if asked:
        raise BackendError(
            f"batch_norm={WHOLE_BATCH!r} needs one micro-batch for {first_of(names)}, got {asked}: "
            f"{_WHY_ONE}; leave it out, or take batch_norm='micro_batch'"
        )
    return Division(1)


def micro_batch_notes(model: keras.Model, rows: Sequence[int]) -> list[str]:
    """Say how micro-batches of so many ``rows`` change the result of training."""
    texts = []
    names = keras_layers.normalizing_in_training(model)
    if names:
        few = ", and with so few rows visibly worse" if min(rows) < LEAST_ROWS else ""
        texts.append(
            f"BatchNormalization normalizes each micro-batch by itself: {first_of(names)}, over {min(rows)} "
            f"rows instead of the batch's {sum(rows)}; moving averages change once a step, by the mean and "
            "the variance of all rows; loss and val_loss become others than in stock training"
            f"{few}; batch_norm={WHOLE_BATCH!r} keeps stock's result, in one micro-batch; fewer "
            "microbatches= or larger batches come nearer to it"
        )
    random = keras_layers.random_layers(model)
    if random:
        texts.append(
            "random numbers are drawn for each micro-batch, others than for the whole batch and the same for "
            f"all schedules: {first_of(random)}; masks are as random as stock's, but other ones"
        )
    masks = keras_compiled.masks(model)
    if masks:
        texts.append(
            f"where the loss divides by what is not masked, or by weights of rows ({masks[0]}), each "
            "micro-batch's does by its own; "
            "they are averaged by rows, which is the whole batch's loss only where all have as much"
        )
    return texts


NEVER_WHOLE = "no device is to hold the whole model"
_ALSO_WHOLE = (
    "the model was not built in tf_ooo.host_memory(): its weights and slots, {} bytes, also stand on {}, "
    "above the limit of {} bytes"
)
_LOSS_UNCHECKED = (
    f"the loss of a batch is not compared with its micro-batches' (check_loss): {NEVER_WHOLE}; one that "
    "adds up rows, or compares them with one another, trains with the micro-batches' mean"
)
_METRIC = (
    "the log {} is that of micro-batches, not the batch's own: what is made of two micro-batches' numbers is "
    "another than that of both in one, as the largest number of a batch may be; use microbatches=1 where it "
    "matters"
)
_FIRST_ONLY = f"whether rows of a batch look at each other was seen in the first batch only: {NEVER_WHOLE}"
_UNLIKE = (
    "{}: what the forward pass assigns for a batch does not follow from what it assigns for micro-batches; "
    "nothing that is trained depends on it, and it becomes another than in stock training; microbatches=1 "
    "keeps stock's"
)


class FirstBatch:
    """Builds a model with its first batch and compares that with its micro-batches; kept from fit to fit.

    Attributes:
        states: how the model's states follow from micro-batches, as was seen then.
        pass_s: seconds of tracing a pass then; 0: none was traced.
    """

    def __init__(self, plans: PipelinePlans) -> None:
        self.states, self.pass_s = StateKinds(), 0.0
        self._plans = plans
        self._said: list[str] = []
        self._later: LaterBatches | None = None  # compares later batches; None: nobody does
        self._checked: Any = None  # the train function and the batches whose loss was looked at

    def build(
        self, model: keras.Model, batch: object, iterator: object, is_never_whole: Callable[[], bool]
    ) -> None:
        """Make all variables, ask ``is_never_whole``, and check the loss, unless that was switched off."""
        plans, options = self._plans, self._plans.options
        plans.find_limit()
        on_host, rows = in_host_memory(model), plans.division.split(rows_of(batch))
        with host_memory() if on_host else contextlib.nullcontext():
            build(model, optimizers_of(model), model.train_step, iterator)
            never_whole = is_never_whole()
            if options.check_loss and (on_host or not never_whole):  # of a few rows; nothing is kept
                self._check_loss(model, batch, len(rows), on_host)
                if never_whole:
                    self.compare_no_later()
            else:
                self.states, self._later = StateKinds(), None
        self.say_what_changes(model, rows)
        if not never_whole or on_host:
            return
        if options.first_steps == "auto" and plans.ranks.engine.size == 1:  # so it is too large
            size, limit_bytes = bytes_of(all_variables(model)), plans.limit.least_bytes
            self._warn(_ALSO_WHOLE.format(size, home_device(), limit_bytes))
        if options.check_loss and keras_compiled.own_loss_code(model):
            self._warn(_LOSS_UNCHECKED)

    def _check_loss(self, model: keras.Model, batch: object, microbatches: int, on_host: bool) -> None:
        """Check such batches once, until the model is compiled again."""
        key = self._plans.distributed.stock, nests.signature(batch), microbatches
        if key[0] is None or self._checked != key:
            what = "looking whether rows of a batch depend on each other"
            with traced_anew(model), timing.said(what) as say_seconds:
                checked = check_loss(model, batch, microbatches, not on_host, say_seconds)
            (self.states, self._later, self.pass_s), self._checked = checked, key
        if self.states.unlike:
            self._warn(_UNLIKE.format(", ".join(self.states.unlike)))
        for name in self.states.metrics:
            self._warn(_METRIC.format(name))

    def look_at_later(self, batch: object, moved: Callable[[], Mapping[int, Any]]) -> None:
        """Raise StepRefused if rows interact in this batch that did not in the first one."""
        self._plans.distributed.report.note(self._later.check(batch, moved) if self._later else "")

    def compare_no_later(self) -> None:
        """Compare no later batch, as no device beside the pipeline may run the whole model."""
        if self._later is not None:
            self._later = None
            self._plans.distributed.report.note(_FIRST_ONLY)

    def say_what_changes(self, model: keras.Model, rows: Sequence[int]) -> None:
        """Warn how micro-batches of so many rows change the result; earlier warnings are withdrawn."""
        report, names = self._plans.distributed.report, keras_layers.normalizing_in_training(model)
        if names and self._plans.options.batch_norm == WHOLE_BATCH:
            report.note(_STAYS_WHOLE.format(first_of(names)))
        report.forget(*self._said)
        self._said = micro_batch_notes(model, rows) if len(rows) > 1 else []
        for text in self._said:
            self._warn(text)

    def _warn(self, note: str) -> None:
        self._plans.distributed.report.note(note, log=logging.WARNING)


def check_loss(
    model: keras.Model,
    batch: object,
    microbatches: int,
    gradients: bool = True,
    say_seconds: Callable[[float], None] = lambda seconds: None,
) -> tuple[StateKinds, LaterBatches | None, float]:
    """Raise StepRefused if a step adds up rows or compares them with each other.

    Compares the loss and the gradients for the optimizers of neighbouring micro-batches, joined and each by
    itself, without dropout and batch statistics, and with one number in the place of all random ones.  No
    variable is changed.  If the loss is divided by masks, outputs are compared instead.  ``gradients=False``
    compares losses and outputs alone.  A step is also refused if its result depends on a state that does not
    follow from micro-batches, also if that is so only in later steps, after the count of steps or a state has
    changed.

    ``say_seconds`` is told about the seconds of all this after a first trace.

    Returns how states follow from micro-batches, an object that compares later batches (or None), and the
    seconds of tracing a pass (0: none was traced).
    """
    rows = split_rows(rows_of(batch), microbatches)
    if len(rows) == 1:
        return StateKinds(), None, 0.0
    try:
        with _no_weight_of_one_value(model):
            comparison = Comparison(model, batch, rows[-1], gradients, say_seconds)
            pairs, compared = comparison.compare(comparison.pairs_of(batch))
            states = comparison.states(pairs)
            difference = comparison.difference(compared) or comparison.later_difference(pairs)
    except BackendError:
        raise
    except Exception as error:  # the step that comes next raises it, if it is the user's
        _LOG.debug("a batch was not compared with its micro-batches: %s", error, exc_info=error)
        _refuse_if_whole_runs(model, batch, len(rows), error)
        return StateKinds(), None, 0.0
    exact = comparison.exact
    may_tell = compared and (exact or keras_compiled.own_loss_code(model))
    if may_tell and all(pair.adds_up(exact) for pair in compared):
        raise StepRefused(
            f"the loss adds up rows ({_looked_at(model)}): of two micro-batches in one it is "
            f"{compared[0].together:.4g}, the mean of both {compared[0].apart:.4g}; micro-batches are "
            f"averaged, so its gradients would be {len(rows)} times smaller: divide it by the number of rows "
            "and take a learning rate that is larger by it, or use microbatches=1; check_loss=False trains "
            "with the micro-batches' mean"
        )
    if difference:
        raise _refused(model, batch, rows[-1], difference)
    if states.used:
        raise StepRefused(
            f"what the forward pass assigns to {first_of(states.used)} for two micro-batches in one is "
            "neither the mean of what it assigns for each, nor do their changes add up, and the loss or a "
            "gradient depends on it, in this step or a later one; use microbatches=1, or check_loss=False to "
            "train with the micro-batches' mean"
        )
    states = dataclasses.replace(states, metrics=comparison.differing_metrics(compared))
    return states, LaterBatches(comparison, compared), comparison.of_both.trace_s


class LaterBatches:
    """Compares rows again in batches 2, 4, 8, ...: rows may interact there that did not in the first one.

    From the 32nd batch on it does so only while that takes less than 2% of the time since the first one.
    """

    def __init__(self, comparison: Comparison, first: list[Compared]) -> None:
        self._comparison, self._first = comparison, first
        self._batch, self._next = 1, 2.0
        self._began_s, self._took_s = time.perf_counter(), 0.0

    def check(self, batch: object, present: Callable[[], Mapping[int, Any]]) -> str:
        """Raise StepRefused if rows interact. Return why no batch is compared from now on, or "".

        ``present``: each moved variable, by the ``id`` of its old handle.
        """
        self._batch += 1
        if self._batch < self._next or not self._comparison.fits(batch):
            return ""
        self._next, started = 2 * self._batch, time.perf_counter()
        if self._batch > _ALWAYS and self._took_s > _MOST * (started - self._began_s):
            return ""
        try:
            difference = self._difference(batch, present())
        except Exception as error:  # no memory beside the stages; a lost worker
            _LOG.debug("batch %d was not compared", self._batch, exc_info=error)
            self._next = math.inf
            said = next(iter(str(error).splitlines()), "")
            return f"rows are not compared from batch {self._batch} on: {type(error).__name__}: {said}"
        self._took_s += time.perf_counter() - started
        if difference:
            where = f"in batch {self._batch}, whose update was not made (compared are 1, 2, 4, 8, ...)"
            model, rows = self._comparison.model, self._comparison.rows
            with traced_anew(model):
                raise _refused(model, batch, rows, f"{where}, {difference}")
        return ""

    def _difference(self, batch: object, present: Mapping[int, Any]) -> str:
        comparison = self._comparison
        moved = [variable for variable in comparison.of_both.variables if id(variable.handle) in present]
        values = {keras_variables.unique_name_of(v): present[id(v.handle)].numpy() for v in moved}
        with set_to(dict(zip(values, moved, strict=True)), values):
            return comparison.difference_of(comparison.pairs_of(batch), self._first)


def _looked_at(model: keras.Model) -> str:
    return f"looked at: {first_of(keras_compiled.own_loss_code(model) or [type(model).__name__], 3)}"


def _refused(model: keras.Model, batch: object, rows: int, difference: str) -> StepRefused:
    # A class of the user's that normalizes as Keras' does is not known to be exempt.
    whole = ", batch_norm='whole_batch'" if keras_layers.normalizing_in_training(model) else ""
    return StepRefused(
        f"{difference} ({_looked_at(model)}{_first_place(model, batch, rows)}): the step compares rows "
        "with one another, or divides by something else than rows, and a pipeline does that for each "
        f"micro-batch; use microbatches=1{whole}, or check_loss=False to train with the micro-batches' "
        "mean"
    )


def _refuse_if_whole_runs(model: keras.Model, batch: object, microbatches: int, error: Exception) -> None:
    """Raise StepRefused if a step that failed with ``error`` on parts of a batch runs on all of it."""
    try:
        LookedAt(model, batch, gradients=False)(batch)
    except Exception:  # the model's own fault
        return
    plain = re.sub(r"\x1b\[\d*m", "", str(error))
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    # Keras says on the first line where it was; what was wrong comes behind.
    said = " ".join(lines[:2] if lines[:1] and "Exception encountered" in lines[0] else lines[:1])
    raise StepRefused(
        f"the step runs on a batch and fails on one of its {microbatches} micro-batches "
        f"({type(error).__name__}: {said}): something in it needs the whole batch, or an input has no "
        "row for each example, as the matrix of a graph's edges; use microbatches=1"
    ) from None


def _first_place(model: keras.Model, batch: object, rows: int) -> str:
    """Name the layer and op at which rows first differ from those of each part; empty: nowhere."""
    try:
        pair = parts_of(batch, [2 * rows, rows_of(batch) - 2 * rows])[0]
        (both,) = forward_tensors(model, [pair])
        first, second = forward_tensors(model, parts_of(pair, (rows, rows)))
    except Exception as error:  # it is looked for only to be named
        _LOG.debug("the layer is not known: %s", error)
        return ""
    for name, whole in both.items():
        parts = [part[name] for part in (first, second) if name in part]
        if len(parts) < 2 or len(whole) != 2 * rows or len(parts[0]) != rows:
            continue
        if parts[0].shape[1:] != whole.shape[1:] or off(whole, np.concatenate(parts)) > ROUNDING:
            return f"; rows first meet at {_title(model, name)}"
    return ""


def _title(model: keras.Model, tensor: str) -> str:
    """Return the layer in whose scope a tensor is, and its op."""
    op = tensor.split(":")[0]
    titles = {
        layer.name: keras_layers.title_of(layer) for layer in keras_layers.parts_of(model, itself=False)
    }
    # Scopes that came before have a number: dense_1 for the layer dense.
    scopes = [scope if scope in titles else scope.rpartition("_")[0] for scope in op.split("/")]
    inner = [titles[scope] for scope in scopes if scope in titles]
    return f"layer {inner[-1]!r}, op {op}" if inner else f"op {op}"


def _no_weight_of_one_value(model: keras.Model) -> AbstractContextManager[None]:
    """Move weights of one value a little inside the block, as a gate of zeros hides later layers."""
    numbers, alike, moved = np.random.default_rng(0), dict[str, Any](), dict[str, np.ndarray]()
    for place, value in enumerate(values_of(model.trainable_variables)):
        if value is None or not value.dtype.is_floating:
            continue
        flat = tf.reshape(value, [-1])
        if tf.size(flat) and tf.reduce_all(flat == flat[0]):
            old, name = value.numpy(), str(place)
            alike[name] = value
            moved[name] = old + (_MOVED * numbers.standard_normal(old.shape)).astype(old.dtype)
    return set_to(alike, moved)
