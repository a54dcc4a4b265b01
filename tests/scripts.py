"""Checks in scripts that a test runs in a process of their own, as logical devices must be set up first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]


@lru_cache
def found_by(script: Path, *arguments: str) -> dict[str, Any]:
    """What a script prints as its last line, JSON."""
    command = [sys.executable, str(script), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def bits_of(model: Any) -> int:
    """A check sum of the bits of a model's variables and its optimizer's."""
    bits = 0
    for variable in (*model.variables, *model.optimizer.variables):
        bits = zlib.crc32(np.asarray(variable).tobytes(), bits)
    return bits


def print_found(checks: Mapping[str, Callable[[], Any]], names: Sequence[str], devices: int) -> None:
    """In such a script: makes so many logical CPUs, and prints what each check found."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
    print(json.dumps({name: checks[name]() for name in names}))
