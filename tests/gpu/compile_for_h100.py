"""Compiles HLO for an H100 without one, in a Python with JAX; each line of its input is a module to compile.

A line is JSON: ``hlo``, a file; ``dump``, the folder that XLA writes to; ``flags``, pairs of name and value.
Each gets a line back, also JSON: XLA's message, or null.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.gpu.hlo_text import executable_of, h100


def main():
    os.environ["JAX_PLATFORMS"] = "cpu"
    device = h100()
    for line in sys.stdin:
        error = None
        try:
            compile_for(device, **json.loads(line))
        except Exception as raised:  # the test says what is wrong, and the next module is compiled
            error = f"{type(raised).__name__}: {raised}"
        print(json.dumps(error), flush=True)


def compile_for(device, hlo, dump, flags):
    flags = [("xla_dump_to", dump), ("xla_dump_hlo_as_text", "True"), *map(tuple, flags)]
    executable_of(Path(hlo).read_text(), device, flags, on_paper=True)


if __name__ == "__main__":
    main()
