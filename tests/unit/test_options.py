from __future__ import annotations

import copy
import dataclasses
import functools
import pickle

import pytest

import tf_ooo
from keras_callbacks.ooo_backprop import OOOBackprop
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import OOOError, OptionsError
from tf_ooo.modes.by_name import Options, options_for_fit
from tf_ooo.modes.compiled import planning
from tf_ooo.modes.compiled.controller import for_function
from tf_ooo.modes.table import MODES, DataParallel, LayerPipe, Pipeline, SingleDevice
from tf_ooo.planning.policies import POLICIES, schedules_of
from tf_ooo.report.parts import note_unused
from tf_ooo.report.report import Report

ALL = {"schedule": "auto", "profile_steps": 7, "timeline": "out", "strict": True}
COSTS = CostTable([tf_ooo.LayerCosts(1.0, 2.0, 3.0)])
# A value that is not the default, and the modes that take it.
OPTIONS = {
    "memory_limit_bytes": (10**9, {"single_device", "pipeline"}),
    "dump_dir": ("out", {"single_device", "data_parallel", "pipeline", "layerpipe"}),
    "batch_size": (8, {"single_device"}),
    "streams": (2, {"single_device"}),
    "store_activations": ("all", {"single_device"}),
    "side_updates": (True, {"single_device"}),
    "any_platform": (True, {"single_device"}),
    "gains": ("gains.json", {"single_device"}),
    "measure_gains_s": (3.0, {"single_device"}),
    "unroll": (4, {"single_device", "data_parallel", "layerpipe"}),
    "engine": ("horovod", {"data_parallel", "pipeline"}),
    "op": ("Sum", {"data_parallel", "pipeline"}),
    "compression": ("fp16", {"data_parallel", "pipeline"}),
    "weighting": ("samples", {"data_parallel", "pipeline"}),
    "lockstep": ("execution", {"data_parallel", "pipeline"}),
    "stop_timeout_s": (30.0, {"data_parallel", "pipeline"}),
    "compile_tasks": (True, {"data_parallel", "pipeline"}),
    "k": (3, {"data_parallel"}),
    "devices": (2, {"pipeline", "layerpipe"}),
    "costs": (COSTS, {"pipeline", "layerpipe"}),
    "microbatches": (4, {"pipeline"}),
    "batch_norm": ("whole_batch", {"pipeline"}),
    "chunks": (2, {"pipeline"}),
    "group": (2, {"pipeline"}),
    "recompute": ("auto", {"pipeline"}),
    "replicas": (2, {"pipeline"}),
    "stages": (("dense", "dense_1"), {"pipeline"}),
    "check_loss": (False, {"pipeline"}),
    "fall_back": (True, {"pipeline"}),
    "first_steps": ("cut", {"pipeline"}),
    "loop_parts": (3, {"pipeline"}),
    "compare": (True, {"single_device", "pipeline", "layerpipe", "data_parallel"}),
    "weights": ("ema", {"layerpipe"}),
    "drain_steps": (5, {"layerpipe"}),
}
# Only some policies read these.
WITH = {"k": "reverse_first_k", "chunks": "interleaved_1f1b", "group": "modulo"}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("HOROVOD_RANK", "HOROVOD_SIZE", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def test_every_option_is_in_the_list():
    named = {name for options in MODES.values() for name in options.defaults()}
    assert named == OPTIONS.keys() | ALL.keys()
    assert {
        "single_device": tf_ooo.SingleDevice,
        "data_parallel": tf_ooo.DataParallel,
        "pipeline": tf_ooo.Pipeline,
        "layerpipe": tf_ooo.LayerPipe,
    } == MODES


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_in_every_mode(mode, name):
    """Accepted, by name and typed, or refused with the option, the mode, and the modes that it belongs to."""
    value, owners = OPTIONS[name]
    given = {name: value, "schedule": WITH.get(name, "auto")}
    if mode in owners:
        typed = MODES[mode](**given)
        assert getattr(typed, name) == value
        assert options_for_fit(mode, **given) == typed == options_for_fit(typed)
        return
    for make in (MODES[mode], functools.partial(Options, mode), functools.partial(OOOBackprop, mode)):
        with pytest.raises(OptionsError) as raised:
            make(**{name: value})
        text = str(raised.value)
        assert text.startswith(f"{name}={value!r:.80} ")
        assert {known for known in MODES if f"mode={known!r}" in text} == {mode, *owners}


@pytest.mark.parametrize("mode", MODES)
def test_what_all_modes_share(mode):
    typed = MODES[mode](**ALL)
    assert options_for_fit(mode, **ALL) == typed
    assert {name: getattr(typed, name) for name in ALL} == ALL


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIONS)
def test_asking_for_nothing_of_another_mode(mode, name):
    """A program that hands its own options on, most of them left at their defaults, goes on working."""
    default = next(options.defaults()[name] for options in MODES.values() if name in options.defaults())
    assert Options(mode=mode, **{name: default}).typed == MODES[mode]()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", POLICIES)
