"""``model.fit`` with forward, dO and dW of different steps at the same time on different devices."""

from __future__ import annotations

import time
from typing import Any

from tf_ooo import compat
from tf_ooo.errors import BackendError, OptionsError
from tf_ooo.layerpipe.reporting import fill_report, fill_spread
from tf_ooo.layerpipe.running import Epoch
from tf_ooo.layerpipe.spread import Spread, spread
from tf_ooo.layerpipe.stages import Stages, stages_of
from tf_ooo.options import Options
from tf_ooo.pipeline.fit import PipelineFit
from tf_ooo.pipeline.measured import measured_costs
from tf_ooo.pipeline.naming import named, variable_layers
from tf_ooo.pipeline.variables import Moved, all_variables
from tf_ooo.planning import plan
from tf_ooo.report import Report
from tf_ooo.schedule import Schedule
from tf_ooo.simulator import simulate
from tf_ooo.xla.compat import Packed, signature

_NO_GRAPH = "TensorFlow handed no graph of it over"
# Batches of the plan, for each processor: enough for the rounds at both ends not to matter.
_BATCHES = 4


class LayerPipeFit(PipelineFit):
    """What the callback does in ``mode="layerpipe"``: profile, plan, spread, run, drain at epoch ends."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.report = Report(mode="layerpipe")
        self.stages: Stages | None = None
        self._home: dict[str, int] = {}
        self._spread: Spread | None = None
        self._epoch: Epoch | None = None
        self._structure: Any = None
        self._of_epoch: int | None = None
        self._taken = 0

    @property
    def _microbatches(self) -> int:
        return 1

    # -- what the callback calls -----------------------------------------------------------------

    def begin(self, model: Any, params: dict[str, Any] | None = None) -> None:
        """At the start of training."""
        super().begin(model, params)
        self.report.mode = "layerpipe"
        self._of_epoch = (params or {}).get("steps")

    def epoch_begin(self, epoch: int) -> None:
        """Nothing is on its way."""
        self._epoch, self._taken = None, 0

    def epoch_end(self, epoch: int, logs: dict[str, Any] | None) -> None:
        """Finishes what an epoch that was stopped early has left on its way."""
        if self._epoch is not None:
            self._epoch.drain()
            self._epoch = None
        super().epoch_end(epoch, logs)

    def end(self) -> None:
        """Puts variables and the model's own train function back."""
        self._epoch, self._spread = None, None
        super().end()

    # -- plan ------------------------------------------------------------------------------------

    def _make_plan(self) -> None:
        started = time.perf_counter()
        request, profiler = self._request, self._profiler
        assert request is not None  # for mypy: _profile has run
        step = request.step
        if step is None:
            raise BackendError(f"the step cannot be spread: {request.skipped or _NO_GRAPH}")
        measured = measured_costs(step, None if profiler is None else profiler.profile)
        costs = self.options.costs or self._on_devices(measured)
        layers = len(step.known.graph.layers)
        if len(costs.layers) != layers:
            raise OptionsError(f"costs= has {len(costs.layers)} layers, the model {layers}: not its costs")
        link = self._link()
        schedule = self._schedule(costs.layers, link)
        self.stages = stages_of(schedule, layers)
        timeline = simulate(schedule, list(costs.layers), link)
        self._layers = variable_layers(step)
        self._home = self._homes(step.known.graph)
        self.report.costs, self.report.planned = costs, schedule
        fill_report(self.report, step.known.graph, self.stages, timeline, costs, self.devices)
        self.report.plan_seconds = time.perf_counter() - started
        self._plan = schedule  # type: ignore[assignment]
        request.close()
        if profiler is not None:
            profiler.close()
        self._request, self._functions, self._profiler = None, None, None

    def _schedule(self, layers: Any, link: Any) -> Schedule:
        policy = "layerpipe" if self.options.schedule == "auto" else self.options.schedule
        return plan(
            layers=list(layers),
            schedule=policy,
            mode="layerpipe",
            devices=len(self.devices),
            microbatches=_BATCHES * len(self.devices),
            link=link,
            memory_limit_bytes=self.options.memory_limit_bytes,
        )

    def _homes(self, graph: Any) -> dict[str, int]:
        """The processor of each variable: of weights and their slots that of dW, of states that of F."""
        assert self.stages is not None  # for mypy: _make_plan has run
        trained = {name for variable in graph.variables for name in (variable.name, *variable.slots)}
        return {
            name: self.stages.of["dW" if name in trained else "F", layer]
            for name, layer in self._layers.items()
        }

    # -- run -------------------------------------------------------------------------------------

    def _execution(self, iterator: Any) -> Any:
        return self._guarded(lambda: self._some_steps(iterator))

    def _some_steps(self, iterator: Any) -> Any:
        outputs = None
        for _ in range(int(self._model.steps_per_execution)):
            found = self._synchronous(iterator) if self._plan is None else self._in_rounds(iterator)
            if found is None:
                break
            outputs = found
        if outputs is None:
            raise StopIteration
        return outputs

    def _synchronous(self, iterator: Any) -> Any:
        """A step on one device, before the plan."""
        batches = compat.take(iterator, 1)
        self._taken += len(batches)
        return self._profile(batches[0], iterator) if batches else None

    def _in_rounds(self, iterator: Any) -> Any:
        """As many rounds as it takes for the next batch's results."""
        if self._epoch is None:
            self._epoch = self._new_epoch(iterator)
        started = time.perf_counter()
        outputs = self._epoch.step()
        if outputs is not None:
            compat.synchronize(outputs)
            self._step_s.append(time.perf_counter() - started)
        return outputs

    def _new_epoch(self, iterator: Any) -> Epoch:
        def batches() -> Any:
            if self._of_epoch is not None and self._taken >= self._of_epoch:
                return None
            taken = compat.take(iterator, 1)
            if not taken:
                return None
            self._taken += 1
            return self._tensors(taken[0])

        waiting = [batches()]
        if self._spread is None:
            raise StopIteration
        self._spread.ticks.reset()
        return Epoch(
            self._spread.ticks,
            self._spread.rounds.batch,
            self._spread.delays.logs_round,
            lambda: waiting.pop() if waiting else batches(),
        )

    def _tensors(self, batch: Any) -> list[Any]:
        """The tensors of a batch; the first one starts the rounds."""
        packed = Packed(batch)
        structure = (signature(batch)[0], [(t.dtype, t.shape.rank) for t in packed.specs])
        if self._spread is None:
            self._start_with(batch)
            self._structure = structure
        if structure != self._structure:
            raise BackendError("a batch has other parts than the first: this mode needs batches of one kind")
        return list(packed.tensors)

    def _start_with(self, batch: Any) -> None:
        """Moves the variables, traces the step where they are, and spreads it."""
        model, stages = self._model, self.stages
        assert stages is not None  # for mypy: _make_plan has run
        self._moved = Moved(model)
        variables = named(all_variables(model))
        devices = {
            id(variable): self.devices[self._home[name]]
            for name, variable in variables.items()
            if name in self._home
        }
        self._moved.move(devices, variables.values())
        seconds = self.report.costs.op_seconds if self.report.costs is not None else {}
        self._spread = spread(model, batch, stages, self.devices, self.options.weights, seconds)
        self.report.notes += [note for note in self._spread.notes if note not in self.report.notes]
        fill_spread(self.report, self._spread)

    def _guarded(self, run: Any) -> Any:
        try:
            return run()
        except StopIteration:
            raise
        except BaseException as error:
            model = self._model
            explained = self._explained(error)
            self.end()
            compat.remove_train_function(model)
            if explained is error:
                raise
            raise explained from error
