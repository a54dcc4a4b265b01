"""Runs the quick tests of a module of which one place is changed."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

# A forked process finds these imported: it loads the packages that are mutated again, and little else.
import hypothesis.extra.numpy  # noqa: F401
import pytest
import scipy.sparse  # noqa: F401

import keras_callbacks  # noqa: F401
import tf_ooo.cli  # noqa: F401
from tests.forked import ROOT
from tests.harness.children import Children, Outcome, Setting
from tests.mutation.targets import TESTS

if TYPE_CHECKING:
    from tests.mutation.mutants import Mutant

KILLED, SURVIVED = "killed", "survived"
# The process has devices for tests of pipelines.
SETTING = Setting(devices=4)
PACKAGES = ("grappler_passes", "tf_ooo", "keras_callbacks")
# A mutant that takes so many times as long as the module itself, and some seconds, is stuck.
TIMES_AS_LONG, MORE_S = 6, 20
# Pytest says these: wrong arguments, no tests. Neither says anything of a mutant.
NO_ANSWER = (4, 5)
NO_PLUGINS = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:anyio")


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from another text than its file has."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = compile(self._source, self.path, "exec", dont_inherit=True)
        return code


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, source: str) -> None:
        self.name = module.removesuffix(".py").replace("/", ".")
        self._loader = _Loader(self.name, str(ROOT / module), source)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._loader.path, loader=self._loader)


def run(mutant: Mutant) -> Outcome:
    """In a process that runs nothing else."""
    return run_with(mutant.module, mutant.code((ROOT / mutant.module).read_text()))


def run_with(module: str, source: str) -> Outcome:
    """Runs the tests of the module, which has this text, in a process that runs nothing else."""
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
    finder = _Finder(module, source)
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module(finder.name)
    except Exception as error:  # no test could run
        return Outcome(KILLED, f"it cannot be imported: {error!r}")
    with tempfile.TemporaryFile("w+") as log:
        os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
        options = ["-x", "-q", "--in-process", *NO_PLUGINS, "--hypothesis-seed=0"]
        status = int(pytest.main([*options, *TESTS[module]]))
        log.seek(0)
        said = log.read()
    if status in NO_ANSWER:
        return Outcome("no answer", said)
    return Outcome(KILLED if status else SURVIVED, said[-3000:])


@functools.cache
def limit_s(module: str) -> float:
    """The time limit of the module's tests, which have to pass as it is."""
    started = time.monotonic()
    source = (ROOT / module).read_text()
    outcome = Children(functools.partial(run_with, module), lambda source: SETTING, renewed_after=1).run(
        source
    )
    if outcome.kind != SURVIVED:
        raise RuntimeError(f"{module}: its tests fail as it is\n{outcome.text}")
    return TIMES_AS_LONG * (time.monotonic() - started) + MORE_S
