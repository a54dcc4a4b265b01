"""A training that is killed while it saves: what stands under a name is whole, and it goes on from there."""

from __future__ import annotations

import json
import os
import signal
from unittest import mock

import pytest

import tf_ooo
from tests import forked, zoo
from tests.same_bits import bits_of
from tests.zoo import keras, layers, needs_keras_3

# Keras 2 saves otherwise, its BackupAndRestore by TensorFlow's checkpoints, which are whole.
pytestmark = [needs_keras_3, pytest.mark.takes(40)]

EPOCHS = 4


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


class Calls:
    """Kills this process at the n-th call of what it is asked to count."""

    def __init__(self, deadly):
        self.left = deadly

    def __call__(self):
        self.left -= 1
        if self.left == 0:
            kill()


def model_that_calls(when_saved):
    @keras.saving.register_keras_serializable("test_saving_killed")
    class Last(layers.Dense):
        def save_own_variables(self, store):
            super().save_own_variables(store)
            when_saved()

    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.Input((7,)), layers.Dense(9, activation="relu"), layers.Dense(5), Last(3)]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model


SAVING = {
    "model": lambda folder: keras.callbacks.ModelCheckpoint(folder / "{epoch}.keras"),
    "weights": lambda folder: keras.callbacks.ModelCheckpoint(
        folder / "{epoch}.weights.h5", save_weights_only=True
    ),
    "backup": lambda folder: keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False),
    "two_backups": lambda folder: keras.callbacks.BackupAndRestore(
        folder / "backup", double_checkpoint=True, delete_checkpoint=False
    ),
}


def train(folder, kind, deadly=0, deadly_epochs=0):
    """Is killed in the n-th saving, or between the weights and the epoch of the n-th backup."""
    model, dumped, dumps = model_that_calls(Calls(deadly)), Calls(deadly_epochs), json.dumps
    x, y = zoo.features(7), zoo.labels()
    model(x)
    ours = tf_ooo.OOOBackprop(schedule="fast_forward", profile_steps=0)

    def dump(what, **options):
        if isinstance(what, dict) and set(what) == {"epoch", "batch"}:
            dumped()
        return dumps(what, **options)

    callbacks = [ours, SAVING[kind](folder)]
    with mock.patch.object(json, "dumps", dump):
        model.fit(x, y, batch_size=3, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
    assert ours.report.moved_ops > 0
    return bits_of(model), int(model.optimizer.iterations)


def killed(*arguments):
    process = forked.start(train, *arguments)
    said = process.communicate(100)[0]
    assert process.returncode == -signal.SIGKILL, said


def names_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def load_all(folder):
    """All files of weights and models, in a process of its own."""
    for path in folder.rglob("*"):
        if path.name.startswith(".") or not path.is_file():
            continue
        if path.suffix == ".keras":
            model_that_calls(lambda: None)  # registers its layer
            keras.models.load_model(path)
        elif path.suffix == ".h5":
            model_that_calls(lambda: None).load_weights(path)


@pytest.mark.parametrize(("kind", "ending"), [("model", "keras"), ("weights", "weights.h5")])
def test_killed_in_a_checkpoint(tmp_path, kind, ending):
    killed(tmp_path, kind, 3)
    half, *whole = names_in(tmp_path)
    assert half.startswith("."), "the half file stands beside, under a name that nobody takes for whole"
    assert whole == [f"1.{ending}", f"2.{ending}"]
    forked.result_of(load_all, tmp_path)
    forked.result_of(train, tmp_path, kind)
    assert names_in(tmp_path) == [f"{epoch}.{ending}" for epoch in range(1, EPOCHS + 1)]


@pytest.mark.parametrize("kind", ["backup", "two_backups"])
@pytest.mark.parametrize("deadly", [(1, 0), (3, 0), (0, 1), (0, 3)])
def test_killed_in_a_backup_then_resumed_to_the_same_bits(tmp_path, kind, deadly):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    expected = forked.result_of(train, whole, kind)
    killed(broken, kind, *deadly)
    assert forked.result_of(train, broken, kind) == expected
    assert names_in(broken) == names_in(whole)
    assert len(names_in(whole)) == (4 if kind == "two_backups" else 2)
