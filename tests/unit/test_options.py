from __future__ import annotations

import pytest

from tf_ooo.errors import OOOError, OptionsError
from tf_ooo.modes.by_name import Options


def test_defaults():
    assert Options().resolved_mode == "single_device"
    assert Options().may_fall_back
    assert not Options(schedule="in_order").may_fall_back


def test_layerpipe():
    options = Options(mode="layerpipe", weights="ema", drain_steps=5, devices=2)
    assert options.resolved_mode == "layerpipe"
    assert Options(mode="layerpipe", schedule="pipedream").schedule == "pipedream"
    for wrong in (
        {"mode": "layerpipe", "schedule": "zb_v"},
        {"mode": "layerpipe", "weights": "stashed"},
        {"mode": "layerpipe", "drain_steps": 0},
        {"mode": "layerpipe", "memory_limit_bytes": 10**9},
        {"mode": "layerpipe", "dump_dir": "out"},
        {"mode": "pipeline", "drain_steps": 3},
        {"mode": "pipeline", "rate_warmup_steps": 3},
        {"mode": "layerpipe", "rate_warmup_steps": 0},
        {"mode": "pipeline", "weights": "latest"},
        {"mode": "pipeline", "schedule": "pipedream"},
        {"schedule": "layerpipe"},
        {"mode": "layerpipe", "accumulate_steps": 4},
        {"mode": "layerpipe", "microbatches": 4},
        {"mode": "layerpipe", "schedule": "pipedream_2bw", "accumulate_steps": 0},
        {"mode": "layerpipe", "schedule": "pipedream_2bw", "weights": "ema"},
        {"mode": "layerpipe", "schedule": "pipedream_2bw", "rate_warmup_steps": 3},
        {"mode": "pipeline", "schedule": "pipedream_2bw"},
    ):
        with pytest.raises(OptionsError):
            Options(**wrong)


@pytest.mark.parametrize("mode", ["pipeline", "layerpipe"])
@pytest.mark.parametrize(
    ("name", "value"), [("streams", 2), ("side_updates", True), ("any_platform", True), ("batch_size", 8)]
)
def test_options_that_a_mode_does_not_look_at(mode, name, value):
    with pytest.raises(OptionsError, match=f"{name}={value} is not for mode='{mode}'"):
        Options(mode=mode, **{name: value})


def test_options_of_pipelines_alone():
    with pytest.raises(OptionsError, match="unroll=4 is not for mode='pipeline'"):
        Options(mode="pipeline", unroll=4)
    assert Options(mode="layerpipe", unroll=4).unroll == 4
    with pytest.raises(OptionsError, match="microbatches=4 needs mode='pipeline'"):
        Options(microbatches=4)
    with pytest.raises(OptionsError, match="write a list"):
        Options(mode="pipeline", devices="GPU:1,GPU:2")
    with pytest.raises(OptionsError, match="write a list"):
        Options(mode="pipeline", devices="GPU:0")


@pytest.mark.parametrize(
    ("name", "value"),
    [("mode", "fast"), ("schedule", 3), ("memory_limit_bytes", 0), ("memory_limit_bytes", True),
     ("profile_steps", -1), ("profile_steps", 1.5), ("strict", "yes"), ("timeline", 3), ("dump_dir", ""),
     ("engine", "mpi"), ("op", "average"), ("compression", "int8"), ("weighting", 1), ("lockstep", "batch")],
)  # fmt: skip
def test_bad_value_names_option_and_value(name, value):
    with pytest.raises(OptionsError) as caught:
        Options(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)
    assert "accepted:" in str(caught.value)
    assert isinstance(caught.value, OOOError)


def test_did_you_mean():
    with pytest.raises(OptionsError, match="did you mean 'fast_forward'"):
        Options(schedule="fast_foward")
    with pytest.raises(OptionsError, match="did you mean 'schedule'"):
        Options.from_arguments(shedule="auto")


def test_data_parallel_is_for_fit():
    import tf_ooo

    with pytest.raises(OptionsError, match="model.fit.*tf_ooo.function accepts 'single_device'"):
        tf_ooo.function(lambda x: x, mode="data_parallel")
    with pytest.raises(OptionsError, match="model.fit"):
        tf_ooo.enabled(Options(mode="data_parallel"))


def test_data_parallel_refuses_what_it_does_not_do_yet():
    from tf_ooo.modes.data_parallel import DataParallelFit

    with pytest.raises(OptionsError, match="memory_limit_bytes=1000 does not go with"):
        DataParallelFit(Options(mode="data_parallel", memory_limit_bytes=1000))


@pytest.mark.parametrize("schedule", ["reverse_first_k", "search"])
def test_orders_of_communication_need_data_parallel(schedule):
    Options(mode="data_parallel", schedule=schedule)
    for mode in ("auto", "single_device"):
        with pytest.raises(OptionsError, match="it needs mode='data_parallel'"):
            Options(mode=mode, schedule=schedule)


def test_k_is_for_reverse_first_k():
    assert Options(mode="data_parallel", schedule="reverse_first_k", k=0).k == 0
    with pytest.raises(OptionsError, match="k=3 goes with schedule='reverse_first_k' only"):
        Options(mode="data_parallel", schedule="search", k=3)
    with pytest.raises(OptionsError, match="k=-1"):
        Options(mode="data_parallel", schedule="reverse_first_k", k=-1)


def test_weighting_by_samples_is_an_average():
    with pytest.raises(OptionsError, match="weighting='samples' goes with op='Average'"):
        Options(weighting="samples", op="Sum")
