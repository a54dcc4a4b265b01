"""``model.fit`` on several processes with a pipeline each: Data parallel's fit around a pipeline's steps."""

from __future__ import annotations

import dataclasses
from typing import Any

from tf_ooo.compat import train_function
from tf_ooo.errors import BackendError
from tf_ooo.hosts.device_names import over_hosts
from tf_ooo.hosts.ranks.engine import choose_engine, resolved_name
from tf_ooo.modes.data_parallel.fit import DataParallelFit
from tf_ooo.modes.data_parallel.options import DataParallel
from tf_ooo.modes.pipeline.fit import PipelineFit
from tf_ooo.modes.pipeline.options import Pipeline
from tf_ooo.modes.pipeline.replicas import Replicas
from tf_ooo.options import RankOptions

_BY_HOROVOD = (
    "pipelines of several processes are averaged by Horovod, not by TensorFlow's collectives, which need all "
    "devices of a process: horovodrun -np N python train.py, without TF_CONFIG and engine='collectives'"
)


class ReplicatedPipelineFit(DataParallelFit):
    """Each rank cuts the same model over devices of its own; ranks are kept in step as in data parallel.

    Raises (from :meth:`begin`):
        BackendError: not as many processes as ``replicas``, or a pipeline that cannot be replicated.
    """

    def __init__(self, options: Pipeline) -> None:
        self._pipeline_options = options
        self.pipeline = PipelineFit(options)
        of_ranks = [item.name for item in dataclasses.fields(RankOptions) if item.name != "schedule"]
        super().__init__(DataParallel(**{name: getattr(options, name) for name in of_ranks}))
        # Without what is other on each rank, or of this rank's pipeline alone.
        own = dataclasses.replace(options, devices=None, costs=None, memory_limit_bytes=None)
        self._agreed = own.shared()
        self.report = self.pipeline.report

    def begin(self, model: Any, params: dict[str, Any] | None = None) -> None:
        """At the start of training."""
        if resolved_name(self.options.engine) == "collectives":  # before they wait for each other
            raise BackendError(_BY_HOROVOD)
        engine = choose_engine(self.options.engine)
        _check(self._pipeline_options, engine.size)
        super().begin(model, params)
        if engine.size == 1:
            self.pipeline.begin(model, params)
        else:
            self._begin_replica(model, params)
        self.report = self.pipeline.report
        self._uncompiled.note_in(self.report)

    def _begin_replica(self, model: Any, params: dict[str, Any] | None) -> None:
        assert self.engine is not None  # for mypy: begin has run
        assert self.averaging is not None
        known = self.pipeline.replicas
        if known is None or known.averaging is not self.averaging:
            self.pipeline.replicas = Replicas(self.engine, self.averaging)
        train_function.remove_train_function(model)
        self.pipeline.begin(model, params)
        train_function.remove_train_function(model)
        stock = train_function.train_function_of(model)
        assert self.step is not None  # for mypy: begin has run
        ours = self.pipeline.guard.guarded(self.step, StopIteration)
        train_function.install_train_function(model, ours, stock, before_next=self._end_replaced)

    def _together(self, model: Any) -> bool:
        return True

    def _run_batches(self, batches: list[Any], iterator: Any) -> Any:
        outputs = None
        for batch in batches:
            outputs = self.pipeline.step(batch, iterator)
        return outputs

    def epoch_end(self, epoch: int, logs: dict[str, Any] | None) -> None:
        """Averages the logs over the ranks; takes note of the step times."""
        self.pipeline.epoch_end(epoch, logs)
        super().epoch_end(epoch, logs)

    def end(self) -> None:
        """Puts variables and the model's own train function back."""
        super().end()
        self.pipeline.end()

    def finish(self) -> None:
        """At the end of training: tells the other ranks, restores; rank 0 writes the timeline."""
        self._check_replaced()
        self.pipeline.epoch_end(0, None)
        if self.engine is not None and self.engine.size > 1:
            self.pipeline.note_too_short()
        super().finish()


def _check(options: Pipeline, size: int) -> None:
    wanted = size if options.replicas is None else options.replicas
    if wanted != size:
        raise BackendError(
            f"replicas={wanted}: {size} process{'es were' if size > 1 else ' was'} launched; each replica is "
            f"a process with devices of its own: horovodrun -np {wanted} python train.py"
        )
    if size == 1:
        return
    if over_hosts(options.devices):
        raise BackendError(
            f"devices={options.devices!r}: a pipeline over several hosts cannot be replicated, its workers "
            "are no ranks; give each process devices of its own, or leave replicas out"
        )
