"""Malformed inputs, drawn from numbers: ``python -m tests.malformed -n 300 --seed 1``."""
