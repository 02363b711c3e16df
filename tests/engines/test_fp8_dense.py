"""The bench's DeepSeek-V4 with dense matrices in FP8, beside the tests' own writer of that layout."""

import numpy as np
import quantized_checkpoints
import torch
from safetensors.torch import save_file

from bench.engines import fp8_dense
from ktmoe.loaders.checkpoint import Checkpoint


def test_matrices_become_what_is_published(tmp_path):
    """Those of attention and shared experts in codes and scales, the compressor's and the router's as they were."""
    generator = torch.Generator().manual_seed(4)
    layer, inputs = "layers.0", {"attn.wq_a": 256, "attn.indexer.wq_b": 128, "ffn.shared_experts.w2": 128}
    left = {"attn.compressor.wkv": 256, "ffn.gate": 256}
    given = {
        f"{layer}.{name}.weight": torch.randn(384, k, generator=generator).bfloat16() for name, k in (inputs | left).items()
    }
    save_file(given, tmp_path / "model.safetensors", {"format": "pt"})
    fp8_dense.store(tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as found:
        stored = {f"{layer}.{name}.scale" for name in inputs}
        assert set(found.names()) == {*given, *stored}
        for name in inputs:
            weight, scale = f"{layer}.{name}.weight", f"{layer}.{name}.scale"
            codes, scales = quantized_checkpoints.fp8(given[weight].double().numpy(), power_of_two=True)
            assert (found.info(weight).dtype, found.info(scale).dtype) == ("F8_E4M3", "F8_E8M0")
            assert np.array_equal(np.asarray(found.read(weight)).view(np.uint8).reshape(codes.shape), codes)
            assert np.array_equal(np.asarray(found.read(scale)).view(np.uint8).reshape(scales.shape), scales)
        for name in left:
            assert found.info(f"{layer}.{name}.weight").dtype == "BF16"
