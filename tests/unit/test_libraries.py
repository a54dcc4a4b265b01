"""The C libraries: one build serves every Python, and every system that TensorFlow's own wheels do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARIES = [*ROOT.glob("grappler_passes/plugin/*.so"), *ROOT.glob("tf_ooo/hosts/*.so")]
# This is manylinux2014's; TensorFlow 2.21 asks for 2.27.
OLDEST_GLIBC = (2, 17)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.stem)
def test_an_older_system_has_all_that_it_asks_for(library):
    asked = re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())
    assert asked
    assert max((int(major), int(minor)) for major, minor in asked) <= OLDEST_GLIBC


def test_no_library_is_tied_to_a_python():
    assert {library.name for library in LIBRARIES} >= {"_shim_cpu.so", "_listening.so", "_silence.so"}
