"""Finds layers: weights whose gradients start from the same dO, numbered by first use.

Weights that the forward pass combines before data meet them (weight normalization, low-rank products) form
one unit.
"""

from __future__ import annotations

from collections.abc import Sequence

from grappler_passes.analysis.backward import REARRANGING_OPS, Backward
from grappler_passes.analysis.gradients import GradientFlow, may_equal
from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.graph.dependencies import SWITCHES
from grappler_passes.graph.flow import SPLIT_OPS, bits_of, marks, several, union

WeightShape = tuple[int, ...]

# Ops that pass a tensor on unchanged or re-arranged: looking through them, the dO that a kernel's
# and a bias's gradient start from is the same one.
VIEW_OPS = REARRANGING_OPS | {"StopGradient", "Enter", *SWITCHES, "Merge", "Exit"}

# These ops add up rows; a product of matrices adds up what belongs to another layer.
_SUMS = {"BiasAddGrad", "Mean", "Sum", *(f"FusedBatchNormGrad{version}" for version in ("", "V2", "V3"))}


def group_weights(backward: Backward) -> list[list[int]]:
    """Return lists of weight numbers, one list per layer, in the order in which the forward pass uses them.

    A layer comes behind all that it is ever used behind: a critic sees data, then a generator's output.
    """
    units = _Units(backward)
    for node in range(backward.size):
        if backward.is_backward[node]:
            _note(backward, units, node)
    keys: dict[tuple[object, ...], list[int]] = {}
    for unit, members in enumerate(units.members):
        back_through = units.through[unit] & ~(1 << unit)
        key = (frozenset(units.starts[unit]), back_through)
        keys.setdefault(key if any(key) else (unit,), []).extend(members)
    use = _first_use(backward.gradients)
    layers = sorted(map(sorted, keys.values()), key=lambda members: min(use[w] for w in members))
    return [layers[number] for number in _in_order(layers, _used_behind(backward.gradients))]


def _in_order(layers: Sequence[Sequence[int]], behind: Sequence[int]) -> list[int]:
    """Sort the layers topologically, cycles ignored; ``behind[w]`` are the weights upstream of w, as bits."""
    layer_of = {weight: number for number, members in enumerate(layers) for weight in members}
    needs = [
        union(1 << layer_of[weight] for weight in bits_of(union(behind[member] for member in members)))
        for members in layers
    ]
    grown = True
    while grown:
        through = [own | union(needs[other] for other in bits_of(own)) for own in needs]
        grown, needs = through != needs, through
    order: dict[int, None] = {}

    def put(number: int) -> None:
        for other in bits_of(needs[number]):
            if other not in order and not needs[other] >> number & 1:
                put(other)
        order[number] = None

    for number in range(len(layers)):
        if number not in order:
            put(number)
    return list(order)


class _Units:
    """Groups weights that are combined before data meet them; bit u of a set stands for unit u."""

    def __init__(self, backward: Backward) -> None:
        self.of_weight = units_of(backward.gradients)
        self.needed = backward.needed_by(self.of_weight)
        count = len(set(self.of_weight))
        self.members: list[list[int]] = [[] for _ in range(count)]
        for weight, unit in enumerate(self.of_weight):
            self.members[unit].append(weight)
        self.starts: list[set[tuple[int, int]]] = [set() for _ in range(count)]
        self.through = [0] * count
        self._shapes = [w.shape for w in backward.gradients.weights]
        self.handed_out = self._handed_out(backward)

    def _handed_out(self, backward: Backward) -> set[tuple[int, int]]:
        """Return the outputs of forward ops, such as a loss op's, that are gradients of several units."""
        return {
            output
            for output, targets in backward.gradients.targets_of_outputs.items()
            if backward.gradients.forward[output[0]]
            and all(backward.is_backward[target] for target in targets)
            and several(union(self.needed[target] for target in targets))
        }

    def of(self, weights: int) -> int:
        return union(1 << self.of_weight[weight] for weight in bits_of(weights))

    def shape(self, unit: int) -> WeightShape | None:
        """Return the shape of a unit's only weight; None if it has several."""
        members = self.members[unit]
        return self._shapes[members[0]] if len(members) == 1 else None


