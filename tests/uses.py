"""The public API as a program uses it that is checked with mypy --strict (test_types.py). It is read, and never run."""

from __future__ import annotations

import os
from collections.abc import Sequence

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import ktmoe
from ktmoe import quantization, reference, synthetic, two_stage
from ktmoe.adapters import export_adapter, import_adapter, merge_adapter
from ktmoe.backends.base import Packed, Plan, Progress
from ktmoe.cache.packing import pack
from ktmoe.distributed import Alone, Communicator, DistributedLayer, Distribution
from ktmoe.errors import InputError, KtmoeError
from ktmoe.training import Lora, SavedStack, Training


def one_layer(path: str, x: NDArray[np.float32], ids: NDArray[np.int64], weights: NDArray[np.float32]) -> NDArray[np.float32]:
    with ktmoe.MoELayer.from_checkpoint(path, 3, activations="bf16", progress=print) as layer:
        layer.expert_mask[:2] = False
        job = layer.submit(x, ids, weights)
        y: NDArray[np.float32] = layer.forward(x, ids, weights, out=np.empty_like(x))
        size: int = layer.hidden + layer.num_experts + layer.nbytes + layer.spec.shape("down")[0]
        print(size, layer.export_expert(0, parts=2)[1]["gate"].codes.dtype)
        return y + job.result()


def a_model(path: os.PathLike[str], x: NDArray[np.float32], ids: NDArray[np.int64], weights: NDArray[np.float32]) -> int:
    with ktmoe.MoEModel.from_checkpoint(path, layers=[0, "mtp.0"], progress=True, wait=False) as model:
        for number in model:
            x = model[number].forward(x, ids, weights)
        done, total = model.loaded
        return total - done


def dense(path: str, x: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    matrix: ktmoe.Matrix = ktmoe.load_matrix(path, "lm_head")
    linear = ktmoe.Linear(matrix)
    n, k = linear.shape
    group = ktmoe.LinearGroup([linear, ktmoe.Linear.from_checkpoint(path, "a", scheme="fp8")])
    ys: list[NDArray[np.float32]] = group.forward(x, dtype=np.float32)
    return [*ys, linear.forward(x), linear.backward(np.ones((1, n), np.float32)), linear.rows(np.arange(k), dtype="float32")]


def formats() -> ktmoe.ExpertWeights:
    def read(expert: int, projection: str) -> ktmoe.Matrix:
        return ktmoe.Matrix(f"{expert}.{projection}", ktmoe.BF16, (64, 64), np.zeros((64, 64), ml_dtypes.bfloat16))

    custom = ktmoe.WeightFormat(ktmoe.MXFP4.element, ktmoe.Scale("fp32", (1, 64)), factor=ktmoe.Factor(per_row=True))
    print(custom.description, custom.arrays(8, 64)["codes"][1], ktmoe.int4(32) == ktmoe.nvfp4())
    experts = ktmoe.ExpertWeights(8, 64, 64, read, {"gate": ktmoe.BF16, "up": ktmoe.BF16, "down": ktmoe.BF16}, ktmoe.SILU)
    arrays = np.zeros((8, 64, 32), np.uint8), np.ones((8, 64, 2), np.float16), np.zeros((8, 64, 2), np.uint8)
    print(ktmoe.ExpertWeights.from_arrays(arrays, arrays, arrays, format=ktmoe.uint4(32)))
    return ktmoe.quantize(experts.take([0, 1]), "mxfp4")


def rounding(path: str, matrix: ktmoe.Matrix) -> float:
    rounded, error = quantization.Quantizer("int4", group=64).matrix(matrix)
    report = ktmoe.convert(path, "out", "mxfp4", progress=lambda done, total: None)
    print(rounded.format, [report.layers[layer].relative for layer in report.layers], pack(path, "cache", layers=[0]).nbytes)
    return error.relative


def training(path: str, layer: ktmoe.MoELayer, x: NDArray[np.float32], ids: NDArray[np.int64], w: NDArray[np.float32]) -> None:
    lora, passes, stack = Lora.initial(layer.spec, rank=8, alpha=16), Training(layer), SavedStack()
    y, saved = passes.forward(x, ids, w, lora)
    if saved is not None:
        stack.push(saved)
        gradients = passes.backward(stack.pop(), y, lora, wanted=["x", "lora"])
        print(gradients.x, gradients.weights, (gradients.lora or {})["down"][0])
    export_adapter("adapter", {3: lora}, path)
    print(merge_adapter(path, import_adapter("adapter", path), "merged").layers)


def stages(layer: ktmoe.MoELayer, x: NDArray[np.float32], ids: NDArray[np.int32], weights: NDArray[np.float32]) -> None:
    sorting = two_stage.moe_sorting(ids, weights, layer.num_experts)
    y = two_stage.gemm2(layer, two_stage.gemm1(layer, two_stage.quantize(x), sorting), sorting)
    experts = synthetic.deepseek_v4_experts(num_experts=2, hidden=64, intermediate=64)
    print(reference.forward(experts, x, ids, weights).worst(y))


def machines(experts: ktmoe.ExpertWeights, communicator: Communicator, x: NDArray[np.float32]) -> NDArray[np.float32]:
    layer = DistributedLayer(experts, Distribution(communicator, shards=8, tokens="own"), layer=3)
    print(Distribution(Alone()).division(experts).home)
    return layer.forward(x, np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32))


class Zeros(Packed):
    """A backend's packed layer, as a plug-in has it."""

    nbytes = 0

    def forward(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, mask: np.ndarray, out: np.ndarray) -> None:
        out[...] = 0

    def close(self) -> None:
        pass


class ZeroBackend(ktmoe.backends.Backend):
    rank = -1

    def pack(self, experts: ktmoe.ExpertWeights, plan: Plan, progress: Progress | None = None) -> Packed:
        return Zeros()


def registries() -> Sequence[str]:
    ktmoe.backends.register("zeros", ZeroBackend(), overwrite=True)
    try:
        backend: ktmoe.backends.Backend = ktmoe.backends.get("zeros")
    except InputError as error:
        wrong: KtmoeError = error
        raise wrong from None
    print(backend.modes, ktmoe.loaders.names(), ktmoe.get_include(), ktmoe.__version__)
    ktmoe.set_num_threads(ktmoe.get_num_threads())
    return ktmoe.backends.available()
