"""Keeps the ways in which one compiled step is rewritten: failures, XLA's modules, and the way kept."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tf_ooo.compat import xla
from tf_ooo.costs.table import GainTable
from tf_ooo.errors import BackendError, OOOError
from tf_ooo.fit.comparison import REWRITTEN, STOCK
from tf_ooo.options import OneDeviceOptions
from tf_ooo.report.parts import Ways
from tf_ooo.report.report import Report
from tf_ooo.report.sections import Section
from tf_ooo.rewriting.request import Failures, StepSession, is_larger
from tf_ooo.rewriting.result import RewriteResult, clear_plan, fill_plan
from tf_ooo.tracing.flat import FlatTrace
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
    """Holds the figures of one compiled step.

    Attributes:
        launches: kernels, library calls and copies that a step launches; None where XLA does not say (CPU).
        in_graphs: how many of them are in CUDA graphs; ``graphs``: the number of these graphs.
        on_side_streams: how many run on side streams; a call inside a CUDA graph does not.
        total_bytes: bytes of all buffers: inputs, variables, results and temporaries.
        flags: XLA's flags, besides those of the process.
    """

    launches: int | None = None
    in_graphs: int = 0
    graphs: int = 0
    on_side_streams: int = 0
    total_bytes: int | None = None
    flags: tuple[str, ...] = ()

    @property
    def share_in_graphs(self) -> float | None:
        """Return the share of launches in CUDA graphs, from 0 to 1; None if not known."""
        return self.in_graphs / self.launches if self.launches else None

    @property
    def text(self) -> str:
        """Return the figures in one line."""
        of_bytes = [] if self.total_bytes is None else [bytes_text(self.total_bytes)]
        if self.launches is None:
            return "".join(of_bytes)
        of_kernels = (
            f"{self.in_graphs} of {self.launches} kernels ({self.share_in_graphs or 0:.0%}) in {self.graphs} "
            f"CUDA {'graph' if self.graphs == 1 else 'graphs'}, {self.on_side_streams} on side streams"
        )
        return "; ".join([of_kernels, *of_bytes])

    def to_dict(self) -> dict[str, Any]:
        described = {"share_in_graphs": self.share_in_graphs, "text": self.text}
        return {**asdict(self), "flags": list(self.flags), **described}


def read_thunks(text: str) -> CompiledModule:
    """Count the launches in XLA:GPU's text of its thunks (``thunk_sequence_after_thunk_passes``)."""
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
    """Return the largest module that XLA wrote into the folder; None where it wrote none."""
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
    """Holds the module that was compiled while it watched."""

    module: CompiledModule | None = None


@contextmanager
def watched(flags: Sequence[str] = ()) -> Iterator[CompilerWatch]:
    """Give compilations inside these XLA flags; on leaving, ``module`` is the largest compiled one.

    Raises:
        BackendError: there are flags and this TensorFlow cannot set them; without flags nothing is found.
    """
    watch = CompilerWatch()
    blind = xla.why_flags_are_fixed() is not None or "xla_dump_to" in xla.flags_of_process()
    if blind:  # nothing can be read, or the user's own dump would go elsewhere
        with xla.added(flags) if flags else nullcontext():
            yield watch
        return
    with tempfile.TemporaryDirectory(prefix="tf_ooo_xla_", ignore_cleanup_errors=True) as folder:
        dump = (f"--xla_dump_to={folder}", "--xla_dump_hlo_as_text=true", "--xla_dump_hlo_module_re=.*")
        with xla.added((*flags, *dump)):
            yield watch
        largest = read_dump(Path(folder))
    if largest is not None:
        watch.module = replace(largest, flags=tuple(flags))


_LOG = logging.getLogger("tf_ooo")
_WHERE_STREAMS_ARE = "CUDA"
_CONVERTED = "in user code:"
# The stock order, with XLA's own way to run kernels side by side.
CONCURRENT = "stock with concurrent command buffers"
CONCURRENT_FLAGS = ("--xla_gpu_command_buffer_scheduling_mode=CONCURRENT", "--xla_gpu_graph_min_graph_size=1")


