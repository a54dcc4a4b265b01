"""The twelve networks, and what was published of each: plain data.

*Scripts* are those of the authors' repository (github.com/mlsys-seo/ooo-backprop, commit 0beb419d, folder
scripts); *list* means that the paper names the network, and no script there runs it.  The abstract has the
ranges of gains of a mode's networks together; there is no figure of a single network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.paper.schedules import FASTFORWARD, MODULO, PUSH
from tf_ooo.errors import OptionsError

SINGLE, DATA_PARALLEL, PIPELINE = "single_device", "data_parallel", "pipeline"
PUBLISHED = {SINGLE: (1.03, 1.58), DATA_PARALLEL: (1.10, 1.27), PIPELINE: (1.41, 1.99)}
OVER = {SINGLE: "XLA", DATA_PARALLEL: "BytePS", PIPELINE: "GPipe"}
SIZES = ("tiny", "small", "full")


@dataclass(frozen=True)
class PaperRun:
    """One published configuration.

    Attributes:
        settings: of the script; ``batch`` is of a step, of each GPU, or of one micro-batch of a pipeline.
        devices, machines: GPUs, and how many machines they are in.
        style: what the authors' script sets as PIPELINE_STYLE.
        k: of reverse first-k.
        assumed: what the sources leave open, and what stands here instead.
    """

    settings: Mapping[str, Any]
    devices: int = 1
    machines: int = 1
    microbatches: int = 1
    style: str = ""
    k: int = 0
    assumed: str = ""

    @property
    def text(self) -> str:
        """``growth=12 batch=32``, and GPUs, micro-batches and schedule where there are several."""
        parts = [" ".join(f"{name}={value}" for name, value in self.settings.items())]
        if self.devices > 1:
            parts.append(f"{self.machines} x {self.devices // self.machines} GPUs")
        if self.style:
            parts.append(f"{self.microbatches} micro-batches, {self.style}")
        return ", ".join(parts) + (f", k={self.k}" if self.k else "") + (" (assumed)" if self.assumed else "")


@dataclass(frozen=True)
class PaperNetwork:
    """One of the twelve.

    Attributes:
        script: of examples/paper; ``fixed`` are its settings that make it this network, ``tiny`` those that
            differ at that size, where tracing a deep network takes long.
        data: the paper's data set; the scripts train on random images, and on a few made texts.
    """

    name: str
    title: str
    script: str
    mode: str
    data: str
    runs: tuple[PaperRun, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)

    def runs_with(self, settings: Mapping[str, Any]) -> list[PaperRun]:
        """The published configurations that agree with a user's settings; else all of them, changed."""
        runs = list(self.runs)
        for name, value in settings.items():
            runs = [run for run in runs if run.settings.get(name) == value] or runs
        changed = [replace(run, settings={**run.settings, **settings}) for run in runs]
        return [run for number, run in enumerate(changed) if run not in changed[:number]]

    def settings_at(self, size: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """What is set of the script's settings at a size; at ``full`` those of a published configuration."""
        published = self.runs_with(given)[0].settings if size == "full" else {}
        return {**self.fixed, **(self.tiny if size == "tiny" else {}), **published, **given}


def _images(options: str, *settings: tuple[float, int], assumed: str = "") -> tuple[PaperRun, ...]:
    return tuple(PaperRun({options: value, "batch": batch}, assumed=assumed) for value, batch in settings)


def _resnet(name: str, depth: int, batch: int, ks: Mapping[int, int], assumed: str = "") -> PaperNetwork:
    """Four GPUs in each machine."""
    settings = {"layers": depth, "batch": batch}
    runs = tuple(PaperRun(settings, n, n // 4, k=k, assumed=assumed) for n, k in ks.items())
    title, few = f"ResNet-{depth}", {"blocks": 0.1}
    return PaperNetwork(name, title, "resnet", DATA_PARALLEL, "ImageNet", runs, {"layers": depth}, few)


def _bert(layers: int, width: int, rows: int, machines: int, microbatches: int) -> PaperNetwork:
    """Pre-trained on eight GPUs a machine; the scripts fine-tune BERT-24 only, on 4 GPUs in 1 machine or 4.

    The scripts that are named ``modulo`` set fastforward_push for pre-training, whose layers are no multiple
    of the GPUs, modulo for 1 machine and fastforward for 4.
    """
    given = {"layers": layers, "width": width, "heads": width // 64, "batch": rows}
    tuned = {"task": "finetune", **given, "batch": 24}
    assumed = "" if layers == 24 else "fine-tuning as BERT-24's"
    runs = (
        PaperRun({"task": "pretrain", **given}, 8 * machines, machines, microbatches, PUSH),
        PaperRun(tuned, 4, 1, 4, MODULO, assumed=assumed),
        PaperRun(tuned, 4, 4, 4, FASTFORWARD, assumed=assumed),
    )
    data, few = "MRPC (fine-tuning)", {"layers": layers // 6}
    return PaperNetwork(
        f"bert{layers}", f"BERT-{layers}", "bert", PIPELINE, data, runs, {"layers": layers}, few
    )


def _assumed(settings: Mapping[str, Any], gpus: int, microbatches: int) -> tuple[PaperRun, ...]:
    """The paper lists the network, and nothing else is known of it."""
    told = "depth and widths are the list's, all else is assumed"
    return (PaperRun(settings, gpus, -(-gpus // 8), microbatches, PUSH, assumed=told),)


_GPT = {"layers": 24, "width": 1024, "heads": 16, "length": 512, "batch": 4}
_NETWORKS = (
    PaperNetwork(
        "densenet121", "DenseNet-121", "densenet", SINGLE, "CIFAR-100, ImageNet",
        _images("growth", (12, 32), (24, 32), (24, 64), (32, 32), (32, 64)),
    ),
    PaperNetwork(
        "mobilenet_v3_large", "MobileNetV3-Large", "mobilenet_v3_large", SINGLE, "ImageNet",
        _images("alpha", (0.5, 32), (0.5, 64), (1.0, 32), (1.0, 64))
        + _images("alpha", (0.25, 32), (0.25, 64), assumed="alpha 0.25 is in the list only"),
    ),
    _resnet("resnet50", 50, 128, {4: 45, 16: 45, 32: 45, 48: 30}),
    _resnet("resnet101", 101, 96, dict.fromkeys((4, 16, 32, 48), 70)),
    _resnet("resnet152", 152, 64, dict.fromkeys((4, 16), 100), "no script runs it: batch 64, k=100"),
    PaperNetwork(
        "rnn16", "RNN, 16 layers", "rnn", PIPELINE, "IWSLT or WMT",
        _assumed({"layers": 16, "width": 1024, "length": 32, "batch": 64}, 4, 8), {"layers": 16},
    ),
    PaperNetwork(
        "feed_forward", "FFNN", "feed_forward", PIPELINE, "not named",
        _assumed({"layers": 16, "width": 4096, "batch": 1024}, 4, 8),
    ),
    _bert(12, 768, 16, 1, 30),
    _bert(24, 1024, 10, 2, 32),
    _bert(36, 1024, 10, 3, 38),
    _bert(48, 1024, 8, 4, 40),
    PaperNetwork(
        "gpt3_medium", "GPT-3 medium", "gpt3", PIPELINE, "OpenWebText or Wikipedia",
        _assumed(_GPT, 8, 24), {"layers": 24}, {"layers": 4},
    ),
)  # fmt: skip
NETWORKS = {network.name: network for network in _NETWORKS}
# Depths that the authors' models can have too (densenet_expr_ooo.py, data_par/.../models.py).
DEPTHS = {"densenet": (169, 201, 264), "resnet": (18, 34, 200)}


def network_named(name: str) -> PaperNetwork:
    """One of the twelve, or a named depth of a DenseNet or ResNet; OptionsError where it is neither."""
    for script, depths in DEPTHS.items():
        for depth in depths:
            if name == f"{script}{depth}":
                return _deep(NETWORKS["densenet121" if script == "densenet" else "resnet50"], name, depth)
    if name not in NETWORKS:
        known = [*NETWORKS, *(f"{script}{depth}" for script in DEPTHS for depth in DEPTHS[script])]
        raise OptionsError(f"{name!r:.80} is none of the paper's networks; they are {', '.join(known)}")
    return NETWORKS[name]


def _deep(network: PaperNetwork, name: str, depth: int) -> PaperNetwork:
    given, told = {"layers": depth}, "the paper has no run of this depth"
    runs = tuple(replace(run, settings={**run.settings, **given}, assumed=told) for run in network.runs)
    title = f"{network.title.split('-')[0]}-{depth}"
    return replace(network, name=name, title=title, runs=runs, fixed=given)
