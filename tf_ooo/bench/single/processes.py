"""The processes of ``tf-ooo bench single``, side by side: each makes steps, then runs them when told to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tf_ooo.bench.shared.processes import LineProcess, command
from tf_ooo.bench.single.cases import FITS, STOCK, AskedWays, Case, Ready

TENSORFLOW, PYTORCH = "tf_ooo.bench.single.worker", "tf_ooo.bench.single.pytorch"
CONCURRENT = "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT --xla_gpu_graph_min_graph_size=1"
# (prefix of the names, XLA's flags, ways to run under them, priority of the main stream), a process each.
FLAGGED: tuple[tuple[str, str, list[str], int | None], ...] = (
    ("command buffers, ", CONCURRENT, [STOCK, "early"], None),
    ("no CUDA graphs, ", "--xla_gpu_enable_command_buffer=", [STOCK, "early"], None),
    ("main stream urgent, ", "", ["early"], -5),
)


class Worker:
    """A process that has made its steps; where it ended instead, it has none, and ``said`` has the reason.

    Attributes:
        names: of the ways in rows, and in the process.
        said: what there is to say of each.
        modules: what XLA made of some.
        device, versions: as in :class:`tf_ooo.bench.single.cases.Ready`.
    """

    def __init__(self, process: LineProcess, prefix: str = "") -> None:
        self._process = process
        try:
            ready: Ready = process.answered()
        except RuntimeError as error:
            ready = {"ready": [], "said": {"": str(error)}}
        self.names = {prefix + name: name for name in ready["ready"]}
        self.said = {prefix + name: text for name, text in ready["said"].items()}
        self.modules = {prefix + name: module for name, module in ready.get("modules", {}).items()}
        self.device, self.versions = ready.get("device", "unknown"), ready.get("versions", {})

    def run(self, name: str, steps: int) -> dict[str, float]:
        """What the process answers; RuntimeError where it has ended, which loses all of its steps."""
        try:
            self._process.tell(f"{self.names[name]} {steps}")
            turn: dict[str, float] = self._process.answered()
        except (RuntimeError, BrokenPipeError) as error:
            for lost in self.names:
                during = "" if lost == name else f" with {name}"
                self.said[lost] = f"{self.said.get(lost) or ''}; stopped{during}: {error}".lstrip("; ")
            self.names = {}
            raise RuntimeError(str(error)) from error
        return turn


def started(module: str, case: Case, ways: AskedWays, flags: str = "") -> LineProcess:
    """A process that begins to make steps; ``flags`` are XLA's, added to those of this process."""
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    return LineProcess(command(module, case, ways), environment)


@contextmanager
def workers(case: Case, names: Sequence[str], more: bool) -> Iterator[list[Worker]]:
    """All processes of a case, once all have made their steps; ``more``: those of :data:`FLAGGED` too."""
    fits = [name for name in names if name in FITS]
    asked = [("", TENSORFLOW, AskedWays([name for name in names if name not in FITS]), "")]
    asked += [("", TENSORFLOW, AskedWays(fits), "")] if fits else []
    for prefix, flags, ways, priority in FLAGGED if more else ():
        asked.append((prefix, TENSORFLOW, AskedWays(ways, priority), flags))
    asked.append(("", PYTORCH, AskedWays([]), ""))
    with ExitStack() as stack:
        processes = []
        for prefix, module, of_process, flags in asked:
            processes.append((started(module, case, of_process, flags), prefix))
            stack.callback(processes[-1][0].close)
        yield [Worker(process, prefix) for process, prefix in processes]
