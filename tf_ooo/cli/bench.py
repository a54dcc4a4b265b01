"""``tf-ooo bench``: benchmarks to run on one's own machine."""

from __future__ import annotations

import click

from tf_ooo.bench.any_size.command import any_size
from tf_ooo.bench.data_parallel.command import data_parallel
from tf_ooo.bench.layerpipe.command import layerpipe
from tf_ooo.bench.mesh.command import mesh
from tf_ooo.bench.pipeline.command import pipeline
from tf_ooo.bench.prediction.command import prediction
from tf_ooo.bench.report.command import report
from tf_ooo.bench.single.command import single
from tf_ooo.bench.single.gpu_day import gpu_day
from tf_ooo.bench.single.one_cpu import single_cpu
from tf_ooo.bench.single.overlap import single_overlap
from tf_ooo.bench.unequal.command import unequal


@click.group()
def bench() -> None:
    """Benchmarks to run on your own machine."""


_COMMANDS = (
    single, single_cpu, single_overlap, gpu_day, data_parallel, pipeline, layerpipe, prediction,
    any_size, mesh, unequal, report,
)  # fmt: skip
for _command in _COMMANDS:
    bench.add_command(_command)
