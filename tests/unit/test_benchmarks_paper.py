"""The paper's networks: what was published, the authors' schedules, predictions, settings, the page."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace

import keras
import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.cases import cases_of
from benchmarks.models import EXAMPLES, ScriptNetwork, loaded, network_of
from benchmarks.paper import command, predicted
from benchmarks.paper.networks import MODES, NETWORKS, SIZES, network_named
from benchmarks.paper.predicted import FASTFORWARD, GPIPE, IN_ORDER, MODULO, PUSH, RING, Pipeline
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.errors import OptionsError
from tf_ooo.planning.model.schedule import Task
from tf_ooo.planning.simulation.simulator import simulate, validate

PAGE = EXAMPLES.parents[1] / "docs" / "paper.md"
ARCHIVE = EXAMPLES.parents[1] / "benchmarks" / "archive" / "rows" / "paper"
STOCK = ("gpipe", "horovod", "horovod_k", "local")
LAYER = LayerCosts(1.0, 2.0, 3.0, output_bytes=1.0)


def invoked(*arguments):
    return CliRunner().invoke(main, ["paper", *arguments])


def of_equal_layers(style, count=4, devices=4, microbatches=6, **more):
    return Pipeline((LAYER,) * count, devices, 1, microbatches, style, **more)


def ran(pipeline):
    """Return when each task of the authors' schedule begins and ends; messages take next to no time."""
    timeline = simulate(pipeline.schedule(), pipeline.layers)
    return {event.task: event for event in timeline.iter_events()}


def test_twelve_networks_and_named_depths():
    assert len(NETWORKS) == 12
    assert {network.mode.name for network in NETWORKS.values()} == set(MODES)
    said = invoked("list").output
    assert all(name in said for name in NETWORKS)
    assert "8 GPUs, 30 micro-batches, fastforward_push" in said
    titles = [network_named(name).title for name in ("densenet264", "resnet18", "resnet200")]
    assert titles == ["DenseNet-264", "ResNet-18", "ResNet-200"]
    assert network_named("resnet18").runs[0].assumed
    with pytest.raises(OptionsError, match="'vgg16' is none of the paper's networks; they are densenet121, "):
        network_named("vgg16")


@pytest.mark.parametrize("name", [*NETWORKS, "densenet201", "resnet34"])
def test_scripts_have_all_sizes_and_what_the_table_sets(name):
    network = network_named(name)
    assert tuple(loaded(network.script).SIZES) == SIZES
    for size in SIZES:
        given = network.at(size, {}).given()
        assert given.batch > 0
    assert vars(given).items() >= dict(network.runs[0].settings).items()  # full is the published size


@pytest.mark.parametrize("count", [(12, 8), (24, 16), (36, 24), (48, 32)])
def test_the_first_gpu_has_one_layer_and_the_next_ones_two(count):
    layers, devices = count
    stages = of_equal_layers(PUSH, layers, devices).stages(PUSH)
    more = layers - devices
    assert [last - first + 1 for first, last, _ in stages] == [1, *[2] * more, *[1] * (devices - more - 1)]
    assert [device for _, _, device in stages] == list(range(devices))


def test_the_table_stands_on_the_last_gpu_but_for_gpipe():
    pipeline = of_equal_layers(PUSH, 6, ends=True, table_bytes=1.0)
    assert pipeline.stages(PUSH) == [(0, 0, 3), (1, 1, 0), (2, 2, 1), (3, 3, 2), (4, 5, 3)]
    assert pipeline.stages(GPIPE) == [(0, 1, 0), (2, 2, 1), (3, 3, 2), (4, 5, 3)]
    assert replace(pipeline, table_bytes=0.0).stages(PUSH) == pipeline.stages(GPIPE)


def test_push_in_its_authors_words():
    """The last stage holds all dW; others run dW(m) before dO(m + 1), with p - s micro-batches under way."""
    pipeline = of_equal_layers(PUSH)
    validate(pipeline.schedule(), pipeline.layers)
    events = ran(pipeline)
    last_s = events[Task("dO", 3, 5)].end_s
    assert all(events[Task("dW", 3, m)].start_s >= last_s for m in range(6))
    for stage in range(3):
        for m in range(5):
            assert events[Task("dW", stage, m)].end_s <= events[Task("dO", stage, m + 1)].start_s
        for late in range(2):
            assert events[Task("F", stage, 4 + late)].start_s >= events[Task("dW", stage, late + stage)].end_s
    # The last stage: F and dO of six micro-batches as they come, then six dW; three forwards come before.
    assert max(event.end_s for event in events.values()) > 3 + 6 * 3 + 6 * 3


