"""Real graphs, placement, order and messages; the tasks wait: logical devices of one process, or workers."""

import os
import tempfile
from pathlib import Path

from benchmarks.cases import Case, Measured
from benchmarks.processes import cluster_of, command, quiet, result_of
from tf_ooo.demo.waits import LOG, library
from tf_ooo.errors import BackendError

_MOST_S = 1800


def why_not(case: Case) -> str:
    """Say why the op is missing; return an empty text where it is there."""
    try:
        library()
    except BackendError as error:
        return str(error)
    return ""


def run(case: Case) -> Measured:
    """Start the workers, if there are to be some, and the process that trains."""
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    near = case.parameters.get("near", 1)
    count = case.parameters["devices"] // near if case.parameters["processes"] else 0

    def line(cluster: str, task: int) -> list[str]:
        return command("benchmarks.emulated.driver:serve_worker", cluster, task, near)

    with tempfile.TemporaryDirectory(dir=shared) as folder:
        environment = quiet() | {LOG: str(Path(folder) / "log")}
        with cluster_of(count, line, environment, folder) as (cluster, _):
            start = command("benchmarks.emulated.driver:measured", case, cluster)
            measured: Measured = result_of(start, environment, timeout_s=_MOST_S)
    return measured
