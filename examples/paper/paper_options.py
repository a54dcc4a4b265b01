"""Reads what the scripts of this folder can be told on their command lines."""

import argparse
import ast
import contextlib
import math

import keras
import tensorflow as tf

from tf_ooo.modes import data_parallel

MODES = ("single_device", "data_parallel", "pipeline")
# Trainings are so long, and in so many parts; these are set beside the settings of a size.
_COUNTS = {"steps": 20, "epochs": 3, "microbatches": 2}
_MEANT = {
    "steps": "of an epoch, with data_parallel of each worker; ",
    "microbatches": "of a step, with --mode pipeline; ",
    "batch": "rows of a step, with data_parallel of each worker, with pipeline of one micro-batch; ",
}


def asked_for(description, sizes, check=None):
    """The command line as a namespace: one of the ``sizes``, and any of its values changed.

    What is no number, or no word, where the size has one is refused; ``check`` raises ValueError where values
    do not go together.  ``rows_of_step`` is what ``fit`` takes as its batch: of a pipeline all micro-batches
    together.  ``rows_of_epoch`` are those of all workers, of which ``shard`` gives each its part.

    ``--mode data_parallel`` is for ``horovodrun -np 2 python ...``; ``--mode pipeline`` takes all GPUs, or
    two logical devices of the CPU.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=sizes, default="tiny", help="default: tiny")
    parser.add_argument("--mode", choices=MODES, default="single_device", help="default: single_device")
    parser.add_argument("--data", choices=("auto", "real", "shipped", "generated"), default="auto")
    for name, usual in _COUNTS.items():
        said = f"{_MEANT.get(name, '')}default: {usual}"
        parser.add_argument(f"--{name}", type=value, default=usual, help=said)
    for name in dict.fromkeys(name for size in sizes.values() for name in size):
        said = f"{_MEANT.get(name, '')}default: {sizes['tiny'].get(name)}, if tiny"
        parser.add_argument(f"--{name}", type=value, help=said)
    of = parser.parse_args()
    given = {name: getattr(of, name) for size in sizes.values() for name in size}
    try:
        for name, usual in _COUNTS.items():
            check_kind(name, getattr(of, name), usual)
        set_here = {name: value for name, value in given.items() if value is not None}
        vars(of).update(changed(sizes, of.size, set_here))
        if check:
            check(of)
    except ValueError as error:
        parser.error(str(error))
    keras.utils.set_random_seed(1)
    of.mode_options, of.shard, of.rows_of_step = {}, lambda x, y: (x, y), of.batch
    if of.mode == "pipeline":
        of.rows_of_step = of.batch * of.microbatches
        of.mode_options = {"microbatches": of.microbatches}
        if not tf.config.list_physical_devices("GPU"):
            cpu = tf.config.list_physical_devices("CPU")[0]
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    workers = 1
    if of.mode == "data_parallel":
        workers = data_parallel.connect().size
        of.shard = data_parallel.shard
    of.rows_of_epoch = of.steps * of.rows_of_step * workers
    return of


def adam_w(rate, steps=10_000):
    """BERT's optimizer, as the authors have it (expr/pipe_par/.../optimization.py, commit 0beb419).

    The rate falls linearly to nothing in so many steps, gradients are clipped to a norm of 1 together, and
    weights decay by 0.01, but not those of normalizations, nor biases.
    """
    decay = keras.optimizers.schedules.PolynomialDecay(rate, steps, end_learning_rate=0.0)
    adam = keras.optimizers.AdamW(decay, weight_decay=0.01, epsilon=1e-6, global_clipnorm=1.0)
    adam.exclude_from_weight_decay(var_names=["gamma", "beta", "bias"])
    return adam


def check_channels(of):
    """ValueError unless a setting says where the channels of images are."""
    if of.channels not in ("first", "last"):
        raise ValueError(f"channels={of.channels!r}: expected first or last")


@contextlib.contextmanager
def channels(of):
    """Layers that are made meanwhile have channels where the setting says; their axis, an image's shape.

    Raises:
        ValueError: channels are first, which convolutions on a CPU do not take.
    """
    if of.channels == "first" and not tf.config.list_physical_devices("GPU"):
        raise ValueError("channels=first takes a GPU: on a CPU, convolutions take channels=last only")
    usual = keras.config.image_data_format()
    keras.config.set_image_data_format(f"channels_{of.channels}")
    sides = (of.pixels, of.pixels)
    try:
        yield (1, (3, *sides)) if of.channels == "first" else (-1, (*sides, 3))
    finally:
        keras.config.set_image_data_format(usual)


def changed(sizes, size, settings):
    """The settings of a size, some of them changed.

    Raises:
        ValueError: there is no such size or setting, or a value is of another kind than the usual one.
    """
    if size not in sizes:
        raise ValueError(f"there is no size {size!r}; there are {', '.join(sizes)}")
    usual = sizes[size]
    for name, value in settings.items():
        if name not in usual:
            raise ValueError(f"there is no {name!r}; there are {', '.join(sorted(usual))}")
        check_kind(name, value, usual[name])
    return {**usual, **settings}


def check_kind(name, value, usual):
    """ValueError unless a setting is a number above 0 or a word, as the usual one is."""
    if isinstance(usual, str):
        kind, fits = "a word", isinstance(value, str)
    elif isinstance(usual, int):
        kind = "a whole number above 0"
        fits = isinstance(value, int) and not isinstance(value, bool) and value > 0
    else:
        kind, fits = "a number above 0", isinstance(value, (int, float)) and 0 < value < math.inf
    if not fits:
        raise ValueError(f"{name}={value!r:.80}: expected {kind}")


def value(text):
    """A number, or a tuple of numbers; anything else is a word."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
