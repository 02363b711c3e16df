"""A layer of SGLang's own for experts on GPU and CPU, unchanged, in which numpy in float64 has the GPU's place."""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import numpy as np
import sglang_edges
import torch
from environments import ROOT
from helpers import BF16

import ktmoe.sglang
from ktmoe import ExpertWeights, reference

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, LAYERS = 8, 4, 256, 256, 3
MODULE = "sglang.srt.layers.moe.kt_ep_wrapper"


@dataclass(frozen=True)
class Wheel:
    """layer: SGLang's module kt_ep_wrapper. moe, dispatch, topk, location: others of its modules."""

    fork: bool
    layer: ModuleType
    moe: ModuleType
    dispatch: ModuleType
    topk: ModuleType
    location: ModuleType


@contextmanager
def imported(fork: bool):
    """kt_kernel is ktmoe: in upstream by its plug-in, as late as there; in the fork by the shim."""
    sglang_edges.stand_in(fork)
    if fork:
        sys.path.append(str(ROOT / "extras" / "kt_kernel_shim"))
    layer = importlib.import_module(MODULE)
    if not fork:
        ktmoe.sglang.register()
    names = ("moe", "moe.token_dispatcher", "moe.topk")
    others = [importlib.import_module(f"sglang.srt.layers.{name}") for name in names]
    location = importlib.import_module("sglang.srt.eplb.expert_location_dispatch")
    rank = {"get_tensor_model_parallel_rank": lambda: 0} if fork else {"get_parallel": lambda: SimpleNamespace(tp_rank=0)}
    with patch.multiple(layer, **rank):
        yield Wheel(fork, layer, *others, location)


class Gpu:
    """SGLang's method of the GPU's experts, those that on_gpu has, one after another."""

    def __init__(self, wheel: Wheel, experts: ExpertWeights, on_gpu: np.ndarray):
        self.wheel, self.experts = wheel, experts
        self.place(on_gpu)

    def place(self, on_gpu: np.ndarray) -> None:
        self.slots = np.append(np.flatnonzero(on_gpu), -1)  # -1: an expert that is not here

    def create_weights(self, layer, num_experts, **_sizes):
        layer.register_parameter("w13_of_the_gpu", torch.nn.Parameter(torch.empty(num_experts)))
        self.made = num_experts

    def create_moe_runner(self, layer, config):
        self.config = config

    def apply(self, layer, dispatched):
        ids, weights = (tensor.numpy() for tensor in (dispatched.topk_output.topk_ids, dispatched.topk_output.topk_weights))
        assert ids.max() < self.made
        y = reference.forward(self.experts, array(dispatched.hidden_states), self.slots[ids], weights).y
        y = reference.round_bfloat16(y)
        return self.wheel.dispatch.StandardCombineInput(hidden_states=tensor(y.astype(BF16)))


