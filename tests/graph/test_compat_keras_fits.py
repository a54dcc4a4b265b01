"""The fit that is running, and the weights that it trains: what a new Keras breaks."""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.compat_models import X, Y, dense_model, normalized_model
from tests.zoo import KERAS_3, keras, loss_scaling, needs_keras_3
from tf_ooo.compat import keras_fits, tf_functions, train_function
from tf_ooo.compat.keras_fits import Callback


def test_the_callback_list_that_calls_is_found():
    found = []
    seen = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: found.append(keras_fits.running_callback_list())
    )
    mine = keras.callbacks.CallbackList([seen], model=normalized_model())
    mine.on_train_begin()
    assert found == [mine]
    assert keras_fits.running_callback_list() is None


def test_main_thread_trains():
    """Asked from another thread, as by ranks that wait."""
    told = []

    def ask(when, *_, **__):
        thread = threading.Thread(target=lambda: told.append((when, keras_fits.main_thread_trains())))
        thread.start()
        thread.join()

    model = normalized_model()
    model.compile("sgd", "mse")
    hooks = ("on_train_begin", "on_epoch_begin", "on_train_batch_end")
    asking = keras.callbacks.LambdaCallback(**{name: functools.partial(ask, name) for name in hooks})
    model.fit(np.ones((4, 3)), np.ones((4, 4)), verbose=0, callbacks=[asking])
    ask("after")
    wanted = {"on_train_begin": False, "on_epoch_begin": True, "on_train_batch_end": True, "after": False}
    assert dict(told) == wanted, "fit has no local variable epoch: ranks without the callback are not noticed"


def test_what_gives_a_fit_its_batches_is_found():
    """Its ``with`` is entered once an epoch, and once for each batch in some versions."""
    found, entered = [], []

    def wrap(logs):
        batches = keras_fits.running_batches()
        found.append(batches)
        original = getattr(batches, keras_fits.AROUND_BATCHES)
        setattr(batches, keras_fits.AROUND_BATCHES, lambda: entered.append(1) or original())

    made = normalized_model()
    made.compile("sgd", "mse")
    made.fit(
        np.ones((4, 3)),
        np.ones((4, 4)),
        verbose=0,
        epochs=2,
        callbacks=[keras.callbacks.LambdaCallback(on_train_begin=wrap)],
    )
    assert found[0] is not None, f"what gives a fit its batches lost {keras_fits.AROUND_BATCHES}"
    assert len(entered) >= 2
    assert keras_fits.running_batches() is None


