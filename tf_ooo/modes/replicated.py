"""Runs ``model.fit`` on several processes, each with a pipeline; ranks are kept in step around its steps."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import train_function
from tf_ooo.errors import BackendError
from tf_ooo.fit.mode import Training
from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.hosts.ranks.engine import choose_engine
from tf_ooo.hosts.ranks.launch import resolved_name
from tf_ooo.modes.data_parallel.fit import averaging_of, check_model
from tf_ooo.modes.data_parallel.ranks import RanksInStep
from tf_ooo.modes.pipeline.mode import PipelineMode
from tf_ooo.modes.pipeline.options import AUTO, Pipeline
from tf_ooo.modes.pipeline.plans import PipelineRanks
from tf_ooo.report.report import Report

if TYPE_CHECKING:
    import keras

_BY_HOROVOD = (
    "pipelines of several processes are averaged by Horovod, not by TensorFlow's collectives, which need all "
    "devices of a process: horovodrun -np N python train.py, without TF_CONFIG and engine='collectives'"
)


class ReplicatedPipelineMode:
    """Cuts the same model on each rank over its own devices; ranks stay in step as in data parallel."""

    keeps_stock = False
    compiles = False

    def __init__(self, options: Pipeline) -> None:
        self.options = options
        self.pipeline = PipelineMode(options)
        # Ranks may differ in their devices, costs and limits.
        alike = dataclasses.replace(options, devices=None, costs=None, memory_limit_bytes=None)
        self._agreed = alike.shared()
        self._stock: Any = None  # that gradients are averaged of

    def join(self) -> Engine:
        """Return the ranks. BackendError: they are not ``replicas`` many, or cannot have a pipeline each."""
        if resolved_name(self.options.engine) == "collectives":  # before they wait for each other
            raise BackendError(_BY_HOROVOD)
        engine = choose_engine(self.options.engine)
        size, asked = engine.size, self.options.replicas
        if asked not in (None, AUTO, size):
            raise BackendError(
                f"replicas={asked}: {size} process{'es were' if size > 1 else ' was'} launched; each replica "
                f"is a process with devices of its own: horovodrun -np {asked} python train.py"
            )
        if self.options.fall_back and size > 1:
            raise BackendError(
                "fall_back=True is for one process: several would have to leave their pipelines together; "
                "leave it out"
            )
        return engine

    def check(self, model: keras.Model, steps: int | None) -> None:
        """Raise BackendError for a model that cannot be cut, or whose gradients cannot be averaged."""
        engine = self.join()
        if engine.size > 1:
            check_model(model)
            stock = train_function.train_function_of(model)
            if self._stock is not stock:
                self._stock = stock
                self.pipeline.plans.ranks = PipelineRanks(engine, averaging_of(engine, self.options))
        self.pipeline.check(model, steps)

    def prepare(self, model: keras.Model, steps: int | None) -> Training:
        """Return the pipeline's training, with equally many steps on all ranks; one rank is a pipeline."""
        fit, own = self.pipeline.fit_of(model, steps), self.pipeline.plans.own
        engine, averaging = self.pipeline.plans.ranks.engine, self.pipeline.plans.ranks.averaging
        if averaging is None:
            return fit
        agreed = self._agreed
        if own is not None:  # whatever each rank's file is called
            order = dataclasses.replace(own.schedule, predicted_step_s=None, predicted_peak_bytes=None)
            agreed = {**agreed, "schedule": order.to_text()}
        ranks = RanksInStep(fit, model, engine, averaging, self.options, agreed, steps)

        def run_batches(batches: list[Any], iterator: object) -> Any:
            return [fit.steps.run(batch, iterator) for batch in batches][-1]

        ranks.begin(fit.run, run_batches)
        return ranks

    def describe(self) -> Report:
        """Return the report of this rank's pipeline."""
        return self.pipeline.describe()
