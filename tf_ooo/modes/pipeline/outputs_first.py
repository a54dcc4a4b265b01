"""``evaluate`` of batches that do not fit: the outputs of all pieces, then loss and metrics of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tf_ooo.compat import evaluation, nests, tf_functions
from tf_ooo.fit.mode import Function
from tf_ooo.hosts.devices import host_device
from tf_ooo.modes.pipeline.evaluation import WHOLE, StagedEvaluation, known_rows, say_whole
from tf_ooo.modes.pipeline.pieces import Pieces
from tf_ooo.report.report import Report
from tf_ooo.rewriting.passes import Folder

if TYPE_CHECKING:
    import keras

_CALLED = "evaluate"
_UNTRACEABLE = object()


class OutputsFirst:
    """Runs a model's test steps; batches that fit, and those of models of which more is needed, pass whole.

    The loss and the metrics are Keras' own of the whole batch, on this host, given the outputs of its pieces.
    """

    def __init__(self, model: keras.Model, report: Report, dump_dir: Folder, pieces: Pieces) -> None:
        self._model, self._report, self._pieces = model, report, pieces
        self._whole = StagedEvaluation(model, "test", report, dump_dir)
        self._needed: list[str] = []  # beside the outputs
        step = evaluation.outputs_on_data(model, self._needed)
        self._outputs = StagedEvaluation(model, "predict", report, dump_dir, pieces, step, _CALLED)
        rest = evaluation.rest_of_test_step(model)
        self._rest = tf_functions.plain_function(rest, any_shape=True)

    def __call__(self, stock: Function, given: object) -> Any:
        """Do with an iterator what Keras' test function ``stock`` does."""
        if not self._pieces.rows:
            return self._whole(stock, given)
        batches, _ = evaluation.batches_of(self._model, "test", given)
        if not batches:
            raise StopIteration
        if all(len(self._pieces.of(known_rows(batch))) == 1 for batch in batches) or not self._may_be_cut():
            return self._whole(stock, evaluation.given_again(given, batches))
        logs = None
        for number, batch in enumerate(batches):
            outputs = self._outputs(lambda _: _UNTRACEABLE, [batch])
            if outputs is _UNTRACEABLE or not self._may_be_cut():
                return self._whole(stock, evaluation.given_again(given, batches[number:]))
            logs = self._evaluated(batch, outputs)
        return logs

    def _may_be_cut(self) -> bool:
        """Return whether outputs are enough; else batches pass whole from now on, and the report says why."""
        reason = evaluation.why_not_of_outputs(self._model) or next(iter(self._needed), "")
        if reason:
            self._pieces = WHOLE
            say_whole(self._report, _CALLED, reason)
        return not reason

    def _evaluated(self, batch: object, outputs: object) -> Any:
        import tensorflow as tf

        with tf.device(host_device()):
            return self._rest(nests.as_tensors(batch), outputs)

    def close(self) -> None:
        self._whole.close()
        self._outputs.close()