def test_where_the_last_stage_holds_nothing_back():
    events = ran(of_equal_layers(PUSH, holds=False))
    assert events[Task("dW", 3, 0)].start_s < events[Task("dO", 3, 5)].end_s


def test_fastforward_runs_all_forwards_of_the_stage_before_the_last_first():
    events = ran(of_equal_layers(FASTFORWARD))
    assert events[Task("dO", 2, 0)].start_s >= events[Task("F", 2, 5)].end_s


def test_modulo_delays_dw_by_a_round_on_the_last_gpu():
    pipeline = of_equal_layers(MODULO, 8, microbatches=4)
    assert [device for _, _, device in pipeline.stages(MODULO)] == [0, 1, 2, 3] * 2
    events = ran(pipeline)
    for m in range(4):
        assert events[Task("dW", 7, m)].start_s >= events[Task("dO", 3, m)].end_s
        assert events[Task("dW", 3, m)].start_s >= events[Task("dO", 3, 3)].end_s


def test_links_between_gpus():
    pipeline = Pipeline((LAYER,) * 16, 16, 2, 1, PUSH)
    assert [pipeline.bytes_per_s(n, n + 1, RING) for n in range(8)] == [5e10] * 7 + [3.125e9]
    assert pipeline.bytes_per_s(7, 0, RING) == 5e10
    assert [pipeline.bytes_per_s(n, n + 1, IN_ORDER) for n in range(7)] == [
        2.5e10, 5e10, 5e10, 1e10, 2.5e10, 5e10, 5e10,
    ]  # fmt: skip


def test_gpipe_sends_the_tables_gradient_for_each_micro_batch():
    free = of_equal_layers(PUSH, 6, microbatches=2, ends=True, table_bytes=1.0)
    # 10 GB/s between the last GPU and the first: 5 s a micro-batch, behind the last stage's dW of each.
    slow = replace(free, devices=4, table_bytes=2.5e10 * 5)
    # The last stage (two layers): F 2, dO and dW 10 each; its first F begins at 4.
    assert slow.gpipe_s() == pytest.approx(max(free.gpipe_s(), 4 + 2 * 2 + 2 * 10 + 5), rel=1e-3)


def test_no_script_can_allocate_modulo_in_pre_training():
    for network in NETWORKS.values():
        for run in network.runs if network.script == "bert" else ():
            is_multiple = run.settings["layers"] % run.devices == 0
            assert is_multiple == (run.style != PUSH)


def test_predictions_of_a_network():
    done = invoked("run", "rnn16", "--only", "predicted")
    assert done.exit_code == 0, done.output
    assert "published over GPipe: 1.41 to 1.99" in done.output
    (of,) = predicted.predictions(NETWORKS["rnn16"], {"layers": 8})
    assert of.run.settings["layers"] == 8
    assert len(of.authors) == 2
    assert of.auto >= 1


def test_predictions_follow_a_users_layers():
    done = invoked("run", "bert12", "--layers", "6", "--option", "task=finetune", "--option", "hidden=3",
                   "--only", "predicted")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "hidden is not counted: predictions have the published one" in done.output
    assert "4 micro-batches, fastforward (assumed): " in done.output  # six layers are no multiple of 4 GPUs
    assert "modulo (assumed)" not in done.output
    refused = invoked("run", "bert12", "--layers", "2", "--only", "predicted")
    assert "layers=2: a published run has 8 GPUs" in refused.output


def test_fine_tuning_with_modulo_is_in_the_published_range():
    run = next(run for run in NETWORKS["bert24"].runs if run.style == MODULO)
    pipeline = predicted.pipeline_of(NETWORKS["bert24"], run)
    low, high = MODES["pipeline"].published
    assert low < pipeline.gpipe_s() / pipeline.step_s() < high


def test_updates_wait_for_the_forward_of_three_layers_before():
    layers = (LayerCosts(1.0, 1.0, 1.0, weight_bytes=1.0),) * 6
    on = {"mode": "data_parallel", "devices": 2, "link": predicted.Link(0.0, 1.0)}
    waiting_s = predicted.first_k_s(layers, 6, on)
    assert waiting_s >= predicted._step_s(layers, "reverse_first_k", {**on, "k": 6}) - 1e-9