def test_every_schedule_in_every_mode(mode, schedule):
    trained_by = POLICIES[schedule].trains
    if mode in trained_by:
        assert MODES[mode](schedule=schedule).schedule == schedule
        return
    with pytest.raises(
        OptionsError, match=f"schedule='{schedule}' is none of mode='{mode}': it needs "
    ) as raised:
        MODES[mode](schedule=schedule)
    assert all(f"mode='{name}'" in str(raised.value) for name in trained_by)


def test_typed_options_stand_in_the_place_of_all_others():
    typed = tf_ooo.Pipeline(devices=2, schedule="zb_v")
    assert OOOBackprop(typed)._life.mode.options is typed
    assert OOOBackprop(tf_ooo.Options(mode="pipeline", devices=2))._life.mode.options == Pipeline(devices=2)
    for more in ({"schedule": "zb_h1"}, {"strict": True}, {"microbatches": 4}, {"profile_steps": 0}):
        name, value = next(iter(more.items()))
        with pytest.raises(OptionsError, match=f"{name}={value!r} beside Pipeline\\(...\\): write Pipeline"):
            OOOBackprop(typed, **more)
    with pytest.raises(OptionsError, match="strict=True beside Options"):
        OOOBackprop(tf_ooo.Options(), strict=True)
    with pytest.raises(OptionsError, match="mode=3 is not accepted"):
        OOOBackprop(3)


def test_typed_options_of_functions():
    typed = tf_ooo.SingleDevice(strict=True)
    assert tf_ooo.function(lambda x: x, mode=typed).options is typed
    assert tf_ooo.function(lambda x: x, strict=True).options == typed
    with pytest.raises(OptionsError, match="schedule='in_order' beside SingleDevice"):
        tf_ooo.function(lambda x: x, mode=typed, schedule="in_order")
    with pytest.raises(OptionsError, match=r"enabled\(\) accepts 'single_device'"):
        tf_ooo.enabled(tf_ooo.DataParallel())
    tf_ooo.enabled(typed)


def test_options_are_values():
    typed = tf_ooo.LayerPipe(devices=3, weights="ema")
    by_name = tf_ooo.Options(mode="layerpipe", devices=3, weights="ema")
    assert by_name.typed == typed
    assert by_name.weights == "ema"
    for value in (typed, by_name):
        assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value
        assert hash(value) == hash(copy.copy(value))
        with pytest.raises(AttributeError):
            value.weights = "latest"
    assert dataclasses.replace(typed, weights="latest") == LayerPipe(devices=3, weights="latest")
    assert repr(by_name) == "Options(mode='layerpipe', devices=3, weights='ema')"


