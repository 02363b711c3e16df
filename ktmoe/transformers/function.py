"""The implementation of experts that transformers calls: packed experts on the CPU, and some of them on a GPU."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ktmoe import forks
from ktmoe.backends.choice import choose_backend
from ktmoe.distributed.layer import DistributedLayer
from ktmoe.errors import UnavailableError
from ktmoe.layer import MoELayer
from ktmoe.machine.numa import placement_of
from ktmoe.torch.counting import count
from ktmoe.torch.function import differentiable
from ktmoe.torch.operators import handle_of, held_operator
from ktmoe.torch.products import experts_product, is_plain
from ktmoe.training import Training
from ktmoe.transformers.gpu_experts import added
from ktmoe.transformers.modules import Experts, examine
from ktmoe.transformers.options import Options, Reporting

#: The name of ktmoe's function in transformers.
NAME = "ktmoe"


def experts_forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What transformers calls for a module of experts: [tokens, hidden] of hidden_states' dtype and device.

    hidden_states: [tokens, hidden], bfloat16 or float32, or float16, which goes by way of float32. On a GPU they are copied to
    the CPU and back. top_k_index, top_k_weights: [tokens, top_k]. The first call packs a module that is not packed yet.
    Where one of them requires grad, gradients flow through the frozen experts, as through ktmoe.torch.MoEExperts without LoRA,
    and through those on a GPU.
    Raises UnavailableError for a module that ktmoe does not compute, InputError for inputs that require grad of a layer that
    rounds activations.
    """
    if not torch.compiler.is_compiling():
        return _computed(self, hidden_states, top_k_index, top_k_weights)
    handle = getattr(self, "ktmoe_handle", None)
    grad = torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad)
    if grad or handle is None:
        return _outside_of_graphs(self, hidden_states, top_k_index, top_k_weights)
    return _operator(hidden_states, top_k_index, top_k_weights, handle)


def _computed(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """experts_forward(), outside of what torch compiles."""
    if getattr(self, "ktmoe_layer", None) is None:
        _first_call.pack(self)
    ids = top_k_index.cpu()
    count(self, ids)
    on_gpu = self.gpu_experts  # once, since place() may come from another thread
    chosen = None if on_gpu is None else on_gpu.choose(ids)
    grad = torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad)
    if chosen is None:
        if grad:
            return differentiable(Training(self.ktmoe_layer), hidden_states, ids, top_k_weights)
        if top_k_weights.is_cpu and hidden_states.dim() == 2 and is_plain(hidden_states):
            return experts_product(self.ktmoe_layer, hidden_states, ids, top_k_weights)  # without what other tensors need
        x = hidden_states.cpu()
        x = x if x.dtype == torch.bfloat16 else x.float()
        return self.ktmoe_layer.forward(x, ids, top_k_weights.cpu().float()).to(hidden_states)
    if grad:
        x = hidden_states.float()  # so that both parts' gradients are added before they are rounded
        outputs = on_gpu.compute(x, top_k_weights, chosen)
        on_cpu = differentiable(Training(self.ktmoe_layer), x, chosen.others, top_k_weights)
    else:
        x = hidden_states.cpu().float()  # so that the CPU's part comes in float32
        job: Future[Any] = self.ktmoe_layer.submit(x, chosen.others, top_k_weights.cpu().float())
        try:
            outputs = on_gpu.compute(hidden_states, top_k_weights, chosen)
        finally:
            on_cpu = job.result()
    return added(on_cpu, outputs, chosen).to(hidden_states)


_outside_of_graphs = torch.compiler.disable(_computed)
_operator = held_operator(
    "moe_experts",
    "Tensor hidden_states, Tensor top_k_index, Tensor top_k_weights",
    _computed,
    lambda hidden_states, top_k_index, top_k_weights: torch.empty_like(hidden_states, memory_format=torch.contiguous_format),
)


def check_packable(found: Iterable[Experts], options: Options) -> None:
    """Raise, before anything is packed, UnavailableError for parameters that are not bfloat16, and what choosing a backend and
    NUMA nodes raises.
    """
    for experts in found:
        tensors = {name: experts.module.get_parameter(name) for name in experts.parameters}
        weights = experts.weights(tensors)
        choose_backend(options.backend, weights, options.activations)
        placement_of(weights, options.numa_nodes)


def pack_module(experts: Experts, options: Options, report: Reporting) -> None:
    """Pack a module's own parameters, and free them. report: of Options.reporting().

    Raises what MoELayer does; the module is then as it was.
    """
    tensors = {name: experts.module.get_parameter(name).detach() for name in experts.parameters}
    layer = pack_tensors(experts, tensors, options, report)
    adopt(experts)
    attach(experts, layer)
    experts.module.register_state_dict_pre_hook(_refuse_saving)


def pack_tensors(
    experts: Experts, tensors: Mapping[str, torch.Tensor], options: Options, report: Reporting
) -> MoELayer | DistributedLayer:
    """What attach() takes, from bfloat16 tensors of the names and shapes of a module's parameters."""
    weights, common = experts.weights(tensors), {**options.packing, "progress": report(experts.nbytes)}
    if options.distributed is not None:
        return DistributedLayer(weights, options.distributed, layer=experts.layer, **common)
    return MoELayer(weights, **common)


def adopt(experts: Experts) -> None:
    """Take a module's parameters away. Until attach(), it cannot be called."""
    module = experts.module
    for name in experts.parameters:
        del module._parameters[name]
    module.__class__ = _without(experts.kind, tuple(experts.parameters))
    module._is_hf_initialized = True  # nothing is left that transformers would have to initialize
    module.ktmoe_layer = None


def attach(experts: Experts, layer: MoELayer | DistributedLayer) -> None:
    """Give a module that was adopted what computes it."""
    experts.module.register_module("gpu_experts", None)
    experts.module.ktmoe_layer = layer
    experts.module.ktmoe_handle = handle_of(experts.module)


class _FirstCall:
    """Packs a module that nobody packed, once, whatever threads call it."""

    def __init__(self) -> None:
        self.after_fork()
        forks.watch(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def pack(self, module: torch.nn.Module) -> None:
        with self._lock:
            if not hasattr(module, "ktmoe_layer"):
                nobody = Options()
                with nobody.reporting(0) as report:
                    pack_module(examine(module, "experts"), nobody, report)


_first_call = _FirstCall()


@functools.cache
def _without(kind: type, parameters: tuple[str, ...]) -> type:
    """The same class, but for parameters that are gone: asking for one says why. torch's parametrize() does it like this."""

    def gone(self: Any) -> None:
        raise UnavailableError(
            f"{kind.__name__}: its parameters were freed when ktmoe packed them; load the model again for another "
            "experts_implementation"
        )

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **dict.fromkeys(parameters, property(gone))})


def _refuse_saving(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    raise UnavailableError(
        f"{prefix.rstrip('.')} ({type(module).__name__}): expected to be saved before it was packed: its parameters were freed"
    )


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