class StreamSession(StepSession):
    """Rewrites one step before XLA compiles it: there is no plug-in.

    Raises BackendError: this TensorFlow or this platform has no streams to call on; says which.
    """

    shows_ops = False  # the profiler sees XLA's kernels

    def __init__(self, options: OneDeviceOptions, report: Report | None = None) -> None:
        if (reason := why_not(options)) is not None:
            raise BackendError(reason)
        self.options = options
        self.several = False  # whether ways are compared
        self.has_step = False  # whether any was made, rewritten or not
        self.traced: dict[Hashable, FlatTrace | Exception] = {}
        self.compiled: dict[Hashable, Callable[..., Any]] = {}
        self.stock_bytes: dict[Hashable, int] = {}
        self.least_bytes: dict[Hashable, int] = {}  # of ways above a memory limit, by kind of input
        self.modules: dict[str, CompiledModule] = {}
        self.said: list[str] = []
        self.gains: GainTable | None = None  # if they were measured
        self.waiting: list[Any] = []  # batches taken from Keras' iterator that no step has trained on
        self.failures = Failures(reason_of=reason_of)
        self._report = report or Report()
        self._kept: str | None = None
        self._failed: dict[str, BaseException] = {}
        self._left_out: dict[str, str] = {}
        self._module_of: dict[Hashable, CompiledModule] = {}
        self._results: dict[str, RewriteResult] = {}
        self._ended = self._stock_has_run = False

    def add(self, result: RewriteResult, name: str = REWRITTEN) -> None:
        """Take note of a rewritten step; among several of one way the one with most ops is reported."""
        before = self._results.get(name)
        if before is None or is_larger(result, before):
            self._results[name] = result

    @property
    def result(self) -> RewriteResult | None:
        """Return the result of rewriting; once one way is kept, that way's."""
        if self._kept is not None:
            return self._results.get(self._kept)
        return next(iter(self._results.values()), None)

    def measured(self, gains: GainTable) -> None:
        self.gains = gains
        self.said += [note for note in gains.notes if note not in self.said]

    @property
    def stock_peak_bytes(self) -> int:
        """Return the stock step's peak as XLA compiles it; only asked with a memory limit."""
        return max(self.stock_bytes.values(), default=0)

    def came_out(self, name: str, key: Hashable, module: CompiledModule | None) -> None:
        """Take note of the compiled module of a way; ways that compile to the same key share one."""
        if module is not None:
            self._module_of[key] = module
        if key in self._module_of:
            self.modules.setdefault(name, self._module_of[key])

    @property
    def _comparing(self) -> bool:
        return self.several and not self._ended

    def fail(self, error: BaseException, name: str = REWRITTEN) -> None:
        """Take note of why a step was not rewritten; one of several ways may fail."""
        _LOG.debug("%s: not rewritten", name, exc_info=error)
        if self._comparing:
            self._failed.setdefault(name, error)
        else:
            self.failures.errors.append(error)

    def failure(self) -> str | None:
        """Say in one line why the stock step runs (for some shapes); None where it does not."""
        has_step = self.has_step or self._comparing
        return self.failures.reason or (None if has_step else "the step has not been traced")

    # The controller calls these while ways are compared.
    def run_stock(self, step: Callable[[], Any], choice: str | None) -> Any:
        """Run the stock step; on its first compilation take note of XLA's module."""
        first, self._stock_has_run = not self._stock_has_run, True
        with watched() if first else nullcontext() as watch:
            outputs = step()
        if watch is not None and watch.module is not None:
            self.modules[STOCK] = watch.module
            self.ran(choice)
        return outputs

    def ran(self, choice: str | None) -> None:
        report, modules = self._report, self.modules
        ours = modules.get(choice or REWRITTEN) or modules.get(REWRITTEN)
        report.put(Ways(report.way, dict(modules), self.gains))
        report.change(predicted_peak_bytes=None if ours is None else ours.total_bytes, unknown_size_ops=0)
        report.note(*self.said, *(f"{way}: left out: {why}" for way, why in self._left_out.items()))
        if STOCK in modules:
            report.change(stock_predicted_peak_bytes=modules[STOCK].total_bytes)

    def failed(self) -> Iterator[tuple[str, BaseException]]:
        """Yield the ways that could not be rewritten or compiled, while others are still compared."""
        for name, error in list(self._failed.items()):
            if self._comparing:
                yield name, error

    def left_out(self, which: str, error: BaseException) -> None:
        self._left_out[which] = reason_of(error)

    def give_up(self) -> None:
        self.failures.errors.extend(self._failed.values())
        self.decided()

    def keeps(self, which: str) -> None:
        """Keep a way: the report is about it from now on."""
        self._kept = which
        self._report.change(way=which if self.several else "")
        if which == CONCURRENT:
            clear_plan(self._report)
        else:
            fill_plan(self._report, self.result)

    def why_stock(self, reason: str, left: Collection[str]) -> str:
        """Return the reason, with the first error if no way is left, and the share in CUDA graphs."""
        self._report.change(way="")
        none_left = self._left_out and not set(left) - {STOCK, CONCURRENT}
        if none_left and self.failures.first is None:
            reason = f"{next(iter(self._left_out.values()))}; {CONCURRENT}: {reason}"
        modules = [self.modules.get(name) for name in (STOCK, REWRITTEN)]
        shares = [None if module is None else module.share_in_graphs for module in modules]
        if shares[0] is not None and shares[1] is not None and shares[1] < shares[0]:
            own, of_stock = f"{shares[1]:.0%}", f"{shares[0]:.0%}"
            reason += f"; of its kernels {own} are in CUDA graphs, of the stock step's {of_stock}"
        return reason

    def decided(self) -> None:
        """Take note that one way is left: if it fails, the stock step runs."""
        self._ended = True


def why_not(options: OneDeviceOptions) -> str | None:
    """Say why no compiled step can be rewritten in this process; None where it can."""
    if (reason := xla.why_no_streams()) is not None:
        return f"jit_compile=True: {reason}"
    platform = xla.platform()
    if platform != _WHERE_STREAMS_ARE and not options.any_platform:
        return (
            f"jit_compile=True: XLA compiles for {platform} here, which has no streams to run dW on; "
            "that needs a CUDA GPU (jit_compile=False is reordered on every device)"
        )
    return None


def reason_of(error: BaseException) -> str:
    """Return an error's first line; its last if AutoGraph converted the code, whose rest is a traceback."""
    if isinstance(error, OOOError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[-1 if lines[0] == _CONVERTED else 0]}"
