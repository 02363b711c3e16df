"""Methods of kt-kernel and the formats that they stand for."""

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from checkpoints import SCHEMES
from checkpoints import write as write_tensors
from helpers import assert_right, same_bits
from kt_wrappers import EXPERTS, REVERSED, batch, wrapper, write

from ktmoe import MoELayer, load_experts, synthetic
from ktmoe.compat import methods, weights
from ktmoe.compat.export import RankBuffers
from ktmoe.errors import FormatError, UnavailableError
from ktmoe.experts import PROJECTIONS, ExpertSpec
from ktmoe.quantization import quantize
from ktmoe.weights.formats import FORMATS, fp8, int4
from ktmoe.weights.ggml import GGML
from ktmoe.weights.order import GPTQ
from ktmoe.weights.scales import Factor

#: method -> the formats that it takes, of FORMATS.
TAKEN = {
    "BF16": {"BF16"},
    "MXFP4": {"MXFP4"},
    "RAWINT4": {"INT4"},
    "FP8": {"FP8 per 128x128", "FP8 per 128x128, bf16 scales"},
    "FP8_PERCHANNEL": {"FP8 per row"},
    "GPTQ_INT4": {"GPTQ, symmetric"},
    "MXFP8": {"MXFP8"},
    "NVFP4": {"NVFP4", "NVFP4, divided"},
    "LLAMAFILE": {name for name in FORMATS if FORMATS[name] in GGML.values()},
    **{method: set(FORMATS) for method in ("AMXINT4", "AMXINT8", "MOE_INT4", "MOE_INT8")},
}
#: method -> what writes such a checkpoint.
NEW = {"FP8": "FP8", "FP8_PERCHANNEL": "FP8 per row", "GPTQ_INT4": "GPTQ symmetric", "MXFP8": "MXFP8", "NVFP4": "NVFP4"}


@pytest.mark.parametrize("method", methods.SERVED)
def test_formats(method):
    for name, weight_format in FORMATS.items():
        formats = dict.fromkeys(PROJECTIONS, weight_format)
        if name in TAKEN[method]:
            methods.check_formats(method, methods.SERVED[method], formats, "experts")
        else:
            with pytest.raises(FormatError, match=rf"experts: method '{method}' expects .*, found .* \(gate\)"):
                methods.check_formats(method, methods.SERVED[method], formats, "experts")


def fits(method, weight_format):
    methods.check_formats(method, methods.SERVED[method], {"gate": weight_format}, "experts")


def test_gguf_types_with_and_without_a_factor():
    for weight_format in GGML.values():
        for factor in (None, Factor(per_row=False)):
            fits("LLAMAFILE", replace(weight_format, factor=factor))


def test_groups_and_blocks_of_any_size():
    fits("RAWINT4", int4(128))
    fits("GPTQ_INT4", int4(32, "bf16", GPTQ))
    fits("GPTQ_INT4", int4(order=GPTQ))
    fits("FP8", fp8("ue8m0", (64, 64)))


@pytest.mark.parametrize(("method", "name"), [("GPTQ_INT4", "GPTQ, symmetric"), ("NVFP4", "NVFP4, divided")])
def test_exports_that_kt_kernel_has_not(method, name):
    """Refused before an address is looked at."""
    experts = ExpertSpec(2, 256, 256, dict.fromkeys(PROJECTIONS, FORMATS[name]), "layers.0.experts")
    message = rf"layers.0.experts: kt-kernel has no buffers for GPUs .* of method '{method}': found .* \(gate\)$"
    with pytest.raises(UnavailableError, match=message):
        RankBuffers(method, experts, 1, *[[1]] * 4)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "ue8m0"])
