"""The mode: what a pipeline refuses before a fit begins."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tf_ooo.compat import keras_losses
from tf_ooo.errors import BackendError, ScheduleError
from tf_ooo.fit.distributed import check_model
from tf_ooo.fit.mode import Training
from tf_ooo.hosts.memory import evaluate_in_host_memory, in_host_memory
from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.modes.pipeline.dividing import division_of
from tf_ooo.modes.pipeline.first_batch import FirstBatch
from tf_ooo.modes.pipeline.fit import PipelineFit
from tf_ooo.modes.pipeline.host_check import check_host_memory
from tf_ooo.modes.pipeline.mesh import counts_of
from tf_ooo.modes.pipeline.options import AUTO, Pipeline
from tf_ooo.modes.pipeline.own_schedule import check_own, layers_named
from tf_ooo.modes.pipeline.planning import SCHEDULES
from tf_ooo.modes.pipeline.plans import PipelinePlans
from tf_ooo.options.base import is_file
from tf_ooo.planning.choosing.recompute import NONE
from tf_ooo.planning.model.problem import check_limits
from tf_ooo.planning.model.schedule_file import ScheduleFile, read_schedule
from tf_ooo.report.report import Report

if TYPE_CHECKING:
    import keras


class PipelineMode:
    """Nothing falls back here unless ``fall_back`` is asked for: the model is distributed by request.

    Attributes:
        plans: what is known of the model trained last.
        first_batch: what was looked at before that was cut.
    """

    keeps_stock = False
    compiles = False

    def __init__(self, options: Pipeline) -> None:
        self.options, self.plans = options, PipelinePlans(options)
        self.distributed, self.first_batch = self.plans.distributed, FirstBatch(self.plans)
        self._refused = ""

    def join(self) -> Engine:
        """This process trains alone."""
        return self.plans.ranks.engine

    def check(self, model: keras.Model, steps: int | None) -> None:
        """Check all before anything has changed.

        BackendError: no such devices, a model that cannot be cut, or too little memory in this process.
        ScheduleError: a schedule's file.
        """
        self._refused = ""
        try:
            self._check_model(model)
        except BackendError as error:
            if not self.plans.may_fall_back():
                raise
            self._refused = str(error)
        check_host_memory(model, self.options)
        self.distributed.place(model, self.options.devices, self.join().local_rank)
        if isinstance(self.options.memory_limit_bytes, Sequence):
            check_limits(self.options.memory_limit_bytes, len(self.distributed.target.devices))
        self.plans.division = division_of(model, self.options)
        if is_file(self.options.schedule):
            self._read_own(self.options.schedule)
        self.plans.counts = self._counts()

    def _check_model(self, model: keras.Model) -> None:
        check_model(model, self.options.mode)
        summed = keras_losses.summed_losses(model)
        if summed:
            raise BackendError(
                f"loss {summed[0]!r} adds up rows (reduction='sum' or none), and micro-batches are averaged; "
                "use reduction='sum_over_batch_size' and a learning rate that is larger by the batch size"
            )

    def _counts(self) -> tuple[int, ...]:
        """Return how many replicas may share this process' devices. OptionsError: they cannot."""
        options, own, plans = self.options, self.plans.own, self.plans
        if plans.ranks.engine.size > 1:  # each process is one
            return (1,)
        asked = own.schedule.workers if own is not None and options.replicas == AUTO else options.replicas
        return counts_of(asked, len(self.distributed.target.devices), plans.division.most)

    def _read_own(self, path: str | os.PathLike[str]) -> None:
        """The user's own schedule; where it is another than before, it is planned with anew."""
        before, options = self.plans.own, self.options
        if not os.path.exists(path):
            raise ScheduleError(
                f"schedule={os.fspath(path)!r}: there is no such file; Schedule.to_text() and tf-ooo plan "
                f"--out write one; by name: auto, {', '.join(SCHEDULES)}"
            )
        own = read_schedule(path)
        check_own(own, *self._share_of(own))
        if options.recompute != NONE:
            raise own.error(
                f"recompute={options.recompute!r}: the file's 'recompute' line says which layers do"
            )
        if options.stages is not None and layers_named(own):
            raise own.error("the file has 'stage' lines, and stages= is given: leave one out", "stage")
        if before is not None and before.schedule != own.schedule:
            self.plans.forget()
        self.plans.own = own

    def _share_of(self, own: ScheduleFile) -> tuple[int, int, int]:
        """Devices and micro-batches of a replica with the user's own schedule, and how many there are."""
        options, processes = self.options, self.join().size
        devices, microbatches = len(self.distributed.target.devices), self.plans.division.most
        if processes > 1:
            return devices, microbatches, processes
        asked = own.schedule.workers if options.replicas == AUTO else options.replicas
        (count,) = counts_of(asked, devices, microbatches)
        return devices // count, -(-microbatches // count), count

    def prepare(self, model: keras.Model, steps: int | None) -> Training | None:
        """Prepare a fit; None: one device trains, as it is faster or the model is refused."""
        fit = self.fit_of(model, steps)
        if self._refused:
            self.plans.train_on_one_device(self._refused)
        return None if self.plans.one_device else fit

    def fit_of(self, model: keras.Model, steps: int | None) -> PipelineFit:
        """Make a fit, with the former plan if that was of the same step on the same devices."""
        if in_host_memory(model):
            evaluate_in_host_memory(model)
        self.plans.begin(model, steps)
        return PipelineFit(self.plans, self.first_batch, model)

    def describe(self) -> Report:
        return self.distributed.describe()
