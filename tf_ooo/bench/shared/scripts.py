"""Networks of training scripts: files that have ``SIZES``, ``build``, ``data`` and
``optimizer``, such as examples/paper.

``SIZES``: by name the settings of a size, ``batch`` among them.  ``build(of, rows=None)``,
``data(of, count, seed)`` and ``optimizer(of)`` are given settings as attributes; the model's
outputs are logits.  A script may have ``check(of)``, which raises ValueError where settings do not go
together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from tf_ooo.bench.shared.networks import Network
from tf_ooo.errors import OptionsError

if TYPE_CHECKING:
    import keras
    import numpy as np

# Where data may be from.
SOURCES = ("auto", "real", "shipped", "generated")
_LABEL = "script "


@dataclass(frozen=True)
class ScriptNetwork:
    """The network of a script at one of its sizes, with some ``settings`` changed; and its data's source.

    As :class:`tf_ooo.bench.shared.networks.Network`.
    """

    script: str
    size: str
    source: str = "auto"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        """Rows of one micro-batch, or of each worker."""
        return int(self.given().batch)

    def given(self) -> SimpleNamespace:
        """What the script's functions are given.

        Raises:
            OptionsError: no such script or size; a setting that the script does not have, or refuses.
        """
        module = loaded(self.script)
        sizes = module.SIZES
        if self.size not in sizes:
            raise OptionsError(f"{self.script} has no size {self.size!r}; it has {', '.join(sizes)}")
        unknown = sorted(set(self.settings) - set(sizes[self.size]))
        if unknown:
            known = ", ".join(sorted(sizes[self.size]))
            raise OptionsError(f"{Path(self.script).stem} has no {unknown[0]!r}; it has {known}")
        for name, value in self.settings.items():
            check_kind(name, value, sizes[self.size][name])
        of = SimpleNamespace(**{**sizes[self.size], **self.settings, "data": self.source})
        try:
            getattr(module, "check", lambda _: None)(of)
        except ValueError as error:
            raise OptionsError(f"{Path(self.script).stem}: {error}") from None
        return of

    def build(self, rows: int | None = None) -> keras.Model:
        """The script's model; ``rows``: for batches of one size."""
        return loaded(self.script).build(self.given(), rows)

    def data(self, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """The script's inputs and labels."""
        x, y = loaded(self.script).data(self.given(), rows, seed)
        return x, y

    def optimizer(self) -> keras.Optimizer:
        """The script's own."""
        return loaded(self.script).optimizer(self.given())

    def optimizer_text(self) -> str:
        """``SGD of rate 0.1, momentum 0.9``, or without a momentum ``Adam of rate 0.001``."""
        optimizer = self.optimizer()
        settings = optimizer.get_config()
        rate, momentum = settings["learning_rate"], settings.get("momentum")
        # Of a schedule its name.
        rate_text = rate["class_name"] if isinstance(rate, dict) else f"{rate:g}"
        text = f"{type(optimizer).__name__} of rate {rate_text}"
        return f"{text}, momentum {momentum:g}" if momentum else text

    def data_used(self) -> str:
        """Which data these are: what the script prints of them, ``shipped, Python's manual``.

        Raises:
            OptionsError: a package that they come from is missing.
        """
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                self.data(1, 0)
        except SystemExit as error:
            raise OptionsError(str(error)) from None
        said = re.search(r"^data: ([^;\n]+)", printed.getvalue(), re.MULTILINE)
        return said[1] if said else self.source

    def label(self) -> str:
        """What :func:`network_of` reads."""
        return _LABEL + json.dumps(dataclasses.asdict(self))


def check_kind(name: str, value: object, usual: object) -> None:
    """Whether a setting is a number above 0, several, or a word, as the usual one is.

    Raises:
        OptionsError: it is not.
    """
    if isinstance(usual, str):
        kind, fits = "a word", isinstance(value, str)
    elif isinstance(usual, (tuple, list)):
        kind = "several whole numbers above 0, such as 2,2"
        fits = isinstance(value, (tuple, list)) and bool(value) and all(map(_is_count, value))
    elif isinstance(usual, int):
        kind, fits = "a whole number above 0", _is_count(value)
    else:
        kind = "a number above 0"
        fits = isinstance(value, (int, float)) and 0 < value < math.inf
    if not fits:
        raise OptionsError(f"{name}={value!r:.80}: expected {kind}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def network_of(table: Mapping[str, Network], workload: str) -> Network | ScriptNetwork:
    """A workload of the table, or that of a script's label."""
    if workload.startswith(_LABEL):
        return ScriptNetwork(**json.loads(workload.removeprefix(_LABEL)))
    return table[workload]


@cache
def loaded(script: str) -> ModuleType:
    """The module of a script, whose neighbours it may import.

    Raises:
        OptionsError: there is no such file.
    """
    path = Path(script)
    if not path.is_file():
        raise OptionsError(
            f"{path} is not there: the scripts come with the repository, not with the installed package; "
            "clone it and name its folder with --examples"
        )
    spec = importlib.util.spec_from_file_location(f"tf_ooo_script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _importable(path.parent):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
