"""FLOP and parameters of the model builders against the published numbers."""

import dataclasses

import pytest

from tf_ooo.costs.devices import DEVICES, DeviceModel, Work, device, elementwise, gemm, usual_precision
from tf_ooo.costs.layer_costs import check_layers
from tf_ooo.costs.layer_work import (
    Conv,
    conv_layer,
    dense_layer,
    transformer_activation_bytes,
    transformer_flop,
)
from tf_ooo.costs.models import MODELS, costs_on, model_costs, resnet, transformer
from tf_ooo.errors import CostError

FLOP_ONLY = DeviceModel(flop_per_s=1.0, bytes_per_s=float("inf"))


def _gmac(works):
    return sum(work.flop()[0] for work in works) / 2e9


def _million_parameters(works):
    return sum(work.parameters for work in works) / 1e6


@pytest.mark.parametrize(
    ("name", "options", "gmac", "parameters", "layers"),
    [
        # torchvision's model tables (GMAC, parameters), which agree with the papers.
        ("vgg16", {}, 15.47, 138.36, 16),
        ("resnet18", {}, 1.81, 11.69, 21),
        ("resnet50", {}, 4.09, 25.56, 54),
        ("resnet101", {}, 7.80, 44.55, 105),
        ("densenet121", {"growth": 32}, 2.83, 7.98, 121),
        ("mobilenet_v3_large", {"alpha": 1.0}, 0.217, 5.48, 64),
    ],
)
def test_flop_and_parameters_are_the_published_ones(name, options, gmac, parameters, layers):
    works = MODELS[name](batch=1, **options)
    assert _gmac(works) == pytest.approx(gmac, rel=0.015)
    assert _million_parameters(works) == pytest.approx(parameters, rel=0.003)
    assert len(works) == layers


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"transformer"}))
def test_work_grows_with_the_batch_and_layers_read_earlier_ones(name):
    one, four = MODELS[name](batch=1), MODELS[name](batch=4)
    assert _gmac(four) == pytest.approx(4 * _gmac(one))
    costs = check_layers(costs_on(four, device("v100")))
    assert costs[0].inputs == ()
    assert all(layer.inputs for layer in costs[1:])
    assert all(0 < share <= 1 for layer in costs for share in layer.occupancy)
    # Every layer but the last is read by another one.
    assert {i for layer in costs for i in layer.inputs} == set(range(len(costs) - 1))


def test_resnet_last_convolution_of_a_block_reads_the_shortcut():
    works = {work.name: (index, work) for index, work in enumerate(resnet(50, batch=1))}
    _, conv3 = works["stage1/block1/conv3"]
    assert conv3.inputs == (works["stage1/block1/shortcut"][0], works["stage1/block1/conv2"][0])


def test_dense_block_reads_all_earlier_layers_of_the_block():
    works = MODELS["densenet121"](batch=1)
    assert works[5].inputs == (0, 2, 4)
    assert works[3].inputs == (0, 2)
    assert works[13].name.startswith("transition1")
    assert len(works[13].inputs) == 7


def test_transformer_products_add_up_to_the_published_formula():
    hidden, heads, seq, microbatch = 2304, 24, 1024, 6
    (layer,) = transformer(1, hidden, heads, seq, microbatch)
    assert layer.flop() == pytest.approx(transformer_flop(hidden, seq, microbatch))
    sbh = seq * microbatch * hidden
    assert transformer_flop(hidden, seq, microbatch) == (
        sbh * (24 * hidden + 4 * seq),
        sbh * (24 * hidden + 8 * seq),
        sbh * 24 * hidden,
    )
    assert layer.output_bytes == 2 * sbh
    assert layer.activation_bytes == pytest.approx(sbh * (34 + 5 * heads * seq / hidden))
    assert layer.weight_grad_bytes == 32 * sbh


def test_transformer_seconds_are_flop_on_a_device_without_memory():
    (costs,) = model_costs("transformer", FLOP_ONLY, layers=1, hidden=64, heads=4, seq=8, microbatch=2)
    forward, output_grad, weight_grad = transformer_flop(64, 8, 2)
    assert costs.forward_s == pytest.approx(forward)
    assert costs.output_grad_s == pytest.approx(output_grad)
    assert costs.weight_grad_s == pytest.approx(weight_grad)
    assert costs.occupancy == (1.0, 1.0, 1.0)


def test_published_parameters_of_gpt_and_bert_layers():
    # GPT-3 175B without embedding: 96 layers of 12288; BERT-Large: 24 of 1024 (302 M).
    assert _million_parameters(transformer(96, 12288, 96, 2048, 1)) == pytest.approx(173_961, rel=1e-3)
    assert _million_parameters(transformer(24, 1024, 16, 128, 1)) == pytest.approx(302.3, rel=1e-3)
    assert transformer_activation_bytes(1024, 16, 128, 1) == 128 * (34 * 1024 + 5 * 16 * 128)


