"""Makes interleaved 1F1B (Megatron-LM, arXiv 2104.04473, section 2.2): several stages on each device."""

from __future__ import annotations

from tf_ooo.errors import OptionsError
from tf_ooo.planning.building.pipeline import StagedLayers, interleaved, lane_peak_bytes
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies.policy import Chunks, Needs, Policy

NAME = "interleaved_1f1b"


def make(problem: Problem) -> Schedule:
    """Return interleaved 1F1B; its bubble is (p - 1)(F + dO + dW) / v for v equal chunks on p devices.

    That holds if p divides m; F, dO and dW are those of all chunks of a device.  Option ``chunks`` is v, 2 if
    neither it nor a cut is given.  Any number of micro-batches goes: they pass in groups of p to 2p - 1.  If
    the memory limit is too low for that, they pass in rounds that fit, each emptied before the next begins.
    """
    chunks = problem.option("chunks", len(problem.cut) // problem.devices or 2, least=1)
    if problem.devices * chunks > len(problem.layers):
        raise OptionsError(
            f"schedule {NAME!r}: {chunks} chunks on each of {problem.devices} devices are "
            f"{problem.devices * chunks} stages, more than the {len(problem.layers)} layers"
        )
    stages, hop = StagedLayers.of(problem, chunks), 2 if chunks > 1 else 1
    lanes = interleaved(stages, chunks, problem.microbatches, hop)
    full, kept = stages.sums("stored_bytes"), stages.sums("kept_bytes")
    peaks = {device: lane_peak_bytes(tasks.codes, full, kept) for (device, _), tasks in lanes.items()}
    if any(peak > stages.room_bytes[device] for device, peak in peaks.items()):
        lanes = interleaved(stages, chunks, stages.most_in_flight(problem.microbatches), hop)
    return stages.schedule(NAME, lanes, fused=True)


POLICY = Policy(NAME, ("pipeline",), make, ("chunks",), needs=Needs(chunks=Chunks((2, 3, 4), "chunks")))
