"""Keeps, from fit to fit, the traced functions of a planned step and the variables that they read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_ooo.compat import nests, tf_functions, train_function
from tf_ooo.compat.train_function import Kind
from tf_ooo.errors import BackendError, OOOError
from tf_ooo.fit.mode import Function
from tf_ooo.hosts.devices import host_device
from tf_ooo.modes.pipeline.mesh import Pieces
from tf_ooo.report.report import Report
from tf_ooo.rewriting.forward import request_to_place_forward
from tf_ooo.rewriting.passes import Folder
from tf_ooo.rewriting.request import RewriteRequest, in_one_line
from tf_ooo.rewriting.result import RewriteResult
from tf_ooo.rewriting.staged import request_to_place
from tf_ooo.tracing.flat import EvaluationFunctions
from tf_ooo.tracing.micro_batches import parts_of, rows_of
from tf_ooo.tracing.variables import Moved, all_variables, values_of

if TYPE_CHECKING:
    import keras

    from tf_ooo.modes.pipeline.plans import PlannedPipeline
    from tf_ooo.modes.pipeline.steps import PipelineSteps


_LOG = logging.getLogger("tf_ooo")
WHOLE = Pieces()
_UNTRACEABLE = object()
_CALLED = {"test": "evaluate", "predict": "predict"}


class StagedEvaluation:
    """Runs a model's test or predict steps, each op on the device of the weights that it reads.

    Steps that cannot be placed run as without us, on one device that is sent all weights; the report says so
    once.

    Args:
        model, kind, report, dump_dir: the model, ``"test"`` or ``"predict"``, and where to report.
        pieces: how a predicted batch is cut.
        step: in place of Keras' own step.
        called: the method that the user calls.

    Attributes:
        requests: open while its functions may run.
    """

    def __init__(
        self,
        model: keras.Model,
        kind: train_function.Kind,
        report: Report,
        dump_dir: Folder,
        pieces: Pieces = WHOLE,
        step: Callable[[Any], Any] | None = None,
        called: str = "",
    ) -> None:
        self._model, self._kind, self._report, self._pieces = model, kind, report, pieces
        self._called = called or _CALLED[kind]
        folder = None if dump_dir is None else Path(dump_dir) / kind
        self._request = request_to_place_forward(lambda: self._seen, folder)
        self.requests = [self._request]
        self._functions = EvaluationFunctions(model, kind, self._request.tracing, step)
        self._seen: Sequence[Any] = ()  # shapes of the batch that is traced
        self._looked_at = 0  # traces
        self._untraceable = self._told = False

    def __call__(self, stock: Function, given: object) -> Any:
        """Run on an iterator, or on batches, what Keras' function ``stock`` runs."""
        if self._untraceable:
            return stock(given)
        batches, spec = train_function.batches_of(self._model, self._kind, given)
        if not batches:
            raise StopIteration
        cut = [self._cut(batch, spec) for batch in batches]
        (first, *_), own = cut[0]
        try:
            self._functions.make(first, own)
        except Exception as error:  # the user's code, which Keras may trace in another way
            self._untraceable = True
            self._say(in_one_line(error).partition("\n")[0])
            return stock(train_function.given_again(given, batches))
        outputs = [self._joined(batch, spec, *parts) for batch, parts in zip(batches, cut, strict=True)]
        return train_function.joined(outputs) if self._kind == "predict" else outputs[-1]

    def _cut(self, batch: object, spec: object) -> tuple[list[Any], Any]:
        """Return a batch's pieces, or the batch alone, and the spec for which they are traced."""
        rows = self._pieces.of(known_rows(batch)) if self._pieces.rows else ()
        if len(rows) < 2:
            return [batch], spec
        return parts_of(nests.as_tensors(batch), rows), None

    def _joined(self, batch: object, spec: object, parts: Sequence[Any], own: object) -> Any:
        """Run the step on a batch; predictions of its pieces, one after the other, are joined."""
        if len(parts) == 1:
            return self._step(batch, spec)
        outputs: list[Any] = []
        for part in parts:
            outputs.append(_on_host(self._step(part, own)))  # or a device would hold those of all rows
            if not _has_rows(outputs[-1], known_rows(part)):
                self._pieces = WHOLE
                say_whole(self._report, self._called, "its outputs have not one row for each of a batch")
                return self._step(batch, spec)
        return train_function.joined(outputs)

    def _step(self, batch: object, spec: object) -> Any:
        self._seen = nests.shapes_of(batch)
        self._functions.make(batch, spec)
        outputs = self._functions(batch, spec)
        if self._functions.traced > self._looked_at:
            self._looked_at = self._functions.traced
            try:
                self._request.failures.raise_first()
                if self._request.count < self._looked_at:
                    self._say(self._request.skipped)
            except OOOError as error:
                self._say(in_one_line(error))
        return outputs

    def _say(self, reason: str) -> None:
        if not self._told:
            self._told = True
            note = f"{self._called} runs on one device, to which all weights are sent: {reason}"
            self._report.note(note, log=logging.WARNING)  # a plan before may have said it


