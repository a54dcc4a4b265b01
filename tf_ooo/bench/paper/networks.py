"""The twelve networks, and what was published of each: plain data.

Sources: *scripts* are those of the authors' repository (github.com/mlsys-seo/ooo-backprop, commit 0beb419);
*list* means that the paper names the network, and its repository has no script for it.  The abstract has the
ranges of gains, of a mode's networks together; figures of single networks are not in these sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tf_ooo.errors import OptionsError

SINGLE, DATA_PARALLEL, PIPELINE = "single_device", "data_parallel", "pipeline"
MODES = (SINGLE, DATA_PARALLEL, PIPELINE)
SIZES = ("tiny", "small", "full")
SCRIPTS, LIST = "scripts", "list"


@dataclass(frozen=True)
class PaperRun:
    """One published configuration.

    Attributes:
        mode: one of :data:`MODES`.
        settings: growth, alpha, layers, batch: of a step, in data parallel of each GPU, in a pipeline the
            rows of one micro-batch.
        devices: GPUs.
        microbatches: of a step of a pipeline.
        k: of reverse first-k.
        assumed: which of these the sources leave open; what is assumed instead.  Runs that differ in nothing
            else are the same.
        changed: whether a user has other settings than those of the paper's list.
    """

    mode: str
    settings: Mapping[str, Any]
    devices: int = 1
    microbatches: int = 1
    k: int = 0
    assumed: str = field(default="", compare=False)
    changed: bool = False

    def given(self, settings: Mapping[str, Any]) -> PaperRun:
        """The same run with a user's settings; a pipeline has no more GPUs than layers."""
        together = {**self.settings, **settings}
        if together == self.settings:
            return self
        most = together["layers"] if self.mode == PIPELINE else self.devices
        return replace(self, settings=together, devices=min(self.devices, most), changed=True)

    @property
    def name(self) -> str:
        """``growth=12 batch=32``."""
        return " ".join(f"{name}={value}" for name, value in self.settings.items())


