"""Tiny: the package imports, without TensorFlow."""

from __future__ import annotations

import subprocess
import sys


def test_import_does_not_load_tensorflow():
    code = "import sys, tf_ooo; tf_ooo.Options(); sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
