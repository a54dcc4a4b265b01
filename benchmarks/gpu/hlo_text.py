"""HLO as text: what a module takes and returns, a loop around it, and calls that stay out of CUDA graphs."""

from __future__ import annotations

import re
from collections.abc import Iterable

_KINDS = {
    "f32": "float32", "f16": "float16", "f64": "float64", "pred": "bool", "u8": "uint8", "s8": "int8",
    "s32": "int32", "s64": "int64", "u32": "uint32", "u64": "uint64",
}  # fmt: skip
_TYPE = r"\w+\[[\d,]*\](?:\{[\d,]*\})?"
# A Fourier transform of two numbers: XLA captures none in a graph, and so not the call that has one in it.
# Its result is never below zero, so what is taken away from the gradient is +0, which changes no bit.
_TRANSFORM = """\
  %apart_two = f32[{ones}2] slice({given}), slice={{{first}[0:2]}}
  %apart_flat = f32[2] reshape(%apart_two)
  %apart_pair = c64[2] complex(%apart_flat, %apart_flat)
  %apart_fft = c64[2] fft(%apart_pair), fft_type=FFT, fft_length={{2}}
  %apart_real = f32[2] real(%apart_fft)
  %apart_abs = f32[2] abs(%apart_real)
  %apart_0 = f32[] constant(0)
  %apart_zeros = f32[2] broadcast(%apart_0), dimensions={{}}
  %apart_none = f32[2] minimum(%apart_abs, %apart_zeros)
  %apart_one = f32[1] slice(%apart_none), slice={{[0:1]}}
  %apart_scalar = f32[] reshape(%apart_one)
  %apart_all = {kind} broadcast(%apart_scalar), dimensions={{}}
  ROOT %apart_dW = {kind} subtract({root}, %apart_all)"""


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
    given = {int(number): kind for kind, number in re.findall(r"= (\S+) parameter\((\d+)\)", step)}
    results = re.findall(_TYPE, _found(r"ROOT \S+ = \((.*?)\) tuple\(", step))
    new_of = {parameter: result for result, parameter in fed_back(hlo)}
    other = [number for number in range(len(results)) if number not in new_of.values()]
    kinds = ["s32[]", *(given[number] for number in sorted(given)), *(results[number] for number in other)]
    carried = [f"%new_{new_of[n]}" if n in new_of else f"%old_{n + 1}" for n in sorted(given)]
    place = {result: parameter + 1 for parameter, result in new_of.items()}
    place |= {number: len(given) + 1 + nth for nth, number in enumerate(other)}
    name = _found(r"(%\S+)", step)
    state, returned = f"({', '.join(kinds)})", f"({', '.join(results)})"
    lines = [
        f"%next_state (state: {state}) -> {state} {{",
        f"  %state = {state} parameter(0)",
        *_elements("old", kinds, "%state"),
        f"  %done = {returned} call({_named('old', range(1, len(given) + 1))}), to_apply={name}",
        *_elements("new", results, "%done"),
        "  %one = s32[] constant(1)",
        "  %following = s32[] add(%old_0, %one)",
        f"  ROOT %next = {state} tuple({', '.join(['%following', *carried, *(f'%new_{n}' for n in other)])})",
        "}",
        f"%goes_on (at: {state}) -> pred[] {{",
        f"  %at = {state} parameter(0)",
        "  %count = s32[] get-tuple-element(%at), index=0",
        f"  %last = s32[] constant({steps})",
        "  ROOT %less = pred[] compare(%count, %last), direction=LT",
        "}",
        f"ENTRY %loop ({', '.join(f'p{n}: {given[n]}' for n in sorted(given))}) -> {returned} {{",
        *(f"  %p_{n} = {given[n]} parameter({n})" for n in sorted(given)),
        "  %zero = s32[] constant(0)",
        *(f"  %nothing_{n} = {results[n].partition('[')[0]}[] constant(0)" for n in other),
        *(f"  %empty_{n} = {results[n]} broadcast(%nothing_{n}), dimensions={{}}" for n in other),
        f"  %begin = {state} tuple(%zero, {_named('p', sorted(given))}, {_named('empty', other)})",
        f"  %end = {state} while(%begin), condition=%goes_on, body=%next_state",
        *(f"  %result_{n} = {results[n]} get-tuple-element(%end), index={at}" for n, at in place.items()),
        f"  ROOT %results = {returned} tuple({_named('result', range(len(results)))})",
        "}",
    ]  # fmt: skip
    head = re.sub(r", entry_computation_layout=.*", "", head)
    return "\n".join([head, before + step, *lines, ""])


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, pattern
    return match[1]


def _elements(what: str, kinds: list[str], of: str) -> Iterable[str]:
    for number, kind in enumerate(kinds):
        yield f"  %{what}_{number} = {kind} get-tuple-element({of}), index={number}"


def _named(what: str, numbers: Iterable[int]) -> str:
    return ", ".join(f"%{what}_{number}" for number in numbers)


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
    added = _TRANSFORM.format(
        ones="1," * (len(sizes) - 1),
        given=name,
        first="[0:1]," * (len(sizes) - 1),
        kind=root[2],
        root=root[1],
    )
    return function.replace(root[0], f"{root[0].removeprefix('ROOT ')}\n{added}")
