"""Defines the options that several modes have; what one mode has stands beside the mode."""

from tf_ooo.options.base import DeviceOptions, ModeOptions, OneDeviceOptions, RankOptions, TaskOptions

__all__ = ["DeviceOptions", "ModeOptions", "OneDeviceOptions", "RankOptions", "TaskOptions"]
