"""Lists devices for planning without a run: a roofline with published peaks, plain data.

A kernel takes ``max(flop / flop_per_s, bytes / bytes_per_s) / share + launch_s``; *share* is the part of the
device that its pieces fill (1 from ``parallel_width`` on).  Nothing reaches its peak (``derated``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tf_ooo.errors import CostError

# One piece of a matrix product: a tile of outputs over a part of the sum.  64 x 64 is the smaller of the
# common tiles of NVIDIA's libraries (CUTLASS, "Efficient GEMM"; they take small ones where large ones
# leave processors idle), and long sums are split ("split-K").  Assumed, not measured.
TILE = 64
SPLIT_SUM = 1024
# One block of an elementwise kernel handles this many elements; this is assumed.
ELEMENTS_A_PIECE = 1024


@dataclass(frozen=True)
class Work:
    """Describes one kernel: a multiply-add is two flop; each of ``pieces`` can keep a processor busy."""

    flop: float = 0.0
    moved_bytes: float = 0.0
    pieces: float = math.inf


@dataclass(frozen=True)
class DeviceModel:
    """Describes a device as a roofline.

    Attributes:
        flop_per_s: peak rate; a multiply-add counts as two flop.
        bytes_per_s: memory bandwidth.
        launch_s: seconds that each kernel costs before it computes anything.
        parallel_width: processors (SMs of a GPU, cores of a CPU); one piece of work fills one.
        name: for tables and messages.

    Raises:
        CostError: a number is not positive, or the launch is negative.
    """

    flop_per_s: float
    bytes_per_s: float
    launch_s: float = 0.0
    parallel_width: int = 1
    name: str = ""

    def __post_init__(self) -> None:
        for field in ("flop_per_s", "bytes_per_s", "parallel_width"):
            if not getattr(self, field) > 0:
                raise CostError(
                    f"device {self.name!r}: {field} must be above 0, got {getattr(self, field)!r}"
                )
        if not 0 <= self.launch_s < math.inf:
            raise CostError(f"device {self.name!r}: launch_s must not be negative, got {self.launch_s!r}")

    def derated(self, flop_share: float = 1.0, bytes_share: float = 1.0) -> DeviceModel:
        """Return the device at shares in (0, 1] of its published peaks."""
        for share in (flop_share, bytes_share):
            if not 0 < share <= 1:
                raise CostError(f"device {self.name!r}: a share of the peak must be in (0, 1], got {share!r}")
        return replace(
            self, flop_per_s=self.flop_per_s * flop_share, bytes_per_s=self.bytes_per_s * bytes_share
        )

    def share(self, work: Work) -> float:
        """Return the part of the device, in (0, 1], that a kernel can fill."""
        return min(1.0, max(work.pieces, 1.0) / self.parallel_width)

    def full_s(self, work: Work) -> float:
        """Return a kernel's seconds if it filled the device and cost nothing to launch."""
        return max(work.flop / self.flop_per_s, work.moved_bytes / self.bytes_per_s)

    def seconds(self, *kernels: Work) -> float:
        return sum(self.full_s(work) / self.share(work) + self.launch_s for work in kernels)

    def occupancy(self, kernels: Iterable[Work]) -> float:
        """Return the average share of the device, in (0, 1], that kernels keep busy; launch gaps are idle."""
        kernels = tuple(kernels)
        taken_s = self.seconds(*kernels)
        used_s = sum(self.full_s(work) for work in kernels)
        return max(min(1.0, used_s / taken_s), 1e-6) if taken_s else 1.0


