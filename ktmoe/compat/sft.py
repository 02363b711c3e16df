"""SFTWrapper: what KTMoEWrapper is in mode "sft": LoRA on experts whose weights stay packed, as kt-kernel's callers train it.

What differs from kt-kernel on purpose: any batch size works; every method computes with float32 between the products, and the
adapter's gradients are rounded once; a change of the adapter in place counts at once; a backward that fails changes no
gradient.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Sequence

import ktmoe
from ktmoe.compat import host_arrays, methods, sft_weights, weights
from ktmoe.compat.arguments import Sizes, count, nodes
from ktmoe.compat.checkpoint_output import CheckpointOutput
from ktmoe.compat.engine import CPU_INFER, ENGINE, CpuInfer
from ktmoe.compat.optimizer_gradients import OptimizerGradients
from ktmoe.compat.sft_lora import NAMES, AdapterTensors
from ktmoe.compat.sft_passes import SFTPasses
from ktmoe.errors import ClosedError, InputError, NotCopyableError, UnavailableError
from ktmoe.experts import ExpertWeights
from ktmoe.layer import MoELayer
from ktmoe.messages import show
from ktmoe.training import RANK_MAX, Lora, Training


class SFTWrapper(SFTPasses, CheckpointOutput, OptimizerGradients):
    """The routed experts of one layer, on the CPU, whose adapter is trained. KTMoEWrapper says what its arguments are.

    The order of the arguments is that of kt-kernel's AMXSFTMoEWrapper. gate_lora_a, grad_gate_lora_a and so on: the tensors of
    init_lora_weights(). reuse_checkpoint_forward, share_backward_bb and share_cache_pool are for kt-kernel's torch layers.
    """

    mode = "sft"
    _full_weight_grad = False
    gate_proj_buf = up_proj_buf = down_proj_buf = None

    def __init__(
        self,
        layer_idx: int,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        moe_intermediate_size: int,
        num_gpu_experts: int | None = 0,
        cpuinfer_threads: int | None = None,
        threadpool_count: int = 1,
        weight_path: str | os.PathLike | None = None,
        chunked_prefill_size: int | None = None,
        lora_rank: int = 16,
        lora_alpha: float = 32.0,
        lora_dropout: float = 0.0,
        max_cache_depth: int = 1,
        method: str = "AMXBF16_SFT",
        group_size: int = 128,
        zero_point: bool = True,
        full_weight_grad: bool = False,
        swiglu_limit: float | None = None,
        *,
        swiglu_alpha: float = 0.0,
        numa_nodes: Sequence[int] | None = None,
        gpu_experts_mask=None,
    ):
        methods.require(self.mode, method)
        sizes = Sizes.checked(layer_idx, num_experts, num_experts_per_tok, hidden_size, moe_intermediate_size)
        self.layer_idx, self.num_experts, self.num_experts_per_tok, self.hidden_size, self.moe_intermediate_size = sizes
        if num_gpu_experts or (gpu_experts_mask is not None and gpu_experts_mask.any()):
            raise UnavailableError("mode 'sft': the CPU computes all experts, as in kt-kernel; found some that are on the GPU")
        if full_weight_grad:
            raise UnavailableError("full_weight_grad: packed weights are frozen; adapters alone are trained")
        if lora_dropout:
            raise UnavailableError(f"lora_dropout must be 0: experts have no dropout, as in PEFT; found {show(lora_dropout)}")
        self.num_gpu_experts = 0
        self.lora_rank = count("lora_rank", lora_rank, most=RANK_MAX)
        if not (isinstance(lora_alpha, (int, float)) and 0 < lora_alpha < math.inf):
            raise InputError(f"lora_alpha must be finite and above 0, found {show(lora_alpha)}")
        self.lora_alpha, self.lora_dropout = float(lora_alpha), 0.0
        self.lora_scaling = self.lora_alpha / self.lora_rank
        self.max_cache_depth = count("max_cache_depth", max_cache_depth)
        self.weight_path = weight_path
        self.chunked_prefill_size = chunked_prefill_size
        self.threadpool_count = count("threadpool_count", threadpool_count)
        self.method, self.group_size, self.zero_point = method, group_size, zero_point
        self.swiglu_limit, self.swiglu_alpha = swiglu_limit, swiglu_alpha
        self.share_backward_bb = self.share_cache_pool = False
        self._tuning = methods.TUNED[method]
        self._activation = weights.gated_activation(swiglu_limit, swiglu_alpha)
        self._nodes = nodes(self.threadpool_count, numa_nodes)
        if cpuinfer_threads is not None:
            ktmoe.set_num_threads(cpuinfer_threads)
        CheckpointOutput.__init__(self)
        OptimizerGradients.__init__(self, self._tuning.shared)
        self._training: Training | None = None
        self._adapter: AdapterTensors | None = None
        self._leave: weakref.finalize | None = None
        self._closed = False
        SFTPasses.__init__(self)

    @property
    def cpu_infer(self) -> CpuInfer:
        """The queue that all wrappers share."""
        return CPU_INFER

    @property
    def moe(self) -> MoELayer | None:
        """What computes, None before the weights are loaded."""
        training = self._training
        return None if training is None else training.layer

    @property
    def _weights_loaded(self) -> bool:
        return self._training is not None

    @property
    def _lora_initialized(self) -> bool:
        return self._adapter is not None

    @property
    def _is_skip_lora(self) -> bool:
        return not self._tuning.adapts

    # Weights

    def load_weights(self, physical_to_logical_map_cpu=None) -> None:
        """Read and pack this layer's experts from weight_path, for any method; once: a second call does nothing.

        physical_to_logical_map_cpu: int64 [num_experts], which expert of the checkpoint fills each slot; None: each its own.
        """
        if self._weights_loaded:
            return
        if not self.weight_path:
            raise InputError("load_weights needs weight_path, the checkpoint's folder; found none")
        self._load_files(sft_weights.OfFiles(self.weight_path, self.layer_idx), physical_to_logical_map_cpu)

    def load_weights_from_tensors(self, gate_proj, up_proj, down_proj, physical_to_logical_map_cpu=None) -> None:
        """Pack bfloat16 matrices, gate and up [E, I, H], down [E, H, I], rounded where the method rounds."""
        given = weights.from_tensors(gate_proj, up_proj, down_proj, self._activation, f"layer {self.layer_idx}")
        self._load(given, physical_to_logical_map_cpu)

    def load_rawint4_weights(self, weights, physical_to_logical_map_cpu=None) -> None:
        """Pack INT4 weights.

        weights: kt-kernel's RAWINT4ExpertWeights, or what has its attributes, of any group size; or sft_weights.OfFiles.
        """
        if isinstance(weights, sft_weights.OfFiles):
            self._load_files(weights, physical_to_logical_map_cpu)
        else:
            self._load(sft_weights.rawint4(weights, f"layer {self.layer_idx}"), physical_to_logical_map_cpu)

    def load_block_fp8_weights(self, weights, physical_to_logical_map_cpu=None) -> None:
        """Pack FP8 weights: kt-kernel's BlockFP8ExpertWeights, or what has its attributes; or sft_weights.OfFiles."""
        if isinstance(weights, sft_weights.OfFiles):
            self._load_files(weights, physical_to_logical_map_cpu)
        else:
            self._load(sft_weights.block_fp8(weights, f"layer {self.layer_idx}"), physical_to_logical_map_cpu)

    def load_mxfp4_weights(self, experts_data, physical_to_logical_map_cpu=None) -> None:
        """Pack MXFP4 weights. experts_data: what kt-kernel's MXFP4SafeTensorLoader.load_experts() returns."""
        self._load(sft_weights.mxfp4(experts_data, f"layer {self.layer_idx}"), physical_to_logical_map_cpu)

    def update_base_weights(self) -> None:
        """Raises UnavailableError: packed weights are frozen."""
        raise UnavailableError(f"layer {self.layer_idx}: update_base_weights: packed weights are frozen")

    def init_full_weight_grad_buffers(self, gate_proj, up_proj, down_proj) -> None:
        """Raises UnavailableError: packed weights are frozen."""
        raise UnavailableError(f"layer {self.layer_idx}: init_full_weight_grad_buffers: packed weights are frozen")

    def submit_backward_repack(self) -> None:
        """Do nothing: backward reads the weights as they are packed, and there is no second copy to make ready."""

    def wait_backward_repack(self) -> None:
        """Do nothing, as there is nothing to wait for."""

    # Adapter

    def init_lora_weights(
        self,
        gate_lora_a,
        gate_lora_b,
        up_lora_a,
        up_lora_b,
        down_lora_a,
        down_lora_b,
        grad_gate_lora_a,
        grad_gate_lora_b,
        grad_up_lora_a,
        grad_up_lora_b,
        grad_down_lora_a,
        grad_down_lora_b,
    ) -> None:
        """The adapter and its gradients, A [E, rank, inputs] and B [E, outputs, rank]: bfloat16 or float32, on the CPU,
        contiguous. They are held, not copied: what is changed in place counts, and backward writes the gradients there.

        Six torch Parameters are registered as register_authoritative_optimizer_grad() does it, in the place of those of an
        adapter before. Raises InputError; UnavailableError while a backward is pending.
        """
        matrices = (gate_lora_a, gate_lora_b, up_lora_a, up_lora_b, down_lora_a, down_lora_b)
        gradients = (grad_gate_lora_a, grad_gate_lora_b, grad_up_lora_a, grad_up_lora_b, grad_down_lora_a, grad_down_lora_b)
        tensors, buffers = dict(zip(NAMES, matrices, strict=True)), dict(zip(NAMES, gradients, strict=True))
        parameters = [host_arrays.is_parameter(matrix) for matrix in matrices]
        if self._uses_authoritative_optimizer_grads and any(parameters) and not all(parameters):
            raise InputError("either all matrices of an adapter or none must be torch Parameters, found some")
        adapter = AdapterTensors(tensors, buffers, self._shapes(), self.lora_alpha)
        self._register_adapter({name: (tensors[name], buffers[name]) for name in NAMES} if all(parameters) else {})
        for name in NAMES:
            setattr(self, name, tensors[name])
            setattr(self, f"grad_{name}", buffers[name])
        self._adapter = adapter

    def update_lora_weights(self) -> None:
        """Find the adapter's memory again: whoever gave a Parameter other memory calls this."""
        self._require()
        if self._adapter is not None:
            self._adapter.tensors = {name: getattr(self, name) for name in NAMES}
            self._adapter.find()
        elif self._tuning.adapts:
            raise InputError(f"layer {self.layer_idx}: init_lora_weights() must come first, found no adapter")

    def close(self) -> None:
        """Give the weights and what is kept back once calls that were submitted are done."""
        self._closed = True
        training, self._training = self._training, None
        self.give_up()
        if training is not None:
            ENGINE.submit(training.layer.close).result()
        if self._leave is not None:
            self._leave()

    def __enter__(self) -> SFTWrapper:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol):
        raise NotCopyableError(
            f"layer {self.layer_idx}: an SFTWrapper cannot be copied or pickled, since its adapter and gradients are its "
            "caller's memory"
        )

    def _load_files(self, files: sft_weights.OfFiles, physical) -> None:
        lease = weights.Lease(files.folder)
        try:
            self._load(lease.experts(files.layer), physical)
        except BaseException:
            lease.close()
            raise
        self._leave = weakref.finalize(self, lease.close)  # until then the next layer finds the checkpoint open
        self._leave.atexit = False

    def _load(self, experts: ExpertWeights, physical) -> None:
        if self._closed:
            raise ClosedError(f"layer {self.layer_idx}: weights were loaded after close()")
        if self._weights_loaded:
            raise UnavailableError(f"layer {self.layer_idx}: its weights are frozen: expected to load them once")
        kind = methods.SERVED[self._tuning.weights]
        sizes = self.num_experts, self.hidden_size, self.moe_intermediate_size
        experts = weights.prepared(experts, self.method, kind, sizes, physical, self._activation)
        self._training = Training(MoELayer(experts, activations="bf16", numa_nodes=self._nodes))

    def _require(self) -> Training:
        training = self._training  # once: close() may come from another thread
        if training is not None:
            return training
        if self._closed:
            raise ClosedError(f"layer {self.layer_idx}: used after close()")
        raise InputError(f"layer {self.layer_idx}: load_weights() must come first, found no weights")

    def _lora(self) -> Lora | None:
        if not self._tuning.adapts:
            return None
        if self._adapter is None:
            raise InputError(f"layer {self.layer_idx}: init_lora_weights() must come first, found no adapter")
        return self._adapter.lora

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        gate, down = (self.moe_intermediate_size, self.hidden_size), (self.hidden_size, self.moe_intermediate_size)
        shapes = {}
        for projection, (n, k) in (("gate", gate), ("up", gate), ("down", down)):
            shapes[f"{projection}_lora_a"] = (self.num_experts, self.lora_rank, k)
            shapes[f"{projection}_lora_b"] = (self.num_experts, n, self.lora_rank)
        return shapes
