"""Measured seconds of ops on real TensorFlow."""

import time
from collections import Counter

import pytest
import tensorflow as tf

from tests import zoo
from tf_ooo.compat import tf_profiler
from tf_ooo.compat.tf_profiler import TracedEvent
from tf_ooo.costs import profile as profile_module
from tf_ooo.costs.analytic import base_type
from tf_ooo.costs.profile import OpProfile, StepProfiler, profile_ops, read_profile
from tf_ooo.errors import BackendError, CostError, OptionsError


def _step(size=256, layers=3):
    weights = [tf.Variable(tf.random.stateless_normal((size, size), (i, 0))) for i in range(layers)]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            y = x
            for w in weights:
                y = tf.nn.relu(y @ w)
            loss = tf.reduce_mean(y * y)
        for w, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(1e-9 * gradient)
        return loss

    return step


def test_every_matmul_is_measured():
    step, x = _step(), tf.ones((512, 256))
    profile = profile_ops(lambda: step(x))
    graph = step.get_concrete_function(x).graph
    products = [op.name for op in graph.get_operations() if op.type == "MatMul"]
    assert len(products) == 8
    assert set(products) <= profile.seconds.keys()
    assert profile.steps == 3
    assert all(seconds >= 0 for seconds in profile.seconds.values())


def test_seconds_are_those_that_passed(monkeypatch):
    """However busy the machine: a step takes as long as a clock around it says, and no less than one within.

    Its ops take together the seconds in which at least one of them ran.
    """
    step, x, within_s, seen = _step(), tf.ones((512, 256)), [], []
    read = read_profile
    monkeypatch.setattr(profile_module, "read_profile", lambda events: seen.extend(events) or read(events))

    def timed():
        started = time.perf_counter()
        step(x).numpy()
        within_s.append(time.perf_counter() - started)

    timed()
    profiler, started = StepProfiler(1), time.perf_counter()
    profiler.run(timed)
    around_s, profile = time.perf_counter() - started, profiler.profile
    assert within_s[-1] <= profile.step_s <= around_s
    assert 0 < profile.overhead_s <= around_s - profile.step_s
    (mark,) = (event for event in seen if event.label.partition("#")[0] == tf_profiler.STEP_MARK)
    ops = [event for event in seen if event.label.rpartition(":")[0] in profile.seconds]
    spans = sorted((event.begin_s, event.begin_s + event.duration_s) for event in ops)
    assert mark.begin_s <= spans[0][0]
    busy_s, end_s = 0.0, 0.0
    for begin_s, until_s in spans:
        busy_s += max(0.0, until_s - max(begin_s, end_s))
        end_s = max(end_s, until_s)
    assert sum(profile.seconds.values()) == pytest.approx(busy_s)
    assert 0 < busy_s <= profile.step_s


