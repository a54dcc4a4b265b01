"""Processes that MPI or Slurm started."""

from __future__ import annotations

import os

# Where launchers say how many processes they have started; srun with PMIx has Slurm's variable only.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def mpi_size() -> int:
    """How many processes MPI's or Slurm's launcher (mpirun, srun) started, as it tells them; else 1."""
    told = (os.environ.get(name, "") for name in _SIZES)
    return max((int(size) for size in told if size.isdecimal()), default=1)
