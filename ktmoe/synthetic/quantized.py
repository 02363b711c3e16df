"""Quantized experts with tensors of their own, a row of a table each; what their functions take is said in models.py."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ktmoe.experts import ExpertWeights
from ktmoe.loaders.naming import NUMBERED_STEMS, PROJ_STEMS
from ktmoe.synthetic.files import Model, check, load, write
from ktmoe.synthetic.models import bases, matrices
from ktmoe.synthetic.tensors import Shaper, Tensor, codes, constant, factors, scales, zero_points
from ktmoe.weights.formats import FP8_PER_ROW, MXFP8, WeightFormat, fp8, int4, int8, nvfp4, uint4
from ktmoe.weights.order import AWQ, GPTQ


@dataclass(frozen=True)
class Published:
    """Experts as some model has them.

    tensors: (ending, dtype) by the array's name. more: the same of others, {(ending, dtype): (shape of (n, k), shaper)}.
    count: config.json's key for the number of experts. config: what else it holds. factor_shape: by n, as a checkpoint has it.
    """

    loader: str
    format: WeightFormat
    tensors: Mapping[str, tuple[str, str]]
    config: Mapping[str, object]
    hidden: int
    intermediate: int
    more: Mapping[tuple[str, str], tuple[Any, ...]] = field(default_factory=dict)
    count: str = "num_experts"
    module: str = "mlp.experts"
    stems: Mapping[str, str] = field(default_factory=lambda: PROJ_STEMS)
    prefix: str = "model."
    factor_shape: Callable[[int], tuple[int, ...]] | None = None

    def write(
        self,
        path: str | os.PathLike[str],
        *,
        num_experts: int = 32,
        hidden: int | None = None,
        intermediate: int | None = None,
        layers: int = 1,
        prefix: str | None = None,
        top_k: int = 8,
        **writing: Any,
    ) -> None:
        """A checkpoint.

        Examples:
            >>> synthetic.write_awq("AWQ", num_experts=2, hidden=128, intermediate=128)
            >>> ktmoe.load_experts("AWQ", 0).formats["gate"].description
            'UINT4 with fp16 scales per 1x128, zero points per 1x128, in awq order'
        """
        prefix = self.prefix if prefix is None else prefix
        model = self._model(bases(prefix, layers), num_experts, hidden or self.hidden, intermediate or self.intermediate)
        model.config.update(num_experts_per_tok=top_k, num_hidden_layers=layers)
        write(path, model, **writing)

    def experts(
        self, *, num_experts: int = 32, hidden: int | None = None, intermediate: int | None = None, seed: int = 0
    ) -> ExpertWeights:
        """Layer 0 of write(), without a file.

        Examples:
            >>> synthetic.nvfp4_experts(num_experts=2, hidden=64, intermediate=64).formats["gate"].description
            'E2M1 with e4m3 scales per 1x16, an fp32 factor per matrix'
        """
        return load(
            self._model(bases(self.prefix, 1), num_experts, hidden or self.hidden, intermediate or self.intermediate), seed
        )

    def _model(self, layers: list[str], num_experts: int, hidden: int, intermediate: int) -> Model:
        blocks = self.format.scale and self.format.scale.extent[0] > 1  # which may be cut
        step = 8 if blocks else math.lcm(self.format.unit[1], 8)
        check(hidden=(hidden, step), intermediate=(intermediate, step), num_experts=(num_experts, 1))
        tensors = []
        for layer in layers:
            for name, n, k in matrices(f"{layer}.{self.module}", self.stems, num_experts, hidden, intermediate):
                for label, (_, shape) in self.format.arrays(n, k).items():
                    ending, dtype = self.tensors[label]
                    if label == "factor" and self.factor_shape:
                        shape = self.factor_shape(n)
                    tensors.append(Tensor(name + ending, dtype, shape, self._shaper(label, dtype, k)))
                for (ending, dtype), (shape, shaper) in self.more.items():
                    tensors.append(Tensor(name + ending, dtype, shape(n, k), shaper(n, k)))
        sizes = {"hidden_size": hidden, "moe_intermediate_size": intermediate, self.count: num_experts}
        return Model(self.loader, {"hidden_act": "silu", **self.config, **sizes}, tensors)

    def _shaper(self, label: str, dtype: str, k: int) -> Shaper:
        if label == "codes":
            return codes(self.format.element)
        if label == "offsets":
            return zero_points
        return scales(self.format, k) if label == "scales" else factors(self.format, k, dtype)


#: The tensor g_idx of groups in order: no activation order.
_G_IDX = {(".g_idx", "I32"): (lambda n, k: (k,), lambda n, k: constant(np.arange(k, dtype=np.int32) // 128))}


def _gptq_config(sym: bool) -> dict[str, object]:
    quantization = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": sym,
        "checkpoint_format": "gptq",
    }
    return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "quantization_config": quantization}


def sevens(out: np.ndarray) -> None:
    """Make zero points of 8, which are stored less 1."""
    out[:] = 0x77


def _int8_config(strategy: str) -> dict[str, object]:
    """compressed-tensors' W8A8, as llm-compressor writes it."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy}
    weights |= {"group_size": 128} if strategy == "group" else {}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
    }
    return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "quantization_config": quantization}