def say_whole(report: Report, called: str, reason: str) -> None:
    """Say once why batches that would not fit are not cut."""
    report.note(f"{called} takes batches whole: {reason}", log=logging.WARNING)


def known_rows(batch: object) -> int:
    """Return the number of rows; 0: not known, or not the same everywhere."""
    try:
        return rows_of(nests.as_tensors(batch))
    except (BackendError, TypeError):
        return 0


def _has_rows(outputs: object, count: int) -> bool:
    """Return whether each tensor has so many rows."""
    shapes = [tensor.shape for tensor in tf.nest.flatten(outputs)]
    return all(shape.rank and shape[0] == count for shape in shapes)


def _on_host(outputs: object) -> Any:
    with tf.device(host_device()):
        return tf.nest.map_structure(tf.identity, outputs, expand_composites=True)


class OutputsFirst:
    """Runs a model's test steps; batches that fit, or whose outputs are not enough, pass whole.

    Keras computes loss and metrics of the whole batch on this host, given the outputs of its pieces.
    """

    def __init__(self, model: keras.Model, report: Report, dump_dir: Folder, pieces: Pieces) -> None:
        self._model, self._report, self._pieces = model, report, pieces
        self._whole = StagedEvaluation(model, "test", report, dump_dir)
        self._needed: list[str] = []  # beside the outputs
        step = train_function.outputs_on_data(model, self._needed)
        self._outputs = StagedEvaluation(model, "predict", report, dump_dir, pieces, step, "evaluate")
        self.requests = [*self._whole.requests, *self._outputs.requests]
        rest = train_function.rest_of_test_step(model)
        self._rest = tf_functions.plain_function(rest, any_shape=True)

    def __call__(self, stock: Function, given: object) -> Any:
        """Run on an iterator what Keras' test function ``stock`` runs."""
        if not self._pieces.rows:
            return self._whole(stock, given)
        batches, _ = train_function.batches_of(self._model, "test", given)
        if not batches:
            raise StopIteration
        if all(len(self._pieces.of(known_rows(batch))) == 1 for batch in batches) or not self._may_be_cut():
            return self._whole(stock, train_function.given_again(given, batches))
        logs = None
        for number, batch in enumerate(batches):
            outputs = self._outputs(lambda _: _UNTRACEABLE, [batch])
            if outputs is _UNTRACEABLE or not self._may_be_cut():
                return self._whole(stock, train_function.given_again(given, batches[number:]))
            with tf.device(host_device()):
                logs = self._rest(nests.as_tensors(batch), outputs)
        return logs

    def _may_be_cut(self) -> bool:
        """Return whether outputs are enough; else batches pass whole from now on, and the report says why."""
        reason = train_function.why_not_of_outputs(self._model) or next(iter(self._needed), "")
        if reason:
            self._pieces = WHOLE
            say_whole(self._report, "evaluate", reason)
        return not reason


Evaluation = StagedEvaluation | OutputsFirst


class PlacedStep:
    """Holds the functions of a plan's step; a later fit of the same model traces none again.

    Between fits the variables on the stages' devices are empty (:class:`Moved`), and nothing is registered
    with TensorFlow, which would hold the model for ever.

    Attributes:
        said_in_report: the first batch's graph; None: none was rewritten yet.
    """

    def __init__(self, steps: PipelineSteps, pipeline: PlannedPipeline) -> None:
        model, plans = steps.model, steps.plans
        self.moved, self._read = Moved(model), values_of(all_variables(model))
        self.request = request_to_place(model, pipeline.plan, steps.options.dump_dir)
        replicas, tracing = pipeline.mesh.replicas, self.request.tracing
        self.functions = steps.functions(plans.division, replicas, steps.seen, tracing)
        self.functions.check_captures = self.moved.check_captures
        self.said_in_report: RewriteResult | None = None
        # These evaluate and predict on the stages' devices, each with the function of Keras it stands for.
        self._evaluations: dict[Kind, tuple[Function, Evaluation]] = {}

    def evaluation(self, kind: Kind, function: Function, make: Callable[[], Evaluation]) -> Evaluation:
        """Return the evaluation made for this function; another function has to be traced, as in stock Keras.

        A traced one is set aside in each fit, and stands for the function that Keras makes in its place.
        """
        function = self.moved.put_away(f"{kind}_function") or function
        before, evaluation = self._evaluations.get(kind, (None, None))
        if evaluation is None or before is not function:
            for request in evaluation.requests if evaluation else ():
                request.close()
            evaluation = make()
            self._evaluations[kind] = function, evaluation
        return evaluation

    @property
    def requests(self) -> list[RewriteRequest[Any]]:
        """Return all requests that are open during a fit."""
        return [self.request, *(request for _, of in self._evaluations.values() for request in of.requests)]

    def why_not(self, steps: PipelineSteps) -> str:
        """Say why a fit that begins has to trace again; empty: it need not."""
        if not nests.are_same(self._read, values_of(all_variables(steps.model))):
            return "the model has other variables than in the fit before"
        if self.functions.division != steps.plans.division:
            return "batches are divided otherwise than in the fit before"
        return self.request.failures.reason or ""
