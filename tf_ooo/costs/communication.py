"""Fits links to measured messages (latency + bytes / bandwidth), and reads links and bytes from text."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence

from tf_ooo.costs.layer_costs import Link
from tf_ooo.errors import CostError
from tf_ooo.units import time_text

# A measurement sends messages of these sizes: small ones show latency, large ones bandwidth.
MEASURED_BYTES = (1024, 16 * 1024, 256 * 1024, 1024**2, 4 * 1024**2)

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BINARY = {"": 1, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_AMOUNT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z/]*)\s*", re.IGNORECASE)
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def fit_link(samples: Sequence[tuple[float, float]], *, flat_ok: bool = False) -> Link:
    """Return the link that fits measured (bytes, seconds) best. CostError: too few, or larger not slower.

    The bandwidth is the median of the slopes between all pairs (Theil-Sen): up to 29% of the samples may be
    disturbed. ``flat_ok``: if larger messages were not slower, take the highest bytes per second among them,
    which the link has at least.
    """
    samples = [_sample(index, sample) for index, sample in enumerate(samples)]
    sizes = {size for size, _ in samples}
    if len(sizes) < 2:
        raise CostError(
            f"a link needs messages of at least two sizes to be fitted, got {len(samples)} samples "
            f"of {len(sizes)}"
        )
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for index, earlier in enumerate(samples)
        for later in samples[index + 1 :]
        if earlier[0] != later[0]
    ]
    seconds_per_byte = statistics.median(slopes)
    if not seconds_per_byte > 0:
        if flat_ok:
            least_s = min(taken_s for _, taken_s in samples)
            return Link(least_s, max((size / s for size, s in samples if s), default=math.inf))
        raise CostError(
            "a link cannot be fitted: larger messages were not slower; send larger ones, up to "
            f"{max(sizes):.0f} bytes is too little"
        )
    latency_s = statistics.median(seconds - size * seconds_per_byte for size, seconds in samples)
    return Link(max(0.0, latency_s), 1 / seconds_per_byte)


def _sample(index: int, sample: tuple[float, float]) -> tuple[float, float]:
    try:
        size, seconds = (float(value) for value in sample)
    except (TypeError, ValueError) as error:
        raise CostError(f"sample {index}: expected (bytes, seconds), got {sample!r:.80}") from error
    if not (0 <= size < math.inf and 0 <= seconds < math.inf):
        raise CostError(f"sample {index}: bytes and seconds must be finite and >= 0, got {sample!r:.80}")
    return size, seconds


_OF_RUNTIME = {"send_s": "to send", "receive_s": "to receive", "task_s": "a task", "step_s": "a step"}


def runtime_text(seconds: Mapping[str, float]) -> str:
    """Say what is in :attr:`Link.runtime`: ``TensorFlow itself takes 20 us a task, 8 ms a step``."""
    said = [f"{time_text(seconds[name])} {what}" for name, what in _OF_RUNTIME.items() if name in seconds]
    return f"TensorFlow itself takes {', '.join(said)}"


def link_of_ring(allreduce: Link, workers: int) -> Link:
    """Return a ring's link from an allreduce: 2 (n - 1) latencies and 2 (n - 1) / n of its bytes."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise CostError(f"workers must be a whole number from 1, got {workers!r}")
    if workers == 1:
        raise CostError("one worker communicates with nobody: no link can be told")
    rounds = 2 * (workers - 1)
    return Link(allreduce.latency_s / rounds, allreduce.bytes_per_s * rounds / workers)


def as_allreduce_bytes(gathered_bytes: float, workers: int) -> float:
    """Return the bytes of the allreduce that sends as much as gathering ``gathered_bytes`` from each rank.

    In a ring of w ranks an allreduce of n bytes sends 2 (w - 1) / w n from each rank to the next (Patarasuk &
    Yuan 2009); gathering n bytes from each rank sends (w - 1) n.
    """
    return gathered_bytes * workers / 2


def parse_link(text: str) -> Link:
    """Return a link from text: ``25Gbit``, ``1.5 GB/s``, ``10Gbit,20us``.  CostError says what is expected.

    ``bit`` and ``B`` are decimal (k, M, G, T), ``KiB`` and the like binary; "/s" and "ps" may be left out.
    """
    bandwidth_text, comma, latency_text = text.partition(",")
    bytes_per_s = _bandwidth(bandwidth_text)
    if bytes_per_s is None or not 0 < bytes_per_s < math.inf:
        raise CostError(f"link {text!r}: expected a bandwidth such as 25Gbit, 1.5GB/s or 10Gbit,20us")
    match = _AMOUNT.fullmatch(latency_text if comma else "0s")
    if match is None or match[2] not in _TIMES:
        raise CostError(f"link {text!r}: expected a latency such as 20us or 1ms after the comma")
    return Link(float(match[1]) * _TIMES[match[2]], bytes_per_s)


def parse_bytes(text: str) -> int:
    """Return the bytes in a text such as ``16GiB``, ``512 MiB``, ``1000000``; CostError if none."""
    match = _AMOUNT.fullmatch(text)
    unit = match[2].lower().removesuffix("b") if match else ""
    factor = _BINARY.get(unit, _PREFIXES.get(unit))
    if match is None or factor is None or (unit and not match[2].endswith("B")):
        raise CostError(f"{text!r}: expected bytes such as 16GiB, 16GB or 512MiB (upper-case B)")
    size = float(match[1]) * factor
    if not 0 < size < 2**63:
        raise CostError(f"{text!r}: expected more than 0 and fewer than 2^63 bytes")
    return round(size)


def _bandwidth(text: str) -> float | None:
    """Return the bytes per second in a text; None if it is no bandwidth."""
    match = _AMOUNT.fullmatch(text)
    if match is None:
        return None
    unit = re.sub(r"(/s|ps)$", "", match[2])
    for suffix, bits in (("bits", 1), ("bit", 1), ("B", 8), ("b", 1)):
        if unit.endswith(suffix):
            prefix = unit.removesuffix(suffix).lower()
            factor = _BINARY.get(prefix, _PREFIXES.get(prefix))
            return None if factor is None else float(match[1]) * factor * bits / 8
    return None
