"""Which library communicates, how gradients are combined, what they travel as."""

from __future__ import annotations

ENGINES = ("auto", "horovod", "collectives", "single")
OPS = ("Average", "Sum", "Adasum")
COMPRESSIONS = ("none", "fp16", "bf16")
