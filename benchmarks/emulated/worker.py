"""A worker process with an emulated device: ``python -m benchmarks.emulated.worker CLUSTER TASK``."""

from __future__ import annotations

import sys

import benchmarks.emulated.layer  # noqa: F401 - loads the op
from benchmarks.emulated.waiting import prefer
from tf_ooo.hosts.worker import serve

if __name__ == "__main__":
    prefer()  # and with it all threads that are started from here
    serve(sys.argv[1], int(sys.argv[2]), inter_op_threads=8, intra_op_threads=1)
