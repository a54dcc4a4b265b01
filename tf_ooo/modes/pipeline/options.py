"""Defines options of ``mode="pipeline"``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tf_ooo.options import DeviceOptions, RankOptions, TaskOptions
from tf_ooo.options.base import (
    choice,
    flag,
    folder,
    is_file,
    number_or_auto,
    number_or_numbers,
    option,
    parts_or_auto,
    whole_number,
)
from tf_ooo.planning.building.stages import Stages, check_stages, is_nested
from tf_ooo.planning.choosing.recomputing import CHOICES, NONE

AUTO = "auto"
MICRO_BATCH, WHOLE_BATCH = BATCH_NORMS = ("micro_batch", "whole_batch")
FIRST_STEPS = ("auto", "whole", "cut")


@dataclass(frozen=True, kw_only=True)
class Pipeline(DeviceOptions, RankOptions, TaskOptions):
    """Cuts a model into stages on several devices, a batch into micro-batches that pass through them.

    >>> callback = tf_ooo.OOOBackprop(tf_ooo.Pipeline(devices=4, microbatches=8, schedule="zb_v"))

    Schedules: ``"auto"`` takes the one with the shortest predicted step; docs/pipeline.md lists all.  A text
    with a dot or a slash, or a path, is a file with a schedule of one's own (docs/planner.md: Text form).
    ``profile_steps`` (3 at most) are measured before the model is cut for good.  Devices and costs:
    :class:`tf_ooo.options.DeviceOptions`; how replicas are averaged:
    :class:`tf_ooo.options.RankOptions`; one pipeline alone refuses that.  What XLA compiles:
    :class:`tf_ooo.options.TaskOptions`.

    Attributes:
        microbatches: parts of a batch; None: 8, one for each replica where these have one device each, with
            BatchNormalization in training as many as leave each at least 8 rows, one for a batch of fewer
            than 16.
        batch_norm: over which rows BatchNormalization takes its statistics. ``"micro_batch"``: each
            micro-batch's own, so that losses and weights are others than stock's, the more the fewer rows
            there are. ``"whole_batch"``: the batch's, as in stock training; such a model then runs in one
            micro-batch, as each of these layers would make all micro-batches wait for one another.
        memory_limit_bytes: every device's limit, or a number for each, in their order; None: what devices
            report, GPUs and workers in a control group with a limit, if any do; 0: no limit.
        chunks: interleaved_1f1b, zb_interleaved: stages on each device; None: 2 to 4 are tried, or the most
            of these that there are layers for.
        group: modulo: layers of a group; None: tried.
        stages: names of the layers (``report.layers``, or what all their variables' names begin with) at
            which stages begin, the first included, or a list of names for each stage, of all its layers;
            None: cuts are tried.  As many as devices, or a multiple of that for schedules with several stages
            on each.
        recompute: layers whose forward runs again before their dO, so that less is kept in between:
            ``"none"``; ``"auto"``: where the memory limit needs it, as few seconds as keep it; ``"all"`` that
            then keep less.
        loop_parts: loops that the time steps of each recurrent layer run in, so that the layer can be cut
            between them; ``"auto"``: several where there are fewer recurrent layers than devices.  Gradients
            of their weights are then added up in another order.
        first_steps: where the steps run that are measured: ``"whole"`` on one device; ``"cut"`` as a
            pipeline, planned with calculated costs; ``"auto"``: whole unless the model was built in
            :func:`tf_ooo.host_memory` or exceeds ``memory_limit_bytes``.
        replicas: so many pipelines share the devices and each batch's micro-batches, and their gradients are
            added up; with one device each they are plain data parallel.  ``"auto"``: the number with the
            shortest predicted step.  Where horovodrun started several processes, each has a pipeline of its
            own, and their number has to be this; None: that number, else 1.
        fall_back: train on one device where that is no slower: where it is predicted, or the fit is too short
            to measure it, before the model is cut, and again when ten steps of the pipeline were measured.
            ``mode="auto"`` with ``devices=`` does.
        check_loss: refuse a step that adds up the rows of a batch or compares them with one another, and so
            is not the mean of its micro-batches' steps; False trains with that mean.
        dump_dir: folder for the graph after every pass; None writes nothing.
    """

    mode: ClassVar[str] = "pipeline"
    schedule_files: ClassVar[bool] = True

    microbatches: int | None = option(None, whole_number(1, optional=True))
    batch_norm: str = option(MICRO_BATCH, choice(BATCH_NORMS))
    memory_limit_bytes: int | Sequence[int] | None = option(None, number_or_numbers(0))
    chunks: int | None = option(None, whole_number(1, optional=True), of_policy=True)
    group: int | None = option(None, whole_number(1, optional=True), of_policy=True)
    stages: Stages | None = option(None, check_stages)
    recompute: str = option(NONE, choice(CHOICES))
    loop_parts: int | str = option(AUTO, parts_or_auto)
    first_steps: str = option("auto", choice(FIRST_STEPS))
    replicas: int | str | None = option(None, number_or_auto)
    fall_back: bool = option(False, flag)
    check_loss: bool = option(True, flag)
    dump_dir: str | os.PathLike[str] | None = option(None, folder)

    def __post_init__(self) -> None:
        if isinstance(self.schedule, os.PathLike) and is_file(self.schedule):
            path = os.fspath(self.schedule)
            object.__setattr__(self, "schedule", path if is_file(path) else os.path.join(os.curdir, path))
        super().__post_init__()
        if isinstance(self.memory_limit_bytes, Sequence):
            object.__setattr__(self, "memory_limit_bytes", tuple(self.memory_limit_bytes))
        if self.stages is not None:
            nested = map(tuple, self.stages) if is_nested(self.stages) else self.stages
            object.__setattr__(self, "stages", tuple(nested))
