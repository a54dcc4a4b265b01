"""What a user can set, as far as several modes have it; what one mode has stands beside the mode."""

from tf_ooo.options.base import ModeOptions
from tf_ooo.options.one_device import COMPILED_SCHEDULES, NEEDS_XLA, OneDeviceOptions
from tf_ooo.options.several import DeviceOptions, RankOptions

__all__ = [
    "COMPILED_SCHEDULES",
    "NEEDS_XLA",
    "DeviceOptions",
    "ModeOptions",
    "OneDeviceOptions",
    "RankOptions",
]
