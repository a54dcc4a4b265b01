"""What papers publish, checked in beside the rows in docs/benchmarks/planner, and how it is compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tf_ooo.bench.shared.options import EXISTING_FILE, json_option, quick_option
from tf_ooo.bench.shared.rows import Row, write_rows
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.costs.layer_work import transformer_activation_bytes, transformer_flop

Inputs = Mapping[str, Any]
Rows = Callable[[Inputs, bool], Iterator[Row]]
Table = Callable[[Sequence[Row]], str]
FOLDER = Path(__file__).parents[3] / "docs" / "benchmarks" / "planner"


def command(
    name: str, doc: str | None, quick: str, inputs: Path, rows: Rows, table: Table, assumptions: Sequence[str]
) -> click.Command:
    """A command that prints predictions beside published figures, the ``inputs``, and what was assumed.

    ``quick``: what ``--quick`` leaves.
    """

    def run(json_file: Path | None, quick: bool, inputs: Path) -> None:
        compared = list(rows(load(inputs), quick))
        show(compared, table, assumptions)
        write_rows(json_file, compared)

    default = f"Configurations and published figures.  [default: docs/benchmarks/planner/{inputs.name}]"
    inputs_option = click.option("--inputs", type=EXISTING_FILE, default=inputs, help=default)
    return click.command(name, help=doc)(json_option(quick_option(quick)(inputs_option(run))))


def load(path: Path) -> Inputs:
    """The configurations and published figures."""
    inputs: Inputs = json.loads(path.read_text())
    return inputs


def show(rows: Sequence[Row], table: Table, assumptions: Sequence[str]) -> None:
    """Prints the rows and what was assumed."""
    click.echo("\n".join((table(rows), "Assumptions:", *(f"- {line}" for line in assumptions))))


def predicted(step_s: float, baseline_s: float) -> Row:
    """What a row says of a prediction beside that of its baseline."""
    return {
        "predicted_step_s": step_s,
        "predicted_baseline_step_s": baseline_s,
        "predicted_speedup": baseline_s / step_s,
    }


def beside_published(row: Row, ratio: float) -> Row:
    """The row with a published speedup, and how far the predicted one is off."""
    return row | {"published_speedup": ratio, "deviation": row["predicted_speedup"] / ratio - 1}


def transformer_layer(inputs: Inputs, model: Inputs, weight_grad_bytes: float | None = None) -> LayerCosts:
    """Costs of one micro-batch of one layer of one of the inputs' models, by its published FLOP."""
    hidden, sequence, batch = model["hidden"], inputs["sequence"], model["microbatch"]
    forward, output_grad, weight_grad = transformer_flop(hidden, sequence, batch)
    return LayerCosts(
        forward / inputs["flop_per_s"],
        output_grad / inputs["flop_per_s"],
        weight_grad / inputs["flop_per_s"],
        activation_bytes=transformer_activation_bytes(hidden, model["heads"], sequence, batch),
        weight_grad_bytes=weight_grad_bytes,
        output_bytes=2.0 * sequence * batch * hidden,
    )