@pytest.mark.parametrize("epoch", [0, 2])
def test_set_start_epoch(epoch):
    class Note(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            keras_fits.set_start_epoch(self.model, epoch)
            # In Keras 2 fit's own question is answered, which may be asked once.
            assert not KERAS_3 or keras_fits.start_epoch_of(self.model) == epoch

        def on_epoch_begin(self, number, logs=None):
            seen.append(number)

    model, seen = dense_model("adam"), []
    model.fit(X, Y, epochs=3, verbose=0, callbacks=[Note()])
    assert seen == list(range(epoch, 3)), "fit begins with another epoch than BackupAndRestore asks for"
    if not KERAS_3:
        assert "_maybe_load_initial_counters_from_ckpt" not in vars(model)


def test_samples_seen():
    model = dense_model("adam")
    model.fit(X, Y, batch_size=5, verbose=0)
    assert keras_fits.samples_seen(model) == 12.0, "the loss is averaged over samples"


def test_which_keras_ends_all_training_where_data_end():
    assert keras_fits.ends_training_without_data(dense_model()) is not KERAS_3


def test_epochs_of_fit_and_what_it_was_given():
    told = []

    def ask(*_):
        told.append((keras_fits.epochs_of_fit(), keras_fits.argument_of_fit("class_weight")))

    model, weights = dense_model(), {0: 1.0, 1: 2.0}
    asking = keras.callbacks.LambdaCallback(on_train_begin=ask)
    model.fit(X, Y, epochs=3, verbose=0, class_weight=None, callbacks=[asking])
    assert told == [(3, None)], "fit no longer has its arguments by these names: ranks could differ in them"
    assert keras_fits.epochs_of_fit() is None
    assert keras_fits.argument_of_fit("class_weight") is None

    def fit(class_weight):
        return keras_fits.argument_of_fit("class_weight")

    assert fit(weights) == weights


@needs_keras_3  # Keras 2 backs up by TensorFlow's checkpoints
def test_backups_are_sent_elsewhere(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    callback = keras.callbacks.BackupAndRestore(str(own))
    callback.set_model(dense_model())
    save = keras_fits.backup_save(callback)
    assert save is not None, "BackupAndRestore saves in another way: a kill may leave half of it"
    with keras_fits.backing_up_into(callback, str(other)):
        save()
    assert sorted(path.name for path in other.iterdir()) == ["latest.weights.h5", "training_metadata.json"]
    assert not own.exists()
    save()
    assert own.exists()
    assert keras_fits.backup_save(keras.callbacks.Callback()) is None


def test_callbacks_that_may_stop_within_epochs():
    class Own(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            pass

    def told(*callbacks):
        answers = []
        asking = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: answers.append(keras_fits.may_stop_within_epochs())
        )
        dense_model().fit(X, Y, epochs=1, verbose=1, callbacks=[*callbacks, asking])
        return answers[0]

    early = keras.callbacks.EarlyStopping("loss")
    assert not told(early, keras.callbacks.ReduceLROnPlateau("loss")), (
        "a message for each step that nobody needs"
    )
    assert told(keras.callbacks.TerminateOnNaN())
    assert told(early, Own())
    assert told(keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None))


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


def model_of_two():
    layers = [keras.layers.Dense(3, name="first"), keras.layers.Dense(2, name="second")]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("sgd", "mse")
    return model


def names(variables):
    return [variable.path.split("/")[-2] for variable in variables]


def traced_step(model, body):
    """The step, each call of which is in a trace of its own: steps that run eagerly keep nothing."""
    step = keras_fits.as_first_traced(model, body)

    def trace():
        with tf.Graph().as_default():
            step()

    return trace


@needs_keras_3
def test_as_first_traced():
    model, seen = model_of_two(), []
    step = traced_step(model, lambda: seen.append(names(model.trainable_variables)))
    train_function.train_function_of(model)
    step()
    model.get_layer("first").trainable = False
    step()
    assert seen[0] == seen[1] == ["first", "first", "second", "second"], (
        "Layer._trainable, Layer._trainable_variables: a layer that is frozen after compile stops training"
    )
    assert names(model.trainable_variables) == ["second", "second"]
    assert names(keras_fits.trained_variables(model)) == seen[0]
    eagerly = keras_fits.as_first_traced(model, lambda: names(model.trainable_variables))
    assert eagerly() == ["second", "second"], "a step that runs eagerly is as if it were traced each time"
    model.compile("sgd", "mse")
    train_function.train_function_of(model)
    step()
    assert seen[2] == ["second", "second"]


@needs_keras_3
def test_what_a_stock_fit_has_trained():
    model = model_of_two()
    model.get_layer("first").trainable = False
    x = keras.ops.ones((4, 4))
    model.fit(x, x[:, :2], verbose=0)
    assert tf_functions.step_of_fit(model.train_function) is not None
    model.get_layer("first").trainable = True
    assert names(keras_fits.trained_variables(model)) == ["second", "second"], (
        "Keras' train function and its captures: a layer that is thawed after stock steps trains"
    )


@needs_keras_3
def test_a_layer_of_states_alone_stays_as_it_is():
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.BatchNormalization(center=False, scale=False), keras.layers.Dense(2)]
    )
    model.compile("sgd", "mse")
    x = keras.ops.ones((4, 4))
    model.fit(x, x[:, :2], verbose=0)
    seen = []
    traced_step(model, lambda: seen.append(model.layers[0].trainable))()
    assert seen == [True]


@needs_keras_3
def test_flags_before_any_step_count():
    model = model_of_two()
    model.optimizer.build(model.trainable_variables)
    train_function.train_function_of(model)
    model.get_layer("first").trainable = False
    assert names(keras_fits.trained_variables(model)) == ["second", "second"]


@needs_keras_3
def test_other_optimizer():
    """The model was trained by us, or by stock."""
    x = keras.ops.ones((4, 4))
    for ours in (True, False):
        model = model_of_two()
        train_function.train_function_of(model)
        if ours:
            traced_step(model, lambda: None)()
        else:
            model.fit(x, x[:, :2], verbose=0)
        assert not keras_fits.other_optimizer(model)
        model.optimizer = keras.optimizers.SGD()
        assert keras_fits.other_optimizer(model), (
            "what Keras' traced step writes: a new optimizer trains, where stock goes on with the old one"
        )
        model.compile("sgd", "mse")
        train_function.train_function_of(model)
        assert not keras_fits.other_optimizer(model)


@needs_keras_3
def test_as_first_fit():
    model, seen = model_of_two(), []
    train_function.train_function_of(model)
    traced_step(model, lambda: None)()
    first, model.optimizer = model.optimizer, keras.optimizers.SGD()

    def note():
        seen.append(model.optimizer)

    def step():
        return tf.function(keras_fits.as_first_fit(model, note, note), autograph=False)

    tf.function(lambda: step()(), autograph=False)()
    step()()
    assert seen == [first, model.optimizer], "Model.optimizer is no attribute of the model any more"
    assert model.optimizer is not first


@needs_keras_3
def test_what_a_model_remembers_is_not_saved(tmp_path):
    """A ``_Traced`` is no container, which Keras would walk through."""
    model = model_of_two()
    train_function.train_function_of(model)
    traced_step(model, lambda: None)()
    assert isinstance(vars(model)["_ooo_trainable"], keras_fits._Traced)
    model.save_weights(tmp_path / "model.weights.h5")
    model.load_weights(tmp_path / "model.weights.h5")


def test_no_other_optimizer_where_losses_are_scaled():
    """With Keras 2, too, whose optimizer does not know its weights."""
    model = model_of_two()
    model.compile(loss_scaling()(keras.optimizers.SGD(0.1)), "mse")
    assert not keras_fits.other_optimizer(model)
