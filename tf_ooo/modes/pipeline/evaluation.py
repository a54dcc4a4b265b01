"""``evaluate`` and ``predict`` while the variables are on their stages' devices."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import evaluation, nests
from tf_ooo.errors import OOOError
from tf_ooo.fit.mode import Function
from tf_ooo.report.report import Report
from tf_ooo.rewriting.failures import in_one_line
from tf_ooo.rewriting.forward import request_to_place_forward
from tf_ooo.rewriting.passes import Folder
from tf_ooo.tracing.evaluating import EvaluationFunctions

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger("tf_ooo")
_CALLED = {"test": "evaluate", "predict": "predict"}


class StagedEvaluation:
    """Runs a model's test or predict steps, each op on the device of the weights that it reads.

    What cannot be placed runs as it would without us, on one device that is sent all weights: the report says
    so once.
    """

    def __init__(self, model: keras.Model, kind: evaluation.Kind, report: Report, dump_dir: Folder) -> None:
        self._model, self._kind, self._report = model, kind, report
        folder = None if dump_dir is None else Path(dump_dir) / kind
        self._request = request_to_place_forward(lambda: self._seen, folder)
        self._functions = EvaluationFunctions(model, kind, self._request.tracing)
        self._seen: Sequence[Any] = ()  # shapes of the batch that is traced
        self._looked_at = 0  # traces
        self._untraceable = self._told = False

    def __call__(self, stock: Function, given: Any) -> Any:
        """What Keras' function ``stock`` does with an iterator, or with batches."""
        if self._untraceable:
            return stock(given)
        batches, spec = evaluation.batches_of(self._model, self._kind, given)
        if not batches:
            raise StopIteration
        try:
            self._functions.make(batches[0], spec)
        except Exception as error:  # the user's code, which Keras may trace in another way
            self._untraceable = True
            self._say(in_one_line(error).partition("\n")[0])
            return stock(evaluation.given_again(given, batches))
        outputs = [self._step(batch, spec) for batch in batches]
        return evaluation.joined(outputs) if self._kind == "predict" else outputs[-1]

    def _step(self, batch: Any, spec: Any) -> Any:
        self._seen = nests.shapes_of(batch)
        outputs = self._functions(batch, spec)
        if self._functions.traced > self._looked_at:
            self._looked_at = self._functions.traced
            self._look_at_traces()
        return outputs

    def _look_at_traces(self) -> None:
        request = self._request
        try:
            request.failures.raise_first()
        except OOOError as error:
            self._say(in_one_line(error))
            return
        if request.count < self._functions.traced:
            self._say(request.skipped)

    def _say(self, reason: str) -> None:
        if self._told:
            return
        self._told = True
        note = f"{_CALLED[self._kind]} runs on one device, to which all weights are sent: {reason}"
        if note in self._report.notes:  # of a plan before
            return
        self._report.notes.append(note)
        _LOG.warning("%s", note)

    def close(self) -> None:
        self._request.close()
