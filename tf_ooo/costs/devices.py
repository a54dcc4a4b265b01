"""Devices for planning without a run: a roofline with published peaks, plain data.

A kernel takes ``max(flop / flop_per_s, bytes / bytes_per_s) / share + launch_s``; *share* is the part of the
device that its pieces fill (1 from ``parallel_width`` on).  Nothing reaches its peak (``derated``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tf_ooo.errors import CostError

# One piece of a matrix product: a tile of outputs over a part of the sum.  64 x 64 is the smaller of the
# common tiles of NVIDIA's libraries (CUTLASS, "Efficient GEMM"; they take small ones where large ones
# leave processors idle), and long sums are split ("split-K").  Assumed, not measured.
TILE = 64
SPLIT_SUM = 1024
# Elements that one block of an elementwise kernel handles.  Assumed.
ELEMENTS_A_PIECE = 1024


@dataclass(frozen=True)
class Work:
    """What one kernel does: a multiply-add is two flop; each of ``pieces`` can keep a processor busy."""

    flop: float = 0.0
    moved_bytes: float = 0.0
    pieces: float = math.inf


@dataclass(frozen=True)
class DeviceModel:
    """A device as a roofline.

    Attributes:
        flop_per_s: peak, a multiply-add counted as two.
        bytes_per_s: memory bandwidth.
        launch_s: what each kernel costs before it computes anything.
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
        """The device at shares in (0, 1] of its published peaks."""
        for share in (flop_share, bytes_share):
            if not 0 < share <= 1:
                raise CostError(f"device {self.name!r}: a share of the peak must be in (0, 1], got {share!r}")
        return replace(
            self, flop_per_s=self.flop_per_s * flop_share, bytes_per_s=self.bytes_per_s * bytes_share
        )

    def share(self, work: Work) -> float:
        """The part of the device, in (0, 1], that a kernel can fill."""
        return min(1.0, max(work.pieces, 1.0) / self.parallel_width)

    def full_s(self, work: Work) -> float:
        """Seconds if the kernel filled the device and cost nothing to launch."""
        return max(work.flop / self.flop_per_s, work.moved_bytes / self.bytes_per_s)

    def seconds(self, *kernels: Work) -> float:
        return sum(self.full_s(work) / self.share(work) + self.launch_s for work in kernels)

    def occupancy(self, kernels: Iterable[Work]) -> float:
        """The share of the device, in (0, 1], that kernels keep busy on average; launch gaps are idle."""
        kernels = tuple(kernels)
        taken_s = self.seconds(*kernels)
        used_s = sum(self.full_s(work) for work in kernels)
        return max(min(1.0, used_s / taken_s), 1e-6) if taken_s else 1.0


def gemm_pieces(rows: float, columns: float, summed: float, batch: float = 1) -> float:
    """Independent pieces of ``batch`` products (rows x summed) @ (summed x columns)."""
    return batch * math.ceil(rows / TILE) * math.ceil(columns / TILE) * max(1.0, summed // SPLIT_SUM)


def gemm(rows: float, columns: float, summed: float, element_bytes: int, batch: float = 1) -> Work:
    """A (batched) matrix product that reads both factors and writes the result once."""
    elements = rows * summed + summed * columns + rows * columns
    return Work(
        flop=2.0 * batch * rows * columns * summed,
        moved_bytes=batch * elements * element_bytes,
        pieces=gemm_pieces(rows, columns, summed, batch),
    )


def elementwise(elements: float, passes: float, element_bytes: int) -> Work:
    """A kernel that reads or writes ``elements`` elements ``passes`` times; its few operations are free."""
    return Work(moved_bytes=elements * passes * element_bytes, pieces=max(1.0, elements / ELEMENTS_A_PIECE))


# launch_s is not published by the makers: about 5 us is what issuing one kernel takes a framework's host
# thread; it is hidden where kernels are longer or are replayed from a CUDA graph (then set it near 1 us:
# dataclasses.replace(device, launch_s=1e-6)).
_LAUNCH_S = 5e-6
GRAPH_LAUNCH_S = 1e-6

DEVICES: dict[str, DeviceModel] = {
    device.name: device
    for device in (
        # NVIDIA V100 data sheet (2020), SXM2: 15.7 TFLOP/s single, 125 tensor; 900 GB/s; 80 SMs.
        DeviceModel(15.7e12, 900e9, _LAUNCH_S, 80, "v100"),
        DeviceModel(125e12, 900e9, _LAUNCH_S, 80, "v100-fp16"),
        # NVIDIA A100 data sheet (2021), 80 GB SXM: 19.5 TFLOP/s single, 156 TF32, 312 FP16, dense;
        # 2,039 GB/s; 108 SMs.
        DeviceModel(19.5e12, 2039e9, _LAUNCH_S, 108, "a100"),
        DeviceModel(156e12, 2039e9, _LAUNCH_S, 108, "a100-tf32"),
        DeviceModel(312e12, 2039e9, _LAUNCH_S, 108, "a100-fp16"),
        # NVIDIA H100 data sheet (2023), SXM: 67 TFLOP/s single; 989 TF32, 1,979 BF16 with sparsity,
        # half of it dense; 3.35 TB/s; 132 SMs.
        DeviceModel(67e12, 3350e9, _LAUNCH_S, 132, "h100"),
        DeviceModel(494.5e12, 3350e9, _LAUNCH_S, 132, "h100-tf32"),
        DeviceModel(989.5e12, 3350e9, _LAUNCH_S, 132, "h100-bf16"),
        # NVIDIA H200 data sheet (2024), SXM: the H100's processors, 4.8 TB/s.
        DeviceModel(67e12, 4800e9, _LAUNCH_S, 132, "h200"),
        DeviceModel(494.5e12, 4800e9, _LAUNCH_S, 132, "h200-tf32"),
        DeviceModel(989.5e12, 4800e9, _LAUNCH_S, 132, "h200-bf16"),
        # NVIDIA Titan Xp product page (2017): 3,840 cores at 1,582 MHz x 2; 547.7 GB/s; 30 SMs.
        DeviceModel(12.15e12, 547.7e9, _LAUNCH_S, 30, "titan-xp"),
        # No data sheet: one core at 3 GHz with two 8-wide multiply-add units (AVX2); 10 GB/s is a usual
        # share of a server's memory; 2 us to dispatch a TensorFlow op.
        DeviceModel(96e9, 10e9, 2e-6, 1, "cpu-core"),
    )
}


def device(name: str) -> DeviceModel:
    """A device of the table.  CostError lists the names."""
    if name not in DEVICES:
        raise CostError(f"unknown device {name!r}; known: {', '.join(DEVICES)}")
    return DEVICES[name]
