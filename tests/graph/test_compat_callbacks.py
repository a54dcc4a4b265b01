"""The base of our callbacks: what a new Keras breaks."""

from __future__ import annotations

from tests.graph.compat_models import X, Y, dense_model
from tf_ooo.compat.keras_fits import Callback


def test_callback_is_asked_for_the_batches_that_it_wants():
    class Epochs(Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(("epoch", sorted(logs)))

    class Batches(Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)

    seen = []
    dense_model("adam").fit(X, Y, batch_size=6, verbose=0, callbacks=[Epochs(), Batches()])
    assert seen == [0, 1, ("epoch", ["loss"])]
    asked = [Epochs()._implements_train_batch_hooks(), Batches()._implements_train_batch_hooks()]
    assert asked == [False, True]
