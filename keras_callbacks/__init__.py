"""Keras callbacks: thin, the logic is in ``tf_ooo``."""

from keras_callbacks.gain_logger import GainLogger
from keras_callbacks.horovod import (
    BroadcastGlobalVariablesCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from keras_callbacks.ooo_backprop import OOOBackprop
from keras_callbacks.timeline_logger import TimelineLogger

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "GainLogger",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "OOOBackprop",
    "TimelineLogger",
]
