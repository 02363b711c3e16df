"""Two stages on torch CPU tensors, by real torch where it is installed: what comes back is of the kind that went in."""

import numpy as np
import pytest
from helpers import BF16, random_batch, random_experts, same_bits
from two_stage_pipeline import Experts

from ktmoe import MoELayer, two_stage
from ktmoe.errors import InputError
from ktmoe.two_stage import dequantize, gemm1, gemm2, moe_sorting, quantize

pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


def test_tensors_in_and_out(torch):
    rng = np.random.default_rng(11)
    experts = random_experts(rng, 6, 200, 90)
    x, ids, weights = random_batch(rng, experts, 37, 4)
    tensors = [torch.from_numpy(x.view(np.int16)).view(torch.bfloat16), torch.from_numpy(ids), torch.from_numpy(weights)]
    for mode in ("bf16", "mxfp4", "mxfp8/mxfp4"):
        with MoELayer(experts, "auto", mode) as layer:
            sorting = moe_sorting(*tensors[1:], 6, expert_mask=torch.from_numpy(layer.expert_mask))
            assert [array.dtype for array in sorting] == [torch.int32, torch.float32, torch.int32, torch.int32]
            h = gemm1(layer, tensors[0], sorting, "tiled")
            assert all(isinstance(part, torch.Tensor) for part in (h[:2] if mode != "bf16" else [h]))
            y = gemm2(layer, h, sorting)
            assert (y.dtype, tuple(y.shape)) == (torch.bfloat16, x.shape)
            assert same_bits(y.view(torch.int16).numpy().view(BF16), layer.forward(x, ids, weights))
            out = torch.empty(y.shape)
            assert gemm2(layer, h, sorting, "float32", out) is out
            assert (out.to(torch.bfloat16) == y).all()


def test_dtypes_of_torch(torch):
    """torch has a dtype for pairs of E2M1, for E4M3 and for UE8M0."""
    x = torch.randn(5, 64)
    for to, dtype in (("mxfp4", "float4_e2m1fn_x2"), ("mxfp8", "float8_e4m3fn")):
        rows = quantize(x, to)
        typed = rows._replace(codes=rows.codes.view(getattr(torch, dtype)), scales=rows.scales.view(torch.float8_e8m0fnu))
        assert (dequantize(typed) == dequantize(rows)).all()
        assert dequantize(rows).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore")  # of torch, about its sparse tensors
def test_tensors_without_memory_of_their_own(torch):
    x = torch.randn(4, 64).bfloat16()
    rows = quantize(x, "mxfp8")
    for value in (x.to_sparse(), x.to_sparse_csr(), torch._neg_view(x)):
        with pytest.raises(InputError, match=r"x: numpy cannot view a torch tensor of torch\.bfloat16"):
            quantize(value)
    for array in ("codes", "scales"):
        sparse = getattr(rows, array).to_sparse()
        with pytest.raises(InputError, match=rf"rows\.{array}: numpy cannot view a torch tensor of .*sparse_coo"):
            dequantize(rows._replace(**{array: sparse}))


def test_weights_of_torch(torch):
    raw = Experts.random(np.random.default_rng(6), 64, 32, 2)
    experts = two_stage.experts(*(torch.from_numpy(array) for array in raw.arrays))
    np.testing.assert_array_equal(experts.matrix(1, "down").codes, raw.w2[1])
