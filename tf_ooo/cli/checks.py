"""Defines ``tf-ooo doctor``: each function checks one installed thing, and says how it is and what to do."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tf_ooo.errors import BackendError, OOOError
from tf_ooo.hosts import devices
from tf_ooo.version import __version__

PYTHONS = (10, 13)
"""The first and the last minor version of Python 3 that is supported."""

State = Literal["ok", "absent", "broken"]
_STYLES = {"ok": "green", "absent": "yellow", "broken": "bold red"}


@dataclass(frozen=True)
class Finding:
    """Says how one checked thing is.

    Args:
        state: ``"ok"``; ``"absent"`` for what training can do without; ``"broken"`` for what it needs.
        fact: says what is there.
        advice: says what to do about it; empty if there is nothing to do.
    """

    state: State
    fact: str
    advice: str = ""


def python() -> Finding:
    """Check whether this Python is one that is tested."""
    version = sys.version.split()[0]
    first, last = PYTHONS
    if sys.version_info[0] == 3 and first <= sys.version_info[1] <= last:
        return Finding("ok", version)
    return Finding("broken", version, f"take Python 3.{first} to 3.{last}")


def tensorflow() -> Finding:
    """Check whether TensorFlow can be imported and is of a supported version."""
    from grappler_passes.compat import releases

    if (reason := releases.why_unsupported()) is not None:
        fact, _, advice = reason.partition("; ")
        return Finding("broken", fact, advice)
    import tensorflow as tf

    return Finding("ok", tf.__version__)


def keras() -> Finding:
    """Check whether the Keras that users get is supported and runs on TensorFlow."""
    from tf_ooo.compat import versions

    versions.check_keras_backend()
    user_keras = versions.user_keras()
    return Finding("ok", f"{user_keras.__name__} {user_keras.__version__} on TensorFlow")


def plug_in() -> Finding:
    """Check whether TensorFlow takes the graph optimizer, without which nothing is rewritten."""
    from grappler_passes import plugin

    try:
        plugin.load()
    except plugin.PluginError as error:
        fact, _, advice = str(error).partition("; ")
        advice = advice or "pip install . again, with a C compiler"
        return Finding("broken", fact, f"{advice}; until then training runs in stock order")
    return Finding("ok", f"loaded for {' and '.join(plugin.loaded())}")


def gpus() -> Finding:
    """Return the GPUs that TensorFlow sees; say so if the machine has one that it does not see."""
    import tensorflow as tf

    names = [
        device.name.removeprefix("/physical_device:") for device in tf.config.list_physical_devices("GPU")
    ]
    if names:
        return Finding("ok", ", ".join(names))
    if shutil.which("nvidia-smi") is None:
        return Finding("absent", "none", "nothing, on a machine without a GPU")
    if not tf.test.is_built_with_cuda():
        advice = "pip install '.[gpu]' in a clone of the repository"
        return Finding("absent", "this TensorFlow is one for CPUs", advice)
    advice = "nvidia-smi shows whether the driver works; CUDA_VISIBLE_DEVICES may hide GPUs"
    return Finding("absent", "TensorFlow sees none, though nvidia-smi is installed", advice)


def xla() -> Finding:
    """Check whether steps that XLA compiles can be rewritten, which matters on a GPU only."""
    import tensorflow as tf

    from grappler_passes.compat import releases
    from tf_ooo.compat import xla as xla_flags

    if releases.major_minor(tf.__version__) < (2, 21):
        fact = "compiled steps stay in stock order with this TensorFlow"
        return Finding("absent", fact, "TensorFlow 2.21, if you train on a GPU")
    if (reason := xla_flags.why_flags_are_fixed()) is not None:
        return Finding("absent", reason, "set XLA_FLAGS before Python starts, if you want other flags")
    return Finding("ok", "compiled steps can be rewritten on a GPU, and flags can be set")


def horovod() -> Finding:
    """Check whether Horovod is there and how it was built; only data parallel over Horovod needs it."""
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        advice = "nothing, unless you start with horovodrun: docs/data_parallel.md says how to install it"
        return Finding("absent", f"cannot be imported ({error})", advice)
    except Exception as error:  # TensorFlow's own, where Horovod was built for another one
        advice = "build it again for this TensorFlow: docs/data_parallel.md says how"
        return Finding("broken", f"cannot be imported ({_named(error)})", advice)
    import horovod

    parts = {"Gloo": hvd.gloo_built, "MPI": hvd.mpi_built, "NCCL": hvd.nccl_built}
    present = [name for name, is_built in parts.items() if is_built()]
    fact = f"{horovod.__version__}, built with {', '.join(present) or 'no network'}"
    if not present:
        return Finding("broken", fact, "build it again with HOROVOD_WITH_GLOO=1")
    return Finding("ok", fact)


def host_libraries() -> Finding:
    """Check whether the small C libraries for several hosts load; only workers on other hosts need them."""
    from tf_ooo.hosts import native

    try:
        for name in ("_listening", "_silence"):
            native.load(name)
    except (BackendError, OSError) as error:
        fact, _, advice = str(error).partition("; ")
        return Finding("absent", fact, advice or "pip install . again, if workers are on other hosts")
    return Finding("ok", "loaded")


def local_ports() -> Finding:
    """Check whether this machine gives a program a port of its own, as training over processes needs."""
    try:
        with devices.held_ports(1) as (port,):
            return Finding("ok", f"127.0.0.1 gives free ports, such as {port}")
    except OSError as error:
        advice = "allow connections on the loopback interface; one process alone trains without them"
        return Finding("absent", f"127.0.0.1 gives no port ({error})", advice)


def task(address: str) -> Finding:
    """Check whether something answers at an address of a cluster, or else this machine could listen there."""
    why_silent = devices.answers(address, timeout_s=2.0)
    if not why_silent:
        return Finding("ok", "answers")
    if not devices.can_listen(address):
        return Finding("absent", "free on this machine", "start its worker, or train here as task 0")
    advice = "start tf-ooo worker there, and let this machine reach the port"
    return Finding("broken", f"does not answer ({why_silent})", advice)


_ALWAYS = {"Python": python, "host libraries": host_libraries, "ports": local_ports}
_WITH_TENSORFLOW = {"Keras": keras, "plug-in": plug_in, "GPUs": gpus, "XLA": xla, "Horovod": horovod}


def findings(cluster: str | None = None) -> Iterator[tuple[str, Finding]]:
    """Yield each checked thing and how it is; without TensorFlow, checks that need it are left out.

    Args:
        cluster: ``"host1:port,host2:port"``, whose addresses are asked too; None: what TF_OOO_CLUSTER says.
            OptionsError: it is no cluster.
    """
    cluster = cluster or devices.cluster_of_environment()
    tasks = devices.parse(cluster) if cluster else ()
    yield "tf_ooo", Finding("ok", __version__)
    for what, check in _ALWAYS.items():
        yield what, _told(check)
    of_tensorflow = _told(tensorflow)
    yield "TensorFlow", of_tensorflow
    if of_tensorflow.state == "ok":
        for what, check in _WITH_TENSORFLOW.items():
            yield what, _told(check)
    for address in tasks:
        yield address, task(address)


def _told(check: Callable[[], Finding]) -> Finding:
    """Run a check and return an error as its result, because later checks are wanted, too."""
    try:
        return check()
    except OOOError as error:
        fact, _, advice = str(error).partition("; ")
        return Finding("broken", fact, advice)
    except Exception as error:  # whatever a library raises: a check that fails is an answer as well
        return Finding("broken", _named(error))


def _named(error: Exception) -> str:
    """Return ``RuntimeError: its first line``, as the text of others' errors alone may say little."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@click.command()
@click.option("--cluster", metavar="HOST:PORT,...", help="Also ask these addresses, of a pipeline's tasks. "
              "[default: what TF_OOO_CLUSTER says]")  # fmt: skip
@click.pass_context
def doctor(context: click.Context, cluster: str | None) -> None:
    """Look at versions, plug-in, GPUs, XLA, Horovod and ports, and say what to do about each.

    Ends with 1 if something that training needs is broken.  What is only absent, such as a GPU, is not.
    """
    looked_at, console = list(findings(cluster)), Console(soft_wrap=True)
    columns = ("what", "state", "found here", "what to do")
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for what, finding in looked_at:
        state = Text(finding.state, style=_STYLES[finding.state])
        table.add_row(Text(what), state, Text(finding.fact), Text(finding.advice))
    console.print(table)
    if broken := [what for what, finding in looked_at if finding.state == "broken"]:
        console.print(f"To be mended: {', '.join(broken)}")
        context.exit(1)
    console.print("Ready to train.")
