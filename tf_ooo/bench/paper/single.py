"""One device: stock and rewritten steps of a script's network in turns, in a process of their own.

On a CPU no gain is expected: TensorFlow's executor runs on all cores whatever is ready.
"""

from __future__ import annotations

from dataclasses import dataclass

from tf_ooo.bench.shared.processes import command, end_with, requests, result_of
from tf_ooo.bench.shared.rows import Row
from tf_ooo.bench.shared.scripts import network_of
from tf_ooo.bench.single.one_cpu import all_threads, fitted, in_turns

ORDER = "fast_forward"


@dataclass(frozen=True)
class SingleRun:
    """The label of a :class:`tf_ooo.bench.shared.scripts.ScriptNetwork`, and how many steps of each way."""

    workload: str
    steps: int


def measured(asked: SingleRun) -> Row:
    """A row as of ``tf-ooo bench single-cpu``, with the losses and whether stock ends with the same bits."""
    return dict(result_of(command(__name__, asked), all_threads()))


def _run(asked: SingleRun) -> Row:
    from tf_ooo.bench.shared.workloads import check_sum, make

    network = network_of({}, asked.workload)
    workload = make(network)
    row, losses = in_turns(workload, ORDER, asked.steps)
    bits = check_sum(workload.model)
    stock = make(network)
    fitted(stock, asked.steps)
    return {**row, "losses": [losses[0], losses[-1]], "bit_equal": bits == check_sum(stock.model)}


if __name__ == "__main__":
    end_with(_run(*requests(SingleRun)))
