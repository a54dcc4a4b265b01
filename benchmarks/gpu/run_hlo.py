"""Time the HLO of training steps on a GPU with JAX, in turns; or compile it for an H100 without one.

It needs JAX (requirements/gpu-jax.in) and what :mod:`benchmarks.gpu.export_hlo` wrote:
``python -m benchmarks.gpu.run_hlo FOLDER STEM``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import functools
import glob
import gzip
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.case import NOBODY, STOCK, Case, Measured, Way, WayRun
from benchmarks.kept import ROWS, rows_of, write
from benchmarks.models import largest_difference
from benchmarks.turns import take_turns

_CONCURRENT = "xla@xla_gpu_command_buffer_scheduling_mode=CONCURRENT,xla_gpu_graph_min_graph_size=1"
_WAYS = ("xla", _CONCURRENT, "joint", "early")
_TURN_S, _LEAST_TURNS, _MOST_TURNS, _WARM, _PROFILED = 0.3, 6, 30, 3, 5
_KINDS = {
    "f32": "float32", "f16": "float16", "f64": "float64", "pred": "bool", "u8": "uint8", "s8": "int8",
    "s32": "int32", "s64": "int64", "u32": "uint32", "u64": "uint64",
}  # fmt: skip
_H100 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
 registers_per_block_limit: 65536 } platform_name: "CUDA"
 dnn_version_info { major: 9 minor: 10 patch: 0 } device_description_str: "NVIDIA H100 80GB HBM3" """


