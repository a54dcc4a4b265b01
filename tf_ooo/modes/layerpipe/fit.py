"""``model.fit`` with forward, dO and dW of different steps at the same time on different devices."""

from __future__ import annotations

import logging
import time
from typing import Any

from tf_ooo.compat import iterators, keras_layers, keras_optimizers, keras_variables, nests, train_function
from tf_ooo.compat.nests import Packed
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import BackendError, OptionsError
from tf_ooo.fit.uncompiled import NOTE
from tf_ooo.modes.layerpipe.choice import make_plan
from tf_ooo.modes.layerpipe.divide import lower_shares
from tf_ooo.modes.layerpipe.numbering import in_order_of
from tf_ooo.modes.layerpipe.options import LayerPipe
from tf_ooo.modes.layerpipe.reporting import fill_report, fill_spread
from tf_ooo.modes.layerpipe.running import Epoch
from tf_ooo.modes.layerpipe.spread import Spread, refuse_unspreadable, spread
from tf_ooo.modes.layerpipe.stages import Stages, stages_of
from tf_ooo.modes.layerpipe.traced import Traced, renumbered, trace
from tf_ooo.modes.layerpipe.two_versions import fewest_batches
from tf_ooo.modes.pipeline.fit import PipelineFit
from tf_ooo.planning.choosing.plan import Plan
from tf_ooo.planning.policies import offers
from tf_ooo.rewriting.naming import named
from tf_ooo.rewriting.unrolled_tasks import Step
from tf_ooo.tracing import sync
from tf_ooo.tracing.optimizers import optimizers_of
from tf_ooo.tracing.variables import Moved, all_variables

_LOG = logging.getLogger("tf_ooo")
_GLOBAL_CLIPPING = (
    "global_clipnorm= has each update wait for all layers' gradients, which come at different times in "
    "mode='layerpipe': train without clipping by global norm (clipnorm= and clipvalue= are fine), or with "
    "another mode"
)
_ONE_DEVICE = "there is one device: the stock step runs"
_GOING_ON = (
    "training goes on, but without costs= (callback.report.costs of the fit before): the first steps train "
    "synchronously again, and the result is not that of a fit without a break"
)
_WITHOUT = ("accumulate_steps", "rate_warmup_steps", "drain_steps")
_AHEAD = (
    "the model was saved within an epoch: its weights have the updates of batches that came in ahead of the "
    "last one reported; a fit that goes on from its number (BackupAndRestore, ModelCheckpoint with "
    "save_freq=N) would train them twice: with drain_steps=N none are ahead"
)
# Batches of the plan, for each processor: enough for the rounds at both ends not to matter.
_BATCHES = 4
# Rounds in one function, and the ops of all of them: a large graph takes TensorFlow long.
_ROUNDS, _OPS = (8, 4, 2), 20_000