class Layer:
    """One layer. experts: of its slots, as the CPU has them. on_gpu: bool [EXPERTS]. deferred: of SGLang's command line."""

    def __init__(self, wheel: Wheel, index: int, experts: ExpertWeights, on_gpu: np.ndarray, slots: np.ndarray, **options):
        self.wheel, self.experts, self.on_gpu = wheel, experts, on_gpu
        deferred = options.get("max_deferred_experts_per_token") or 0
        self.deferred = deferred if index < LAYERS - 1 else 0
        self.gpu = Gpu(wheel, experts, on_gpu)
        given = {
            "layer_idx": index,
            "num_gpu_experts": int(on_gpu.sum()),
            "gpu_experts_mask": torch.from_numpy(on_gpu.copy()),
            "cpuinfer_threads": 2,
            "threadpool_count": 1,
            "chunked_prefill_size": 64,
            "max_deferred_experts_per_token": None,
            "num_layers": LAYERS,
            **options,
        }
        known = {field.name for field in fields(wheel.layer.KTConfig)}
        config = wheel.layer.KTConfig(**{name: value for name, value in given.items() if name in known})
        self.method = wheel.layer.KTEPWrapperMethod(self.gpu, config)
        self.module = torch.nn.Module()
        self.module.top_k, self.module.moe_tp_size, self.module.num_experts = TOP_K, 1, EXPERTS
        self.module.intermediate_size_per_partition = INTERMEDIATE
        self.module.moe_runner_config = runner = wheel.moe.MoeRunnerConfig(
            activation="silu", routed_scaling_factor=2.5, **clamped(experts)
        )
        self.method.create_weights(
            layer=self.module,
            num_experts=EXPERTS,
            hidden_size=HIDDEN,
            intermediate_size_per_partition=INTERMEDIATE,
            params_dtype=torch.bfloat16,
        )
        self.method.create_moe_runner(self.module, runner)
        maps = torch.from_numpy(np.broadcast_to(slots, (LAYERS, EXPERTS)).copy())
        with patch.object(wheel.location, "get_global_expert_location_metadata", sglang_edges.metadata(maps)):
            self.method.process_weights_after_loading(self.module)

    def close(self) -> None:
        self.method.wrapper.close()

    def apply(self, x, ids, weights) -> np.ndarray:
        """Call the layer as SGLang does, with int32 ids."""
        routed = self.wheel.topk.StandardTopKOutput(
            torch.from_numpy(weights.copy()), torch.from_numpy(ids.astype(np.int32)), None
        )
        dispatched = self.wheel.dispatch.StandardDispatchOutput(tensor(x.copy()), None, routed)
        return array(self.method.apply(self.module, dispatched).hidden_states)

    def check(self, x, ids, weights, y, before):
        """y has all experts, each once, within the bounds of what is computed in float64; returns what is deferred."""
        on_gpu = np.where((ids >= 0) & self.on_gpu[ids], ids, -1)
        first = np.argsort(-weights, axis=1, kind="stable")[:, : TOP_K - self.deferred]
        urgent = np.isin(ids, np.take_along_axis(ids, first, axis=1))  # by any token
        here = (ids >= 0) & ~self.on_gpu[ids]
        now = reference.forward(self.experts, x, np.where(here & urgent, ids, -1), weights, out_dtype="float32")
        gpu = reference.forward(self.experts, x, on_gpu, weights).y
        cpu, eps = now.y, now.bound
        if before is not None:
            deferred = reference.round_bfloat16(before.y)
            cpu, eps = cpu + deferred, eps + before.bound + np.abs(deferred - before.y) + 2.0**-24 * np.abs(cpu + deferred)
        low, high = (reference.round_bfloat16(cpu + sign * eps) for sign in (-1, 1))
        gpu = reference.round_bfloat16(gpu)
        assert (reference.round_bfloat16(gpu + low) <= y).all()
        assert (y <= reference.round_bfloat16(gpu + high)).all()
        if before is None and not self.deferred:  # and so it is all experts at once, but for three roundings
            whole = reference.forward(self.experts, x, ids, weights)
            parts = np.abs(gpu) + np.abs(cpu) + np.abs(whole.y)
            assert (np.abs(y - whole.y) <= whole.bound + eps + 2.0**-8 * parts).all()
        return reference.forward(self.experts, x, np.where(here & ~urgent, ids, -1), weights) if self.deferred else None


def clamped(experts: ExpertWeights) -> dict:
    """The activation as models of SGLang give it to a layer."""
    found = experts.activation
    limit = None if found.limit == np.inf else found.limit
    return {"gemm1_alpha": found.alpha, "gemm1_clamp_limit": limit} if found.up_offset else {"swiglu_limit": limit}


def batch(rng: np.random.Generator, tokens: int):
    x = rng.standard_normal((tokens, HIDDEN)).astype(BF16)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)]).astype(np.int64)
    return x, ids, rng.random((tokens, TOP_K), np.float32)


def tensor(x: np.ndarray):
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)


def array(x) -> np.ndarray:
    return x.view(torch.int16).numpy().view(BF16)
