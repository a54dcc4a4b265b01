"""The table of modes: the options of each."""

from __future__ import annotations

from collections.abc import Mapping

from tf_ooo.modes.data_parallel.options import DataParallel
from tf_ooo.modes.layerpipe.options import LayerPipe
from tf_ooo.modes.pipeline.options import Pipeline
from tf_ooo.modes.single_device.options import SingleDevice
from tf_ooo.options import ModeOptions

__all__ = ["MODES", "DataParallel", "LayerPipe", "Pipeline", "SingleDevice"]

MODES: Mapping[str, type[ModeOptions]] = {
    options.mode: options for options in (SingleDevice, DataParallel, Pipeline, LayerPipe)
}
