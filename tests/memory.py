"""Peak memory of an order on one device, or as if all devices were one."""

from __future__ import annotations

from grappler_passes.graph.training_graph import freed_after, owns_memory


def memory_curve(graph, order, resident_bytes=0):
    """Bytes alive while each op of ``order`` runs, ``resident_bytes`` included."""

    def own_bytes(name):
        op = graph.ops[name]
        return op.output_bytes or 0 if owns_memory(op) else 0

    alive, curve = resident_bytes, []
    for name, done in zip(order, freed_after(graph, order), strict=True):
        alive += own_bytes(name)
        curve.append(alive)
        alive -= sum(map(own_bytes, done))
    return curve


def peak_bytes(graph, order, resident_bytes=0):
    return max(memory_curve(graph, order, resident_bytes), default=resident_bytes)
