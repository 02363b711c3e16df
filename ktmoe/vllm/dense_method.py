"""PackedLinearMethod: how vLLM's dense layers are made, loaded and computed where ktmoe computes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    RowParallelLinear,
    register_weight_loader_v2_supported_method,
)

from ktmoe.errors import FormatError
from ktmoe.linear import Linear
from ktmoe.vllm import cpus, dense_parameters, operator
from ktmoe.vllm.parameters import Parameters
from ktmoe.vllm.report import REPORT
from ktmoe.vllm.tensors import arrays_of


def reads_parameters(layer: torch.nn.Module) -> bool:
    """Whether vLLM's model reads a layer's parameters itself: kv_b_proj of MLA, and wo_a of DeepSeek-V4, which it never calls.

    vLLM's own methods ask for the same two attributes, which models set on layers that they have made.
    """
    return getattr(layer, "_cpu_skip_gemm_dispatch", False) or getattr(layer, "is_bmm", False)


@register_weight_loader_v2_supported_method
class PackedLinearMethod(LinearMethodBase):
    """vLLM's loaders fill parameters as they are in the checkpoint; then they are packed, layer by layer, and freed.

    parameters: of the matrix.
    """

    def __init__(self, parameters: Parameters):
        self.parameters = parameters
        self.packed: Linear | None = None
        REPORT.wait_for(self)

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes,
    ) -> None:
        k, rows = input_size_per_partition, output_partition_sizes
        layer.logical_widths, layer.output_size_per_partition = rows, sum(rows)
        layer.input_size_per_partition = k
        scale = self.parameters.format.scale
        if scale and scale.extent[0] > 1:
            layer.weight_block_size = list(scale.extent)  # vLLM's loaders look at it
        self._check_cuts(layer.prefix, k, rows, k != input_size, sum(rows) != output_size)
        dummy = get_current_vllm_config().load_config.load_format == "dummy"  # random numbers, which would be no bfloat16
        dtype = params_dtype if dummy else torch.float32
        self._made = list(dense_parameters.create(layer, self.parameters, k, rows, attributes["weight_loader"], dtype))

    def _check_cuts(self, name: str, k: int, rows: Sequence[int], inputs_cut: bool, outputs_cut: bool) -> None:
        """Raise FormatError where a process, or a merged matrix, begins or ends within what shares a scale or an item."""
        units = self.parameters.units
        if inputs_cut and k % units[1]:
            raise FormatError(
                f"{name}: expected a multiple of {units[1]} inputs in each process, which share a scale or an item, found {k}; "
                "a smaller tensor parallel size may have it"
            )
        if any(n % units[0] for n in (rows if outputs_cut else rows[:-1])):
            hint = "; a smaller tensor parallel size may have it" if outputs_cut else ""
            raise FormatError(
                f"{name}: expected matrices of a multiple of {units[0]} outputs each, which share a scale or an item, found "
                f"{', '.join(map(str, rows))}{hint}"
            )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        try:
            if not getattr(layer, "is_bmm", False):  # DeepSeek-V4 takes that one's parameters itself, and frees them
                self._pack(layer)
        except BaseException as error:
            REPORT.failed(error)
            raise
        REPORT.done(self)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """y [..., n] in x's dtype. x: [..., k]. bias: the layer's, which is packed; any other one is added to y."""
        y = operator.product(x, layer.output_size_per_partition, layer.ktmoe)
        return y if bias is None or (self._biased and bias is layer.bias) else (y + bias).to(y.dtype)

    def _pack(self, layer: torch.nn.Module) -> None:
        cpus.share()
        found = self.parameters.fitted(arrays_of(layer), name=layer.prefix)
        shape = layer.output_size_per_partition, layer.input_size_per_partition
        bias = self._bias(layer)
        # vLLM gives apply() the bias whenever there is one that is added here
        self._biased = bias is not None
        packed = Linear(found.matrix(arrays_of(layer), shape, layer.logical_widths, layer.prefix, bias))
        if not reads_parameters(layer):
            for name in self._made:
                setattr(layer, name, _emptied(getattr(layer, name)))
        if self.packed is None:
            REPORT.dense(packed)
        self.packed = packed
        operator.hold(layer, packed)

    def _bias(self, layer: torch.nn.Module) -> np.ndarray | None:
        """float32 [n] of what vLLM adds to y in this layer and process, or None."""
        if not isinstance(layer, LinearBase) or layer.bias is None or layer.skip_bias_add:
            return None
        if isinstance(layer, RowParallelLinear) and layer.tp_rank > 0:
            return None
        return layer.bias.detach().float().numpy()


def _emptied(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """The same without numbers. It is a new one: the old one is the embedding's, too, where a model has tied them."""
    empty = torch.nn.Parameter(parameter.data.new_empty(0), requires_grad=False)
    empty.__class__, empty.__dict__ = type(parameter), dict(parameter.__dict__)
    return empty
