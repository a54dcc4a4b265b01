"""The authors' pipelines: where their layers run, and which task waits for which.

Facts are from github.com/mlsys-seo/ooo-backprop, commit 0beb419d; its code is not used.  File names below are
those of expr/pipe_par/code/OOO_backprop/schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.planning.policies import POLICIES
from tf_ooo.planning.simulation.simulator import simulate

GPIPE, FASTFORWARD, PUSH, MODULO = "gpipe", "fastforward", "fastforward_push", "modulo"
# How many NVLinks lead from a GPU of a p3.16xlarge (row) to another (`nvidia-smi topo -m`); a p3.8xlarge has
# the first four GPUs.  A link carries 25 GB/s in each direction (V100 datasheet); PCIe is used without one.
_NVLINKS = (
    "01122000", "10210200", "12020010", "21200001", "20000112", "02001021", "00101202", "00012120",
)  # fmt: skip
NVLINK_BYTES_PER_S, PCIE_BYTES_PER_S, LATENCY_S = 2.5e10, 1e10, 5e-5
# Amazon's p3.16xlarge has 25 Gbit/s, smaller ones have 10.
_NETWORK_BYTES_PER_S = {8: 3.125e9, 4: 1.25e9, 1: 1.25e9}
# DeviceAllocatorManager.gpu_seq: neighbours have two NVLinks each, and so have the last and the first.
IN_ORDER, RING = (0, 1, 2, 3, 4, 5, 6, 7), (0, 3, 2, 1, 5, 6, 7, 4)


@dataclass(frozen=True)
class Pipeline:
    """One run of the authors' pipeline.

    Attributes:
        layers: costs of one micro-batch; with ``ends`` the first is the embedding, the last is the head.
        machines: the GPUs are on; each has as many.
        style: :data:`FASTFORWARD`, :data:`PUSH` or :data:`MODULO`.
        table_bytes: of the table that embedding and head share; 0: they share none.
        gpus: the order of GPUs in a machine for the style; GPipe has :data:`IN_ORDER`.
        holds: the last stage computes all dW after its last dO.
        forward_first: where F and dO are both ready, F runs; TensorFlow's queue has no rule.
    """

    layers: tuple[LayerCosts, ...]
    devices: int
    machines: int
    microbatches: int
    style: str
    ends: bool = False
    table_bytes: float = 0.0
    gpus: Sequence[int] = RING
    holds: bool = True
    forward_first: bool = False

    @property
    def link(self) -> Link:
        """One NVLink; what other connections take longer is in the sizes of messages."""
        return Link(LATENCY_S, NVLINK_BYTES_PER_S)

    def bytes_per_s(self, source: int, target: int, gpus: Sequence[int]) -> float:
        """The rate between two devices."""
        each = self.devices // self.machines
        if source // each != target // each:
            return _NETWORK_BYTES_PER_S[each]
        links = int(_NVLINKS[gpus[source % each]][gpus[target % each]])
        return links * NVLINK_BYTES_PER_S or PCIE_BYTES_PER_S

    def stages(self, style: str) -> list[tuple[int, int, int]]:
        """First layer, last layer and device of each stage (DeviceAllocatorManager.get_gpu_idx).

        With a shared table, all styles but GPipe have the embedding on the last GPU
        (get_embedding_table_device).
        """
        count = len(self.layers) - 2 * self.ends
        few, more = divmod(count, self.devices)
        sizes = [few] + [few + 1] * more + [few] * (self.devices - 1 - more)
        if style == MODULO:
            sizes = [1] * count
        firsts = [self.ends + sum(sizes[:number]) for number in range(len(sizes))]
        stages = [
            (first, first + size - 1, number % self.devices)
            for number, (first, size) in enumerate(zip(firsts, sizes, strict=True))
        ]
        if self.ends:
            stages[-1] = (stages[-1][0], len(self.layers) - 1, self.devices - 1)
            if self.table_bytes and style != GPIPE:
                return [(0, 0, self.devices - 1), *stages]
            stages[0] = (0, *stages[0][1:])
        return stages

    def costs(self, stages: Sequence[tuple[int, int, int]], gpus: Sequence[int]) -> tuple[LayerCosts, ...]:
        """The layers, with messages as long as they would be on one NVLink."""
        layers = list(self.layers)
        for (_, last, source), (_, _, target) in zip(stages, stages[1:], strict=False):
            slower = NVLINK_BYTES_PER_S / self.bytes_per_s(source, target, gpus) if source != target else 1
            layers[last] = replace(layers[last], output_bytes=layers[last].output_bytes * slower)
        return tuple(layers)

    def step_s(self) -> float:
        """Seconds of a step of the authors' schedule."""
        stages = self.stages(self.style)
        return simulate(self.schedule(), self.costs(stages, self.gpus), self.link).makespan_s

    def gpipe_s(self, recompute: bool = False) -> float:
        """Seconds of a step of GPipe, whose last GPU sends the table's gradient for each micro-batch.

        The table stands on GPU 0 there, and each micro-batch's gradient of it is a tensor of its own
        (optimization.py, compute_grads; run_pretraining.py adds them up).  These messages were not measured.
        """
        stages = self.stages(GPIPE)
        cut = tuple((first, last) for first, last, _ in stages)
        layers = self.costs(stages, IN_ORDER)
        problem = Problem(layers, self.devices, self.microbatches, self.link, cut=cut)
        schedule = POLICIES["gpipe"].make(problem)
        again = tuple(range(len(layers))) if recompute else ()
        timeline = simulate(replace(schedule, recompute=again), layers, self.link)
        last, arrived_s = len(stages) - 1, 0.0
        table_s = self.table_bytes / self.bytes_per_s(self.devices - 1, 0, IN_ORDER)
        events = [event for event in timeline.iter_events() if event.task.kind == "dW"]
        for end_s in sorted(event.end_s for event in events if event.task.stage == last):
            arrived_s = max(arrived_s, end_s) + table_s
        return max(timeline.makespan_s, arrived_s)

    def schedule(self) -> Schedule:
        """Each GPU runs whatever is ready; tasks wait for those of :meth:`_after`."""
        stages = self.stages(self.style)
        lanes: dict[tuple[int, int], list[Task]] = {(device, 0): [] for device in range(self.devices)}
        kinds = ("F", "dO", "dW") if self.forward_first else ("dO", "dW", "F")
        for number, (_, _, device) in enumerate(stages):
            lanes[device, 0] += [Task(kind, number, m) for kind in kinds for m in range(self.microbatches)]
            lanes[device, 0].append(Task("U", number))
        for tasks in lanes.values():
            tasks.sort(key=lambda task: ((*kinds, "U").index(task.kind), _urgency(task)))
        return Schedule(
            "pipeline",
            self.style,
            {lane: TaskList(tasks) for lane, tasks in lanes.items()},
            microbatches=self.microbatches,
            stages=tuple((first, last) for first, last, _ in stages),
            priority_lanes=frozenset(lanes),
            after=tuple((later, earlier, 0) for later, earlier in self._after(stages)),
        )

    def _after(self, stages: Sequence[tuple[int, int, int]]) -> list[tuple[Task, Task]]:
        """(task, what it waits for) beside data (ModelScheduleHelper)."""
        own = int(len(stages) > 1 and stages[0][2] == self.devices - 1)  # the embedding is a stage
        count, devices, many = len(stages) - own, self.devices, self.microbatches
        modulo = self.style == MODULO
        cap = devices if self.style == PUSH and many > devices else many

        def task(kind: str, stage: int, microbatch: int) -> Task:
            return Task(kind, stage + own, microbatch)

        def delayed(stage: int) -> int:
            """The stage whose dW runs behind this stage's dO: on the last GPU that of a round later."""
            return stage if (stage + 1) % devices else stage + devices

        # _schedule_forward_first_virtual_layers, _schedule_forward_second_last_virtual_layers
        waits = [(Task("F", 0, m + 1), task("F", 0, m)) for m in range(many - 1) if own]
        waits.append((task("dO", count - 2, 0), task("F", count - 2, cap - 1)))
        # _schedule_ooo_backpropagation
        for m in range(many):
            if modulo:
                waits += [(task("dW", delayed(v), m), task("dO", v, m)) for v in range(count - 1)]
            if self.holds:
                held = devices - 1 if modulo else count - 1
                waits.append((task("dW", held, m), task("dO", held, many - 1)))
        # _schedule_micro_batch_race_condition: dW(m) runs before dO(m + 1), but on the last stage.
        for m in range(many - 1):
            waits += [(task("dO", v, m + 1), task("dW", delayed(v), m)) for v in range(count - 1)]
        # _schedule_virtual_layers_race_condition
        if modulo and count > devices:
            before = count - devices - 1
            waits += [(task("dO", v, 0), task("dW", delayed(v + devices), many - 1)) for v in range(before)]
            waits.append((task("dO", before, 0), task("dO", count - 1, many - 1)))
        # _schedule_microbatch_cap_fastforward: as many micro-batches are in flight as GPUs, and fewer behind.
        for late in range(many - cap):
            for v in range(count - 1):
                gated = Task("F", 0, cap + late) if v == 0 else task("F", v, cap + late)
                waits.append((gated, task("dW", v, late + v)))
        return waits


def _urgency(task: Task) -> tuple[int, int]:
    """What a queue, first in, first out, would hold first: gradients of later stages, outputs of earlier."""
    return (task.microbatch, -task.stage) if task.kind in ("dO", "dW") else (task.stage, task.microbatch)
