"""Holds every private name and version check of TensorFlow and Keras in ``tf_ooo``, one topic per file.

Functions are called through their topic (``from tf_ooo.compat import keras_layers``, then
``keras_layers.parts_of(model)``), classes are imported by name.  Names that the packages below also need are
in ``grappler_passes.compat`` and are used from there. tests/graph/test_compat_<topic>.py says what an upgrade
breaks.

Tested on TensorFlow 2.15 (Keras 2), 2.18 and 2.21 (Keras 3 and tf_keras).
"""