@dataclass(frozen=True)
class PaperNetwork:
    """One of the twelve.

    Attributes:
        name: on the command line.
        title: as in the paper.
        script: of examples/paper, without ``.py``; ``fixed`` are its settings that make it this network,
            ``tiny`` those that differ at that size: a sixth of the layers or a tenth of the blocks, where
            tracing them takes long.
        source: :data:`SCRIPTS` or :data:`LIST`.
        data: the data set, of the paper; ``left_open`` is what the sources do not say.
        runs: published configurations, of the modes that the paper uses it in.
    """

    name: str
    title: str
    script: str
    source: str
    data: str
    left_open: str
    runs: tuple[PaperRun, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)

    def runs_with(self, settings: Mapping[str, Any], mode: str) -> list[PaperRun]:
        """The published configurations of a mode with a user's settings, each once.

        Where some agree with a setting already, such as ``task=finetune``, only those.
        """
        runs = [run for run in self.runs if run.mode == mode]
        for name, value in settings.items():
            runs = [run for run in runs if run.settings.get(name) == value] or runs
        given: list[PaperRun] = []
        for run in runs:
            if (changed := run.given(settings)) not in given:
                given.append(changed)
        return given

    def settings_at(self, size: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What is set of the script's settings at a size, beside those that a user has ``given``.

        At ``full`` those of the first published configuration which agrees with them.
        """
        given = given or {}
        published = self.runs_with(given, self.modes[0])[0].settings if size == "full" else {}
        return {**self.fixed, **(self.tiny if size == "tiny" else {}), **published, **given}

    @property
    def tasks(self) -> tuple[dict[str, Any], ...]:
        """Settings of what it is trained for: of BERT both tasks, of others one without any."""
        names = dict.fromkeys(run.settings["task"] for run in self.runs if "task" in run.settings)
        return tuple({"task": name} for name in names) or ({},)

    @property
    def modes(self) -> tuple[str, ...]:
        """Those that the paper uses it in."""
        return tuple(mode for mode in MODES if any(run.mode == mode for run in self.runs))


def _images(settings: tuple[Mapping[str, Any], ...], assumed: str = "") -> tuple[PaperRun, ...]:
    return tuple(PaperRun(SINGLE, given, assumed=assumed) for given in settings)


def _mobilenet(alphas: tuple[float, ...], assumed: str = "") -> tuple[PaperRun, ...]:
    return _images(tuple({"alpha": alpha, "batch": batch} for alpha in alphas for batch in (32, 64)), assumed)


def _resnet(depth: int, batch: int, ks: Mapping[int, int], assumed: str = "") -> tuple[PaperRun, ...]:
    given = {"layers": depth, "batch": batch}
    return tuple(PaperRun(DATA_PARALLEL, given, workers, k=k, assumed=assumed) for workers, k in ks.items())


def _bert(layers: int, hidden: int, rows: int, devices: int, microbatches: int) -> tuple[PaperRun, ...]:
    """Pre-training as published, and fine-tuning, of which the scripts have BERT-24's settings only."""
    given = {"layers": layers, "width": hidden, "heads": hidden // 64, "batch": rows}
    assumed = "" if layers == 24 else "fine-tuning as BERT-24's: 4 GPUs, 4 micro-batches of 24"
    return (
        PaperRun(PIPELINE, {"task": "pretrain"} | given, devices, microbatches),
        PaperRun(PIPELINE, {"task": "finetune"} | given | {"batch": 24}, 4, 4, assumed=assumed),
    )


_RANDOM_IMAGES = "the scripts train on random images of 224 x 224 pixels"
_BERT_DATA = "MRPC (fine-tuning)"
_BERT_OPEN = "which text pre-training reads; the scripts pre-train on a file of a few made examples"
_FEW_BLOCKS = {"blocks": 0.1}  # of each stage a tenth, one at least
_NETWORKS = (
    PaperNetwork(
        "densenet121", "DenseNet-121", "densenet121", SCRIPTS, "CIFAR-100, ImageNet", _RANDOM_IMAGES,
        _images((
            {"growth": 12, "batch": 32},
            *({"growth": growth, "batch": batch} for growth in (24, 32) for batch in (32, 64)),
        )),
    ),
    PaperNetwork(
        "mobilenet_v3_large", "MobileNetV3-Large", "mobilenet_v3_large", SCRIPTS, "ImageNet",
        f"{_RANDOM_IMAGES}, alpha 0.5 and 1.0",
        _mobilenet((0.5, 1.0))
        + _mobilenet((0.25,), "alpha 0.25 is in the list only; batches as of the others"),
    ),
    PaperNetwork(
        "resnet50", "ResNet-50", "resnet", SCRIPTS, "ImageNet",
        f"{_RANDOM_IMAGES}; how much of the network's 10 Gbit/s BytePS reaches",
        _resnet(50, 128, {4: 45, 16: 45, 32: 45, 48: 30}), {"layers": 50}, _FEW_BLOCKS,
    ),
    PaperNetwork(
        "resnet101", "ResNet-101", "resnet", SCRIPTS, "ImageNet",
        f"{_RANDOM_IMAGES}; how much of the network's 10 Gbit/s BytePS reaches",
        _resnet(101, 96, dict.fromkeys((4, 16, 32, 48), 70)), {"layers": 101}, _FEW_BLOCKS,
    ),
    PaperNetwork(
        "resnet152", "ResNet-152", "resnet", LIST, "ImageNet",
        "all settings: the scripts' model can be 152 layers deep, and no script makes it so",
        _resnet(152, 64, dict.fromkeys((4, 16), 100), "batch 64; k=100, two of three layers"),
        {"layers": 152}, _FEW_BLOCKS,
    ),
    PaperNetwork(
        "rnn16", "RNN, 16 layers", "rnn", LIST, "IWSLT or WMT", "cell, widths, length of texts, GPUs",
        (PaperRun(
            PIPELINE, {"layers": 16, "width": 1024, "length": 32, "batch": 64}, 4, 8,
            assumed="plain cells of 1,024 units, texts of 32 words, 4 GPUs, 8 micro-batches of 64",
        ),), {"layers": 16},
    ),
    PaperNetwork(
        "feed_forward", "FFNN", "feed_forward", LIST, "not named", "depth, widths, data, GPUs",
        (PaperRun(
            PIPELINE, {"layers": 16, "width": 4096, "batch": 1024}, 4, 8,
            assumed="16 layers of 4,096 units, 4 GPUs, 8 micro-batches of 1,024",
        ),),
    ),
    PaperNetwork(
        "bert12", "BERT-12", "bert", SCRIPTS, _BERT_DATA, _BERT_OPEN, _bert(12, 768, 16, 8, 30),
        {"layers": 12}, {"layers": 2},
    ),
    PaperNetwork(
        "bert24", "BERT-24", "bert", SCRIPTS, _BERT_DATA, _BERT_OPEN, _bert(24, 1024, 10, 16, 32),
        {"layers": 24}, {"layers": 4},
    ),
    PaperNetwork(
        "bert36", "BERT-36", "bert", SCRIPTS, _BERT_DATA, _BERT_OPEN, _bert(36, 1024, 10, 24, 38),
        {"layers": 36}, {"layers": 6},
    ),
    PaperNetwork(
        "bert48", "BERT-48", "bert", SCRIPTS, _BERT_DATA, _BERT_OPEN, _bert(48, 1024, 8, 32, 40),
        {"layers": 48}, {"layers": 8},
    ),
    PaperNetwork(
        "gpt3_medium", "GPT-3 medium", "gpt3", LIST, "OpenWebText or Wikipedia",
        "length of texts, micro-batches, GPUs",
        (PaperRun(
            PIPELINE, {"layers": 24, "width": 1024, "heads": 16, "length": 512, "batch": 4}, 12, 24,
            assumed="texts of 512 words, 12 GPUs, 24 micro-batches of 4",
        ),), {"layers": 24}, {"layers": 4},
    ),
)  # fmt: skip
NETWORKS = {network.name: network for network in _NETWORKS}


def network_named(name: str) -> PaperNetwork:
    """OptionsError with all names where it is none of them."""
    if name not in NETWORKS:
        raise OptionsError(f"{name!r:.80} is none of the paper's networks; they are {', '.join(NETWORKS)}")
    return NETWORKS[name]


def modes_of(network: PaperNetwork, asked: str | None, any_mode: bool = False) -> tuple[str, ...]:
    """The modes to run it in: the one that is ``asked`` for, or the paper's.

    Raises:
        OptionsError: the paper does not use it in that mode, and ``any_mode`` is not asked for.
    """
    if asked is None:
        return network.modes
    if asked not in network.modes and not any_mode:
        raise OptionsError(
            f"the paper does not use {network.name} in mode {asked}, but in {' and '.join(network.modes)}; "
            "--any-mode runs it nonetheless"
        )
    return (asked,)
