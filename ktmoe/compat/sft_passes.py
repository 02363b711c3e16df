"""The forward and backward calls of an SFTWrapper: tasks of the queue that all wrappers share, and what waits for them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from ktmoe import forks
from ktmoe.compat import host_arrays
from ktmoe.compat.arguments import batch
from ktmoe.compat.buffers import Key
from ktmoe.compat.calls import Call, Loaded
from ktmoe.compat.engine import ENGINE
from ktmoe.compat.optimizer_gradients import checked_scale
from ktmoe.compat.sft_lora import AdapterTensors, GradientMemory
from ktmoe.compat.sides import side_of
from ktmoe.errors import InputError, UnavailableError
from ktmoe.training import Lora, Saved, SavedStack, Training

_GRADIENT_MEMORY = GradientMemory()


@dataclass(frozen=True)
class _Pending:
    """A call that was submitted. given: the argument whose kind its result has. device: where that is to be."""

    output: Future
    given: object
    device: object


class SFTPasses:
    """A mixin of SFTWrapper, which has all other attributes."""

    def __init__(self) -> None:
        self._saved = SavedStack(self.max_cache_depth, forgets=True)
        self.after_fork()
        forks.watch(self)

    def after_fork(self) -> None:
        """What was submitted is the parent's."""
        self._writing = None
        self._forward_call: _Pending | None = None
        self._backward_call: _Pending | None = None
        self._inference: Call | None = None

    @property
    def _cache_depth(self) -> int:
        return len(self._saved)

    def give_up(self) -> None:
        """Give up whatever was submitted or kept."""
        call, self._inference = self._inference, None
        if call is not None:
            call.abandon()
        self._forward_call = self._backward_call = None
        self._saved.clear()

    def forward(self, hidden_states, expert_ids, weights, save_for_backward: bool = True, output_device=None):
        """submit_forward() and sync_forward() in one."""
        self.submit_forward(hidden_states, expert_ids, weights, save_for_backward)
        return self.sync_forward(output_device)

    def submit_forward(self, hidden_states, expert_ids, weights, save_for_backward: bool = True) -> None:
        """Begin a call; its arguments are copied. One that was submitted before and not asked for is given up.

        hidden_states: [tokens, hidden], floats, rounded to bfloat16. expert_ids: integers [tokens, top_k]; one that is no
        expert adds zero. weights: floats [tokens, top_k]. Arrays, or torch tensors on the CPU or a GPU.
        """
        training, lora = self._require(), self._lora()
        batch(self.hidden_size, hidden_states, expert_ids, weights)
        x = host_arrays.bits("hidden_states", hidden_states).reshape(-1, self.hidden_size)
        ids, scores = host_arrays.integers("expert_ids", expert_ids), host_arrays.floats("weights", weights)
        output = ENGINE.submit(_forward, training, (x, ids, scores), lora, bool(save_for_backward))
        self._forward_call = _Pending(output, hidden_states, None)

    def sync_forward(self, output_device=None):
        """The result of the last submit_forward(), bfloat16 [tokens, hidden], on a device, or on the CPU.

        What it keeps for backward is the newest of max_cache_depth; the oldest is forgotten.
        """
        forward, self._forward_call = self._forward_call, None
        if forward is None:
            raise InputError(f"layer {self.layer_idx}: sync_forward needs a submit_forward before it, found none")
        y, saved = forward.output.result()
        if saved is not None:
            self._saved.push(saved)
        return host_arrays.like(forward.given, y, output_device)

    def submit_forward_inference(self, hidden_states, expert_ids, weights, cuda_stream) -> None:
        """Begin a call that keeps nothing, after the work that cuda_stream has now: for serving. The adapter takes part."""
        serving = Loaded(_Serving(self._require(), self._lora()), ("", self.hidden_size), None)
        if self._inference is not None:
            raise InputError(f"layer {self.layer_idx}: sync_forward_inference() must come first, found a call that is pending")
        tokens, top_k = batch(self.hidden_size, hidden_states, expert_ids, weights)
        side = side_of(hidden_states)
        buffers = ENGINE.pool.take(Key(side, 0, tokens, self.hidden_size, top_k))
        try:
            ready = side.bring(buffers, hidden_states, expert_ids, weights, cuda_stream)
            call = Call(serving, buffers, hidden_states.dtype, np.zeros(self.num_experts, bool), ready)
            call.output = ENGINE.submit(call.now)
        except BaseException:
            buffers.release()
            raise
        self._inference = call

    def sync_forward_inference(self, cuda_stream=None):
        """The result of submit_forward_inference(), where hidden_states were and of their dtype."""
        call, self._inference = self._inference, None
        if call is None:
            raise InputError(f"layer {self.layer_idx}: sync_forward_inference needs a submit before it, found none")
        return call.result(cuda_stream)

    def backward(self, grad_output, output_device=None, optimizer_grad_scale: float = 1.0) -> tuple:
        """submit_backward_async() and sync_backward() in one."""
        self.submit_backward_async(grad_output, output_device, optimizer_grad_scale)
        return self.sync_backward()

    def submit_backward_async(self, grad_output, output_device=None, optimizer_grad_scale: float = 1.0) -> None:
        """Begin the backward of the newest forward that is kept, which is used up.

        grad_output: floats [tokens, hidden], rounded to bfloat16; copied. optimizer_grad_scale: multiplies the adapter's
        gradients alone. They are written anew, or added to where all registered Parameters' grads are their buffers.
        Raises InputError, UnavailableError.
        """
        training, scale = self._require(), checked_scale(optimizer_grad_scale)
        if self._backward_call is not None:
            raise UnavailableError(f"layer {self.layer_idx}: sync_backward() must come first, found a backward that is pending")
        if not self._saved:
            raise UnavailableError(f"layer {self.layer_idx}: backward needs a forward that was saved for it, found none")
        grad = host_arrays.bits("grad_output", grad_output)
        tokens = len(self._saved.last.x)
        if grad.shape != (tokens, self.hidden_size):
            raise InputError(f"grad_output must have shape [{tokens}, {self.hidden_size}], found {list(grad.shape)}")
        adapter = self._adapter if self._tuning.adapts else None
        add = self._begin_gradients()
        try:
            output = ENGINE.submit(_backward, training, self._saved.pop(), grad, adapter, scale, add)
        except BaseException:
            self._abort_gradients()
            raise
        self._backward_call = _Pending(output, grad_output, output_device)

    def sync_backward(self) -> tuple:
        """(gradient of hidden_states, bfloat16 [tokens, hidden]; of the router weights, float32 [tokens, top_k])."""
        backward, self._backward_call = self._backward_call, None
        if backward is None:
            raise InputError(f"layer {self.layer_idx}: sync_backward needs a submit_backward_async before it, found none")
        try:
            of_x, of_weights = backward.output.result()
        except BaseException:
            self._abort_gradients()
            raise
        self._publish_gradients()
        return tuple(host_arrays.like(backward.given, array, backward.device) for array in (of_x, of_weights))

    @staticmethod
    def clear_sft_buffer_cache() -> None:
        """Give up the memory in which all layers' gradients are summed, after the backward that runs."""
        with _GRADIENT_MEMORY.lock:
            _GRADIENT_MEMORY.clear()


@dataclass(frozen=True)
class _Serving:
    """What stands in the place of a layer: it computes with an adapter, and keeps nothing."""

    training: Training
    lora: Lora | None

    def forward(self, x, ids, weights, out=None):
        y, _ = self.training.forward(x, ids, weights, self.lora, save=False, out=out)
        return y


def _forward(training: Training, arguments: tuple, lora: Lora | None, save: bool) -> tuple[np.ndarray, Saved | None]:
    return training.forward(*arguments, lora, save=save)


def _backward(
    training: Training, saved: Saved, grad: np.ndarray, adapter: AdapterTensors | None, scale: float, add: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of x and of the router weights; the adapter's are in their buffers if nothing was raised."""
    if adapter is None:
        gradients = training.backward(saved, grad)
        return gradients.x, gradients.weights
    with _GRADIENT_MEMORY.lock:
        staged = _GRADIENT_MEMORY.pairs(adapter.lora)
        gradients = training.backward(saved, grad, adapter.lora, into=staged, scale=scale)
        adapter.write(staged, add)
    return gradients.x, gradients.weights
