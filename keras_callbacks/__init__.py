"""Holds Keras callbacks, which are thin: the logic is in ``tf_ooo``."""

from keras_callbacks.horovod import (
    BroadcastGlobalVariablesCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from keras_callbacks.loggers import GainLogger, TimelineLogger
from keras_callbacks.ooo_backprop import OOOBackprop

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "GainLogger",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "OOOBackprop",
    "TimelineLogger",
]
