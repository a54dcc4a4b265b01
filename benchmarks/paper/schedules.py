"""The authors' pipelines: where their layers run, and which task waits for which.

Facts are from github.com/mlsys-seo/ooo-backprop, commit 0beb419d; its code is not used.  File names below are
those of expr/pipe_par/code/OOO_backprop/schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import After, Schedule, Task, TaskList
from tf_ooo.planning.policies import POLICIES
from tf_ooo.planning.simulation.simulator import simulate

GPIPE, FASTFORWARD, PUSH, MODULO = "gpipe", "fastforward", "fastforward_push", "modulo"
# How many NVLinks lead from a GPU of a p3.16xlarge (row) to another (`nvidia-smi topo -m`); a p3.8xlarge has
# the first four GPUs.  A link carries 25 GB/s in each direction (V100 datasheet); PCIe is used without one.
_NVLINKS = ("01122000", "10210200", "12020010", "21200001", "20000112", "02001021", "00101202", "00012120")
NVLINK_BYTES_PER_S, PCIE_BYTES_PER_S, LATENCY_S = 2.5e10, 1e10, 5e-5
NVLINK = Link(LATENCY_S, NVLINK_BYTES_PER_S)
# Amazon's p3.16xlarge has 25 Gbit/s, smaller ones have 10.
_NETWORK_BYTES_PER_S = {8: 3.125e9, 4: 1.25e9, 1: 1.25e9}
# DeviceAllocatorManager.gpu_seq: neighbours have two NVLinks each, and so have the last and the first.
IN_ORDER, RING = (0, 1, 2, 3, 4, 5, 6, 7), (0, 3, 2, 1, 5, 6, 7, 4)


@dataclass(frozen=True)
class Pipeline:
    """One run of the authors' pipeline; its GPUs are on machines that have as many each."""

    layers: tuple[LayerCosts, ...]  # for one micro-batch
    devices: int
    machines: int
    microbatches: int
    style: str  # FASTFORWARD, PUSH or MODULO
    ends: bool = False  # the first layer is the embedding, the last is the head
    table_bytes: float = 0.0  # of the table that both share; 0: they share none
    gpus: Sequence[int] = RING  # their order in a machine for the style; GPipe has IN_ORDER
    holds: bool = True  # the last stage computes all dW after its last dO
    forward_first: bool = False  # where F and dO are both ready; TensorFlow's queue has no rule

    def bytes_per_s(self, source: int, target: int, gpus: Sequence[int]) -> float:
        each = self.devices // self.machines
        if source // each != target // each:
            return _NETWORK_BYTES_PER_S[each]
        links = int(_NVLINKS[gpus[source % each]][gpus[target % each]])
        return links * NVLINK_BYTES_PER_S or PCIE_BYTES_PER_S

    def stages(self, style: str) -> list[tuple[int, int, int]]:
        """Return first layer, last layer and device of each stage (DeviceAllocatorManager.get_gpu_idx).

        With a shared table, all styles but GPipe have the embedding on the last GPU
        (get_embedding_table_device).
        """
        count, last_device = len(self.layers) - 2 * self.ends, self.devices - 1
        few, more = divmod(count, self.devices)
        sizes = [few] + [few + 1] * more + [few] * (last_device - more)
        edges = accumulate([1] * count if style == MODULO else sizes, initial=int(self.ends))
        stages = [(first, after - 1, n % self.devices) for n, (first, after) in enumerate(pairwise(edges))]
        if not self.ends:
            return stages
        stages[-1] = (stages[-1][0], len(self.layers) - 1, last_device)
        if self.table_bytes and style != GPIPE:
            return [(0, 0, last_device), *stages]
        return [(0, *stages[0][1:]), *stages[1:]]

    def costs(self, stages: Sequence[tuple[int, int, int]], gpus: Sequence[int]) -> tuple[LayerCosts, ...]:
        """Return the layers, with messages as long as they would be on one NVLink."""
        layers = list(self.layers)
        for (_, last, source), (_, _, target) in pairwise(stages):
            slower = NVLINK_BYTES_PER_S / self.bytes_per_s(source, target, gpus) if source != target else 1
            layers[last] = replace(layers[last], output_bytes=layers[last].output_bytes * slower)
        return tuple(layers)

    def step_s(self) -> float:
        layers = self.costs(self.stages(self.style), self.gpus)
        return simulate(self.schedule(), layers, NVLINK).makespan_s

    def gpipe_s(self, recompute: bool = False) -> float:
        """Return seconds of a step of GPipe, whose last GPU sends the table's gradient for each micro-batch.

        The table stands on GPU 0 there, and each micro-batch's gradient of it is a tensor of its own
        (optimization.py, compute_grads; run_pretraining.py adds them up).  These messages were not measured.
        """
        stages = self.stages(GPIPE)
        layers, cut = self.costs(stages, IN_ORDER), tuple((first, last) for first, last, _ in stages)
        problem = Problem(layers, self.devices, self.microbatches, NVLINK, cut=cut)
        again = tuple(range(len(layers))) if recompute else ()
        timeline = simulate(replace(POLICIES["gpipe"].make(problem), recompute=again), layers, NVLINK)
        table_s = self.table_bytes / self.bytes_per_s(self.devices - 1, 0, IN_ORDER)
        arrived_s, sent = 0.0, {Task("dW", len(stages) - 1, m) for m in range(self.microbatches)}
        for end_s in sorted(event.end_s for event in timeline.iter_events() if event.task in sent):
            arrived_s = max(arrived_s, end_s) + table_s
        return max(timeline.makespan_s, arrived_s)

    def schedule(self) -> Schedule:
        """Return a schedule in which each GPU runs whatever is ready; tasks wait for those of _after."""
        stages, many = self.stages(self.style), self.microbatches
        numbers = range(len(stages))
        # A queue would hold these first: gradients of later stages, outputs of earlier ones.
        backward = [(n, m) for m in range(many) for n in reversed(numbers)]
        forward = [(n, m) for n in numbers for m in range(many)]
        queues = {"dO": backward, "dW": backward, "F": forward, "U": [(n, 0) for n in numbers]}
        kinds = ("F", "dO", "dW", "U") if self.forward_first else ("dO", "dW", "F", "U")
        lanes = {}
        for device in range(self.devices):
            tasks = [Task(k, n, m) for k in kinds for n, m in queues[k] if stages[n][2] == device]
            lanes[device, 0] = TaskList(tasks)
        return Schedule(
            "pipeline", self.style, lanes, microbatches=many, priority_lanes=frozenset(lanes),
            stages=tuple((first, last) for first, last, _ in stages), after=self._after(stages),
        )  # fmt: skip

    def _after(self, stages: Sequence[tuple[int, int, int]]) -> tuple[After, ...]:
        """(task, what it waits for beside data, 0), as in ModelScheduleHelper."""
        own = int(len(stages) > 1 and stages[0][2] == self.devices - 1)  # the embedding is a stage: -1
        count, devices, many = len(stages) - own, self.devices, self.microbatches
        cap, modulo = min(devices, many) if self.style == PUSH else many, self.style == MODULO
        # The stage whose dW runs behind each one's dO: on the last GPU that of a round later.
        behind = [v if (v + 1) % devices else v + devices for v in range(count - 1)]
        pairs = [(v, m) for v in range(count - 1) for m in range(many)]
        # _schedule_forward_first_virtual_layers, _schedule_forward_second_last_virtual_layers
        waits = [(("F", -1, m + 1), ("F", 0, m)) for m in range(many - 1) if own]
        waits.append((("dO", count - 2, 0), ("F", count - 2, cap - 1)))
        # _schedule_ooo_backpropagation
        waits += [(("dW", behind[v], m), ("dO", v, m)) for v, m in pairs if modulo]
        held = devices - 1 if modulo else count - 1
        waits += [(("dW", held, m), ("dO", held, many - 1)) for m in range(many) if self.holds]
        # _schedule_micro_batch_race_condition: dW(m) runs before dO(m + 1), but on the last stage.
        waits += [(("dO", v, m + 1), ("dW", behind[v], m)) for v, m in pairs if m + 1 < many]
        # _schedule_virtual_layers_race_condition
        if modulo and count > devices:
            last = count - devices - 1
            waits += [(("dO", v, 0), ("dW", behind[v + devices], many - 1)) for v in range(last)]
            waits.append((("dO", last, 0), ("dO", count - 1, many - 1)))
        # _schedule_microbatch_cap_fastforward: as many micro-batches are in flight as GPUs, and fewer behind.
        waits += [(("F", v or -own, cap + m), ("dW", v, v + m)) for v, m in pairs if cap + m < many]
        return tuple((Task(a, v + own, m), Task(b, w + own, n), 0) for (a, v, m), (b, w, n) in waits)
