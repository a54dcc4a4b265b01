"""The texts tell people to install and to make only what is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(*arguments):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    command = ["make", "-n", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=800)


@needs_make
@pytest.mark.parametrize(
    "text", ["requirements/tf-2.15.in", "requirements/tf-2.18.in", "tests/graph/test_addons.py"]
)
def test_named_targets_exist(text):
    (target,) = re.findall(r"make (\.venv-[^ `\"]+)", (ROOT / text).read_text())
    # -B: also where it is up to date.
    run = make("-B", target)
    assert run.returncode == 0, run.stderr
    version = target.removeprefix(".venv-").partition("/")[0]
    assert f"-r requirements/tf-{version}.txt" in run.stdout


@needs_make
@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/testing.md"])
def test_targets_of_pages_exist(page):
    targets = set(re.findall(r"`make ([\w.-]+)", (ROOT / page).read_text()))
    assert "wheel-smoke" in targets
    assert {target: run.stderr for target in targets if (run := make(target)).returncode} == {}


@needs_make
def test_the_wheel_is_tried_away_from_this_folder():
    lines = make("-B", "wheel-smoke", "PYTHON=python3.12").stdout.splitlines()
    assert "python3.12 -m venv build/wheel-smoke" in lines
    (installs,) = (line for line in lines if "[cpu,digits]" in line)
    assert '"$(echo dist/*.whl)[cpu,digits]"' in installs
    assert any(line.startswith("cd build/wheel-smoke/away && export PYTHONPATH= &&") for line in lines)


@needs_make
def test_the_matrix_goes_on_after_a_version_that_fails():
    run = make("test-matrix")
    assert re.search(r"^\S*make -j1 -k test test-2\.15 test-2\.18$", run.stdout, re.MULTILINE), run.stdout[
        :300
    ]


@needs_make
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fuzz"], "tests.fuzz -n 100 --seed 1"),
        (["fuzz"], "tests.fuzz.kinds -n 100 --seed 1"),
        (["fuzz-kinds"], "tests.fuzz.kinds -n 40 --seed 1 --mode $mode"),
        (["faults"], "tests.faults -n 100 --seed 1 --keep-going"),
        (["mutants"], "tests.mutation -n 200 --seed 1 --keep-going"),
        (["mutants", "N=7", "SEED=3"], "tests.mutation -n 7 --seed 3 --keep-going"),
    ],
)
def test_how_many_and_which(arguments, said):
    assert said in make(*arguments).stdout


@needs_make
def test_a_version_without_locked_packages_is_an_error():
    run = make("test-2.14")
    assert run.returncode != 0
    assert "TensorFlow 2.14 has no locked packages here; there are test-2.15 test-2.18" in run.stderr


def test_the_extra_legacy_has_what_addons_leave_out():
    (legacy,) = re.findall(r'"legacy": \[(.*)\]', (ROOT / "setup.py").read_text())
    assert '"tqdm"' in legacy
