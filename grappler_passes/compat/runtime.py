"""TensorFlow's runtime in this process: its devices, plug-ins and functions."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2


def load_library(path: str) -> None:
    """Loads a graph optimizer.  A second one for the same device type aborts the process.

    ``load_pluggable_device_library`` would rescan the devices and forget what the user chose of them.
    """
    from tensorflow.python.client import pywrap_tf_session

    pywrap_tf_session.TF_LoadPluggableDeviceLibrary(path)


def has_gpu() -> bool:
    """Return whether TensorFlow sees a GPU; does not initialize it."""
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def runtime_devices() -> frozenset[str]:
    """Full names of the devices of this process and of its cluster, once TensorFlow has run an op."""
    return frozenset(_context().devices())


def device_memory_bytes() -> dict[str, int]:
    """Return what TensorFlow says it may use of each device of this process and its cluster, by full name.

    Of a CPU it says 256 MiB, whatever there is.
    """
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.client import pywrap_tf_session

    context = _context()
    context.ensure_initialized()
    devices = pywrap_tfe.TFE_ContextListDevices(context._context_handle)
    try:
        name_of, bytes_of = pywrap_tfe.TF_DeviceListName, pywrap_tf_session.TF_DeviceListMemoryBytes
        numbers = range(pywrap_tfe.TF_DeviceListCount(devices))
        return {name_of(devices, number): bytes_of(devices, number) for number in numbers}
    finally:
        pywrap_tfe.TF_DeleteDeviceList(devices)


def host_device(device: str) -> str:
    """Return the CPU of the machine that a full device name is on."""
    import tensorflow as tf

    spec = tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0)
    name: str = spec.to_string()
    return name


def register_functions(graph_def: graph_pb2.GraphDef) -> None:
    """Makes the library's functions known to TensorFlow's runtime, where XLA looks them up."""
    context = _context()
    for function in graph_def.library.function:
        if not context.has_function(function.signature.name):
            context.add_function_def(function)


def kept_functions(functions: Iterable[Any]) -> list[Any]:
    """Makes FunctionDefs known to TensorFlow's runtime, where it does not know them.

    It knows them as long as whoever holds what this returns, or any other function of these names, lives.
    """
    from tensorflow.core.function.polymorphism import function_type
    from tensorflow.python.eager.polymorphic_function import atomic_function

    context, kept = _context(), []
    for function in functions:
        if not context.has_function(function.signature.name):
            context.add_function_def(function)
        counted = atomic_function.AtomicFunction(
            function.signature.name, context, function_type.FunctionType([])
        )
        kept.append(counted)
    return kept


def call_function(name: str, inputs: Sequence[Any], results: int) -> list[Any]:
    """Return the results, so many, of a function that the runtime knows; it has no nests, nor captures."""
    returned: list[Any] | None = _context().call_function(name.encode(), list(inputs), results)
    return returned or []


def keep_order_on_workers() -> None:
    """Let ops that write to variables on workers be waited for; call it before workers are joined.

    By default TensorFlow streams them, and a function that is called next may overtake them: metrics were
    counted on from before their reset.  Whoever has set the variable keeps what he has set.
    """
    os.environ.setdefault("TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE", "false")


@contextlib.contextmanager
def failing_where_cut_off() -> Iterator[None]:
    """Calls to workers that begin in the block fail where their connection does.

    TensorFlow has those that join workers connect again, for ever, also to a worker that never answers.
    """
    name = "GRPC_FAIL_FAST"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def keep_functions() -> None:
    """Keep all functions that the runtime holds now until the process ends.

    A runtime that has joined workers asks them to forget each function that goes, and prints two lines of
    error for each that was there before they joined, or where they are gone.
    """
    from tensorflow.python.eager.polymorphic_function import atomic_function

    uses = getattr(atomic_function, "RUNTIME_FUNCTION_REFS", {})
    for name in list(uses):
        uses[name] += 1


def abort_collectives(why: str) -> None:
    """TensorFlow's collectives that this process waits in fail with UnavailableError, and all later ones."""
    import tensorflow as tf

    _context().abort_collective_ops(tf.errors.UNAVAILABLE, why)


def calls_not_optimized() -> AbstractContextManager[None]:
    """Functions that are called in the block run as they are: no graph optimizer sees them."""
    return _calling(_no_optimizers)


def calls_without_idle_optimizers() -> AbstractContextManager[None]:
    """Functions called in the block are spared graph optimizers that look at all and change nothing.

    On CPUs alone the layout optimizer converts nothing, and all that the memory optimizer does is to take
    sums apart; whoever has set them otherwise has them run.  The graph is sorted and given shapes in another
    dialect, twice, which took 15% of the seconds before the first step of MobileNetV2.
    """
    on_cpus = all("/device:CPU:" in name for name in runtime_devices())
    return _calling(_no_idle_optimizers) if on_cpus else contextlib.nullcontext()


def _no_optimizers(options: Any) -> None:
    options.disable_meta_optimizer = True


def _no_idle_optimizers(options: Any) -> None:
    if options.cpu_layout_conversion == options.NO_CONVERSION_ON_CPU:
        options.MergeFrom(type(options)(layout_optimizer=options.OFF))
    if options.memory_optimization == options.DEFAULT_MEM_OPT:
        options.memory_optimization = options.NO_MEM_OPT
    options.MergeFrom(type(options)(disable_tfg_optimizer=True))


@contextlib.contextmanager
def _calling(change: Callable[[Any], None]) -> Iterator[None]:
    here = _context()
    before = here.function_call_options
    here.function_call_options = _call_options(before.config_proto_serialized, change)
    try:
        yield
    finally:
        here.function_call_options = before


@functools.lru_cache(maxsize=4)
def _call_options(config_proto: bytes, change: Callable[[Any], None]) -> Any:
    from tensorflow.core.protobuf import config_pb2
    from tensorflow.python.eager import context

    config = config_pb2.ConfigProto.FromString(config_proto)
    change(config.graph_options.rewrite_options)
    return context.FunctionCallOptions(config_proto=config)


def _context() -> Any:
    from tensorflow.python.eager import context

    return context.context()
