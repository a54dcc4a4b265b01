"""Keras' own tests run under this package: plug-ins of pytest, and ``python -m tests.keras_own``."""
