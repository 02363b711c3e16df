"""vLLM's quantization configs, which give routed experts and dense layers ktmoe's methods.

They take the place of vLLM's by its register_quantization_config(). Each leaves the layers alone that vLLM's own would.
"""

from __future__ import annotations

import torch
from compressed_tensors import CompressionFormat
from compressed_tensors.quantization import QuantizationStrategy, QuantizationType
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import (
    auto_awq,
    auto_gptq,
    fp8,
    get_quantization_config,
    modelopt,
    mxfp4,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.model_executor.layers.quantization.quark import quark
from vllm.model_executor.layers.quantization.utils.gptq_utils import get_linear_quant_method
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped, kMxfp4Static
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.models.deepseek_v4 import quant_config as deepseek_v4

from ktmoe.errors import UnavailableError
from ktmoe.vllm import dense_choice, schemes
from ktmoe.vllm.dense_method import PackedLinearMethod
from ktmoe.vllm.experts_formats import (
    SERVED,
    CompressedTensorsW4A4Mxfp4MoEMethod,
    CompressedTensorsW4A4Nvfp4MoEMethod,
    CompressedTensorsW8A8Fp8MoEMethod,
    CompressedTensorsW8A8Mxfp8MoEMethod,
    CompressedTensorsWNA16MoEMethod,
    QuarkOCP_MX_MoEMethod,
)
from ktmoe.vllm.experts_layer import LORA
from ktmoe.vllm.parameters import Parameters
from ktmoe.vllm.report import leaves


class KtmoeConfig:
    """A config whose get_quant_method() asks experts() and dense() first."""

    def experts(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        """ktmoe's method for routed experts; None if they are not quantized. Raises UnavailableError for what ktmoe does not
        read."""
        raise NotImplementedError

    def dense(self, layer: torch.nn.Module, prefix: str) -> Parameters | None:
        """How a dense layer is stored; None if it is not quantized. Raises UnavailableError for what ktmoe does not read."""
        return None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        method = None
        try:
            if isinstance(layer, RoutedExperts):
                method = self.experts(layer, prefix)
            elif isinstance(layer, (LinearBase, ParallelLMHead)) and dense_choice.mode() != "none":
                method = self._dense(layer, prefix)
        except UnavailableError as error:
            what = "experts" if isinstance(layer, RoutedExperts) else "dense layer"
            leaves(f"the {what} of {prefix}, and those like it,", str(error))
        return super().get_quant_method(layer, prefix) if method is None else method

    def _dense(self, layer: torch.nn.Module, prefix: str) -> PackedLinearMethod | None:
        parameters = self.dense(layer, prefix)
        if parameters is None:
            return None
        if get_current_vllm_config().lora_config is not None:
            raise UnavailableError(LORA)
        dense_choice.backend_of(parameters.format, (layer.output_size, layer.input_size))  # raises if there is none
        return PackedLinearMethod(parameters)


class Mxfp4Config(KtmoeConfig, mxfp4.Mxfp4Config):
    def experts(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        return SERVED[mxfp4.Mxfp4MoEMethod](layer.moe_config)


class GptOssMxfp4Config(KtmoeConfig, mxfp4.GptOssMxfp4Config):
    def experts(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        return SERVED[mxfp4.GptOssMxfp4MoEMethod](layer.moe_config)


class Fp8Config(KtmoeConfig, fp8.Fp8Config):
    def experts(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        return _fp8(self, layer, prefix)

    def dense(self, layer: torch.nn.Module, prefix: str) -> Parameters | None:
        return _dense_fp8(self, layer, prefix)


class DeepseekV4FP8Config(KtmoeConfig, deepseek_v4.DeepseekV4FP8Config):
    def experts(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        if self.expert_dtype != "fp4" or _skipped(self, prefix):
            return _fp8(self, layer, prefix)
        if self.moe_quant_algo == "NVFP4":
            return SERVED[modelopt.ModelOptNvFp4FusedMoE](quant_config=self._get_nvfp4_config(), moe_config=layer.moe_config)
        return SERVED[mxfp4.Mxfp4MoEMethod](layer.moe_config)

    def dense(self, layer: torch.nn.Module, prefix: str) -> Parameters | None:
        return _dense_fp8(self, layer, prefix)


def _skipped(config: fp8.Fp8Config, prefix: str) -> bool:
    mode = config.ignored_layers_match_mode
    return is_layer_skipped(prefix, config.ignored_layers, config.packed_modules_mapping, match_mode=mode)


def _fp8(config: fp8.Fp8Config, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
    if _skipped(config, prefix):
        return None
    if config.store_dtype == "mxfp4":
        return SERVED[mxfp4.Mxfp4MoEMethod](layer.moe_config)
    return SERVED[fp8.Fp8MoEMethod](config, layer)


def _dense_fp8(config: fp8.Fp8Config, layer: torch.nn.Module, prefix: str) -> Parameters | None:
    if not isinstance(layer, LinearBase) or _skipped(config, prefix):
        return None
    blocks = config.weight_block_size
    found = schemes.fp8_of_blocks(blocks, "weight_scale_inv") if blocks else schemes.fp8_of_matrices()
    return found if config.activation_scheme == "static" else found.without_inputs()


class CompressedTensorsConfig(KtmoeConfig, compressed_tensors.CompressedTensorsConfig):
    def experts(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        self._add_fused_moe_to_target_scheme_map()
        names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        scheme, *others = [self.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in names]
        if any(other != scheme for other in others):
            raise UnavailableError("expected one scheme for gate, up and down, found several")
        if scheme is None:
            return None
        weights, inputs, moe = scheme["weights"], scheme.get("input_activations"), layer.moe_config
        if self._is_mxfp4(weights):
            return SERVED[CompressedTensorsW4A4Mxfp4MoEMethod](moe)
        if self._is_mxfp8(weights):
            return SERVED[CompressedTensorsW8A8Mxfp8MoEMethod](moe)
        if self._is_nvfp4_format(weights):
            return SERVED[CompressedTensorsW4A4Nvfp4MoEMethod](moe, prefix, use_a16=inputs is None)
        if self._is_wNa16_group_channel(weights, inputs) and scheme.get("format") == CompressionFormat.pack_quantized.value:
            zero_points = weights.num_bits == 4 and weights.strategy == QuantizationStrategy.GROUP
            if weights.type == QuantizationType.INT and weights.num_bits in (4, 8) and (weights.symmetric or zero_points):
                return SERVED[CompressedTensorsWNA16MoEMethod](weights, inputs, moe)
        if self._is_fp8_w8a8(weights, inputs):
            return SERVED[CompressedTensorsW8A8Fp8MoEMethod](weights, inputs, moe)
        what = f"{weights.type} of {weights.num_bits} bits by {weights.strategy}"
        raise UnavailableError(
            f"expected a scheme of compressed-tensors that ktmoe reads, found {what}, "
            f"{'symmetric' if weights.symmetric else 'asymmetric'}, in format {scheme.get('format')}"
        )

    def dense(self, layer: torch.nn.Module, prefix: str) -> Parameters | None:
        if self.transform_config:
            raise UnavailableError("expected weights without transforms, found some in transform_config")
        try:
            scheme = self.get_scheme_dict(layer, prefix)
        except ValueError:
            if isinstance(layer, LinearBase):
                raise
            return None  # an output layer that no group of the config names
        return (
            None
            if scheme is None
            else schemes.compressed(scheme["weights"], scheme.get("input_activations"), scheme.get("format"))
        )


class _Chosen:
    """What vLLM would make a method of: a layer's own config, after its rules for single layers."""

    def __init__(self, config: auto_gptq.AutoGPTQConfig):
        self.config = config


class AutoGPTQConfig(KtmoeConfig, auto_gptq.AutoGPTQConfig):
    def experts(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        kind = SERVED[auto_gptq.AutoGPTQMoEMethod]
        method = auto_gptq.get_moe_quant_method(self, layer, prefix, kind)
        if not isinstance(method, kind):
            return None
        if method.quant_config.weight_bits != 4:
            raise UnavailableError(f"expected GPTQ of 4 bits, found {method.quant_config.weight_bits}")
        return method

    def dense(self, layer: torch.nn.Module, prefix: str) -> Parameters | None:
        found = get_linear_quant_method(self, layer, prefix, _Chosen)
        if not isinstance(found, _Chosen):
            return None
        return schemes.gptq(found.config.weight_bits, found.config.group_size)


class AutoAWQConfig(KtmoeConfig, auto_awq.AutoAWQConfig):
    def experts(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        if is_layer_skipped(prefix, self.modules_to_not_convert, match_mode="substring"):
            return None
        return SERVED[auto_awq.AutoAWQMoEMethod](self, layer.moe_config)

    def dense(self, layer: torch.nn.Module, prefix: str) -> Parameters | None:
        if isinstance(layer, ParallelLMHead) and not self.lm_head_quantized:
            return None
        skipped = self.modules_to_not_convert, self.packed_modules_mapping
        if is_layer_skipped(prefix, *skipped, match_mode="substring"):
            return None
        return schemes.awq(self.weight_bits, self.group_size, self.zero_point)


#: Parts of models that ModelOpt does not quantize, as vLLM has them.
_NOT_QUANTIZED = ("vision_tower", "vision_model", "vit_large_projector")
#: ModelOpt's algorithms.
_MODELOPT = {
    "FP8": schemes.fp8_of_matrices(),
    "NVFP4": schemes.NVFP4_WEIGHT,
    "W4A16_NVFP4": schemes.NVFP4_WEIGHT,
    "MXFP8": schemes.MXFP8_WEIGHT,
}


class _ModelOptConfig(KtmoeConfig):
    def experts(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        if self.is_layer_excluded(prefix):
            return None
        return SERVED[self.FusedMoEMethodCls](quant_config=self, moe_config=layer.moe_config)

    def dense(self, layer: torch.nn.Module, prefix: str) -> Parameters | None:
        if self.is_layer_excluded(prefix) or any(part in prefix for part in _NOT_QUANTIZED):
            return None
        if self.quant_method not in _MODELOPT:
            raise UnavailableError(f"expected {', '.join(_MODELOPT)} of ModelOpt, found {self.quant_method}")
        return _MODELOPT[self.quant_method]


class ModelOptFp8Config(_ModelOptConfig, modelopt.ModelOptFp8Config):
    pass


class ModelOptNvFp4Config(_ModelOptConfig, modelopt.ModelOptNvFp4Config):
    pass


class ModelOptMxFp8Config(_ModelOptConfig, modelopt.ModelOptMxFp8Config):
    pass


class QuarkConfig(KtmoeConfig, quark.QuarkConfig):
    def experts(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        weights, inputs, kind = self.get_quant_method_target(prefix, type(layer))
        if weights is None:
            return None
        if kind is not QuarkOCP_MX_MoEMethod or weights != kMxfp4Static:
            raise UnavailableError(f"expected MXFP4 of Quark, found {weights}")
        return SERVED[kind](layer.moe_config, weights, inputs)

    def dense(self, layer: torch.nn.Module, prefix: str) -> Parameters | None:
        if not isinstance(layer, LinearBase):
            return None
        weights, _, _ = self.get_quant_method_target(prefix, type(layer))
        if weights is None:
            return None
        if weights != kMxfp4Static:
            raise UnavailableError(f"expected MXFP4 of Quark, found {weights}")
        return schemes.MXFP4_WEIGHT


#: ktmoe's configs, by the names under which vLLM has those that they replace.
CONFIGS = {
    "mxfp4": Mxfp4Config,
    "gpt_oss_mxfp4": GptOssMxfp4Config,
    "fp8": Fp8Config,
    "deepseek_v4_fp8": DeepseekV4FP8Config,
    "compressed-tensors": CompressedTensorsConfig,
    "gptq": AutoGPTQConfig,
    "auto_gptq": AutoGPTQConfig,
    "gptq_marlin": AutoGPTQConfig,
    "awq": AutoAWQConfig,
    "auto_awq": AutoAWQConfig,
    "awq_marlin": AutoAWQConfig,
    "modelopt": ModelOptFp8Config,
    "modelopt_fp4": ModelOptNvFp4Config,
    "modelopt_mxfp8": ModelOptMxFp8Config,
    "mxfp8": ModelOptMxFp8Config,
    "quark": QuarkConfig,
}


def register() -> None:
    """Put CONFIGS in the place of vLLM's. A second call changes nothing. One that another plug-in has registered stays."""
    for name, config in CONFIGS.items():
        if get_quantization_config(name) in config.__bases__:
            register_quantization_config(name)(config)
