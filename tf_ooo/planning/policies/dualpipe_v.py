"""Makes DualPipeV: F of one micro-batch beside another's backward (DeepSeek-V3, arXiv 2412.19437)."""

from __future__ import annotations

from collections.abc import Iterator

from tf_ooo.planning.building.v_shape import v_stages
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.planning.policies.policy import Chunks, Needs, Policy


def make(problem: Problem) -> Schedule:
    """Return two stages on each of p devices, in a V; at most 2p + 1 stages' activations on a device.

    The authors run an F and a backward pass at the same time, so that one computes while the other
    communicates.  A device here runs one task at a time: such a pair is F, then dO, then dW, and the gain by
    overlapping must be put into the costs.  The order is the authors' and needs 2p micro-batches: with fewer,
    the tasks of missing ones are left out.
    """
    count, devices = max(problem.microbatches, 2 * problem.devices), range(problem.devices)
    orders = (_DeviceOrder(device, problem.devices).order(count) for device in devices)
    there = ([task for task in order if task.microbatch < problem.microbatches] for order in orders)
    return v_stages(problem).with_updates("dualpipe_v", there, back=True)


class _DeviceOrder:
    """Holds one device's tasks; counts the micro-batches of each kind and keeps the dW that are delayed."""

    def __init__(self, device: int, devices: int) -> None:
        self.device, self.devices = device, devices
        self.stages = (device, 2 * devices - 1 - device)
        self.counts = {(kind, chunk): 0 for kind in ("F", "dO") for chunk in (0, 1)}
        self.put_off: list[Task] = []

    def order(self, microbatches: int) -> Iterator[Task]:
        """Yield tasks in eight phases; the closer a device is to the turn, the fewer F it runs ahead."""
        after, before = self.devices - 1 - self.device, self.device + 1
        for _ in range(2 * after):
            yield self._next("F", 0)
        for _ in range(before):
            yield self._next("F", 0)
            yield self._next("F", 1)
        for _ in range(after):
            yield self._output_grad(1)
            yield self.put_off.pop(0)
            yield self._next("F", 1)
        for _ in range(microbatches - 2 * self.devices + before):
            for chunk in (0, 1):
                yield self._next("F", chunk)
                yield from self._backward(1 - chunk)
        for _ in range(after):
            yield from self._backward(1)
            yield self._next("F", 1)
            yield from self._backward(0)
        for place in range(2 * before):
            yield self._output_grad(1 - place % 2)
            if place < before:
                yield self.put_off.pop(0)
        for _ in range(after):
            yield self.put_off.pop(0)
            yield self._output_grad(0)
        yield from self.put_off

    def _next(self, kind: str, chunk: int) -> Task:
        self.counts[kind, chunk] += 1
        return Task(kind, self.stages[chunk], self.counts[kind, chunk] - 1)

    def _output_grad(self, chunk: int) -> Task:
        task = self._next("dO", chunk)
        self.put_off.append(Task("dW", task.stage, task.microbatch))
        return task

    def _backward(self, chunk: int) -> Iterator[Task]:
        yield self._output_grad(chunk)
        yield self.put_off.pop()


POLICY = Policy("dualpipe_v", ("pipeline",), make, needs=Needs(chunks=Chunks((2,), back=True)))