def gemm_pieces(rows: float, columns: float, summed: float, batch: float = 1) -> float:
    """Return the independent pieces of ``batch`` products (rows x summed) @ (summed x columns)."""
    return batch * math.ceil(rows / TILE) * math.ceil(columns / TILE) * max(1.0, summed // SPLIT_SUM)


def gemm(rows: float, columns: float, summed: float, element_bytes: int, batch: float = 1) -> Work:
    """Return the work of a (batched) matrix product that reads both factors and writes the result once."""
    elements = rows * summed + summed * columns + rows * columns
    return Work(
        flop=2.0 * batch * rows * columns * summed,
        moved_bytes=batch * elements * element_bytes,
        pieces=gemm_pieces(rows, columns, summed, batch),
    )


def elementwise(elements: float, passes: float, element_bytes: int) -> Work:
    """Return the work of reading or writing ``elements`` elements ``passes`` times; operations are free."""
    return Work(moved_bytes=elements * passes * element_bytes, pieces=max(1.0, elements / ELEMENTS_A_PIECE))


# launch_s is not published by the makers: about 5 us is what issuing one kernel takes a framework's host
# thread; it is hidden where kernels are longer or are replayed from a CUDA graph (then set it near 1 us:
# dataclasses.replace(device, launch_s=1e-6)).
_LAUNCH_S = 5e-6
GRAPH_LAUNCH_S = 1e-6
# Dispatching a TensorFlow op on a CPU takes about this long.
_CPU_LAUNCH_S = 2e-6

# fp32 does without tensor cores; tf32 has float32 tensors in tensor cores; bf16 and fp16 sum in 32 bits.
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
_OF_TYPES = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class _Published:
    """Holds a row of a data sheet: bytes/s, processors, and dense TFLOP/s of each precision that it has."""

    name: str
    bytes_per_s: float
    parallel_width: int
    tflop_per_s: Mapping[str, float]
    launch_s: float = _LAUNCH_S

    def at(self, precision: str, name: str) -> DeviceModel:
        peak = self.tflop_per_s[precision] * 1e12
        return DeviceModel(peak, self.bytes_per_s, self.launch_s, self.parallel_width, name)


_PUBLISHED = {
    row.name: row
    for row in (
        # NVIDIA V100 data sheet (2020), SXM2: 15.7 TFLOP/s single, 125 tensor; 900 GB/s; 80 SMs.
        _Published("v100", 900e9, 80, {"fp32": 15.7, "fp16": 125}),
        # NVIDIA T4 data sheet (2019): 8.1 TFLOP/s single, 65 mixed FP16; 320 GB/s; 40 SMs.
        _Published("t4", 320e9, 40, {"fp32": 8.1, "fp16": 65}),
        # NVIDIA A100 data sheet (2021), 80 GB SXM: 19.5 TFLOP/s single, 156 TF32, 312 BF16 and FP16, dense;
        # 2,039 GB/s; 108 SMs.
        _Published("a100", 2039e9, 108, {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312}),
        # NVIDIA L40S data sheet (2023): 91.6 TFLOP/s single, 183 TF32, 362.05 BF16 and FP16, dense;
        # 864 GB/s; 142 SMs.
        _Published("l40s", 864e9, 142, {"fp32": 91.6, "tf32": 183, "bf16": 362.05, "fp16": 362.05}),
        # NVIDIA H100 data sheet (2023), SXM: 67 TFLOP/s single; 989 TF32, 1,979 BF16 and FP16 with sparsity,
        # half of it dense; 3.35 TB/s; 132 SMs.
        _Published("h100", 3350e9, 132, {"fp32": 67, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5}),
        # NVIDIA H200 data sheet (2024), SXM: the H100's processors, 4.8 TB/s.
        _Published("h200", 4800e9, 132, {"fp32": 67, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5}),
        # NVIDIA Blackwell data sheet (2025), one GPU of HGX B200: 75 TFLOP/s single; 2,200 TF32, 4,500 BF16
        # and FP16 with sparsity, half of it dense; 7.7 TB/s; 148 SMs.
        _Published("b200", 7700e9, 148, {"fp32": 75, "tf32": 1100, "bf16": 2250, "fp16": 2250}),
        # NVIDIA GA102 white paper (2021), appendix: 35.6 TFLOP/s single and TF32, 71 BF16 and FP16 with FP32
        # sums, dense; 936 GB/s; 82 SMs.
        _Published("rtx3090", 936e9, 82, {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71}),
        # NVIDIA Ada white paper (2022), appendix: 82.6 TFLOP/s single and TF32, 165.2 BF16 and FP16 with FP32
        # sums, dense; 1,008 GB/s; 128 SMs.
        _Published("rtx4090", 1008e9, 128, {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2}),
        # NVIDIA RTX Blackwell white paper (2025), appendix: 104.8 TFLOP/s single and TF32, 209.5 BF16 and
        # FP16 with FP32 sums, dense; 1,792 GB/s; 170 SMs.
        _Published("rtx5090", 1792e9, 170, {"fp32": 104.8, "tf32": 104.8, "bf16": 209.5, "fp16": 209.5}),
        # NVIDIA Titan Xp product page (2017): 3,840 cores at 1,582 MHz x 2; 547.7 GB/s; 30 SMs.
        _Published("titan-xp", 547.7e9, 30, {"fp32": 12.15}),
        # Intel Xeon Platinum 8480+ product page (2023): 56 cores at 2.0 GHz (base), 8 channels of DDR5-4800.
        # Intel's optimization manual: 64 single-precision flop a cycle (two AVX-512 units), 1,024 of BF16
        # (AMX: 16 x 16 x 32 multiply-adds in 16 cycles).
        _Published("xeon-8480", 307.2e9, 56, {"fp32": 7.17, "bf16": 114.7}, _CPU_LAUNCH_S),
        # AMD EPYC 9654 product page (2022): 96 cores at 2.4 GHz (base), 460.8 GB/s.  AMD's Zen 4 optimization
        # guide: 32 single-precision flop a cycle, 64 of BF16.
        _Published("epyc-9654", 460.8e9, 96, {"fp32": 7.37, "bf16": 14.7}, _CPU_LAUNCH_S),
        # There is no data sheet: one core at 3 GHz with two 8-wide multiply-add units (AVX2); 10 GB/s is a
        # usual share of a server's memory.
        _Published("cpu-core", 10e9, 1, {"fp32": 0.096}, _CPU_LAUNCH_S),
    )
}
# This device is taken if none is given; plans state it.
DEFAULT_DEVICE = "v100"
# Devices are named NAME at their fp32 peak, and NAME-PRECISION at others.
DEVICES: dict[str, DeviceModel] = {
    model.name: model
    for row in _PUBLISHED.values()
    for precision in row.tflop_per_s
    for model in [row.at(precision, row.name if precision == "fp32" else f"{row.name}-{precision}")]
}


def device(name: str, precision: str | None = None) -> DeviceModel:
    """Return a device at a precision it has; None: the one in its name (``h100-bf16``), else fp32.

    Raises:
        CostError: an unknown device (the error lists the names), a precision that the device lacks (the error
            lists the ones it has), or another precision than the name says.
    """
    if not isinstance(name, str) or name not in DEVICES:
        raise CostError(
            f"unknown device {name!r:.80}; known: {', '.join(_PUBLISHED)}, and with a precision, h100-bf16"
        )
    row, own = split_device(name)
    if precision is None:
        return DEVICES[name]
    if precision not in PRECISIONS:
        raise CostError(f"precision={precision!r:.80} is not accepted; accepted: {', '.join(PRECISIONS)}")
    if own is not None and own != precision:
        raise CostError(f"device {name!r} is {row} at {own}, not at {precision}; write one of the two")
    has = _PUBLISHED[row].tflop_per_s
    if precision not in has:
        raise CostError(f"device {row!r} has no {precision}; it has {', '.join(has)}")
    return DEVICES[row if precision == "fp32" else f"{row}-{precision}"]


def devices_with(precision: str) -> list[str]:
    """Return the names of devices with a published peak for a precision."""
    return [name for name, row in _PUBLISHED.items() if precision in row.tflop_per_s]


def usual_precision(name: str, computed_in: str) -> str:
    """Return the precision in a device's name, else the type's usual one: TF32 for float32 if there is."""
    row, own = split_device(name)
    of_float32 = "tf32" if f"{row}-tf32" in DEVICES else "fp32"
    return own or _OF_TYPES.get(computed_in, of_float32)


def split_device(name: str) -> tuple[str, str | None]:
    """Return the device's own name, and the precision in ``name``; None if it has none."""
    row, _, precision = name.rpartition("-")
    return (row, precision) if precision in PRECISIONS else (name, None)