class TestAuto:
    """One device, and in ``fit`` data parallel where a launcher started several processes."""

    @pytest.fixture
    def _launched(self, monkeypatch):
        monkeypatch.setenv("HOROVOD_RANK", "0")
        monkeypatch.setenv("HOROVOD_SIZE", "2")

    def test_one_process(self):
        assert options_for_fit("auto") == options_for_fit(Options()) == SingleDevice()
        assert options_for_fit("auto", streams=2) == SingleDevice(streams=2)
        for name in ("compression", "op"):
            said = f"{name}=.* needs mode='data_parallel' .*; mode='auto' is 'single_device' here"
            with pytest.raises(OptionsError, match=said):
                OOOBackprop(**{name: OPTIONS[name][0]})

    @pytest.mark.usefixtures("_launched")
    def test_launched_processes(self):
        assert options_for_fit("auto", compression="fp16") == DataParallel(compression="fp16")
        assert options_for_fit(Options(compression="fp16")) == DataParallel(compression="fp16")
        assert options_for_fit(Options(dump_dir="out")) == DataParallel(dump_dir="out")
        assert tf_ooo.function(lambda x: x, mode="auto", streams=2).options == SingleDevice(streams=2)
        with pytest.raises(
            OptionsError, match="streams=2 needs mode='single_device'; mode='auto' is 'data_parallel'"
        ):
            OOOBackprop(streams=2)
        with pytest.raises(OptionsError, match="compression='fp16' needs mode='data_parallel'"):
            tf_ooo.enabled(Options(compression="fp16"))
        with pytest.raises(OptionsError, match="microbatches=2 needs mode='pipeline'"):
            Options(microbatches=2)


def test_defaults():
    assert Options().resolved_mode == "single_device"
    assert Options().may_fall_back
    assert not Options(schedule="in_order").may_fall_back


def test_layerpipe():
    for wrong in (
        {"weights": "stashed"},
        {"drain_steps": 0},
        {"rate_warmup_steps": 3},
        {"accumulate_steps": 4},
        {"schedule": "pipedream_2bw"},
    ):
        with pytest.raises(OptionsError):
            Options(mode="layerpipe", **wrong)


def test_a_pipeline_alone_refuses_what_it_would_not_average(monkeypatch):
    """Gradients are added up, not compressed or weighted otherwise.  One of ``horovodrun -np 1`` may."""
    for name, value in (("op", "Sum"), ("compression", "fp16"), ("weighting", "samples")):
        for replicas in (None, 1, 2, "auto"):
            options = Pipeline(**{name: value}, replicas=replicas)
            with pytest.raises(
                OptionsError, match=f"^{name}='{value}' is for several processes.*leave {name} out"
            ):
                OOOBackprop(options)
    monkeypatch.setenv("HOROVOD_RANK", "0")
    for size in ("1", "2"):
        monkeypatch.setenv("HOROVOD_SIZE", size)
        assert OOOBackprop(Pipeline(compression="fp16"))._life.mode.options.compression == "fp16"


def test_options_of_pipelines_alone():
    with pytest.raises(OptionsError, match="write a list"):
        Options(mode="pipeline", devices="GPU:1,GPU:2")
    with pytest.raises(OptionsError, match="write a list"):
        Options(mode="pipeline", devices="GPU:0")


@pytest.mark.parametrize(
    ("name", "value"),
    [("mode", "fast"), ("schedule", 3), ("memory_limit_bytes", 0), ("memory_limit_bytes", True),
     ("profile_steps", -1), ("profile_steps", 1.5), ("strict", "yes"), ("timeline", 3), ("dump_dir", ""),
     ("engine", "mpi"), ("op", "average"), ("compression", "int8"), ("weighting", 1),
      ("lockstep", "batch"), ("stop_timeout_s", -1)],
)  # fmt: skip
def test_bad_value_names_option_and_value(name, value):
    mode = "data_parallel" if "data_parallel" in OPTIONS.get(name, ((), ()))[1] else "auto"
    with pytest.raises(OptionsError) as caught:
        Options(**{"mode": mode, name: value})
    assert f"{name}={value!r}" in str(caught.value)
    assert "accepted:" in str(caught.value)
    assert isinstance(caught.value, OOOError)


@pytest.mark.parametrize("kind", MODES.values())
def test_options_without_their_names(kind):
    name = kind.__name__
    with pytest.raises(OptionsError, match=rf"{name}\(4\): options are given by name, {name}\("):
        kind(4)


