"""Finds the costs of a plan: computes them from a model, or reads a table."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tf_ooo.costs.table import CostTable
from tf_ooo.errors import OptionsError


def costs_for_model(model: object, modules: Sequence[str] = (), **settings: Any) -> CostTable:
    """Return the costs of a Keras model, given itself, as the path of a saved one, or as ``MODULE:NAME``.

    ``modules`` are imported first; settings are those of ``keras_model.costs_of_model``.
    """
    from tf_ooo.costs.keras_model import costs_of_model, load_model  # imports TensorFlow

    if isinstance(model, (str, os.PathLike)):
        text = os.fspath(model)
        model = load_model(text, is_name(text), modules)
    return costs_of_model(model, **settings)


def is_name(text: str) -> bool:
    """Return whether a text is ``MODULE:NAME``, and not the name of a file."""
    module, colon, name = text.partition(":")
    words = [*module.split("."), name]
    return bool(colon) and all(word.isidentifier() for word in words) and not Path(text).exists()


def refuse_of_models(**settings: Any) -> None:
    """Raise OptionsError if settings for a model's costs are given without a model."""
    for name, value in settings.items():
        if value is not None and value is not False:
            raise OptionsError(f"{name}={value!r:.80} is for a model; what is given has seconds already")


def rows_of_micro_batch(batch: int | None, microbatches: int) -> int | None:
    """Return the rows of the largest micro-batch; values that are no numbers are refused elsewhere."""
    if not isinstance(batch, int) or not isinstance(microbatches, int) or microbatches < 1:
        return batch
    return -(-batch // microbatches)


def with_rows(table: CostTable, batch: int | None) -> CostTable:
    """Return the table with the rows of its micro-batch.  OptionsError if it is for other rows."""
    if batch is None or batch == table.rows:
        return table
    if table.rows is not None:
        raise OptionsError(
            f"micro-batches of {batch} rows: the costs are for micro-batches of {table.rows} rows; leave "
            "batch out, or give as many times these rows as there are micro-batches"
        )
    return dataclasses.replace(table, rows=batch)