def test_every_convolution_of_a_keras_model_is_measured_inside_fit_s_function():
    model, x, y = zoo.convolutions()
    model.compile("sgd", zoo.keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    model.fit(x, y, batch_size=len(x), epochs=1, verbose=0)
    batches = iter(tf.data.Dataset.from_tensors((x, y)).repeat(8))
    profile = profile_ops(lambda: model.train_function(batches), steps=2)
    types = [base_type(op_type) for op_type in profile.types.values()]
    kinds = Counter(types)
    # One convolution and the pointwise half of the separable one; one depthwise and its other half.
    assert kinds["Conv2D"] == kinds["Conv2DBackpropFilter"] == 2
    assert kinds["DepthwiseConv2dNative"] == kinds["DepthwiseConv2dNativeBackpropFilter"] == 2


def test_run_hands_the_result_through_and_profiles_only_once():
    step, x = _step(8, 1), tf.ones((4, 8))
    profiler = StepProfiler(steps=2)
    first = profiler.run(step, x)
    assert float(first) == pytest.approx(float(step(x)), rel=1e-3)
    assert profiler.profile is None
    profiler.run(step, x)
    profile = profiler.profile
    assert profile is not None
    profiler.run(step, x)
    assert profiler.profile is profile


def test_a_step_that_raises_ends_the_trace():
    profiler = StepProfiler()

    def fails():
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        profiler.run(fails)
    step, x = _step(8, 1), tf.ones((4, 8))
    assert profile_ops(lambda: step(x), steps=1).seconds


def test_close_ends_a_trace_that_is_under_way():
    step, x = _step(8, 1), tf.ones((4, 8))
    profiler = StepProfiler()
    profiler.run(step, x)
    profiler.close()
    assert profile_ops(lambda: step(x), steps=1).seconds


def test_profiler_in_use_is_said(tmp_path):
    step, x = _step(8, 1), tf.ones((4, 8))
    tf.profiler.experimental.start(str(tmp_path))
    try:
        with pytest.raises(BackendError, match="already running"):
            StepProfiler().run(step, x)
    finally:
        tf.profiler.experimental.stop(save=False)


def test_profiler_stopped_by_somebody_else_is_said():
    step, x = _step(8, 1), tf.ones((4, 8))
    profiler = StepProfiler(steps=2)
    profiler.run(step, x)
    tf.profiler.experimental.stop(save=False)
    with pytest.raises(BackendError, match="was stopped"):
        profiler.run(step, x)


def test_step_without_ops_is_said():
    with pytest.raises(CostError, match="no op in it"):
        profile_ops(lambda: None)


@pytest.mark.parametrize("steps", [0, 4, True, 1.5])
def test_steps_out_of_range(steps):
    with pytest.raises(OptionsError, match="1 to 3"):
        StepProfiler(steps)


def _event(label, begin_s, duration_s, plane="/host:CPU", line="tf_Compute/1"):
    return TracedEvent(plane, line, label, begin_s, duration_s)


def test_median_over_steps_of_the_sum_in_a_step():
    events = [_event(tf_profiler.STEP_MARK, start, 9.0, line="python") for start in (0.0, 10.0, 20.0)]
    for start, duration in ((0.0, 5.0), (10.0, 1.0), (20.0, 2.0)):
        events += [
            _event("a/b:MatMul", start + 1, duration / 2),
            _event("a/b:MatMul", start + 2, duration / 2),
        ]
    events += [
        _event("late:Mul", 19.5, 1.0),
        _event("in_data:Mul", 1.0, 1.0, line="tf_data_private/3"),
        _event("ExecutorState::Process", 1.0, 1.0),
        _event("EagerLocalExecute: __inference_f_45", 1.0, 1.0),
    ]
    profile = read_profile(events)
    assert profile == OpProfile({"a/b": pytest.approx(2.0)}, {"a/b": "MatMul"}, 3, 9.0, 0.0, profile.core_s)
    assert profile.core_s == pytest.approx({"a/b": 2.0})


def test_gpu_kernels_count_instead_of_their_launch():
    events = [
        _event(tf_profiler.STEP_MARK, 0.0, 9.0),
        _event("m:MatMul", 1.0, 0.1),
        _event("m:MatMul", 2.0, 3.0, plane="/device:GPU:0", line="Stream #1"),
        _event("m:MatMul", 5.0, 1.0, plane="/device:GPU:0", line="Stream #1"),
        _event("host:Identity", 1.0, 0.2),
        _event("host:Identity", 9.5, 0.2),
        _event("update:AssignSub", 0.5, 0.1),
        _event("update:AssignSub", 9.5, 2.0, plane="/device:GPU:0", line="Stream #1"),
    ]
    # The last kernel began after the step's results were there.
    assert read_profile(events).seconds == pytest.approx({"host": 0.2, "m": 4.0, "update": 2.0})


def test_threads_that_compute_at_the_same_time_share_the_seconds():
    events = [
        _event(tf_profiler.STEP_MARK, 0.0, 9.0, line="python"),
        _event("a:MatMul", 1.0, 4.0, line="tf_Compute/1"),
        _event("b:MatMul", 3.0, 4.0, line="tf_Compute/2"),
        _event("c:Mul", 3.0, 1.0, line="tf_Compute/2"),  # called by b
    ]
    assert read_profile(events).seconds == pytest.approx({"a": 3.0, "b": 3.0, "c": 0.5})


def _part(thread, begin_s, end_s):
    """Return the events of a thread of the pool within ops, as the profiler tells them."""
    line = f"tf_numa_-1_Eigen/{thread}"
    marks = ("ThreadpoolListener::StartRegion", begin_s), ("ThreadpoolListener::StopRegion", end_s)
    return [_event(label, at_s, 0.0, line=line) for label, at_s in marks]


@pytest.mark.parametrize(
    ("cores", "product", "beside"),
    [
        # 1 s alone; 2 s with one part, which count 1.5 times; 1 s with two, 2.5 times.
        (4, 1 + 2 * 1.5 + 1 * 2.5, 2.0),
        (2, 1 + 2 * 1.5 + 1 * 2.0, 2.0),  # there are no more
        (1, 4.0, 1.0),
    ],
)
def test_how_many_cores_an_op_keeps_busy(monkeypatch, cores, product, beside):
    """One that waits for its parts, or computes one, counts half; two ops have half of the cores each."""
    monkeypatch.setattr(profile_module, "usable_cores", lambda: cores)
    events = [
        _event(tf_profiler.STEP_MARK, 0.0, 20.0, line="python"),
        _event("a:MatMul", 1.0, 4.0, line="tf_Compute/1"),
        *_part(1, 2.0, 5.0),
        *_part(2, 4.0, 5.0),
        _event("b:Tanh", 10.0, 2.0, line="tf_Compute/1"),
        _event("c:Tanh", 10.0, 2.0, line="tf_Compute/2"),
        *_part(1, 15.0, 16.0),  # of no op
    ]
    profile = read_profile(events)
    assert profile.seconds == pytest.approx({"a": 4.0, "b": 1.0, "c": 1.0})
    assert profile.core_s == pytest.approx({"a": product, "b": beside, "c": beside})


def test_kernels_of_a_gpu_keep_no_core_busy():
    events = [
        _event(tf_profiler.STEP_MARK, 0.0, 9.0),
        _event("m:MatMul", 2.0, 3.0, plane="/device:GPU:0", line="Stream #1"),
    ]
    assert read_profile(events).core_s == {}


def test_trace_without_steps_is_said():
    with pytest.raises(CostError, match="no step"):
        read_profile([_event("m:MatMul", 1.0, 0.1)])