def _note(backward: Backward, units: _Units, node: int) -> None:
    """Note what a backward op tells about the weights that it hands a gradient to.

    A weight's gradient starts at the shared ops that its own ops read.  If these also read another weight's
    value, its chain goes back *through* that layer first: it lies further down.
    """
    g, bits = backward.gradients, units.needed[node]
    if several(bits):
        for weight in bits_of(backward.hands_over(node)):
            unit = units.of_weight[weight]
            for port in _ports_to_update(backward, node, weight):
                units.starts[unit] |= _start(backward, units, node, port, unit)
        return
    if not bits:
        return
    unit = bits.bit_length() - 1
    for edge in backward.flow.data[node]:
        source = edge.source
        if backward.is_backward[source] and several(units.needed[source]) and g.from_data[source]:
            if source not in backward.unstashing and source not in backward.recomputed:
                units.starts[unit] |= _start(backward, units, source, edge.port, unit)
        elif (source, edge.port) in units.handed_out:
            units.starts[unit].add((source, edge.port))
        elif not g.from_data[source]:
            units.through[unit] |= units.of(g.depends_on_tensors[source])


def _ports_to_update(backward: Backward, node: int, weight: int) -> set[int]:
    """Return the outputs of a shared op that a weight's update takes as its gradient."""
    g = backward.gradients
    return {
        edge.port
        for target in backward.successors[node]
        if backward.is_update[target] and g.reach[target] == 1 << weight
        for edge in backward.flow.data[target]
        if edge.source == node
    }


def _start(backward: Backward, units: _Units, node: int, port: int, unit: int) -> set[tuple[int, int]]:
    """Return the dO tensors that a unit's gradients start from, given the shared tensor that they read."""
    shape = units.shape(unit)
    if _is_fused_gradient(backward, units, node, port, unit):
        chain = [e for e in backward.flow.data[node] if _continues_chain(backward, e.source)]
        return set().union(*(_origin(backward, e.source, e.port, shape) for e in chain))
    return _origin(backward, node, port, shape)


def _is_fused_gradient(backward: Backward, units: _Units, node: int, port: int, unit: int) -> bool:
    """Tell whether one op computes dO and, at an output of its own, this unit's gradient."""
    g, flow = backward.gradients, backward.flow
    if flow.types[node] in VIEW_OPS | SPLIT_OPS:
        return False
    serves: dict[int, int] = {}
    for target in backward.successors[node]:
        bits = units.needed[target] if backward.is_backward[target] else units.of(g.reach[target])
        for edge in flow.data[target]:
            if edge.source == node:
                serves[edge.port] = serves.get(edge.port, 0) | bits
    if len(serves) < 2 or serves.get(port) != 1 << unit:
        return False
    shape = flow.outputs[node][port].shape if port < len(flow.outputs[node]) else None
    return shape is None or may_equal(shape, units.shape(unit))


def _origin(backward: Backward, node: int, port: int, shape: WeightShape | None) -> set[tuple[int, int]]:
    """Return the dO tensors behind a shared tensor: looks through views and reductions to a weight's shape. A
    batch normalization written out shares the sums of its dO with the layer below, yet the gradients of scale
    and offset start from that dO."""
    flow, origins, seen = backward.flow, set(), set()
    stack = [(node, port)]
    while stack:
        node, port = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        edges = [e for e in flow.data[node] if _continues_chain(backward, e.source)]
        looks_through = flow.types[node] in VIEW_OPS or _undoes_broadcast(backward, node)
        if edges and (looks_through or _is_reduced(backward, node, port, shape)):
            stack.extend((e.source, e.port) for e in edges)
        else:
            origins.add((node, port))
    return origins


def _undoes_broadcast(backward: Backward, node: int) -> bool:
    """Tell whether an op is the Sum in a broadcasting op's gradient; it may have nothing to sum."""
    flow = backward.flow
    return flow.types[node] == "Sum" and flow.types[flow.data[node][1].source] == "BroadcastGradientArgs"


def _continues_chain(backward: Backward, node: int) -> bool:
    is_gradient = backward.is_backward[node] and node not in backward.recomputed
    return is_gradient and bool(backward.gradients.from_data[node])


def _is_reduced(backward: Backward, node: int, port: int, shape: WeightShape | None) -> bool:
    """Tell whether a result was summed to the vector weight's shape, or goes only into ops that sum it so.

    A shape alone tells nothing: a dO may have the shape of a kernel or a bias by chance, with as many
    examples as inputs or with a single one.
    """
    if not _is_vector(shape):
        return False
    if _is_summed(backward, node, port, shape):
        return True
    flow, targets = backward.flow, [t for t in backward.successors[node] if backward.is_backward[t]]
    return bool(targets) and all(
        flow.types[target] in _SUMS and _has_shape(flow.outputs[target], shape) for target in targets
    )


