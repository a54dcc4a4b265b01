"""A training process that may have less memory than all of the model needs, before its first step."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from benchmarks.machine import groups
from tests.memory_limited import needs_memory_groups

pytestmark = [
    pytest.mark.takes(40),
    needs_memory_groups,
]
# 36 M weights are 144 MB; Adam needs twice as much beside them, one micro-batch next to nothing.
TRAINS = """
import contextlib, sys, keras, numpy as np, tensorflow as tf, tf_ooo
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, 2 * [tf.config.LogicalDeviceConfiguration()])

def fit(where):
    keras.utils.set_random_seed(1)
    depth = int(sys.argv[-1]) if sys.argv[-1].isdecimal() else 10
    with where:
        model = keras.Sequential([keras.Input((8,)), *map(keras.layers.Dense, depth * [2000] + [1])])
    model.compile("adam", "mse", jit_compile=False)
    before = model.get_weights()
    ours = tf_ooo.OOOBackprop(tf_ooo.Pipeline(devices=2, microbatches=2, profile_steps=0))
    try:
        model.fit(np.ones((2, 8)), np.ones((2, 1)), verbose=0, callbacks=[ours])
        print("trained")
    except tf_ooo.BackendError as error:
        print(error)
        assert not model.optimizer.built
        assert all(map(np.array_equal, before, model.get_weights()))

try:
    fit(tf_ooo.host_memory() if "on_host" in sys.argv else contextlib.nullcontext())
except tf_ooo.BackendError as error:
    print(error)
"""


def said_in_a_group(limit_bytes, *arguments):
    """The lines that the script prints."""
    with groups.memory_group(f"tf_ooo_test_{os.getpid()}", limit_bytes) as group:
        command = group.command([sys.executable, "-c", TRAINS, *arguments])
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout.splitlines()


def test_slots_that_would_not_fit_are_refused_before_they_are_made():
    (for_stages,) = said_in_a_group(780 << 20, "on_host")
    group = r"left of the 817889280 of this process' control group /tf_ooo_test_\d+"
    match = re.fullmatch(
        "this process has 144152004 bytes of trainable weights and needs 288304020 bytes for the slots of "
        r"Adam and about (\d+) bytes for gradients, messages and graphs beside them, but (\d+) are "
        f"{group}: about (\\d+) more would do; train "
        "on a machine, or in a group, with more memory, or take an optimizer with fewer slots",
        for_stages,
    )
    assert match
    working_bytes, available_bytes, more_bytes = map(int, match.groups())
    assert working_bytes > 144152004
    assert available_bytes + more_bytes == 288304020 + working_bytes


def test_whole_steps_have_another_way_out():
    (said,) = said_in_a_group(780 << 20)
    assert said.endswith("build the model in tf_ooo.host_memory(), so that no step runs whole here")


def test_weights_that_do_not_fit_are_refused_while_they_are_made():
    """All of them take 1,440 MB; Linux would end the process without a word."""
    (said,) = said_in_a_group(900 << 20, "on_host", "100")
    match = re.fullmatch(
        r"tf_ooo.host_memory\(\): (\d+) bytes of weights are there, and 16000000 more for '.*kernel' are too "
        r"many: (\d+) bytes are left of the 943718400 of this process' control group /tf_ooo_test_\d+; "
        "build the model on a machine, or in a group, with more memory",
        said,
    )
    assert match, said
    there_bytes, left_bytes = map(int, match.groups())
    # 512 MB, and 464 MB where this group has to read TensorFlow's libraries from the disk.
    assert 100e6 < there_bytes < 900e6, said
    assert left_bytes <= 16000000 + (32 << 20), said


def test_with_enough_it_trains():
    assert said_in_a_group(1500 << 20, "on_host") == ["trained"]
