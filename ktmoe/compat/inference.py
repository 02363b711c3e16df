"""InferenceWrapper: what KTMoEWrapper is in mode "inference", for SGLang and KTransformers.

What differs from kt-kernel on purpose: any batch size works; CUDA is needed only for CUDA tensors; outside of CUDA graphs,
sync_forward() waits on the host (cuda.py says why); no layer loses what it deferred (deferral.py).
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future

import ktmoe
from ktmoe import forks
from ktmoe.compat import masks, methods, weights
from ktmoe.compat.arguments import Sizes, batch, count, nodes
from ktmoe.compat.buffers import Key
from ktmoe.compat.calls import Call, Loaded
from ktmoe.compat.captures import CapturedCall, Request
from ktmoe.compat.deferral import Pending
from ktmoe.compat.engine import CPU_INFER, ENGINE, CpuInfer
from ktmoe.compat.export import RankBuffers
from ktmoe.compat.sides import side_of
from ktmoe.errors import ClosedError, InputError
from ktmoe.experts import ExpertWeights
from ktmoe.layer import MoELayer
from ktmoe.weights.formats import BF16

#: Buffers alternate by layer, so that what one layer deferred can still be read while the next one runs.
SLOTS = 2


class InferenceWrapper:
    """The routed experts of one layer, on the CPU; what others compute (the GPU) is skipped. KTMoEWrapper has its arguments."""

    mode = "inference"

    def __init__(
        self,
        *,
        layer_idx: int,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        moe_intermediate_size: int,
        gpu_experts_mask,
        cpuinfer_threads: int | None,
        threadpool_count: int,
        weight_path: str | os.PathLike | None,
        chunked_prefill_size: int | None,
        cpu_save: bool,
        max_deferred_experts_per_token: int | None,
        method: str,
        numa_nodes: Sequence[int] | None,
        num_gpu_experts: int | None,
        swiglu_limit: float | None,
        swiglu_alpha: float,
    ):
        methods.require(self.mode, method)
        sizes = Sizes.checked(layer_idx, num_experts, num_experts_per_tok, hidden_size, moe_intermediate_size)
        self.layer_idx, self.num_experts, self.num_experts_per_tok, self.hidden_size, self.moe_intermediate_size = sizes
        self.max_deferred_experts_per_token = count("max_deferred_experts_per_token", max_deferred_experts_per_token or 0, 0)
        self.gpu_experts_mask = masks.make(
            gpu_experts_mask, count("num_gpu_experts", num_gpu_experts or 0, 0), self.num_experts
        )
        self.num_gpu_experts = int(self.gpu_experts_mask.sum())
        self.weight_path = weight_path
        self.chunked_prefill_size = chunked_prefill_size
        self.cpu_save = cpu_save
        self.method = method
        self.swiglu_limit = swiglu_limit
        self.swiglu_alpha = swiglu_alpha
        self._activation = weights.gated_activation(swiglu_limit, swiglu_alpha)
        self._nodes = nodes(count("threadpool_count", threadpool_count), numa_nodes)
        if cpuinfer_threads is not None:
            ktmoe.set_num_threads(cpuinfer_threads)
        self._loaded: Loaded | None = None
        self._closed = False
        self.after_fork()
        forks.watch(self)

    def after_fork(self) -> None:
        """What was submitted is the parent's."""
        self._lock = threading.Lock()
        self._submitted: Call | CapturedCall | None = None
        self._writes: list[Future] = []

    @property
    def cpu_infer(self) -> CpuInfer:
        """The queue that all wrappers share."""
        return CPU_INFER

    @property
    def moe(self) -> MoELayer | None:
        """What computes, None before the weights are loaded."""
        loaded = self._loaded
        return None if loaded is None else loaded.layer

    def load_weights(self, physical_to_logical_map_cpu=None) -> None:
        """Read and pack this layer's experts from weight_path.

        physical_to_logical_map_cpu: int64 [num_experts], which expert of the checkpoint fills each slot; None: each its own.
        """
        if not self.weight_path:
            raise InputError("load_weights needs weight_path, the checkpoint's folder; found none")
        lease = weights.Lease(self.weight_path)
        try:
            self._load(lease.experts(self.layer_idx), physical_to_logical_map_cpu, lease)
        except BaseException:
            lease.close()
            raise

    def load_weights_from_tensors(self, gate_proj, up_proj, down_proj, physical_to_logical_map_cpu=None) -> None:
        """Pack bfloat16 matrices: gate and up [E, I, H], down [E, H, I]; the map as in load_weights().

        method: "BF16", or one that rounds, see methods.SERVED.
        """
        takes = [name for name, method in methods.SERVED.items() if method.fits(BF16) and not method.files]
        if self.method not in takes:
            raise InputError(
                f"load_weights_from_tensors takes bfloat16: method must be one of {', '.join(takes)}, found {self.method!r}"
            )
        name = f"layer {self.layer_idx}"
        self._load(weights.from_tensors(gate_proj, up_proj, down_proj, self._activation, name), physical_to_logical_map_cpu)

    def forward(self, hidden_states, topk_ids, topk_weights, cuda_stream=None):
        """submit_forward() and sync_forward() in one, on the caller's thread; several threads may call it."""
        call = self._call(hidden_states, topk_ids, topk_weights, cuda_stream)
        if isinstance(call, CapturedCall):
            return call.result(cuda_stream)
        try:
            with ENGINE.lock:
                self._take(call)
            call.now()
            with ENGINE.lock:
                self._defer(call)
        except BaseException:
            call.buffers.release()
            raise
        return call.result(cuda_stream)

    def submit_forward(self, hidden_states, topk_ids, topk_weights, cuda_stream=None) -> None:
        """Begin a call; all arguments are copied, after the work that cuda_stream has now.

        hidden_states: bfloat16 [tokens, hidden]. topk_ids: int64 [tokens, top_k]; an id below 0, from num_experts on, or of an
        expert on the GPU adds zero. topk_weights: float32 [tokens, top_k]. cuda_stream: a torch stream or a handle.
        A call that was submitted before and not asked for is given up.

        While cuda_stream is captured in a CUDA graph, the call becomes part of it, and sync_forward() must, too. A replay reads
        the mask that was gpu_experts_mask at the capture: change that in place, as one that is assigned later does not count.
        What a replay fails with is raised by the next call of any wrapper, and its result is NaN. Raises UnavailableError where
        the CUDA runtime or the backend cannot do that.
        """
        call = self._call(hidden_states, topk_ids, topk_weights, cuda_stream)
        if isinstance(call, Call):
            self._queue(call)
        with self._lock:
            earlier, self._submitted = self._submitted, call
        if earlier is not None:
            earlier.abandon()

    def _queue(self, call: Call) -> None:
        try:
            with ENGINE.lock:
                self._take(call)
                call.output = ENGINE.submit(call.now)
                self._defer(call)
        except BaseException:
            call.buffers.release()
            raise

    def sync_forward(self, hidden_states=None, cuda_stream=None):
        """The result of the last submit_forward(), [tokens, hidden], where hidden_states were and of their dtype.

        A captured batch size has one result a slot (layer_idx % 2), which the next call of that slot overwrites. In a graph
        each call has its own. Raises InputError if only one of the two calls is in a graph, or each in another one.
        """
        ENGINE.captures.settle()
        with self._lock:
            call, self._submitted = self._submitted, None
        if call is None:
            raise InputError(f"layer {self.layer_idx}: sync_forward needs a submit_forward before it, found none")
        return call.result(cuda_stream)

    def submit_write_weight_scale_to_buffer(
        self, gpu_tp_count: int, expert_id: int, w13_weight_ptrs, w13_scale_ptrs, w2_weight_ptrs, w2_scale_ptrs
    ) -> None:
        """Begin to write one expert's weights, in the checkpoint's own packing, to host addresses, one a GPU rank.

        expert_id: a slot, whether on the GPU or not. A rank's w13 holds its I / gpu_tp_count rows of gate, then of up, [.., H];
        its w2 those columns of down, [H, ..]. Scales are what export.py says. Raises UnavailableError for a method that has no
        such buffers in kt-kernel.
        """
        loaded = self._require()
        expert = count("expert_id", expert_id, 0)
        if expert >= self.num_experts:
            raise InputError(f"expert_id must be in [0, {self.num_experts}), found {expert}")
        pointers = w13_weight_ptrs, w13_scale_ptrs, w2_weight_ptrs, w2_scale_ptrs
        target = RankBuffers(self.method, loaded.layer.spec, gpu_tp_count, *pointers)
        with self._lock:
            self._writes.append(ENGINE.submit(_write, loaded.layer, expert, target))

    def sync_write_weight_scale_to_buffer(self) -> None:
        """Wait for all that submit_write_weight_scale_to_buffer() began; raises what the first of them raised."""
        with self._lock:
            writes, self._writes = self._writes, []
        for error in [write.exception() for write in writes]:
            if error is not None:
                raise error

    @staticmethod
    def set_capture_batch_sizes(capture_bs: Sequence[int]) -> None:
        """Batch sizes whose buffers are kept for good, at the same addresses."""
        ENGINE.pool.captured = [count("capture_bs", size) for size in capture_bs]

    @staticmethod
    def get_capture_batch_sizes() -> list[int]:
        return list(ENGINE.pool.captured)

    @staticmethod
    def clear_buffer_cache() -> None:
        """Give up all buffers that no call uses, and what is still to be added to a next layer's result."""
        with ENGINE.lock:
            ENGINE.passes.reset()
            ENGINE.captures.forget()
            ENGINE.pool.clear()

    def close(self) -> None:
        """Give the weights back once calls that were submitted are done, and the checkpoint after its last layer."""
        self._closed = True
        with self._lock:
            loaded, self._loaded = self._loaded, None
            call, self._submitted = self._submitted, None
        if call is not None:
            call.abandon()
        if loaded is not None:
            ENGINE.submit(loaded.layer.close).result()
            loaded.leave()

    def __enter__(self) -> InferenceWrapper:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _load(self, experts: ExpertWeights, physical, lease: weights.Lease | None = None) -> None:
        ENGINE.captures.settle()
        if self._closed:
            raise ClosedError(f"layer {self.layer_idx}: weights were loaded after close()")
        sizes = self.num_experts, self.hidden_size, self.moe_intermediate_size
        experts = weights.prepared(experts, self.method, methods.SERVED[self.method], sizes, physical, self._activation)
        layer = MoELayer(experts, numa_nodes=self._nodes)
        model = os.fspath(self.weight_path or ""), self.hidden_size
        with ENGINE.lock:
            ENGINE.passes.join(model, self.layer_idx)
        leave = weakref.finalize(self, _leave, model, self.layer_idx, lease)
        leave.atexit = False
        loaded = Loaded(layer, model, leave)
        with self._lock:
            earlier, self._loaded = self._loaded, loaded
        if earlier is not None:
            ENGINE.submit(earlier.layer.close).result()  # so that no graph is replayed with the old weights from now on
            earlier.leave()

    def _require(self) -> Loaded:
        ENGINE.captures.settle()
        loaded = self._loaded  # once: close() may come from another thread
        if loaded is not None:
            return loaded
        if self._closed:
            raise ClosedError(f"layer {self.layer_idx}: used after close()")
        raise InputError(f"layer {self.layer_idx}: load_weights() must come first, found no weights")

    def _call(self, x, ids, weights_, stream) -> Call | CapturedCall:
        """A call whose arguments are on their way into its buffers; one that is captured is submitted, too."""
        loaded = self._require()
        side = side_of(x)
        tokens, top_k = batch(self.hidden_size, x, ids, weights_)
        if (place := side.capturing(stream)) is not None:
            with ENGINE.lock:
                on_gpu, deferral = masks.live(self.gpu_experts_mask, self.num_experts), self._deferral(loaded.model)
                return ENGINE.captures.submit(Request(place, side, self.layer_idx, loaded, on_gpu, *deferral), x, ids, weights_)
        on_gpu = masks.read(self.gpu_experts_mask, self.num_experts)
        buffers = ENGINE.pool.take(Key(side, self.layer_idx % SLOTS, tokens, self.hidden_size, top_k))
        try:
            return Call(loaded, buffers, x.dtype, on_gpu, side.bring(buffers, x, ids, weights_, stream))
        except BaseException:
            buffers.release()
            raise

    def _take(self, call: Call) -> None:
        """What is due to this layer, and whether it may defer. Under ENGINE.lock, as is _defer()."""
        model = call.loaded.model
        call.successor, protected = self._deferral(model)
        if call.successor is not None:
            call.protected = protected
        call.earlier = ENGINE.passes.take(model, self.layer_idx, call.buffers.x.shape)

    def _deferral(self, model) -> tuple[int | None, int]:
        """The layer to which what is deferred goes, None if nothing is; and how many of a token's slots are not deferred."""
        successor = ENGINE.passes.successor(model, self.layer_idx) if self.max_deferred_experts_per_token else None
        return successor, self.num_experts_per_tok - self.max_deferred_experts_per_token

    def _defer(self, call: Call) -> None:
        if call.successor is not None:
            late = ENGINE.submit(call.late)
            call.buffers.hold()
            pending = Pending(call.successor, call.buffers.x.shape, late, call.buffers.release)
            ENGINE.passes.put(call.loaded.model, pending)


def _leave(model: tuple[str, int], layer: int, lease: weights.Lease | None) -> None:
    ENGINE.lock.soon(functools.partial(ENGINE.leave, model, layer))
    if lease is not None:
        lease.close()


def _write(layer: MoELayer, expert: int, target: RankBuffers) -> None:
    layer.export_expert(expert, len(target.parts), out=target.parts)
    target.finish()
