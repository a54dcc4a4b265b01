"""``evaluate`` and ``predict`` while the variables are on their stages' devices."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import evaluation, nests
from tf_ooo.errors import OOOError
from tf_ooo.report.report import Report
from tf_ooo.rewriting.failures import in_one_line
from tf_ooo.rewriting.forward import PlacedForward, request_to_place_forward
from tf_ooo.rewriting.request import RewriteRequest
from tf_ooo.tracing.evaluating import EvaluationFunctions

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger("tf_ooo")


class StagedEvaluation:
    """Runs a model's test or predict steps, each op on the device of the weights that it reads.

    What cannot be placed runs as it would without us, on one device that is sent all weights: the report says
    so once.
    """

    def __init__(self, model: keras.Model, kind: evaluation.Kind, report: Report, dump_dir: Any) -> None:
        self._model, self._kind, self._report = model, kind, report
        self._request = request_to_place_forward(lambda: self._seen, dump_dir)
        self._functions = EvaluationFunctions(model, kind, self._request.tracing)
        self._seen: Sequence[Any] = ()  # shapes of the batch that is traced
        self._told = False

    @property
    def request(self) -> RewriteRequest[PlacedForward]:
        return self._request

    def __call__(self, given: Any) -> Any:
        """What Keras' function does with an iterator, or with batches."""
        batches, spec = evaluation.batches_of(self._model, self._kind, given)
        if not batches:
            raise StopIteration
        outputs = [self._step(batch, spec) for batch in batches]
        return evaluation.joined(outputs) if self._kind == "predict" else outputs[-1]

    def _step(self, batch: Any, spec: Any) -> Any:
        before, self._seen = self._functions.traced, nests.shapes_of(batch)
        outputs = self._functions(batch, spec)
        if self._functions.traced > before:
            self._look_at_traces()
        return outputs

    def _look_at_traces(self) -> None:
        request, reason = self._request, None
        try:
            request.failures.raise_first()
        except OOOError as error:
            reason = in_one_line(error)
        if reason is None and request.count < self._functions.traced:
            reason = request.skipped
        if reason is not None and not self._told:
            self._told = True
            what = "evaluate" if self._kind == "test" else "predict"
            note = f"{what} runs on one device, to which all weights are sent: {reason}"
            self._report.notes.append(note)
            _LOG.warning("%s", note)

    def close(self) -> None:
        self._request.close()
