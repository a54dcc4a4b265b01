"""Compiles HLO for an H100 without one, where ``deviceless/build.sh`` has made the compiler."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from tf_ooo.modes.compiled.captured import CompiledModule, read_dump

VARIABLE = "TF_OOO_GPUHLO"


def why_not() -> str | None:
    """Say why there is no compiler; None where there is one."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return f"{VARIABLE} is not set: tests/gpu/deviceless/build.sh makes the compiler from the GPU wheel"
    missing = [p for p in ("gpuhlo", "nv/nvidia/cuda_nvcc/bin/ptxas") if not (Path(folder) / p).exists()]
    return (
        f"{VARIABLE}={folder}: {missing[0]} is missing; see tests/gpu/deviceless/build.sh"
        if missing
        else None
    )


def scheduled_hlo(hlo: str, *flags: str) -> str:
    """The module that XLA:GPU would run, in launch order.  RuntimeError with XLA's message."""
    return compiled(hlo, *flags)[0]


def compiled(hlo: str, *flags: str) -> tuple[str, CompiledModule]:
    """(the module in launch order, what is said of it).  RuntimeError with XLA's message."""
    work = Path(os.environ[VARIABLE])
    cuda = work / "nv/nvidia"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.hlo"
        source.write_text(hlo)
        xla_flags = [
            f"--xla_gpu_cuda_data_dir={cuda / 'cuda_nvcc'}", "--xla_gpu_autotune_level=0",
            f"--xla_dump_to={folder}/dump", "--xla_dump_hlo_as_text", *flags,
        ]  # fmt: skip
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(cuda / "cuda_runtime/lib"),
            "PATH": f"{cuda / 'cuda_nvcc/bin'}:{os.environ['PATH']}",
            "XLA_FLAGS": " ".join(xla_flags),
            "TF_CPP_MIN_LOG_LEVEL": "1",
        }
        command = [str(work / "gpuhlo"), str(source), "backend"]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=500, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        dump = Path(folder, "dump")
        found = read_dump(dump)
        assert found is not None
        return next(dump.glob("*gpu_after_optimizations.txt")).read_text(), found
