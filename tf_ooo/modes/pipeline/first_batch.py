"""Looks at batches before a model is cut: what micro-batches change in the result of training."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import keras_layers, keras_losses, nests
from tf_ooo.costs.places import first_of
from tf_ooo.errors import BackendError
from tf_ooo.fit import timing
from tf_ooo.hosts.devices import home_device
from tf_ooo.hosts.memory import host_memory, in_host_memory
from tf_ooo.modes.pipeline.losses import LaterBatches, check_loss
from tf_ooo.modes.pipeline.options import WHOLE_BATCH, Pipeline
from tf_ooo.modes.pipeline.plans import PipelinePlans
from tf_ooo.modes.pipeline.state_kinds import StateKinds
from tf_ooo.options.base import is_file
from tf_ooo.planning.choosing.on_paper import MICROBATCHES
from tf_ooo.tracing import sync
from tf_ooo.tracing.micro_batches import Division, rows_of
from tf_ooo.tracing.traces import traced_anew
from tf_ooo.tracing.variables import all_variables, bytes_of, optimizers_of

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
    """Say what micro-batches of so many ``rows`` each change in the result of training."""
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
    masks = keras_losses.masks(model)
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
    """Builds a model with its first batch, and compares that with its micro-batches; stays from fit to fit.

    Attributes:
        states: how those of the model follow from micro-batches, as was seen then.
        pass_s: what tracing a pass took then; 0: none was traced.
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
        """Make all variables, ask ``is_never_whole``, and look at the loss, unless that was switched off."""
        plans, options = self._plans, self._plans.options
        plans.find_limit()
        on_host, rows = in_host_memory(model), plans.division.split(rows_of(batch))
        with host_memory() if on_host else contextlib.nullcontext():
            sync.build(model, optimizers_of(model), model.train_step, iterator)
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
        if options.check_loss and keras_losses.own_loss_code(model):
            self._warn(_LOSS_UNCHECKED)

    def _check_loss(self, model: keras.Model, batch: object, microbatches: int, on_host: bool) -> None:
        """Look once for such batches, until the model is compiled again."""
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
        """StepRefused where rows meet in this batch that did not in the first one."""
        self._plans.distributed.report.note(self._later.check(batch, moved) if self._later else "")

    def compare_no_later(self) -> None:
        """There is no device on which the whole model may run beside the pipeline."""
        if self._later is not None:
            self._later = None
            self._plans.distributed.report.note(_FIRST_ONLY)

    def say_what_changes(self, model: keras.Model, rows: Sequence[int]) -> None:
        """Warns of what micro-batches of so many rows change in the result; what was said before goes."""
        report, names = self._plans.distributed.report, keras_layers.normalizing_in_training(model)
        if names and self._plans.options.batch_norm == WHOLE_BATCH:
            report.note(_STAYS_WHOLE.format(first_of(names)))
        report.forget(*self._said)
        self._said = micro_batch_notes(model, rows) if len(rows) > 1 else []
        for text in self._said:
            self._warn(text)

    def _warn(self, note: str) -> None:
        self._plans.distributed.report.note(note, log=logging.WARNING)
