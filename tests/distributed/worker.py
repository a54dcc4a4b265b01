"""One worker: runs the checks named on the command line, in order, and writes what came of them.

    worker.py MODULE[,MODULE...] FOLDER [CHECK ...]

A check is a function of a MODULE whose name starts with ``check_``; it asserts.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def main() -> None:
    modules, folder, *names = sys.argv[1:]
    from tf_ooo import data_parallel

    engine = data_parallel.connect()
    imported = [vars(importlib.import_module(module)) for module in modules.split(",")]
    checks = {name: f for found in imported for name, f in found.items() if name.startswith("check_")}
    results = {}
    for name in names or checks:
        print(f"-- {name}", flush=True)
        faulthandler.dump_traceback_later(240, repeat=True)  # where a check hangs
        started = time.perf_counter()
        try:
            checks[name](engine)
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
            print(results[name], flush=True)
        print(f"   {time.perf_counter() - started:.1f} s", flush=True)
        engine.barrier()
    (Path(folder) / f"rank{engine.rank}.json").write_text(json.dumps(results))
    engine.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
