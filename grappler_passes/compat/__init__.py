"""Holds every private TensorFlow name that graphs need, one topic per file; ``tf_ooo.compat`` uses these too.

Functions are called through their topic (``graph_protos.is_stateful``), classes are imported by name.
tests/graph/test_compat_<topic>.py says what an upgrade breaks.  Tested on TensorFlow 2.15, 2.18, 2.21.
"""