def test_a_long_value_is_shortened():
    with pytest.raises(OptionsError) as caught:
        Options(mode="pipeline", schedule="x" * 10_000)
    assert len(str(caught.value)) < 400


def test_did_you_mean():
    with pytest.raises(OptionsError, match="did you mean 'fast_forward'"):
        Options(schedule="fast_foward")
    with pytest.raises(OptionsError, match="did you mean 'schedule'"):
        Options.from_arguments(shedule="auto")


def test_data_parallel_is_for_fit():
    with pytest.raises(OptionsError, match="model.fit.*tf_ooo.function accepts 'single_device'"):
        tf_ooo.function(lambda x: x, mode="data_parallel")
    with pytest.raises(OptionsError, match="model.fit"):
        tf_ooo.enabled(Options(mode="data_parallel"))


def test_k_is_for_reverse_first_k():
    assert Options(mode="data_parallel", schedule="reverse_first_k", k=0).k == 0
    with pytest.raises(OptionsError, match="k=3 goes with schedule='reverse_first_k' only"):
        Options(mode="data_parallel", schedule="search", k=3)
    with pytest.raises(OptionsError, match="k=-1"):
        Options(mode="data_parallel", schedule="reverse_first_k", k=-1)


def test_weighting_by_samples_is_an_average():
    with pytest.raises(OptionsError, match="weighting='samples' goes with op='Average'"):
        Options(mode="data_parallel", weighting="samples", op="Sum")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, []),
        ({"streams": 1, "unroll": None}, []),  # as if they were not given
        ({"streams": 2, "gains": "g"}, ["streams=2, gains='g': no effect without jit_compile=True"]),
        (
            {"unroll": 2, "store_activations": "all", "side_updates": True, "any_platform": True},
            ["unroll=2, store_activations='all', side_updates=True, any_platform=True: no effect without "
             "jit_compile=True"],
        ),
        ({"measure_gains_s": 0.0}, ["measure_gains_s=0.0: no effect without jit_compile=True"]),
    ],
)  # fmt: skip
def test_options_for_xla_are_named_where_it_does_not_compile(options, said, caplog):
    report = Report()
    note_unused(report, SingleDevice(**options).given_for_xla)
    assert report.notes == said == caplog.messages


def test_a_new_policy_without_streams_is_none_for_steps_that_xla_compiles(monkeypatch):
    """Nor does it take the place of the one that auto means there."""
    new = dataclasses.replace(POLICIES["in_order"], name="new", backward_order=None)
    monkeypatch.setitem(POLICIES, "new", new)
    assert "new" in schedules_of("single_device")
    assert schedules_of("single_device", streams=True) == ("multi_stream",)
    assert planning.USUAL.name == "multi_stream"
    with pytest.raises(OptionsError, match="'new' orders the graph executor; jit_compile=True takes 'auto'"):
        for_function(abs, abs, SingleDevice(schedule="new"), Report())


def test_auto_with_devices_is_a_pipeline_that_may_fall_back():
    chosen = Options(devices=4, microbatches=4).typed
    assert (chosen.mode, chosen.replicas, chosen.fall_back, chosen.microbatches) == (
        "pipeline",
        "auto",
        True,
        4,
    )
    assert not Options(devices=4, fall_back=False).typed.fall_back
    assert Options(devices=4, replicas=None).typed.replicas is None
    named = Options(devices=4, schedule="gpipe").typed
    assert (named.fall_back, named.recompute) == (False, "none")
    assert chosen.recompute == "auto"
    assert Options(devices=4, recompute="all").typed.recompute == "all"
    assert Options(devices=1).typed == Options().typed
    with pytest.raises(OptionsError, match="mode='auto' is 'pipeline' here"):
        Options(devices=4, weights="ema")


def test_a_name_of_another_mode_is_meant():
    """A callback without a mode knows the options of all modes."""
    with pytest.raises(OptionsError, match=r"did you mean 'devices'\?.*known: .*microbatches"):
        Options(device=2)
    with pytest.raises(OptionsError, match=r"did you mean 'microbatches'\?"):
        Options(mode="pipeline", micro_batches=2)
