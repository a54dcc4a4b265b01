"""Time the HLO of training steps on a GPU with JAX, in turns; or compile it for an H100 without one.

It needs JAX (requirements/gpu-jax.in) and what :mod:`benchmarks.gpu.export_hlo` wrote:
``python -m benchmarks.gpu.run_hlo FOLDER STEM``.
"""

import argparse
import contextlib
import datetime
import fcntl
import functools
import glob
import gzip
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomllib

from benchmarks.cases import NOBODY, STOCK, Case, Measured, Way, WayRun, take_turns
from benchmarks.gpu.hlo_text import WAYS, executable_of, fed_back, h100, looped, parameters_of
from benchmarks.kept import ROWS, largest_difference, rows_of, write

FLAGS: dict[str, dict[str, str]] = {"": {}, **tomllib.loads(WAYS.read_text())["flags"]}
# Kernels of CUDA graphs are profiled as they run, in the graph.
_SHOWN = ("xla_enable_command_buffers_during_profiling", "True")
_WAYS = ("xla", "xla@graph", "xla@concurrent", "xla@concurrent-graph", "early", "joint", "apart@graph")
_TURN_S, _LEAST_TURNS, _MOST_TURNS = 0.2, 6, 15
_LOOP = 10  # steps of one call
_PATIENCE_S = 300.0  # for other processes


