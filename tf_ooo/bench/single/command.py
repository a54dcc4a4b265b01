"""The command ``tf-ooo bench single``."""

from __future__ import annotations

import itertools
from pathlib import Path

import click

from tf_ooo.bench.shared.bars import save_bars
from tf_ooo.bench.shared.options import (
    COUNT,
    FILE,
    POSITIVE,
    SeveralValues,
    json_option,
    quick_option,
    several,
)
from tf_ooo.bench.shared.rows import Row, write_rows
from tf_ooo.bench.single.cases import FITS, QUICK, STEPS, Case
from tf_ooo.bench.single.inputs import KINDS
from tf_ooo.bench.single.measuring import has_gpu, measure, text_of
from tf_ooo.bench.single.networks import BATCHES, NETWORKS, SMALL


@click.command("single", cls=SeveralValues)
@quick_option("Small networks, few ways: under 5 minutes.")
@json_option
@click.option("--picture", type=FILE, help="File for a bar chart (.png or .svg).")
@several("--networks", click.Choice(NETWORKS), help="Default: all but the small ones; small with --quick.")
@several("--batches", COUNT, help=f"Images or sequences of a step.  [default: {' '.join(map(str, BATCHES))}]")
@several("--data", click.Choice(KINDS), default=["random"], show_default=True)
@click.option("--size", type=COUNT, help="Pixels of an image's side, for networks on images.")
@click.option("--all-ways", is_flag=True, help="Also those that need a GPU to differ.")
@click.option("--make-s", type=POSITIVE, help="Seconds after which no other way is begun to be made.")
@several("--ways", click.Choice([*STEPS, *FITS]),
         help=f"Only these; {' and '.join(FITS)}: model.fit without and with OOOBackprop().")  # fmt: skip
@click.option("--rounds", type=COUNT, default=7, show_default=True, help="Turns of each way.")
@click.option("--steps", type=COUNT, default=10, show_default=True, help="Steps of one turn.")
def single(
    quick: bool, json_file: Path | None, picture: Path | None, networks: tuple[str, ...],
    batches: tuple[int, ...], data: tuple[str, ...], size: int | None, all_ways: bool, make_s: float | None,
    ways: tuple[str, ...], rounds: int, steps: int,
) -> None:  # fmt: skip
    """One GPU: dW on side streams against stock XLA.

    Compared are stock Keras (XLA), XLA with concurrent command buffers, TensorFlow without XLA, ours and,
    where it is installed, PyTorch with torch.compile and CUDA graphs.  All take turns, a few steps at a time.
    Without a GPU small networks run as a check of the machinery, and the rows say "device: cpu".
    """
    gpu = has_gpu()
    if not gpu:
        click.echo("no GPU: small networks, to check the machinery; the times say nothing about streams")
    small = quick or not gpu
    networks = networks or (SMALL if small else tuple(name for name in NETWORKS if name not in SMALL))
    batches = batches or ((8,) if small else BATCHES)
    names = ways or (QUICK if quick else STEPS)
    more = not ways and (not small or all_ways)
    rows: list[Row] = []
    for network, batch, kind in itertools.product(networks, batches, data):
        after_round: list[Row] = []
        for after_round in measure(Case(network, batch, kind, size, make_s), names, rounds, steps, more):
            write_rows(json_file, [*rows, *after_round])
        for row in after_round:
            click.echo(text_of(row))
        rows += after_round
    compared = [row for row in rows if "speedup" in row]
    if picture and compared:
        save_bars(compared, picture)
