"""What the scripts of this folder can be told on their command lines."""

import argparse
import ast

import keras
import tensorflow as tf

from tf_ooo.modes import data_parallel

MODES = ("single_device", "data_parallel", "pipeline")
# What a setting means, beside its default.
_MEANT = {"batch": "; rows of a step, with data_parallel of each worker, with pipeline of one micro-batch"}


def asked_for(description, sizes, check=None):
    """The command line as a namespace: one of the ``sizes``, and any of its values changed.

    ``check`` raises ValueError where they do not go together.  ``rows_of_step`` is what ``fit`` takes as
    its batch: of a pipeline all micro-batches together.

    ``--mode data_parallel`` is for ``horovodrun -np 2 python ...``; ``--mode pipeline`` takes all GPUs, or
    two logical devices of the CPU.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=sizes, default="tiny", help="default: tiny")
    parser.add_argument("--mode", choices=MODES, default="single_device", help="default: single_device")
    parser.add_argument("--data", choices=("auto", "real", "shipped", "generated"), default="auto")
    parser.add_argument("--steps", type=int, default=20, help="of an epoch; default: 20")
    parser.add_argument("--epochs", type=int, default=3, help="default: 3")
    parser.add_argument("--microbatches", type=int, default=2, help="with --mode pipeline; default: 2")
    for name in dict.fromkeys(name for size in sizes.values() for name in size):
        said = f"default: {sizes['tiny'].get(name)}, if tiny{_MEANT.get(name, '')}"
        parser.add_argument(f"--{name}", type=_value, help=said)
    of = parser.parse_args()
    for name, value in sizes[of.size].items():
        if getattr(of, name) is None:
            setattr(of, name, value)
    if check:
        try:
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
    if of.mode == "data_parallel":
        data_parallel.connect()
        of.shard = data_parallel.shard
    return of


def _value(text):
    """A number, or a tuple of numbers; anything else is a word."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
