"""How many tensors' negotiation Horovod remembers."""

from __future__ import annotations

import os

# Names of tensors differ by step where several steps run together: Horovod's own 1024 are too few for a
# ResNet-50 in 8 steps, and what is forgotten is negotiated anew in every step.
_CACHE, _CACHED = "HOROVOD_CACHE_CAPACITY", "16384"


def remember_names() -> None:
    """Says so to Horovod, which reads it in ``hvd.init()``; what the user has set stays."""
    os.environ.setdefault(_CACHE, _CACHED)


def launched() -> bool:
    """Whether Horovod's launcher, or its environment variables, started this process."""
    return "HOROVOD_RANK" in os.environ and "HOROVOD_SIZE" in os.environ