def _is_vector(shape: WeightShape | None) -> bool:
    """Return whether at most one dimension is not 1; a kernel with one output, (n, 1), counts as a matrix."""
    if not shape or (len(shape) == 2 and shape[1] == 1 != shape[0]):
        return False
    return sum(dim != 1 for dim in shape) <= 1


def _is_summed(backward: Backward, node: int, port: int, shape: WeightShape | None) -> bool:
    """Say whether a tensor of the weight's shape is a sum, or computed from one without a change of shape."""
    seen, stack = set(), [(node, port)]
    while stack:
        node, port = stack.pop()
        if node in seen or not _has_shape(backward.flow.outputs[node][port : port + 1], shape):
            continue
        seen.add(node)
        if backward.flow.types[node] in _SUMS:
            return True
        edges = backward.flow.data[node]
        stack.extend((e.source, e.port) for e in edges if _continues_chain(backward, e.source))
    return False


def _has_shape(outputs: Sequence[OutputInfo], shape: WeightShape | None) -> bool:
    def squeezed(dims: Sequence[int | None]) -> list[int | None]:
        return [dim for dim in dims if dim != 1]

    known = [o.shape for o in outputs if o.shape is not None]
    return shape is not None and bool(shape) and any(squeezed(dims) == squeezed(shape) for dims in known)


def _first_use(g: GradientFlow) -> list[tuple[int, int]]:
    """Return for each weight (depth, position) of the first forward op that mixes it with data."""
    position = {node: i for i, node in enumerate(g.order)}
    depth = [0] * len(g.flow)
    first = [(len(g.flow), len(g.flow))] * len(g.weights)
    for group in g.cut.groups:
        outside = (p for node in group for p in g.cut.preds[node] if g.from_data[p])
        level = 1 + max((depth[p] for p in outside), default=0)
        for node in group:
            depth[node] = level
            if g.forward[node] and g.from_data[node]:
                mixed = union(g.depends[p] for p in g.cut.preds[node] if not g.from_data[p])
                for weight in bits_of(mixed | g.read_bits.get(node, 0)):
                    first[weight] = min(first[weight], (level, position[node]))
    return first


def _used_behind(g: GradientFlow) -> list[int]:
    """Return for each weight, as bits, the weights upstream of the data that it is mixed with."""
    behind = [0] * len(g.weights)
    for node, preds in enumerate(g.cut.preds):
        if g.forward[node] and g.from_data[node]:
            mixed = union(g.depends[p] for p in preds if not g.from_data[p])
            data = union(g.depends[p] for p in preds if g.from_data[p])
            for weight in bits_of(mixed | g.read_bits.get(node, 0)):
                behind[weight] |= data
    return behind


def units_of(g: GradientFlow) -> list[int]:
    """Return the unit of each weight; weights share a unit if one tensor without data is computed from them.

    ``kernel = normalize(v) * g`` makes one unit of ``v`` and ``g``: the kernel's gradient is no dO, because
    no other layer needs it.  Units are numbered by their first weight; most have only one.
    """
    first = list(range(len(g.weights)))

    def find(weight: int) -> int:
        while first[weight] != weight:
            weight = first[weight]
        return weight

    for node in _combining(g):
        members = sorted({find(weight) for weight in bits_of(g.depends_on_tensors[node])})
        for member in members[1:]:
            first[member] = members[0]
    numbers: dict[int, int] = {}
    return [numbers.setdefault(find(weight), len(numbers)) for weight in range(len(first))]


def _combining(g: GradientFlow) -> list[int]:
    """Return the forward ops that combine weights alone, several of them, before data meet them."""
    if not any(several(bits) for bits in g.depends_on_tensors):
        return []
    data = g.cut.downstream(g.data_sources | marks(_tables(g)))
    met = g.cut.upstream(marks(n for n, forward in enumerate(g.forward) if forward and g.from_data[n]))
    return [
        node
        for node, bits in enumerate(g.depends_on_tensors)
        if several(bits) and g.forward[node] and met[node] and not data[node]
    ]


def _tables(g: GradientFlow) -> list[int]:
    """Return the floating-point tensors that no weight goes into: they count as data (a first state)."""

    def is_table(output: OutputInfo) -> bool:
        return "float" in output.dtype and (output.shape is None or any(dim != 1 for dim in output.shape))

    return [
        node
        for node, bits in enumerate(g.depends_on_tensors)
        if not bits and any(map(is_table, g.flow.outputs[node]))
    ]