def test_block_scales_are_exported_as_float32(kind):
    """Exactly, whatever they are in the checkpoint."""
    weight_format = fp8(kind)
    experts = ExpertSpec(2, 256, 128, dict.fromkeys(PROJECTIONS, weight_format), "experts")
    w13, w2 = np.full(2 * 256 * 128, 0xA5, np.uint8), np.full(256 * 128, 0xA5, np.uint8)
    w13_scales, w2_scales = np.full(4, np.nan, np.float32), np.full(2, np.nan, np.float32)
    target = RankBuffers("FP8", experts, 1, *([array.ctypes.data] for array in (w13, w13_scales, w2, w2_scales)))
    numbers = 2.0 ** np.arange(-127, -121) * ([1] * 6 if kind == "ue8m0" else [1, 1.5, 1.25, 1.75, 1, 1])
    for projection, these in zip(PROJECTIONS, np.split(numbers, 3), strict=True):
        (part,) = target.parts
        part[projection]["scales"][...] = weight_format.scale.stored(these.reshape(part[projection]["scales"].shape))
    target.finish()
    assert np.array_equal(np.concatenate([w13_scales, w2_scales]).astype(np.float64), numbers)


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(
    ("method", "to"), [("AMXINT4", "int4"), ("AMXINT8", "int8"), ("MOE_INT4", "int4"), ("MOE_INT8", "int8")]
)
def test_methods_that_round(method, to, tmp_path):
    """A bfloat16 checkpoint, or its tensors: the same bits. There is nothing to export."""
    experts = load_experts(write("BF16", tmp_path), 0)
    tensors = [np.stack([experts.matrix(e, p).codes for e in range(EXPERTS)]) for p in PROJECTIONS]
    rounded, batch_ = quantize(experts, to, rule=method.lower()), batch()
    with wrapper(tmp_path, method=method) as w, MoELayer(rounded) as layer:
        y = w.forward(*batch_)
        assert_right(layer, rounded, *batch_, y)
        with pytest.raises(UnavailableError, match=f"no buffers for GPUs that take these weights of method '{method}'"):
            w.submit_write_weight_scale_to_buffer(1, 0, [1], [1], [1], [1])
        w.load_weights_from_tensors(*tensors)
        assert same_bits(w.forward(*batch_), y)
        w.load_weights(REVERSED)
        x, ids, scores = batch_
        assert_right(layer, rounded, x, REVERSED[ids], scores, w.forward(x, ids, scores))


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(("method", "source"), [("AMXINT4", "FP8"), ("AMXINT8", "MXFP8"), ("MOE_INT8", "FP8 per row")])
def test_rounding_weights_that_are_not_bfloat16(method, source, tmp_path):
    synthetic.PUBLISHED[source].write(tmp_path, num_experts=8, hidden=128, intermediate=256, top_k=4)
    experts = load_experts(tmp_path, 0)
    rounded, batch_ = quantize(experts, method[-4:].lower(), rule=method.lower()), batch()
    with wrapper(tmp_path, method=method, moe_intermediate_size=256) as w, MoELayer(rounded) as layer:
        assert_right(layer, rounded, *batch_, w.forward(*batch_))


@pytest.mark.usefixtures("nothing_is_left")
def test_layers_of_different_formats(tmp_path):
    """Each has the loader of its own tensors; the checkpoint is open once."""
    methods_ = {1: ("fp8 per row", "FP8_PERCHANNEL"), 2: ("bf16", "BF16"), 3: ("nvfp4", "NVFP4")}
    tensors = {}
    for number, (scheme, _) in methods_.items():
        tensors |= SCHEMES[scheme].layer(f"model.layers.{number}", number)
    write_tensors(tmp_path, tensors).close()
    with ExitStack() as stack:
        for number, (_, method) in methods_.items():
            experts = load_experts(tmp_path, number)
            sizes = {"num_experts": experts.num_experts, "num_experts_per_tok": 1, "hidden_size": experts.hidden}
            sizes["moe_intermediate_size"] = experts.intermediate
            made = stack.enter_context(wrapper(tmp_path, layer=number, method=method, **sizes))
            assert made.moe.spec.formats == experts.formats
        assert len(weights.Lease.leased) == 1


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("method", ["AMXINT4", "MOE_INT8"])
def test_converted_checkpoints(method, tmp_path):
    """Their bytes are in an order that only kt-kernel's sources say: the message sends to the original."""
    tensors = {}
    for projection in PROJECTIONS:
        for node in range(2):
            base = f"blk.0.ffn_{projection}_exps.0.numa.{node}"
            tensors[f"{base}.weight"] = ["U8", np.zeros(64 * 128 // 2, np.uint8)]
            tensors[f"{base}.scale"] = ["F32", np.ones(64, np.float32)]
    write_tensors(tmp_path, tensors).close()
    message = r"Found 'blk\.0\.ffn_.*_exps\.0\.numa\.[01]\..*', weights that kt-kernel has converted .*: take the checkpoint"
    for load in (lambda: wrapper(tmp_path, method=method), lambda: load_experts(tmp_path, 0)):
        with pytest.raises(UnavailableError, match=message):
            load()


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("method", NEW)
def test_forward(method, tmp_path):
    synthetic.PUBLISHED[NEW[method]].write(tmp_path, num_experts=8, hidden=128, intermediate=256, top_k=4)
    experts = load_experts(tmp_path, 0)
    with wrapper(tmp_path, method=method, moe_intermediate_size=256) as w, MoELayer(experts) as layer:
        x, ids, scores = batch()
        assert_right(layer, experts, x, ids, scores, w.forward(x, ids, scores))