def parameters_of(hlo: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return numpy's kind and the shape of each parameter of a module."""
    entry = hlo[hlo.index("\nENTRY") :]
    by_number = {
        int(match[3]): (_KINDS[match[1]], tuple(int(size) for size in match[2].split(",") if size))
        for match in re.finditer(r"= (\w+)\[([\d,]*)\]\S* parameter\((\d+)\)", entry)
    }
    return [by_number[number] for number in sorted(by_number)]


def fed_back(hlo: str) -> list[tuple[int, int]]:
    """Return pairs of a result and the parameter that it becomes in the next step: weights and slots."""
    head = hlo[: hlo.index("\n")]
    return [(int(out), int(given)) for out, given in re.findall(r"\{(\d+)\}: \((\d+), \{\}", head)]


def side_by_side(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return how long any of the spans lasts, and how long two or more last at once."""
    edges = sorted(edge for begin, end in spans for edge in ((begin, 1), (end, -1)))
    any_ns = several_ns = last = 0.0
    running = 0
    for moment, change in edges:
        any_ns += (moment - last) * (running > 0)
        several_ns += (moment - last) * (running > 1)
        running, last = running + change, moment
    return any_ns, several_ns


@dataclass
class Step:
    """A compiled step with its state, and what is known of it."""

    executable: Any
    pairs: Sequence[tuple[int, int]]
    about: dict[str, Any]
    state: Sequence[Any] = ()

    def run(self, count: int) -> float:
        """Train so many steps, and return the seconds of one."""
        import jax

        began_s = time.perf_counter()
        for _ in range(count):
            results = self.executable.execute_sharded(
                list(self.state)
            ).disassemble_into_single_device_arrays()
            state = list(self.state)
            for result, parameter in self.pairs:
                state[parameter] = results[result][0]
            self.state = state
        jax.block_until_ready(self.state)
        return (time.perf_counter() - began_s) / count


def text_of(folder: Path, stem: str, way: str) -> str:
    """Return the HLO of a way; StableHLO, which JAX is fed with, has no ``copy``: they become reshapes."""
    packed = folder / f"{stem}_{way.partition('@')[0]}.hlo.gz"
    return re.sub(r"(= \S+) copy\(", r"\1 reshape(", gzip.decompress(packed.read_bytes()).decode())


def compiled(hlo: str, way: str, device: Any, on_paper: bool) -> Step:
    """Compile a way with its flags; ``on_paper``: for a device that is not there."""
    from jax._src.interpreters import mlir as jax_mlir
    from jax._src.lib import xla_client
    from jaxlib import _hlo, _jax
    from jaxlib.mlir import ir

    module = _hlo.hlo_module_from_text(hlo)
    proto = _hlo.XlaComputation(module.as_serialized_hlo_module_proto()).as_serialized_hlo_module_proto()
    program = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(proto), jax_mlir.make_ir_context())
    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    flags = [tuple(flag.split("=", 1)) for flag in way.partition("@")[2].split(",") if flag]
    options.env_option_overrides = flags + ([("xla_gpu_autotune_level", "0")] if on_paper else [])
    make = device.client.compile if on_paper else device.client.compile_and_load
    began_s = time.perf_counter()
    executable = make(program, xla_client.DeviceList((device,)), options)
    optimized, memory = executable.hlo_modules()[0].to_string(), executable.get_compiled_memory_stats()
    about = {
        "compile_s": time.perf_counter() - began_s,
        "async_calls": len(re.findall(r"%\S*call-start\S* = ", optimized)),
        "fusions": optimized.count(" fusion("),
        "temporary_bytes": memory.temp_size_in_bytes,
    }
    return Step(executable, fed_back(hlo), about)


def overlap_of(step: Step) -> dict[str, Any]:
    """Profile some steps: seconds of one in which any stream works, and in which two or more do."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            step.run(_PROFILED)
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        planes = jax.profiler.ProfileData.from_file(path).planes
        lines = [line for plane in planes if "GPU" in plane.name for line in plane.lines]
        names = sorted({line.name for line in lines})
        streams = [
            [(event.start_ns, event.end_ns) for event in line.events]
            for line in lines
            if line.name.startswith("Stream")
        ]
    busy_ns, several_ns = side_by_side(span for stream in streams for span in stream)
    part_s = 1e-9 / _PROFILED
    seconds = {"busy_s": busy_ns * part_s, "overlapped_s": several_ns * part_s}
    return {**seconds, "streams": sum(map(bool, streams)), "profiled_lines": names}


def on_paper(asked: argparse.Namespace) -> None:
    """Compile all ways for an H100."""
    from jax.experimental import topologies

    described = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", topology="1x1x1", target_config=_H100
    )
    for way in asked.ways:
        step = compiled(text_of(asked.folder, asked.stem, way), way, described.devices[0], on_paper=True)
        print(way, step.about, flush=True)


def measured(asked: argparse.Namespace) -> None:
    """Compile all ways side by side, run them in turns, and keep the rows."""
    import jax
    import jaxlib

    began, began_s = datetime.datetime.now(datetime.UTC), time.monotonic()
    device = jax.devices()[0]
    texts = {way: text_of(asked.folder, asked.stem, way) for way in asked.ways}
    not_run: dict[str, str] = {}
    with concurrent.futures.ThreadPoolExecutor(max(2, (os.cpu_count() or 4) // 4)) as pool:
        jobs = {way: pool.submit(compiled, hlo, way, device, False) for way, hlo in texts.items()}
    steps: dict[str, Step] = {}
    given = parameters_of(texts[asked.ways[0]])
    for way, job in jobs.items():
        try:
            if parameters_of(texts[way]) != given:
                raise ValueError(f"it takes other parameters than {asked.ways[0]}")
            job.result().state = [jax.device_put(value, device) for value in _drawn(given)]
            job.result().run(_WARM)
            steps[way] = job.result()
        except Exception as error:  # others can run
            not_run[way] = str(error)[:300]
    weights = {
        way: [array for value in step.state if (array := np.asarray(value)).dtype.kind == "f" and array.size]
        for way, step in steps.items()
    }
    first = next(iter(steps))
    turn_s = max(step.run(_WARM) for step in steps.values())
    count = max(1, min(50, round(_TURN_S / turn_s)))
    left_s = asked.seconds - (time.monotonic() - began_s)
    turns = max(_LEAST_TURNS, min(_MOST_TURNS, int(left_s / (1.2 * count * turn_s * len(steps)))))
    runs: dict[str, Callable[[], float]] = {
        way: functools.partial(step.run, count) for way, step in steps.items()
    }
    turns_s = take_turns(runs, turns)
    of_way = {}
    for way, step in steps.items():
        apart = None if way == first else largest_difference(weights[way], weights[first])
        step_about = {**step.about, **overlap_of(step)}
        of_way[way] = WayRun(turns_s[way], largest_difference=apart, about=step_about)
    ways = tuple(Way(way, STOCK if way.startswith("xla") else NOBODY) for way in asked.ways)
    about = {"jaxlib": jaxlib.__version__, "device": device.device_kind, "steps in a turn": count,
             "weights compared after steps": _WARM}  # fmt: skip
    case = Case(asked.stem, "one_gpu", "run_hlo", ways, {}, turns)
    rows = rows_of("gpu", case, Measured(of_way, None, None, about, not_run), began)
    for row in rows:
        print(
            row.way, f"{np.median(row.turns_s) * 1e3:.3f} ms", row.largest_difference, row.about, flush=True
        )
    for way, why in not_run.items():
        print(f"{way} did not run: {why}")
    print(write(rows, asked.rows, began))


def _drawn(parameters: Sequence[tuple[str, tuple[int, ...]]]) -> list[np.ndarray]:
    """Return the same values every time: small floats, and whole numbers below ten."""
    random = np.random.default_rng(0)
    return [
        np.asarray(
            random.normal(size=shape) * 0.05 if "float" in kind else random.integers(0, 10, shape)
        ).astype(kind)
        for kind, shape in parameters
    ]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("stem", help="NETWORK_bBATCH of the files")
    parser.add_argument("ways", nargs="*", default=_WAYS, help=f"default: {' '.join(_WAYS)}")
    parser.add_argument("--compile-only", action="store_true", help="for an H100, without one")
    parser.add_argument("--seconds", type=float, default=230.0, help="for all ways together")
    parser.add_argument("--rows", type=Path, default=ROWS, help="folder that keeps the rows")
    asked = parser.parse_args()
    if asked.compile_only:
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_enable_x64", True)
    (on_paper if asked.compile_only else measured)(asked)


if __name__ == "__main__":
    main()