class LayerPipeFit(PipelineFit):
    """What the callback does in ``mode="layerpipe"``: profile, plan, spread, run, drain at epoch ends."""

    options: LayerPipe  # type: ignore[assignment] # reads none of a Pipeline's own
    whole_layers = True

    def __init__(self, options: LayerPipe) -> None:
        super().__init__(options)  # type: ignore[arg-type]
        self.stages: Stages | None = None
        self._home: dict[str, int] = {}
        self._spread: Spread | None = None
        self._epoch: Epoch | None = None
        self._structure: Any = None
        self._of_epoch: int | None = None
        self._taken = 0  # batches of this epoch
        self._waiting: Any = None
        self._planned_layers: list[set[str]] = []
        self._traced: Traced | None = None  # the step as it is before the plan
        self._data_spec: Any = None

    @property
    def _microbatches(self) -> int:
        return 1

    # -- what the callback calls -----------------------------------------------------------------

    def begin(self, model: Any, params: dict[str, Any] | None = None) -> None:
        """At the start of training; with one device Keras' own step runs.

        Raises:
            BackendError: no such devices, or a model that cannot be spread.
        """
        super().begin(model, params)
        if self._model is None:  # an unsupported TensorFlow
            return
        self._of_epoch = (params or {}).get("steps")
        self._traced = self._waiting = None
        if len(self.devices) == 1:
            self.report.fell_back, self.report.fallback_reason = True, _one_device_text(self.options)
            self.report.notes = [note for note in self.report.notes if note != NOTE]
            self.end()
            return
        together, every = train_function.steps_per_execution(model), self.options.drain_steps
        if every is not None and every % together and together != self._of_epoch:
            self.end()
            raise OptionsError(
                f"drain_steps={every} is no multiple of steps_per_execution={together}: callbacks would see "
                "batches on their way"
            )
        if any(getattr(one, "global_clipnorm", None) for one in optimizers_of(model)):
            self.end()
            raise BackendError(_GLOBAL_CLIPPING)
        least = fewest_batches(len(self.devices))
        if self._group is not None and self._group < least:
            self.end()
            raise OptionsError(
                f"accumulate_steps={self._group} is not accepted with {len(self.devices)} devices: two "
                f"versions of the weights do from {least} on"
            )

    @property
    def _group(self) -> int | None:
        """How many batches are one update, where several are."""
        if not offers(self.options.schedule, "accumulate_steps"):
            return None
        return self.options.accumulate_steps or fewest_batches(len(self.devices))

    def epoch_begin(self, epoch: int) -> None:
        """Nothing is on its way."""
        self._epoch, self._taken = None, 0

    def settle(self) -> None:
        """Before an evaluation in an epoch, and at its end: all updates are in the weights."""
        if self._epoch is not None:
            self._epoch.drain()

    def saving(self) -> None:
        """As an evaluation; says what a fit that goes on from the number of that batch would do."""
        if self._epoch is not None and self._epoch.ahead and _AHEAD not in self.report.notes:
            _LOG.warning("%s", _AHEAD)
            self.report.notes.append(_AHEAD)
        self.settle()

    def epoch_end(self, epoch: int, logs: dict[str, Any] | None) -> None:
        """Finishes what an epoch that was stopped early has left on its way."""
        if self._epoch is not None:
            self._epoch.drain()
            self._epoch = None
        super().epoch_end(epoch, logs)

    def _ended(self) -> list[str]:
        # Asked first: what is given up on a worker that has just died might wait for ever.
        getattr(self._target, "lost", dict)()
        self._epoch, self._spread = None, None
        return super()._ended()

    # -- plan ------------------------------------------------------------------------------------

    def _plan_with(self, step: Step, costs: CostTable) -> None:
        graph = step.known.graph
        self._planned_layers = [set(layer.variables) for layer in graph.layers]
        plan = self._choose(costs)
        self.stages = stages_of(plan.schedule, len(costs.layers))
        self._home = self._homes(graph)
        fill_report(self.report, graph, plan, costs, self.stages, self.devices)
        self._note_versions()
        self._plan, self._traced = plan.schedule, None

    def _note_versions(self) -> None:
        """What ``weights="ema"`` cannot know."""
        if self.options.weights != "ema":
            return
        notes = [
            f"weights='ema': earlier weights are rebuilt from the updates that {type(one).__name__} made, "
            "which change from step to step; weights='stash' is exact"
            for one in optimizers_of(self._model)
            if not keras_optimizers.is_plain_sgd(one)
        ]
        names = keras_layers.batch_normalizations(self._model)
        if names:
            notes.append(
                f"weights='ema': {len(names)} BatchNormalization layers, {names[0]} first, use the "
                "statistics of their forward pass with rebuilt weights"
            )
        for note in notes:
            _LOG.warning("%s", note)
        self.report.notes += [note for note in notes if note not in self.report.notes]

    def _note_going_on(self) -> None:
        """Training that goes on, without the costs of the fit before."""
        steps = max(
            int(keras_variables.value_of(one.iterations).numpy()) for one in optimizers_of(self._model)
        )
        if steps and _GOING_ON not in self.report.notes:
            self.report.notes.append(_GOING_ON)

    def _choose(self, costs: CostTable) -> Plan:
        assert self._traced is not None  # for mypy: no step has run before it was traced
        group, traced = self._group, renumbered(self._traced, self._planned_layers)
        options = {"lower_shares": lower_shares(traced, costs.op_seconds), "accumulate_steps": group}
        return make_plan(
            self.options.schedule,
            costs.layers,
            costs.link,
            len(self.devices),
            _BATCHES * (group or len(self.devices)),
            {name: value for name, value in options.items() if value is not None},
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
        guard, outputs = self.guard, None
        self._data_spec = getattr(iterator, "element_spec", None)
        try:
            for _ in range(train_function.steps_per_execution(self._model)):
                found = self._synchronous(iterator) if self._plan is None else self._in_rounds(iterator)
                if found is None:
                    break
                outputs = found
        except BaseException as error:
            guard.raise_for(error)
        if outputs is None:
            raise StopIteration
        return outputs

    def _synchronous(self, iterator: Any) -> Any:
        """A step on one device, before the plan; with costs there is none."""
        started = time.perf_counter()
        if self._traced is None and not self._look(iterator):
            return None
        if self.options.costs is not None:
            self._plan_from_costs(self.options.costs)
            self.report.plan_seconds = time.perf_counter() - started
            return self._in_rounds(iterator)
        if not self._seen:
            self._note_going_on()
        batches = self._take(iterator)
        return self._profile(batches[0], iterator) if batches else None

    def _look(self, iterator: Any) -> bool:
        """Traces the step before the first one runs: what cannot be spread has trained nothing.

        Returns whether there is a batch.
        """
        model, options = self._model, self.options
        sync.build(model, optimizers_of(model), model.train_step, iterator)
        batches = iterators.take(iterator, 1)
        if not batches:
            return False
        self._waiting = batches[0]
        traced = trace(model, batches[0], self._group is not None, data_spec=self._data_spec)
        refuse_unspreadable(model, traced, options.rate_warmup_steps, self._group)
        self._traced = traced
        return True

    def _plan_from_costs(self, costs: CostTable) -> None:
        """A plan for given costs needs no step of its own: the first batch is delayed as all others are."""
        assert self._traced is not None  # for mypy: _look has run
        layers = self._traced.graph.layers
        order = in_order_of([layer.name for layer in costs.layers], [layer.name for layer in layers])
        traced = renumbered(self._traced, [layers[number].variables for number in order])
        self._plan_from(traced.as_step(), costs)

    def _in_rounds(self, iterator: Any) -> Any:
        """As many rounds as it takes for the next batch's results; None at the end of the data."""
        if self._plan is None:
            return None
        outputs = None if self._epoch is None else self._timed_step(self._epoch)
        if outputs is None:  # the first batch, or nothing is on its way
            self._epoch = self._new_epoch(iterator)
            outputs = None if self._epoch is None else self._timed_step(self._epoch)
        return outputs

    def _timed_step(self, epoch: Epoch) -> Any:
        """The results of the next batch; takes note of the seconds of each round, where none was traced."""
        made = self._spread
        assert made is not None  # for mypy: there is an epoch
        started, rounds, functions = time.perf_counter(), epoch.rounds, made.ticks.traced_functions
        outputs = epoch.step()
        if outputs is not None:
            nests.synchronize(outputs)
        ran = epoch.rounds - rounds if made.ticks.traced_functions == functions else 0
        self._step_s += [(time.perf_counter() - started) / ran] * ran if ran else []
        return outputs

    def _new_epoch(self, iterator: Any) -> Epoch | None:
        """From the next batch to the end of the data, or until ``drain_steps`` batches have come in."""
        first = self._next_batch(iterator)
        if first is None:
            return None
        made = self._spread
        assert made is not None  # for mypy: there has been a batch
        every = self.options.drain_steps or 1
        left = [every - (self._taken - 1) % every]
        waiting = [first]

        def batches() -> Any:
            if self.options.drain_steps and not left[0]:
                return None
            left[0] -= 1
            return waiting.pop() if waiting else self._next_batch(iterator)

        made.ticks.reset()
        small = (count for count in self._sizes() if count * len(made.traced.index) <= _OPS)
        together = self.options.unroll or next(small, 1)
        return Epoch(made.ticks, made.rounds.batch, made.delays.logs_round, batches, together)

    def _sizes(self) -> list[int]:
        """How many rounds may run as one function, most first.

        With groups of batches a multiple or a part of a group: others would start in ever other phases of it,
        each of which is a function.
        """
        group = self._group
        if group is None:
            return list(_ROUNDS)
        most = max(_ROUNDS[0], group)
        return [count for count in range(most, 1, -1) if count % group == 0 or group % count == 0]

    def _next_batch(self, iterator: Any) -> Any:
        """Its tensors; None at the end of the epoch.  Keras counts the steps, the data may go on."""
        if self._of_epoch is not None and self._taken >= self._of_epoch:
            return None
        taken = self._take(iterator)
        return self._tensors(taken[0]) if taken else None

    def _take(self, iterator: Any) -> list[Any]:
        """The next batch of the data, if there is one."""
        taken = iterators.take(iterator, 1) if self._waiting is None else [self._waiting]
        self._waiting = None
        self._taken += len(taken)
        return taken

    def _tensors(self, batch: Any) -> list[Any]:
        """The tensors of a batch; the first one starts the rounds."""
        packed = Packed(batch)
        structure = (nests.signature(batch)[0], [(t.dtype, tuple(t.shape[1:])) for t in packed.specs])
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
        self._spread = spread(
            model,
            batch,
            stages,
            self.devices,
            self.options.weights,
            seconds,
            self.options.rate_warmup_steps,
            self._group,
            self._planned_layers,
            self._data_spec,
        )
        self._moved.check_captures(self._spread.traced.captured.values())
        self.report.notes += [note for note in self._spread.notes if note not in self.report.notes]
        fill_spread(self.report, self._spread)


def _one_device_text(options: LayerPipe) -> str:
    """Names what the user asked for and does not get."""
    asked = [f"schedule={options.schedule!r}"] if offers(options.schedule, "accumulate_steps") else []
    asked += [f"{name}={getattr(options, name)}" for name in _WITHOUT if getattr(options, name) is not None]
    return f"{_ONE_DEVICE}, without {', '.join(asked)}" if asked else _ONE_DEVICE
