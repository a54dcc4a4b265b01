"""Where the costs of a plan come from: a model, or a table that is there already."""

from __future__ import annotations

import dataclasses
from typing import Any

from tf_ooo.costs.table import CostTable
from tf_ooo.errors import OptionsError


def costs_for_model(model: Any, **settings: Any) -> CostTable:
    """Of a Keras model or the path of a saved one; settings as of ``keras_model.costs_of_model``."""
    import os

    from tf_ooo.costs.keras_model import costs_of_file, costs_of_model  # imports TensorFlow

    if isinstance(model, (str, os.PathLike)):
        return costs_of_file(os.fspath(model), **settings)
    return costs_of_model(model, **settings)


def refuse_of_models(what: str, **settings: Any) -> None:
    """OptionsError for a setting that only costs of a model have; ``what`` is given instead of one."""
    for name, value in settings.items():
        if value is not None and value is not False:
            raise OptionsError(f"{name}={value!r:.80} is for a model; {what} has seconds already")


def with_rows(table: CostTable, batch: int | None) -> CostTable:
    """The table with the rows of its micro-batch.  OptionsError: it is for others."""
    if batch is None or batch == table.rows:
        return table
    if table.rows is not None:
        raise OptionsError(
            f"batch={batch}: the costs are for micro-batches of {table.rows} rows; leave it out"
        )
    return dataclasses.replace(table, rows=batch)
