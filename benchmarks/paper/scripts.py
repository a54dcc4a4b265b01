"""Networks of the training scripts in examples/paper: SIZES, build, data, optimizer, and check."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from tf_ooo.errors import OptionsError

if TYPE_CHECKING:
    import keras
    import numpy as np

EXAMPLES = Path(__file__).parents[2] / "examples" / "paper"


@dataclass(frozen=True)
class ScriptNetwork:
    """The network of a script at one of its sizes, with some ``settings`` changed.

    ``source``: ``real`` data, which are downloaded, ``shipped`` with a package, or ``generated``; ``auto``:
    shipped where the package is there.
    """

    script: str
    size: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    source: str = "auto"

    @property
    def batch(self) -> int:
        """Rows of one micro-batch, or of each worker."""
        return int(self.given().batch)

    def given(self) -> SimpleNamespace:
        """Return what the script's functions are given.

        Raises:
            OptionsError: no such script or size; a setting that the script does not have, or refuses.
        """
        module = loaded(self.script)
        try:
            settings = loaded("paper_options").changed(module.SIZES, self.size, self.settings)
            of = SimpleNamespace(**settings, data=self.source)
            getattr(module, "check", lambda _: None)(of)
        except ValueError as error:
            raise OptionsError(f"{self.script}: {error}") from None
        return of

    def build(self, rows: int | None = None) -> keras.Model:
        """Build the script's model; ``rows``: for batches of one size."""
        return loaded(self.script).build(self.given(), rows)

    def data(self, rows: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Return the script's inputs and labels, made on the CPU that is no device of the benchmark."""
        import tensorflow as tf

        with tf.device("CPU:0"):
            x, y = loaded(self.script).data(self.given(), rows, seed)
        return x, y

    def optimizer(self, momentum: float = 0.0) -> keras.Optimizer:
        """Return the script's own, whatever the momentum of others is."""
        del momentum
        return loaded(self.script).optimizer(self.given())


@cache
def loaded(script: str) -> ModuleType:
    """Return the module of a script of examples/paper, whose neighbours it imports."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    path = EXAMPLES / f"{script}.py"
    if not path.is_file():
        raise OptionsError(
            f"{path} is not there: the scripts come with the repository; run this in its folder"
        )
    return importlib.import_module(script)
