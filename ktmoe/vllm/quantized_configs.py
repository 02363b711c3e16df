"""vLLM's quantization configs, which give routed experts ktmoe's methods. All other layers are vLLM's.

They take the place of vLLM's by its register_quantization_config(). Each names the method that vLLM's own would choose.
"""

from __future__ import annotations

import torch
from compressed_tensors import CompressionFormat
from compressed_tensors.quantization import QuantizationStrategy, QuantizationType
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
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
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped, kMxfp4Static
from vllm.models.deepseek_v4 import quant_config as deepseek_v4

from ktmoe.errors import UnavailableError
from ktmoe.vllm.quantized import (
    SERVED,
    CompressedTensorsW4A4Mxfp4MoEMethod,
    CompressedTensorsW4A4Nvfp4MoEMethod,
    CompressedTensorsW8A8Fp8MoEMethod,
    CompressedTensorsW8A8Mxfp8MoEMethod,
    CompressedTensorsWNA16MoEMethod,
    QuarkOCP_MX_MoEMethod,
)

_logger = init_logger("vllm.ktmoe")
#: Reasons that the log has.
_said: set[str] = set()


class RoutedExpertsConfig:
    """A config whose get_quant_method() asks ours() for routed experts first."""

    def ours(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        """ktmoe's method for a layer; None if it is not quantized. Raises UnavailableError for what ktmoe does not read."""
        raise NotImplementedError

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        method = None
        if isinstance(layer, RoutedExperts):
            try:
                method = self.ours(layer, prefix)
            except UnavailableError as error:
                _say(f"ktmoe leaves the experts of {prefix}, and those like them, to vLLM: {error}", str(error))
        return super().get_quant_method(layer, prefix) if method is None else method


def _say(text: str, reason: str) -> None:
    """Log a text, if it is the first with that reason."""
    if reason not in _said:
        _said.add(reason)
        _logger.warning("%s", text)


class Mxfp4Config(RoutedExpertsConfig, mxfp4.Mxfp4Config):
    def ours(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        return SERVED[mxfp4.Mxfp4MoEMethod](layer.moe_config)


class GptOssMxfp4Config(RoutedExpertsConfig, mxfp4.GptOssMxfp4Config):
    def ours(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        return SERVED[mxfp4.GptOssMxfp4MoEMethod](layer.moe_config)


class Fp8Config(RoutedExpertsConfig, fp8.Fp8Config):
    def ours(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        return _fp8(self, layer, prefix)


class DeepseekV4FP8Config(RoutedExpertsConfig, deepseek_v4.DeepseekV4FP8Config):
    def ours(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        if self.expert_dtype != "fp4" or _skipped(self, prefix):
            return _fp8(self, layer, prefix)
        if self.moe_quant_algo == "NVFP4":
            return SERVED[modelopt.ModelOptNvFp4FusedMoE](quant_config=self._get_nvfp4_config(), moe_config=layer.moe_config)
        return SERVED[mxfp4.Mxfp4MoEMethod](layer.moe_config)


def _skipped(config: fp8.Fp8Config, prefix: str) -> bool:
    mode = config.ignored_layers_match_mode
    return is_layer_skipped(prefix, config.ignored_layers, config.packed_modules_mapping, match_mode=mode)


def _fp8(config: fp8.Fp8Config, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
    if _skipped(config, prefix):
        return None
    if config.store_dtype == "mxfp4":
        return SERVED[mxfp4.Mxfp4MoEMethod](layer.moe_config)
    return SERVED[fp8.Fp8MoEMethod](config, layer)


class CompressedTensorsConfig(RoutedExpertsConfig, compressed_tensors.CompressedTensorsConfig):
    def ours(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
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


class AutoGPTQConfig(RoutedExpertsConfig, auto_gptq.AutoGPTQConfig):
    def ours(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        kind = SERVED[auto_gptq.AutoGPTQMoEMethod]
        method = auto_gptq.get_moe_quant_method(self, layer, prefix, kind)
        if not isinstance(method, kind):
            return None
        if method.quant_config.weight_bits != 4:
            raise UnavailableError(f"expected GPTQ of 4 bits, found {method.quant_config.weight_bits}")
        return method


class AutoAWQConfig(RoutedExpertsConfig, auto_awq.AutoAWQConfig):
    def ours(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        if is_layer_skipped(prefix, self.modules_to_not_convert, match_mode="substring"):
            return None
        return SERVED[auto_awq.AutoAWQMoEMethod](self, layer.moe_config)


class ModelOptFp8Config(RoutedExpertsConfig, modelopt.ModelOptFp8Config):
    def ours(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        return _modelopt(self, layer, prefix)


class ModelOptNvFp4Config(RoutedExpertsConfig, modelopt.ModelOptNvFp4Config):
    def ours(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        return _modelopt(self, layer, prefix)


class ModelOptMxFp8Config(RoutedExpertsConfig, modelopt.ModelOptMxFp8Config):
    def ours(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        return _modelopt(self, layer, prefix)


def _modelopt(config: modelopt.ModelOptQuantConfigBase, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
    if config.is_layer_excluded(prefix):
        return None
    return SERVED[config.FusedMoEMethodCls](quant_config=config, moe_config=layer.moe_config)


class QuarkConfig(RoutedExpertsConfig, quark.QuarkConfig):
    def ours(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        weights, inputs, kind = self.get_quant_method_target(prefix, type(layer))
        if weights is None:
            return None
        if kind is not QuarkOCP_MX_MoEMethod or weights != kMxfp4Static:
            raise UnavailableError(f"expected MXFP4 of Quark, found {weights}")
        return SERVED[kind](layer.moe_config, weights, inputs)


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
