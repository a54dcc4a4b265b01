"""The twelve networks, what was published of each (networks.toml), and their scripts in examples/paper."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import tomllib

from benchmarks.models import ScriptNetwork
from tf_ooo.errors import OptionsError

SIZES = ("tiny", "small", "full")


class Mode(NamedTuple):
    """Networks of one mode have this in common."""

    name: str
    published: tuple[float, float]
    over: str
    suite: str  # has the ways and the runner that measure them
    assumes: str


@dataclass(frozen=True)
class PaperRun:
    """One published configuration."""

    settings: Mapping[str, Any]  # of the script; the batch of a step, of each GPU, or of one micro-batch
    devices: int = 1
    machines: int = 1
    microbatches: int = 1
    style: str = ""  # what the authors' script sets as PIPELINE_STYLE
    k: int = 0  # of reverse first-k
    assumed: str = ""  # what the sources leave open, and what stands here instead

    @property
    def text(self) -> str:
        """``growth=12 batch=32``, and GPUs, micro-batches and schedule where there are several."""
        text = " ".join(f"{name}={value}" for name, value in self.settings.items())
        if self.devices > 1:
            text += f", {self.machines} x {self.devices // self.machines} GPUs"
        if self.style:
            text += f", {self.microbatches} micro-batches, {self.style}"
        return text + (f", k={self.k}" if self.k else "") + (" (assumed)" if self.assumed else "")


@dataclass(frozen=True)
class PaperNetwork:
    """One of the twelve, or one of the authors' models at another depth."""

    name: str
    title: str
    script: str
    mode: Mode
    runs: Sequence[PaperRun]
    measured: str  # what the last archived run came to; a test reads it there
    fixed: Mapping[str, Any] = field(default_factory=dict)  # settings that make the script this network
    tiny: Mapping[str, Any] = field(default_factory=dict)  # where tracing a deep network takes long
    depths: Sequence[int] = ()

    def runs_with(self, settings: Mapping[str, Any]) -> list[PaperRun]:
        """Return the configurations that agree with a user's settings; else all of them, changed."""
        runs = self.runs
        for name, value in settings.items():
            runs = [run for run in runs if run.settings.get(name) == value] or runs
        changed = [replace(run, settings={**run.settings, **settings}) for run in runs]
        return [run for number, run in enumerate(changed) if run not in changed[:number]]

    def at(self, size: str, given: Mapping[str, Any]) -> ScriptNetwork:
        """Return the script's network at a size; at ``full`` that of a published configuration."""
        published = self.runs_with(given)[0].settings if size == "full" else {}
        tiny = self.tiny if size == "tiny" else {}
        return ScriptNetwork(self.script, size, {**self.fixed, **tiny, **published, **given})

    def of_depth(self, layers: int) -> "PaperNetwork":
        given, told = {"layers": layers}, "the paper has no run of this depth"
        runs = [replace(run, settings={**run.settings, **given}, assumed=told) for run in self.runs]
        title = f"{self.title.split('-')[0]}-{layers}"
        return replace(self, name=f"{self.script}{layers}", title=title, runs=runs, fixed=given)


_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
MODES = {of["name"]: Mode(**of) for of in _DATA["modes"]}
NETWORKS: dict[str, PaperNetwork] = {}
for _of in _DATA["networks"]:
    _of |= {"mode": MODES[_of["mode"]], "runs": [PaperRun(**run) for run in _of["runs"]]}
    NETWORKS[_of["name"]] = PaperNetwork(**_of)


def network_named(name: str) -> PaperNetwork:
    """Return one of the twelve, or a named depth of one; OptionsError where there is none of this name."""
    deeper = [network.of_depth(layers) for network in NETWORKS.values() for layers in network.depths]
    known = NETWORKS | {network.name: network for network in deeper}
    if name not in known:
        raise OptionsError(f"{name!r:.80} is none of the paper's networks; they are {', '.join(known)}")
    return known[name]