def test_convolution_by_hand():
    shape = Conv(batch=2, size=8, channels_in=3, channels_out=5, kernel=3, stride=2)
    assert shape.size_out == 4
    assert shape.weights == 135
    assert shape.flop == 2 * (2 * 16 * 5) * 27
    layer = conv_layer(shape, name="c")
    assert layer.flop() == (shape.flop,) * 3
    assert layer.parameters == 135 + 10
    assert layer.output_bytes == 2 * 16 * 5 * 4
    assert layer.activation_bytes == (2 * 64 * 3 + 2 * 16 * 5) * 4
    assert conv_layer(shape, first=True).flop()[1] == 0


def test_depthwise_convolution_by_hand():
    shape = Conv(batch=1, size=4, channels_in=6, channels_out=6, kernel=3, groups=6)
    assert shape.weights == 54
    assert shape.flop == 2 * 16 * 6 * 9


def test_dense_layer_by_hand():
    layer = dense_layer(4, 10, 3)
    assert layer.flop() == (240, 240, 240)
    assert layer.parameters == 33
    assert (layer.activation_bytes, layer.output_bytes) == (4 * 13 * 4, 48)


def test_roofline_launch_and_share_by_hand():
    model = DeviceModel(flop_per_s=100, bytes_per_s=10, launch_s=0.5, parallel_width=4)
    compute = Work(flop=200, moved_bytes=10, pieces=2)
    memory = Work(flop=1, moved_bytes=30)
    assert model.seconds(compute) == 2 / 0.5 + 0.5
    assert model.seconds(memory) == 3 + 0.5
    assert model.seconds(compute, memory) == 8
    assert model.occupancy([compute, memory]) == 5 / 8
    assert model.occupancy([]) == 1


def test_update_reads_and_writes_the_slots():
    model = DeviceModel(flop_per_s=1, bytes_per_s=4)
    layer = dense_layer(1, 1, 1)
    assert layer.costs(model).update_s == 6
    adam = layer.costs(model, slots=2)
    assert (adam.update_s, adam.weight_bytes, adam.slot_bytes) == (14, 8, 16)


def test_gemm_by_hand():
    work = gemm(128, 65, 2048, 2, batch=3)
    assert work.flop == 2 * 3 * 128 * 65 * 2048
    assert work.moved_bytes == 2 * 3 * (128 * 2048 + 2048 * 65 + 128 * 65)
    assert work.pieces == 3 * 2 * 2 * 2
    assert elementwise(2048, 3, 4) == Work(0, 2048 * 12, 2)


def test_derated_and_known_devices():
    v100 = device("v100")
    assert v100.derated(0.5, 0.25).flop_per_s == v100.flop_per_s / 2
    assert v100.derated(0.5, 0.25).bytes_per_s == v100.bytes_per_s / 4
    assert all(name == model.name for name, model in DEVICES.items())
    with pytest.raises(CostError, match="share of the peak"):
        v100.derated(0)


@pytest.mark.parametrize("field", ["flop_per_s", "bytes_per_s", "parallel_width"])
def test_bad_device_names_the_field(field):
    with pytest.raises(CostError, match=field):
        dataclasses.replace(device("a100"), **{field: 0})
    with pytest.raises(CostError, match="launch_s"):
        dataclasses.replace(device("a100"), launch_s=-1)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(CostError, match="titan-xp"):
        device("gtx")
    with pytest.raises(CostError, match="resnet50"):
        model_costs("alexnet", device("v100"))
    with pytest.raises(CostError, match="vgg16.*growth"):
        model_costs("vgg16", device("v100"), batch=1, growth=3)
    with pytest.raises(CostError, match="depth must be one of"):
        resnet(49, batch=1)


def test_published_peaks_of_every_precision():
    """Dense figures of the makers' data sheets."""
    assert device("h200", "bf16").flop_per_s == 989.5e12
    assert device("h100", "fp32") == device("h100")
    assert device("b200", "tf32").flop_per_s == 1.1e15
    assert device("a100-fp16") == device("a100", "fp16") == device("a100-fp16", "fp16")
    for name in ("v100", "t4", "a100", "h100", "h200", "b200", "l40s", "rtx3090", "rtx4090", "rtx5090"):
        assert device(name, "fp16").flop_per_s > device(name).flop_per_s
    assert {device(name).bytes_per_s for name in ("xeon-8480", "epyc-9654")} == {307.2e9, 460.8e9}


def test_a_precision_that_a_device_lacks_is_refused_with_what_it_has():
    with pytest.raises(CostError, match=r"^device 'v100' has no bf16; it has fp32, fp16$"):
        device("v100", "bf16")
    with pytest.raises(CostError, match="^device 'h100-bf16' is h100 at bf16, not at tf32"):
        device("h100-bf16", "tf32")
    with pytest.raises(CostError, match="precision='int8' is not accepted; accepted: fp32, tf32, bf16, fp16"):
        device("h100", "int8")


@pytest.mark.parametrize(
    ("name", "kind", "precision"),
    [("a100", "float32", "tf32"), ("v100", "float32", "fp32"), ("a100-fp16", "float32", "fp16"),
     ("h100", "bfloat16", "bf16"), ("v100", "float16", "fp16"), ("xeon-8480", "float32", "fp32")],
)  # fmt: skip
def test_what_tensorflow_multiplies_in(name, kind, precision):
    """float32 goes through tensor cores that have TF32: TensorFlow's default."""
    assert usual_precision(name, kind) == precision
