"""What the scripts of this folder can be told on their command lines."""

import argparse
import ast

import keras
import tensorflow as tf

from tf_ooo.bench.shared.scripts import check_kind
from tf_ooo.modes import data_parallel

MODES = ("single_device", "data_parallel", "pipeline")
# How long to train, and in how many parts; what is set beside the settings of a size.
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
        parser.add_argument(f"--{name}", type=_value, default=usual, help=said)
    for name in dict.fromkeys(name for size in sizes.values() for name in size):
        said = f"{_MEANT.get(name, '')}default: {sizes['tiny'].get(name)}, if tiny"
        parser.add_argument(f"--{name}", type=_value, help=said)
    of = parser.parse_args()
    for name, value in sizes[of.size].items():
        if getattr(of, name) is None:
            setattr(of, name, value)
    try:
        for name, usual in {**_COUNTS, **sizes[of.size]}.items():
            check_kind(name, getattr(of, name), usual)
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


def _value(text):
    """A number, or a tuple of numbers; anything else is a word."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
