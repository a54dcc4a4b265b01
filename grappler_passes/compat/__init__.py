"""Holds every private TensorFlow name that graphs need, one topic per file; ``tf_ooo.compat`` uses these too.

Functions are called through their topic (``op_types.is_stateful``), classes are imported by name.  What an
upgrade breaks is said by tests/graph/test_compat_<topic>.py.  Seen working on TensorFlow 2.15, 2.18, 2.21.
"""