def side_by_side(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return how long any of the spans lasts, and how long two or more last at once."""
    edges = sorted(edge for begin, end in spans for edge in ((begin, 1), (end, -1)))
    moments, changes = np.reshape(edges, (-1, 2)).T
    running, long = np.cumsum(changes)[:-1], np.diff(moments)
    return float(long[running > 0].sum()), float(long[running > 1].sum())


@dataclass
class Steps:
    """Some compiled steps in a loop, with their state and what is known of them."""

    executable: Any
    pairs: Sequence[tuple[int, int]]
    about: dict[str, Any]
    count: int
    state: Sequence[Any] = ()

    def run(self, calls: int) -> float:
        """Make so many calls, and return the seconds of one step."""
        import jax

        began_s = time.perf_counter()
        for _ in range(calls):
            state = list(self.state)
            # Nothing else holds the last call's results: those of the next one find the same memory.
            results = self.executable.execute_sharded(state).disassemble_into_single_device_arrays()
            for result, parameter in self.pairs:
                state[parameter] = results[result][0]
            self.state, results = state, None
        self.about["dispatch_s"] = (time.perf_counter() - began_s) / calls / self.count
        jax.block_until_ready(self.state)
        return (time.perf_counter() - began_s) / calls / self.count

    def weights(self) -> list[np.ndarray]:
        """Return the floats of the state, weights and slots among them."""
        arrays = map(np.asarray, self.state)
        return [array for array in arrays if array.dtype.kind == "f" and array.size]


def text_of(folder: Path, stem: str, way: str) -> str:
    """Return the HLO of a way, as it was exported."""
    return gzip.decompress((folder / f"{stem}_{way.partition('@')[0]}.hlo.gz").read_bytes()).decode()


def compiled(hlo: str, way: str, device: Any, count: int = _LOOP, on_paper: bool = False) -> Steps:
    """Compile so many steps of a way with its flags; ``on_paper``: for a device that is not there."""
    began_s = time.perf_counter()
    flags = [*FLAGS[way.partition("@")[2]].items(), *([] if on_paper else [_SHOWN])]
    executable = executable_of(looped(hlo, count) if count > 1 else hlo, device, flags, on_paper)
    optimized, memory = executable.hlo_modules()[0].to_string(), executable.get_compiled_memory_stats()
    about = {
        "compile_s": time.perf_counter() - began_s,
        "async_calls": len(re.findall(r"%\S*call-start\S* = ", optimized)),
        "fusions": optimized.count(" fusion("),
        "temporary_bytes": memory.temp_size_in_bytes,
    }
    return Steps(executable, fed_back(hlo), about, count)


def overlap_of(steps: Steps, events_to: Path | None) -> dict[str, Any]:
    """Profile a call: seconds of a step in which any kernel runs, and in which two or more do."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            steps.run(1)
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        planes = [of for of in jax.profiler.ProfileData.from_file(path).planes if "GPU" in of.name]
    lines = [line for plane in planes for line in plane.lines if line.name.startswith("Stream")]
    events = [(line.name, of.name, of.start_ns, of.duration_ns) for line in lines for of in line.events]
    if events_to is not None:
        last = sorted(events, key=lambda event: event[2])[-len(events) // 3 :]
        events_to.write_bytes(gzip.compress(json.dumps(last).encode()))
    busy_ns, several_ns = side_by_side((start, start + long) for _, _, start, long in events)
    part_s = 1e-9 / steps.count
    return {
        "busy_s": busy_ns * part_s,
        "overlapped_s": several_ns * part_s,
        "kernels_s": sum(long for *_, long in events) * part_s,
        "kernels": len(events) / steps.count,
        "streams": len({stream for stream, *_ in events}),
    }


def on_paper(asked: argparse.Namespace, dump: Path) -> None:
    """Compile one step of all ways for an H100, and print a line of JSON for each."""
    device = h100()
    for way in asked.ways:
        hlo = text_of(asked.folder, asked.stem, way)
        for earlier in dump.glob("*thunk_sequence*.txt"):
            earlier.unlink()
        about = compiled(hlo, way, device, count=1, on_paper=True).about
        # XLA writes the second, with a longer name, only where its passes have changed something.
        latest = max(dump.glob("*thunk_sequence*.txt"), key=lambda path: len(path.name))
        kernels, captured, graphs = counts_of(latest.read_text())
        about |= {"kernels": kernels, "outside_of_graphs": kernels - captured, "graphs": graphs}
        print(json.dumps({"network": asked.stem, "way": way, **about}), flush=True)


def counts_of(thunks: str) -> tuple[int, int, int]:
    """Count the launches in XLA's text of thunks, those of them in CUDA graphs, and the graphs."""
    kernels = captured = graphs = 0
    graph_at: int | None = None
    for indent, kind in re.findall(r"(?m)^( *)\d+: (k\w+)", thunks):
        if graph_at is not None and len(indent) <= graph_at:
            graph_at = None
        if kind == "kCommandBuffer":
            graph_at, graphs = len(indent), graphs + 1
        elif kind not in ("kAsyncStart", "kAsyncDone", "kWhile"):
            kernels, captured = kernels + 1, captured + (graph_at is not None)
    return kernels, captured, graphs


@contextlib.contextmanager
def alone(folder: Path | None, processes: int) -> Iterator[None]:
    """Wait until so many processes that were given this folder have compiled, and none of them measures."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.getpid()}.compiled").touch()
    until_s = time.monotonic() + _PATIENCE_S
    while len(list(folder.glob("*.compiled"))) < processes and time.monotonic() < until_s:
        time.sleep(0.2)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measure(asked: argparse.Namespace) -> None:
    """Compile all ways side by side, run them in turns, and keep the rows."""
    import jax

    began, began_s = datetime.datetime.now(datetime.UTC), time.monotonic()
    device = jax.devices()[0]
    texts = {way: text_of(asked.folder, asked.stem, way) for way in asked.ways}
    jobs = dict[str, Future[Steps]]()
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 4) // 2)) as pool:
        for way, hlo in texts.items():
            jobs[way] = pool.submit(compiled, hlo, way, device)
            if len(jobs) == 1:  # what it has tuned by itself, on an idle card, the others take
                wait(jobs.values())
    about = {"device": device.device_kind, "all compiled after s": time.monotonic() - began_s}
    given, ready, not_run = parameters_of(next(iter(texts.values()))), dict[str, Steps](), dict[str, str]()
    with alone(asked.together, asked.processes):
        for way, job in jobs.items():
            try:
                if parameters_of(texts[way]) != given:
                    raise ValueError("it takes other parameters than the first way")
                steps = job.result()
                steps.state = [jax.device_put(value) for value in _drawn(given)]
                steps.run(1)
                ready[way] = steps
            except Exception as error:  # others can run
                not_run[way] = str(error)[:300]
        if not ready:
            raise SystemExit(f"no way ran: {not_run}")
        runs = _in_turns(asked, ready)
    ways = tuple(Way(way, STOCK if way.startswith("xla") else NOBODY) for way in asked.ways)
    keep(asked, asked.stem, ways, Measured(runs, about=about, not_run=not_run), began)


def _in_turns(asked: argparse.Namespace, ready: dict[str, Steps]) -> dict[str, WayRun]:
    """Compare what one call has trained, run the ways in turns, then profile them."""
    import jaxlib

    first, *others = (steps.weights() for steps in ready.values())
    apart = [None, *(largest_difference(weights, first) for weights in others)]
    call_s = max(steps.run(2) for steps in ready.values()) * _LOOP
    calls = max(1, min(50, round(_TURN_S / call_s)))
    turns = int(np.clip(asked.seconds / (1.2 * calls * call_s * len(ready)), _LEAST_TURNS, _MOST_TURNS))
    turns_s = take_turns({way: functools.partial(of.run, calls) for way, of in ready.items()}, turns)
    shared = {"jaxlib": jaxlib.__version__, "steps in a turn": calls * _LOOP}
    runs = {}
    for (way, steps), difference in zip(ready.items(), apart, strict=True):
        about = {**shared, "weights compared after steps": _LOOP, **steps.about}
        try:
            about |= overlap_of(steps, asked.events and asked.events / f"{asked.stem}_{way}.json.gz")
        except Exception as error:  # times stand without a profile
            about["not_profiled"] = str(error)[:300]
        runs[way] = WayRun(turns_s[way], largest_difference=difference, about=about)
    return runs


def _drawn(parameters: Sequence[tuple[str, tuple[int, ...]]]) -> Iterator[np.ndarray]:
    """Yield the same values every time: small floats, and whole numbers below ten."""
    random = np.random.default_rng(0)
    for kind, shape in parameters:
        floats = "float" in kind
        yield np.asarray(random.normal(size=shape) * 0.05 if floats else random.integers(0, 10, shape), kind)


def keep(
    asked: argparse.Namespace, name: str, ways: tuple[Way, ...], measured: Measured, began: datetime.datetime
) -> None:
    """Keep a row of each way, and print them."""
    turns = max(len(run.turns_s) for run in measured.ways.values())
    rows = rows_of("gpu", Case(name, "one_gpu", "gpu", ways, {}, turns), measured, began)
    for row in rows:
        print(f"{row.way} {row.median_s * 1e3:.3f} ms", row.largest_difference, row.about)
    for way, why in measured.not_run.items():
        print(f"{way} did not run: {why}")
    print(write(rows, asked.rows, began), flush=True)


def shared_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every process that measures."""
    parser.add_argument("--together", type=Path, help="folder shared by processes that measure one by one")
    parser.add_argument("--processes", type=int, default=1, help="how many share it")
    parser.add_argument("--rows", type=Path, default=ROWS, help="folder that keeps the rows")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("stem", help="NETWORK_bBATCH of the files")
    parser.add_argument("ways", nargs="*", default=_WAYS, help=f"default: {' '.join(_WAYS)}")
    parser.add_argument("--compile-only", action="store_true", help="for an H100, without one")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the turns of all ways together")
    parser.add_argument("--events", type=Path, help="folder that keeps the profiled kernels of each way")
    shared_options(parser)
    asked = parser.parse_args()
    unknown = {way.partition("@")[2] for way in asked.ways} - FLAGS.keys()
    if unknown:
        parser.error(f"no flags are called {', '.join(sorted(unknown))}; there are {', '.join(FLAGS)}")
    with tempfile.TemporaryDirectory() as dump:
        if asked.compile_only:
            os.environ["JAX_PLATFORMS"] = "cpu"
            os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"
        import jax

        jax.config.update("jax_enable_x64", True)
        on_paper(asked, Path(dump)) if asked.compile_only else measure(asked)


if __name__ == "__main__":
    main()
