"""The implementation of experts that transformers calls: packed experts on the CPU, and those that stay on a GPU."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future

import numpy as np
import torch
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ktmoe import forks
from ktmoe.backends.choice import choose_backend
from ktmoe.errors import UnavailableError
from ktmoe.layer import MoELayer, placement_of
from ktmoe.torch.function import differentiable
from ktmoe.training import Training
from ktmoe.transformers.modules import Experts, examine
from ktmoe.transformers.options import Options, Reporting

#: Its name in transformers.
NAME = "ktmoe"
#: What computes experts that stay on a GPU: transformers' own, which leaves out ids that are too large.
_ON_GPU = "grouped_mm"


@torch.compiler.disable
def experts_forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What transformers calls for a module of experts: [tokens, hidden] of hidden_states' dtype and device.

    hidden_states: [tokens, hidden], bfloat16 or float32, or float16, which goes by way of float32. On a GPU they are copied to
    the CPU and back. top_k_index, top_k_weights: [tokens, top_k]. The first call packs a module that is not packed yet.
    Where one of them requires grad, gradients flow through the frozen experts, as through ktmoe.torch.MoEExperts without LoRA.
    Raises UnavailableError for a module that ktmoe does not compute, and for inputs that require grad where some experts are on
    a GPU; InputError for such inputs of a layer that rounds activations.
    """
    if getattr(self, "ktmoe_layer", None) is None:
        _first_call.pack(self)
    if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
        if self.gpu_experts is not None:
            raise UnavailableError(
                f"{type(self).__name__}: expected inputs without grad, since some of its experts are on a GPU; "
                "call the model under torch.no_grad()"
            )
        return differentiable(Training(self.ktmoe_layer), hidden_states, top_k_index, top_k_weights)
    x = hidden_states.cpu()
    x = x if x.dtype == torch.bfloat16 else x.float()
    ids, weights = top_k_index.cpu(), top_k_weights.cpu().float()
    if self.gpu_experts is None:
        return self.ktmoe_layer.forward(x, ids, weights).to(hidden_states)
    job: Future = self.ktmoe_layer.submit(x, ids, weights)
    on_gpu = self.gpu_experts(hidden_states, top_k_index, top_k_weights)
    return job.result().to(hidden_states) + on_gpu


class GpuExperts(torch.nn.Module):
    """Some experts of a module, as torch parameters, which transformers computes where they are.

    tensors: their parameters, on that device. chosen: which experts they are.
    """

    def __init__(self, experts: Experts, tensors: Mapping[str, torch.Tensor], chosen: np.ndarray):
        super().__init__()
        self.chosen = chosen
        part = copy.copy(experts.module)
        part.__class__ = experts.kind
        part._modules = dict(part._modules)
        part._parameters = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
        part.num_experts = len(chosen)
        part._is_expert_parallel = True  # ids of other experts are num_experts
        self.part = part
        slots = np.full(experts.num_experts, len(chosen))
        slots[chosen] = np.arange(len(chosen))
        device = next(iter(tensors.values())).device
        self.register_buffer("slots", torch.from_numpy(slots).to(device), persistent=False)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        x, ids, weights = (tensor.to(self.slots.device) for tensor in (hidden_states, top_k_index, top_k_weights))
        return ALL_EXPERTS_FUNCTIONS[_ON_GPU](self.part, x, self.slots[ids], weights).to(hidden_states)


def check_packable(found: Iterable[Experts], options: Options) -> None:
    """Raise, before anything is packed, UnavailableError for parameters that are not bfloat16, and what choosing a backend and
    NUMA nodes raises.
    """
    for experts in found:
        tensors = {name: experts.module.get_parameter(name) for name in experts.parameters}
        weights = experts.weights(tensors)
        choose_backend(options.backend, weights, options.activations)
        placement_of(weights, options.numa_nodes)


def pack_module(experts: Experts, options: Options, on_gpu: np.ndarray, report: Reporting) -> None:
    """Pack a module's own parameters, and free them. on_gpu: ids of experts that stay in torch. report: of Options.reporting().

    Raises what MoELayer does; the module is then as it was.
    """
    tensors = {name: experts.module.get_parameter(name).detach() for name in experts.parameters}
    packed = pack_tensors(experts, tensors, options, on_gpu, report)
    adopt(experts)
    attach(experts, *packed)
    experts.module.register_state_dict_pre_hook(_refuse_saving)


def pack_tensors(
    experts: Experts, tensors: Mapping[str, torch.Tensor], options: Options, on_gpu: np.ndarray, report: Reporting
) -> tuple[MoELayer, GpuExperts | None]:
    """What attach() takes, from bfloat16 tensors of the names and shapes of a module's parameters."""
    layer = MoELayer(experts.weights(tensors), **options.packing, progress=report(experts.nbytes))
    if not on_gpu.size:
        return layer, None
    chosen = {name: tensor[torch.from_numpy(on_gpu).to(tensor.device)] for name, tensor in tensors.items()}
    return layer, GpuExperts(experts, chosen, on_gpu)


def adopt(experts: Experts) -> None:
    """Take a module's parameters away. Until attach(), it cannot be called."""
    module = experts.module
    for name in experts.parameters:
        del module._parameters[name]
    module.__class__ = _without(experts.kind, tuple(experts.parameters))
    module._is_hf_initialized = True  # nothing is left that transformers would have to initialize
    module.ktmoe_layer = None


def attach(experts: Experts, layer: MoELayer, stay: GpuExperts | None) -> None:
    """Give a module that was adopted what computes it."""
    if stay is not None:
        layer.expert_mask[stay.chosen] = False
    experts.module.gpu_experts = stay
    experts.module.ktmoe_layer = layer


class _FirstCall:
    """Packs a module that nobody packed, once, whatever threads call it."""

    def __init__(self):
        self.after_fork()
        forks.watch(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def pack(self, module: torch.nn.Module) -> None:
        with self._lock:
            if not hasattr(module, "ktmoe_layer"):
                nobody = Options()
                with nobody.reporting(0) as report:
                    pack_module(examine(module, "experts"), nobody, np.zeros(0, np.int64), report)


_first_call = _FirstCall()


@functools.cache
def _without(kind: type, parameters: tuple[str, ...]) -> type:
    """The same class, but for parameters that are gone: asking for one says why. torch's parametrize() does it like this."""

    def gone(self):
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