#: The kinds of quantized weights, by the name that tables give them.
PUBLISHED = {
    "FP8": Published(
        "fp8",
        fp8(),
        {"codes": (".weight", "F8_E4M3"), "scales": (".weight_scale_inv", "F32")},
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        },
        hidden=7168,
        intermediate=2048,
        count="n_routed_experts",
    ),
    "FP8 per row": Published(
        "fp8_per_row",
        FP8_PER_ROW,
        {"codes": (".weight", "F8_E4M3"), "factor": (".weight_scale", "BF16")},
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"},
        },
        hidden=5120,
        intermediate=1536,
        count="n_routed_experts",
        factor_shape=lambda n: (n, 1),
    ),
    "MXFP8": Published(
        "mxfp8",
        MXFP8,
        {"codes": (".weight", "F8_E4M3"), "scales": (".weight_scale_inv", "U8")},
        {
            "architectures": ["MiniMaxM3ForCausalLM"],
            "hidden_act": "swigluoai",
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "quantization_config": {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
        },
        hidden=6144,
        intermediate=3072,
        count="num_local_experts",
        module="block_sparse_moe.experts",
        stems=NUMBERED_STEMS,
        prefix="language_model.model.",
    ),
    "NVFP4": Published(
        "nvfp4",
        nvfp4(),
        {"codes": (".weight", "U8"), "scales": (".weight_scale", "F8_E4M3"), "factor": (".weight_scale_2", "F32")},
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        },
        hidden=2048,
        intermediate=768,
        more={(".input_scale", "F32"): (lambda n, k: (), lambda n, k: constant(np.array([0.01], np.float32)))},
        factor_shape=lambda n: (),
    ),
    "GPTQ": Published(
        "gptq",
        uint4(128, order=GPTQ, plus=1),
        {"codes": (".qweight", "I32"), "scales": (".scales", "F16"), "offsets": (".qzeros", "I32")},
        _gptq_config(sym=False),
        hidden=2048,
        intermediate=768,
        more=_G_IDX,
    ),
    "GPTQ symmetric": Published(
        "gptq",
        int4(128, "fp16", GPTQ),
        {"codes": (".qweight", "I32"), "scales": (".scales", "F16")},
        _gptq_config(sym=True),
        hidden=2048,
        intermediate=768,
        more=_G_IDX | {(".qzeros", "I32"): (lambda n, k: (k // 128, n // 8), lambda n, k: sevens)},
    ),
    "INT8 per row": Published(
        "int8",
        int8(),
        {"codes": (".weight", "I8"), "factor": (".weight_scale", "BF16")},
        _int8_config("channel"),
        hidden=2048,
        intermediate=768,
        factor_shape=lambda n: (n, 1),
    ),
    "INT8 per group": Published(
        "int8",
        int8(128),
        {"codes": (".weight", "I8"), "scales": (".weight_scale", "BF16")},
        _int8_config("group"),
        hidden=2048,
        intermediate=768,
    ),
    "AWQ": Published(
        "awq",
        uint4(128, order=AWQ),
        {"codes": (".qweight", "I32"), "scales": (".scales", "F16"), "offsets": (".qzeros", "I32")},
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "quantization_config": {
                "quant_method": "awq",
                "bits": 4,
                "group_size": 128,
                "version": "gemm",
                "zero_point": True,
            },
        },
        hidden=2048,
        intermediate=768,
    ),
}

write_fp8, fp8_experts = PUBLISHED["FP8"].write, PUBLISHED["FP8"].experts
write_mxfp8, mxfp8_experts = PUBLISHED["MXFP8"].write, PUBLISHED["MXFP8"].experts
write_nvfp4, nvfp4_experts = PUBLISHED["NVFP4"].write, PUBLISHED["NVFP4"].experts
write_gptq, gptq_experts = PUBLISHED["GPTQ"].write, PUBLISHED["GPTQ"].experts
write_awq, awq_experts = PUBLISHED["AWQ"].write, PUBLISHED["AWQ"].experts
