"""KTMoEWrapper and generate_gpu_experts_masks with kt-kernel 0.7.2's names and meaning, for SGLang and KTransformers.

This is the module kt_kernel of who asks ktmoe.compat.provided for it: SGLang's plug-in and extras/kt_kernel_shim.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence

from ktmoe.compat import methods
from ktmoe.compat.inference import InferenceWrapper
from ktmoe.compat.masks import generate_gpu_experts_masks
from ktmoe.compat.sft import SFTWrapper

#: The version of kt-kernel whose interface this is.
__version__ = "0.7.2+ktmoe"

__all__ = ["KTMoEWrapper", "generate_gpu_experts_masks"]


class KTMoEWrapper:
    """The routed experts of one layer, on the CPU; what others compute (the GPU) is skipped.

    What is made is an InferenceWrapper or, in mode "sft", an SFTWrapper.

    gpu_experts_mask: bool [num_experts], True = on the GPU, copied; or num_gpu_experts: the first so many are. With neither,
    all are here. The attribute of that name is an array or a tensor as given, else a tensor where torch is loaded; it may be
    changed in place at any time and is read when a forward call is submitted. Fine-tuning computes all experts.
    cpuinfer_threads: ktmoe.set_num_threads(), so it counts for the whole process. threadpool_count: tensor-parallel parts, one
    a NUMA node, at most as many as there are; numa_nodes: which.
    weight_path: the checkpoint's folder, or a GGUF file; opened once for all its layers.
    max_deferred_experts_per_token: so many of a token's experts, those with the least weights, may be added to the next layer's
    result instead of this one's; 0 and None: none.
    method: a key of methods.SERVED, such as "MXFP4" (DeepSeek-V4), "RAWINT4" (compressed-tensors INT4), "FP8" (DeepSeek-V3),
    "LLAMAFILE" (GGUF) or "BF16"; in mode "sft" one of methods.TUNED, such as "MXFP4_SFT". AMXINT4, AMXINT8, MOE_INT4 and
    MOE_INT8 round weights, as do INT8_SFT, AMXINT8_SFT and AMXINT4_SFT. UnavailableError says what the others lack.
    swiglu_limit: None = as the checkpoint says, 0 = no clamp. swiglu_alpha: not 0 = GPT-OSS's activation.
    lora_rank, lora_alpha: of the adapter, whose scale is alpha / rank. lora_dropout: 0. max_cache_depth: forward calls that are
    kept for backward, the newest ones. full_weight_grad: False.
    chunked_prefill_size, cpu_save, group_size and zero_point are taken and change nothing.

    Raises InputError (a ValueError) for a wrong mode or method and for arguments that do not fit.
    """

    def __new__(
        cls,
        layer_idx: int,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        moe_intermediate_size: int,
        gpu_experts_mask=None,
        cpuinfer_threads: int | None = None,
        threadpool_count: int = 1,
        weight_path: str | os.PathLike | None = None,
        chunked_prefill_size: int | None = None,
        cpu_save: bool = False,
        max_deferred_experts_per_token: int | None = None,
        method: str = "AMXINT4",
        numa_nodes: Sequence[int] | None = None,
        mode: str = "inference",
        num_gpu_experts: int | None = None,
        lora_rank: int = 16,
        lora_alpha: float = 32.0,
        lora_dropout: float = 0.0,
        max_cache_depth: int = 1,
        group_size: int = 128,
        zero_point: bool = True,
        full_weight_grad: bool = False,
        swiglu_limit: float | None = None,
        swiglu_alpha: float = 0.0,
    ) -> InferenceWrapper | SFTWrapper:
        methods.require(mode, method)
        _say()
        both = {
            "layer_idx": layer_idx,
            "num_experts": num_experts,
            "num_experts_per_tok": num_experts_per_tok,
            "hidden_size": hidden_size,
            "moe_intermediate_size": moe_intermediate_size,
            "cpuinfer_threads": cpuinfer_threads,
            "threadpool_count": threadpool_count,
            "numa_nodes": numa_nodes,
            "weight_path": weight_path,
            "chunked_prefill_size": chunked_prefill_size,
            "method": method,
            "num_gpu_experts": num_gpu_experts,
            "gpu_experts_mask": gpu_experts_mask,
            "swiglu_limit": swiglu_limit,
            "swiglu_alpha": swiglu_alpha,
        }
        if mode == "inference":
            deferred = max_deferred_experts_per_token
            return InferenceWrapper(**both, cpu_save=cpu_save, max_deferred_experts_per_token=deferred)
        return SFTWrapper(
            **both,
            lora_rank=lora_rank,
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            max_cache_depth=max_cache_depth,
            group_size=group_size,
            zero_point=zero_point,
            full_weight_grad=full_weight_grad,
        )

    set_capture_batch_sizes = staticmethod(InferenceWrapper.set_capture_batch_sizes)
    get_capture_batch_sizes = staticmethod(InferenceWrapper.get_capture_batch_sizes)
    clear_buffer_cache = staticmethod(InferenceWrapper.clear_buffer_cache)
    clear_sft_buffer_cache = staticmethod(SFTWrapper.clear_sft_buffer_cache)


@functools.cache
def _say() -> None:
    """Log once a process who computes the experts on the CPU."""
    logging.getLogger(__name__).info("experts on the CPU are computed by ktmoe")