def test_why_takes_settings_away():
    done = invoked("why", "bert12")
    assert done.exit_code == 0, done.output
    assert done.output.count("all of the authors' settings") == 3
    assert done.output.count("GPipe sends no gradient of the table") == 1  # of pre-training alone


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bert12", "--option", "growth=12"], "there is no 'growth'; there are batch, heads, "),
        (["bert12", "--option", "task=finetuning"], "task='finetuning': expected pretrain or finetune"),
        (["bert12", "--option", "width=65"], "width=65 is no multiple of heads=12"),
        (["bert12", "--option", "width=wide"], "width='wide': expected a whole number above 0"),
        (["resnet50", "--layers", "35"], "layers=35: a ResNet has 18, 34, 50, 101, 152, 200"),
        (["densenet121", "--option", "channels=middle"], "channels='middle': expected first or last"),
        (["bert12", "--option", "width"], "width='': expected a whole number above 0"),
        (["vgg16"], "'vgg16' is none of the paper's networks"),
    ],
)
def test_what_is_refused(arguments, said):
    done = invoked("run", *arguments, "--only", "predicted")
    assert said in " ".join(done.output.split())
    assert done.exit_code == 2


def test_a_case_has_the_ways_of_its_modes_suite():
    case = command.case_of(NETWORKS["densenet121"], "tiny", {"growth": 4})
    like = cases_of("one_cpu", quick=True)[0]
    assert (case.ways, case.runner, case.turns) == (like.ways, like.runner, like.turns)
    network = network_of(case.parameters)
    assert (network.script, network.given().growth) == ("densenet", 4)


def archived(files):
    """Return what the last run of each network and task at size tiny measured, over the best baseline."""
    last, texts = {}, defaultdict(list)
    for rows in files:
        gains = defaultdict(dict)
        for row in rows:
            if row.get("size") == "tiny" and "speedup" in row:
                task = command._TASKS.get(row["settings"].get("task"), "")
                gains[row["network"], task][row["schedule"]] = row["speedup"]
        last |= gains
    for (name, task), of in last.items():
        best = max((of[way] for way in STOCK if way in of), default=1.0)
        ours = ", ".join(f"{way} {gain / best:.2f}" for way, gain in of.items() if way not in STOCK)
        texts[name].append(f"{task}: {ours}" if task else ours)
    return {name: "; ".join(of_tasks) for name, of_tasks in texts.items()}


def test_no_network_reached_the_published_range_in_its_last_kept_run():
    """The first line of the page."""
    kept = archived(json.loads(path.read_text())["rows"] for path in sorted(ARCHIVE.glob("*.json")))
    assert PAGE.read_text().splitlines()[2].startswith("**No network reached the published range here**")
    assert kept == {network.name: network.measured for network in NETWORKS.values()}
    for name, text in kept.items():
        gains = [float(word.rstrip(",;")) for word in text.split() if word[0].isdigit()]
        assert max(gains) < NETWORKS[name].mode.published[0], name


def test_the_page_has_these_predictions():
    """``python -m benchmarks paper all`` prints its table; a few of its lines are made here."""
    page = PAGE.read_text()
    for line in command.table([NETWORKS["feed_forward"], NETWORKS["bert24"]]):
        assert line in page


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("densenet121", keras.optimizers.SGD, {"learning_rate": 0.1}),
        ("mobilenet_v3_large", keras.optimizers.SGD, {"learning_rate": 0.1}),
        ("resnet50", keras.optimizers.RMSprop, {"learning_rate": 0.001, "rho": 0.9}),
        ("bert24", keras.optimizers.AdamW, {"weight_decay": 0.01, "global_clipnorm": 1.0, "epsilon": 1e-6}),
    ],
)
def test_optimizers_are_the_authors(name, kind, settings):
    optimizer = ScriptNetwork(NETWORKS[name].script, "tiny").optimizer()
    assert type(optimizer) is kind
    config = optimizer.get_config()
    assert {key: config[key] for key in settings} == pytest.approx(settings)


def test_berts_rate_falls_linearly():
    rate = ScriptNetwork("bert", "tiny", {"task": "finetune"}).optimizer()._learning_rate
    assert [float(rate(step)) for step in (0, 5000, 10_000)] == pytest.approx([2e-5, 1e-5, 0])


def test_channels_first():
    of = ScriptNetwork("densenet", "tiny", {"channels": "first"}, "generated")
    x, _ = of.data(2)
    assert x.shape == (2, 3, 32, 32)
    last, _ = replace(of, settings={}).data(2)
    np.testing.assert_array_equal(x.transpose(0, 2, 3, 1), last)
    with pytest.raises(ValueError, match="channels=first takes a GPU"):
        of.build()
