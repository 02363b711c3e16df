"""Methods of kt-kernel and the formats that they stand for; exports of formats that its buffers have no place for."""

import numpy as np
import pytest
from helpers import assert_right
from kt_wrappers import batch, wrapper

from ktmoe import MoELayer, load_experts, synthetic
from ktmoe.compat import methods
from ktmoe.compat.export import Target
from ktmoe.errors import FormatError, UnavailableError
from ktmoe.experts import PROJECTIONS, ExpertSpec
from ktmoe.weights.formats import FORMATS, fp8, int4
from ktmoe.weights.order import GPTQ

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
}
#: method -> what writes such a checkpoint.
NEW = {"FP8": "FP8", "FP8_PERCHANNEL": "FP8 per row", "GPTQ_INT4": "GPTQ symmetric", "MXFP8": "MXFP8", "NVFP4": "NVFP4"}


@pytest.mark.parametrize("method", methods.SERVED)
def test_formats(method):
    for name, weight_format in FORMATS.items():
        formats = dict.fromkeys(PROJECTIONS, weight_format)
        if name in TAKEN[method]:
            methods.check_formats(method, formats, "experts")
        else:
            with pytest.raises(FormatError, match=rf"experts: method '{method}' expects .*, found .* \(gate\)"):
                methods.check_formats(method, formats, "experts")


def test_groups_and_blocks_of_any_size():
    methods.check_formats("RAWINT4", {"gate": int4(128)}, "experts")
    methods.check_formats("GPTQ_INT4", {"gate": int4(32, "bf16", GPTQ)}, "experts")
    methods.check_formats("FP8", {"gate": fp8("ue8m0", (64, 64))}, "experts")


@pytest.mark.parametrize("name", FORMATS)
def test_exports(name):
    """Whatever has more than codes and scales, or others, is refused before an address is looked at."""
    experts = ExpertSpec(2, 256, 256, dict.fromkeys(PROJECTIONS, FORMATS[name]), "layers.0.experts")
    memory = np.zeros(1 << 20, np.uint8)
    pointers = [[memory.ctypes.data]] * 4
    if name in ("MXFP4", "INT4", "BF16"):
        (part,) = Target(experts, 1, *pointers).parts
        for projection in PROJECTIONS:
            found = {label: (array.dtype, array.shape) for label, array in part[projection].items()}
            assert found == FORMATS[name].arrays(256, 256)
    else:
        with pytest.raises(UnavailableError, match=r"layers.0.experts: the buffers for GPUs take .*; found .* \(gate\)$"):
            Target(experts, 1, *pointers)


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("method", NEW)
def test_forward(method, tmp_path):
    synthetic.PUBLISHED[NEW[method]].write(tmp_path, num_experts=8, hidden=128, intermediate=256, top_k=4)
    experts = load_experts(tmp_path, 0)
    with wrapper(tmp_path, method=method, moe_intermediate_size=256) as w, MoELayer(experts) as layer:
        x, ids, scores = batch()
        assert_right(layer, experts, x, ids, scores, w.forward(x, ids, scores))
        with pytest.raises(UnavailableError, match="the buffers for GPUs take"):
            w.submit_write_weight_scale_to_buffer(1, 0, [1], [1], [1], [1])
