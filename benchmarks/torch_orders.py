"""Fixed orders of ``torch.distributed.pipelining``; our policies with these names search for the costs."""

from collections import Counter
from collections.abc import Iterator

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.planning.building.pipeline import StagedLayers, interleaved
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList


def interleaved_zero_bubble(devices: int, microbatches: int, chunks: int) -> Schedule:
    """ScheduleInterleavedZeroBubble; ValueError where torch does not take so many micro-batches."""
    if microbatches % max(1, microbatches // devices):
        raise ValueError(f"torch does not divide {microbatches} micro-batches among {devices} devices")
    layers = (LayerCosts(1.0, 1.0, 1.0),) * (devices * chunks)
    stages = StagedLayers.of(Problem(layers, devices, microbatches, mode="pipeline"), chunks)
    lanes = interleaved(stages, chunks, microbatches, 1, delayed=True)
    return Schedule("pipeline", "torch_interleaved_zb", lanes, microbatches=microbatches)


def zbv(devices: int, microbatches: int) -> Schedule:
    """ScheduleZBVZeroBubble: two stages on each device, in a V; needless micro-batches are left out."""
    lanes = {}
    for device in range(devices):
        counts: Counter[tuple[str, int]] = Counter()
        tasks = []
        for kind, stage in _zbv(device, devices, max(2 * devices - 1, microbatches)):
            tasks.append(Task(kind, stage, counts[kind, stage]))
            counts[kind, stage] += 1
        kept = [task for task in tasks if task.microbatch < microbatches]
        lanes[device, 0] = TaskList([*kept, Task("U", 2 * devices - 1 - device), Task("U", device)])
    return Schedule("pipeline", "torch_zbv", lanes, microbatches=microbatches)


def _zbv(device: int, devices: int, count: int) -> Iterator[tuple[str, int]]:
    down, back, after = device, 2 * devices - 1 - device, devices - device
    backward, backward_back = [("dO", down), ("dW", down)], [("dO", back), ("dW", back)]
    yield from [("F", down)] * (2 * after - 1)
    yield from [("F", back), ("F", down)] * device
    yield from [("F", back), *backward_back] * after
    for forward in range(2 * devices - 1 - device, devices - 1 - device + count):
        yield from [("F", down)] * (forward < count)
        yield from (*backward, ("F", back), *backward_back)
    yield from [("dO", down), ("dO", back)] * device
    yield from backward * after
    yield from [("dW", back)] * device
    yield from [("dW", down)] * device
