"""Reads from XLA's dumps what it made of a step: kernels, which of them are in CUDA graphs, bytes."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tf_ooo.compat import xla_flags
from tf_ooo.report.sections import Section
from tf_ooo.units import bytes_text

# "  012: kKernel \t, kernel = ...": children of the thunk above are indented further.
_THUNK = re.compile(r"^(\s*)\d+: (k\w+)")
_INSIDE = re.compile(r"^\s*\d+: kSequential\s+\d+: (k\w+)")  # the first of a body shares its line
# A call on another stream has its kernels in the first with TensorFlow 2.21, in the second with newer XLA.
_GRAPH, _CALLS = "kCommandBuffer", ("kSequential", "kAsyncStart")
_TOTAL = re.compile(r"^Total bytes(?: used)?: (\d+)", re.MULTILINE)
# They launch nothing themselves.
_NO_LAUNCH = frozenset({_GRAPH, *_CALLS, "kAsyncDone", "kWaitForStreams", "kConditional", "kWhile"})
# Newer XLA writes the first only where a pass has changed something.
_THUNKS = ("*thunk_sequence_after_thunk_passes.txt", "*thunk_sequence.txt")
_BYTES = "*memory-usage-report.txt"


@dataclass(frozen=True)
class CompiledModule(Section):
    """One compiled step.

    Attributes:
        launches: kernels, library calls and copies that a step launches; None where XLA does not say (CPU).
        in_graphs: how many of them are in CUDA graphs, ``graphs`` of which it makes.
        on_side_streams: how many run on another stream than the main one; a call inside of a graph does not.
        total_bytes: of all buffers: inputs, variables, results and what is alive in between.
        flags: of XLA, besides those of the process.
    """

    launches: int | None = None
    in_graphs: int = 0
    graphs: int = 0
    on_side_streams: int = 0
    total_bytes: int | None = None
    flags: tuple[str, ...] = ()

    @property
    def share_in_graphs(self) -> float | None:
        """0 to 1; None where nothing is known."""
        return self.in_graphs / self.launches if self.launches else None

    @property
    def text(self) -> str:
        """All of it in one line."""
        parts = []
        if self.launches is not None:
            graphs = "graph" if self.graphs == 1 else "graphs"
            parts.append(
                f"{self.in_graphs} of {self.launches} kernels ({self.share_in_graphs or 0:.0%}) in "
                f"{self.graphs} CUDA {graphs}, {self.on_side_streams} on side streams"
            )
        if self.total_bytes is not None:
            parts.append(bytes_text(self.total_bytes))
        return "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "flags": list(self.flags),
            "share_in_graphs": self.share_in_graphs,
            "text": self.text,
        }


def read_thunks(text: str) -> CompiledModule:
    """Counts the launches in XLA:GPU's text of its thunks (``thunk_sequence_after_thunk_passes``)."""
    launches = in_graphs = graphs = beside = 0
    around: list[tuple[int, str]] = []  # indent and kind of this thunk, behind those that it is in
    for match in filter(None, map(_THUNK.match, text.splitlines())):
        indent, kind = len(match[1]), match[2]
        while around and around[-1][0] >= indent:
            around.pop()
        graphs += kind == _GRAPH and all(outer != _GRAPH for _, outer in around)
        around.append((indent, kind))
        first = _INSIDE.match(match.string)
        if (first[1] if first else kind) in _NO_LAUNCH:
            continue
        launches += 1
        inside = [outer for _, outer in around if outer in (_GRAPH, *_CALLS)]
        in_graphs += _GRAPH in inside
        beside += bool(inside) and inside[0] != _GRAPH
    return CompiledModule(launches, in_graphs, graphs, beside)


def read_dump(folder: Path) -> CompiledModule | None:
    """Return the largest module that XLA wrote there; None where it wrote none."""
    modules = []
    for path in folder.glob(_BYTES):
        spaces = _TOTAL.findall(path.read_text(errors="replace"))
        modules.append((sum(map(int, spaces)), path.name.partition(".")[0]))
    if not modules:
        return None
    total_bytes, module = max(modules)
    thunks = next((path for name in _THUNKS for path in folder.glob(f"{module}.{name}")), None)
    module_read = CompiledModule() if thunks is None else read_thunks(thunks.read_text(errors="replace"))
    return replace(module_read, total_bytes=total_bytes or None)


class CompilerWatch:
    """Holds what was compiled while it was watched."""

    module: CompiledModule | None = None


@contextmanager
def watched(flags: Sequence[str] = ()) -> Iterator[CompilerWatch]:
    """Compilations inside get these flags of XLA; the largest is ``module`` on leaving.

    Raises:
        BackendError: there are flags and this TensorFlow cannot set them; without flags nothing is found.
    """
    watch = CompilerWatch()
    blind = xla_flags.why_flags_are_fixed() is not None or "xla_dump_to" in xla_flags.flags_of_process()
    if blind:  # nothing can be read, or the user's own dump would go elsewhere
        with xla_flags.added(flags) if flags else nullcontext():
            yield watch
        return
    with tempfile.TemporaryDirectory(prefix="tf_ooo_xla_", ignore_cleanup_errors=True) as folder:
        dump = (f"--xla_dump_to={folder}", "--xla_dump_hlo_as_text=true", "--xla_dump_hlo_module_re=.*")
        with xla_flags.added((*flags, *dump)):
            yield watch
        largest = read_dump(Path(folder))
    if largest is not None:
        watch.module = replace(largest, flags=tuple(flags))
