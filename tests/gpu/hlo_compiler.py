"""Compiles HLO for an H100 without one, by the XLA of a Python that has JAX (``make test-gpu-compiler``)."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tempfile
from pathlib import Path

from tf_ooo.modes.compiled.session import CompiledModule, read_dump

VARIABLE = "TF_OOO_JAX_PYTHON"
SCRIPT = Path(__file__).with_name("compile_for_h100.py")


def why_not() -> str | None:
    """Say why there is no compiler; None where there is one."""
    python = os.environ.get(VARIABLE)
    if not python:
        return f"{VARIABLE} is not set: `make test-gpu-compiler` runs this with the compiler inside JAX"
    return None if Path(python).exists() else f"{VARIABLE}={python}: there is no such file"


@functools.cache
def _compiler() -> subprocess.Popen[str]:
    """Start the process for all modules of a test process; it ends with its input, when this process ends."""
    # Modules of this environment would be in the way of the other one's.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [os.environ[VARIABLE], str(SCRIPT)]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def compiled(hlo: str, *flags: str) -> tuple[str, CompiledModule]:
    """Return (the module in launch order, what is said of it).  RuntimeError with XLA's message."""
    process = _compiler()
    with tempfile.TemporaryDirectory() as folder:
        source, dump = Path(folder, "in.hlo"), Path(folder, "dump")
        source.write_text(hlo)
        pairs = [flag.removeprefix("--").split("=", 1) for flag in flags]
        process.stdin.write(json.dumps({"hlo": str(source), "dump": str(dump), "flags": pairs}) + "\n")
        answer = process.stdout.readline()
        if answer.strip() != "null":
            raise RuntimeError(json.loads(answer) if answer else f"{SCRIPT.name} ended: {process.wait()}")
        found = read_dump(dump)
        assert found is not None
        return next(dump.glob("*gpu_after_optimizations.txt")).read_text(), found
