"""HLO as text, made for calls and loops, and compiled by the XLA inside JAX, with a card or without one."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_UNTUNED = ("xla_gpu_autotune_level", "0")
_H100, WAYS = (Path(__file__).with_name(name) for name in ("h100.textproto", "ways.toml"))
_KINDS = {
    "f32": "float32", "f16": "float16", "f64": "float64", "pred": "bool", "u8": "uint8", "s8": "int8",
    "s32": "int32", "s64": "int64", "u32": "uint32", "u64": "uint64",
}  # fmt: skip
_TYPE = r"\w+\[[\d,]*\](?:\{[\d,]*\})?"
# A Fourier transform of two numbers: XLA captures none in a graph, and so not the call that has one in it.
# Its result is never below zero, so what is taken away from the gradient is +0, which changes no bit.
_TRANSFORM, _LOOP = (Path(__file__).with_name(f"{name}.hlo").read_text() for name in ("apart", "loop"))


def h100() -> Any:
    """Return an H100 to compile for, where JAX_PLATFORMS is ``cpu``."""
    from jax.experimental import topologies

    config = _H100.read_text()
    return topologies.get_topology_desc("h100", "cuda", topology="1x1x1", target_config=config).devices[0]


def executable_of(hlo: str, device: Any, flags: Iterable[tuple[str, str]], on_paper: bool = False) -> Any:
    """Compile a module with these flags of XLA; ``on_paper``: for a device that is not there, untuned."""
    from jax._src.interpreters import mlir as jax_mlir
    from jax._src.lib import xla_client
    from jaxlib import _hlo, _jax
    from jaxlib.mlir import ir

    # StableHLO, which JAX is fed with, has no copy: they become reshapes.
    text = re.sub(r"(= \S+) copy\(", r"\1 reshape(", hlo)
    module = _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    proto = _hlo.XlaComputation(module).as_serialized_hlo_module_proto()
    program = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(proto), jax_mlir.make_ir_context())
    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    options.env_option_overrides = [*flags, *([_UNTUNED] if on_paper else [])]
    make = device.client.compile if on_paper else device.client.compile_and_load
    return make(program, xla_client.DeviceList((device,)), options)


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


def looped(hlo: str, steps: int) -> str:
    """Return a module that trains so many steps in a loop on the device, on the same batch.

    A host spends some 10 us in JAX for each array of a call: of many weights, that would be most of a step.
    """
    head, _, body = hlo.partition("\n")
    before, _, step = body.rpartition("ENTRY ")
    given = dict(sorted((int(n), kind) for kind, n in re.findall(r"= (\S+) parameter\((\d+)\)", step)))
    results = dict(enumerate(re.findall(_TYPE, _match_of(r"ROOT \S+ = \((.*?)\) tuple\(", step))))
    new_of = {parameter: result for result, parameter in fed_back(hlo)}
    other = {n: kind for n, kind in results.items() if n not in new_of.values()}
    kinds = dict(enumerate(["s32[]", *given.values(), *other.values()]))
    carried = [f"%new_{new_of[n]}" if n in new_of else f"%old_{n + 1}" for n in given]
    place = {new_of[n]: n + 1 for n in new_of} | {n: len(given) + 1 + nth for nth, n in enumerate(other)}
    loop = _LOOP.format(
        state=f"({', '.join(kinds.values())})",
        returned=f"({', '.join(results.values())})",
        steps=steps,
        step=_match_of(r"(%\S+)", step),
        old=_each("  %old_{n} = {kind} get-tuple-element(%state), index={n}\n", kinds),
        new=_each("  %new_{n} = {kind} get-tuple-element(%done), index={n}\n", results),
        stepped=", ".join(f"%old_{n + 1}" for n in given),
        following=", ".join(["%following", *carried, *(f"%new_{n}" for n in other)]),
        takes=_each("p{n}: {kind}", given, ", "),
        given=_each("  %p_{n} = {kind} parameter({n})\n", given),
        zeros=_each("  %nothing_{n} = {kind}[] constant(0)\n", {n: other[n].split("[")[0] for n in other}),
        empty=_each("  %empty_{n} = {kind} broadcast(%nothing_{n}), dimensions={{}}\n", other),
        begin=", ".join(["%zero", *(f"%p_{n}" for n in given), *(f"%empty_{n}" for n in other)]),
        ended="".join(
            f"  %result_{n} = {results[n]} get-tuple-element(%end), index={at}\n" for n, at in place.items()
        ),
        results=_each("%result_{n}", results, ", "),
    )
    return "\n".join([re.sub(", entry_computation_layout=.*", "", head), before + step, loop])


def _match_of(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, pattern
    return match[1]


def _each(text: str, kinds: Mapping[int, str], separator: str = "") -> str:
    return separator.join(text.format(n=n, kind=kind) for n, kind in kinds.items())


def apart(hlo: str) -> str:
    """Return the module with every call on a side stream kept out of CUDA graphs, between which it starts.

    XLA captures a call that it can capture as a whole, and the graph then runs it in turn with all the rest.
    """
    called = set(re.findall(r"to_apply=(%\S+), frontend_attributes=\{_xla_stream_annotation", hlo))
    parts = re.split(r"(?m)^(?=%\S+ \(|ENTRY )", hlo)
    return "".join(_not_captured(part) if part.split(" ", 1)[0] in called else part for part in parts)


def _not_captured(function: str) -> str:
    """Return a function of the module that no graph can hold, with the same result."""
    given = re.findall(r"(%\S+) = f32\[([\d,]+)\]\S* parameter", function)
    root = re.search(r"ROOT (%\S+) = (f32\[[\d,]*\])(?:\{[\d,]*\})? [^\n]*", function)
    wide = [(name, sizes.split(",")) for name, sizes in given if int(sizes.split(",")[-1]) > 1]
    if root is None or not wide:
        return function
    name, sizes = wide[-1]
    ones, first = ("1," * (len(sizes) - 1), "[0:1]," * (len(sizes) - 1))
    added = _TRANSFORM.format(ones=ones, given=name, first=first, kind=root[2], root=root[1])
    return function.replace(root[0], f"{root[0].removeprefix('ROOT ')}\n{added.rstrip()}")
