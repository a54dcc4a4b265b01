"""One process of ``tf-ooo bench single``: builds steps of one network, then runs them when told to.

Reads lines ``NAME STEPS`` and answers each with a line of JSON; XLA's flags are those of the process.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tf_ooo.bench.single.fit import FITS, Fit
from tf_ooo.bench.single.inputs import batches
from tf_ooo.bench.single.networks import CLASSES, build
from tf_ooo.modes.compiled import plans
from tf_ooo.modes.compiled.captured import CompiledModule, watched
from tf_ooo.modes.compiled.launches import capture_like
from tf_ooo.modes.compiled.measuring import MeasuredGains
from tf_ooo.modes.compiled.priority import high_priority_main_stream

Step = Callable[[], Any]

MEASURED = "joint, measured gains"
# name -> (plan, side streams, who reads stored activations)
OURS: Mapping[str, tuple[Any, int, str]] = {
    "early": (plans.every_layer, 1, "cost"),
    "joint": (plans.joint, 1, "cost"),
    MEASURED: (plans.joint, 1, "cost"),
    "early, 2 streams": (plans.every_layer, 2, "cost"),
    "early, barriers on all activations": (plans.every_layer, 1, "all"),
    "early, recompute": (plans.every_layer, 1, "backward"),
    "early, updates aside": (plans.every_layer, 1, "cost"),
    "early, no barriers on activations": (plans.every_layer, 1, "none"),
}
MEASURE_S = 60.0
BASE = ("xla", "no xla", "early", "joint")


def main() -> None:
    """``python -m tf_ooo.bench.single.worker '{"network": ..., "batch": ..., "data": ...,
    "steps": [...]}'``."""
    request = json.loads(sys.argv[1])
    if request.get("priority") is not None:
        set_priority(int(request["priority"]))
    steps, said, modules = make(
        request["network"],
        request["batch"],
        request["steps"],
        request["data"],
        request.get("size"),
        request.get("make_s") or math.inf,
    )
    found = {name: module.to_dict() for name, module in modules.items()}
    _answer(
        {"ready": list(steps), "said": said, "modules": found, "device": device(), "versions": versions()}
    )
    for line in sys.stdin:
        name, _, count = line.strip().rpartition(" ")
        _answer(run(steps[name], int(count)))


def _answer(value: Any) -> None:
    print("ANSWER " + json.dumps(value), flush=True)


def set_priority(priority: int) -> None:
    """The main stream of the first GPU gets this CUDA priority, where there is a GPU."""
    import tensorflow as tf

    if tf.config.list_physical_devices("GPU"):
        high_priority_main_stream(32 * 2**30, priority)


def device() -> str:
    """The GPU's name, or ``cpu``."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return "cpu"
    return str(tf.config.experimental.get_device_details(gpus[0]).get("device_name", "gpu"))


def versions() -> dict[str, str]:
    """Of TensorFlow, Keras, and the CUDA that TensorFlow was built with."""
    import keras
    import tensorflow as tf

    built = tf.sysconfig.get_build_info()
    found = {"cuda": built.get("cuda_version"), "cudnn": built.get("cudnn_version")}
    known = {name: str(version) for name, version in found.items() if version}
    return {"tensorflow": tf.__version__, "keras": keras.__version__, **known}


def make(
    network: str,
    count: int,
    names: list[str],
    data: str = "random",
    size: int | None = None,
    make_s: float = math.inf,
) -> tuple[dict[str, Step], dict[str, str], dict[str, CompiledModule]]:
    """The steps that can be made, warmed up; what there is to say about each; what XLA made of each."""
    import keras

    keras.utils.set_random_seed(0)
    model = build(network, size)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    model.optimizer.build(model.trainable_variables)
    source = batches(model.input_shape[1:], count, CLASSES, data)
    first = next(source)
    model.compute_loss(y=first[1], y_pred=model(first[0]))
    steps: dict[str, Step] = {}
    said: dict[str, str] = {}
    modules: dict[str, CompiledModule] = {}
    end_s = time.monotonic() + make_s
    for name in names:
        if time.monotonic() > end_s:
            said[name] = f"not made: {make_s:.0f} s were over"
            continue
        try:
            if name in FITS:
                steps[name] = fit = Fit(name, network, count, data, size, end_s)
                said[name] = fit.note
                continue
            with watched() as watch:
                steps[name], said[name] = _step(name, model, source, modules.get("xla"), end_s)
                _wait(steps[name]())
            _wait(steps[name]())
            if watch.found is not None and name != "no xla":
                modules[name] = watch.found
                said[name] = "; ".join(filter(None, (said[name], watch.found.text())))
        except Exception as error:  # one that cannot be made must not stop the others
            steps.pop(name, None)
            said[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
    return steps, said, modules


def _step(
    name: str, model: Any, source: Iterator[Any], stock: CompiledModule | None, end_s: float
) -> tuple[Step, str]:
    import tensorflow as tf

    from tf_ooo.modes.compiled.rewrite import StreamRewrite
    from tf_ooo.modes.compiled.session import StreamSession
    from tf_ooo.modes.compiled.step import CompiledStep, StreamStep, Way, default_rewriter
    from tf_ooo.modes.single_device.options import SingleDevice

    if name not in OURS:
        function = tf.function(model.train_step, jit_compile=name != "no xla", autograph=False)
        return lambda: function(next(source)), ""
    plan, streams, store = OURS[name]
    notes: list[str] = []
    if plan is plans.joint:
        plan = functools.partial(plan, capture=capture_like(lambda: stock))
    if name == MEASURED:
        budget_s = max(1.0, min(MEASURE_S, (end_s - time.monotonic()) / 2))
        plan = functools.partial(plan, gains=MeasuredGains(budget_s, lambda table: notes.extend(table.notes)))
    rewriter = default_rewriter(functools.partial(plan, streams=streams), store, name.endswith("aside"))
    session = StreamSession(SingleDevice(schedule="multi_stream", any_platform=True))
    step = StreamStep(model.train_step, model.train_step, session, Way(rewriter))
    compiled = CompiledStep(step, (next(source),), {})
    made = compiled.made
    assert isinstance(made, StreamRewrite)  # for mypy: default_rewriter makes them
    said = f"{len(made.calls)} calls, {made.barriers} barriers, planned in {made.plan_seconds:.1f} s"
    return lambda: compiled((next(source),), {}), "; ".join((said, *notes))


def run(step: Step, count: int) -> dict[str, Any]:
    """Seconds of one step, on average over ``count``, and the peak of the GPU's memory in bytes."""
    import tensorflow as tf

    on_gpu = bool(tf.config.list_logical_devices("GPU"))
    if on_gpu:
        tf.config.experimental.reset_memory_stats("GPU:0")
    found: dict[str, Any] = {"step_s": step.step_s(count) if isinstance(step, Fit) else _step_s(step, count)}
    if on_gpu:
        found["peak_bytes"] = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    return found


def _step_s(step: Step, count: int) -> float:
    _wait(step())
    started = time.perf_counter()
    for _ in range(count):
        out = step()
    _wait(out)
    return (time.perf_counter() - started) / count


def _wait(out: Any) -> None:
    import tensorflow as tf

    for value in tf.nest.flatten(out):
        value.numpy()


if __name__ == "__main__":
    main()
