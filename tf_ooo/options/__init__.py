"""Defines the options that several modes share; a mode's own options stand beside the mode."""

from tf_ooo.options.base import DeviceOptions, ModeOptions, OneDeviceOptions, RankOptions, TaskOptions

__all__ = ["DeviceOptions", "ModeOptions", "OneDeviceOptions", "RankOptions", "TaskOptions"]
