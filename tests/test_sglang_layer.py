"""What SGLang's layer for experts on CPU and GPU calls, in its order, against KTMoEWrapper, with a GPU of numpy.

The GPU's experts are float64 and made of nothing but the bytes that the wrapper exported for them: a layer's result is right
only if the CPU's and the GPU's experts together are all experts, each once, and what was deferred comes with the next layer.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers import BF16, DEEPSEEK

from ktmoe import MXFP4, ExpertWeights, Matrix, load_experts, reference, synthetic
from ktmoe.compat.kt_kernel import KTMoEWrapper, generate_gpu_experts_masks

pytestmark = pytest.mark.smoke

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 12, 4, 128, 128
#: The first layer of the model is dense, as DeepSeek's; the others have experts.
DENSE, LAYERS = 1, 4
ON_GPU, DEFERRED, GPUS = 8, 2, 2
CAPTURED, MOST_TOKENS, MANY = [1, 2, 4], 64, 48

#: Bytes of one rank: two slots, each of one expert.
STAGING = {
    "w13": (2, 2 * INTERMEDIATE // GPUS, HIDDEN // 2),
    "w13 scales": (2, 2 * INTERMEDIATE // GPUS, HIDDEN // 32, 2),
    "w2": (2, HIDDEN, INTERMEDIATE // GPUS // 2),
    "w2 scales": (2, HIDDEN, INTERMEDIATE // GPUS // 32, 2),
}


class Arrays:
    """What a caller without torch has."""

    name = "numpy"
    given = staticmethod(lambda array: array)
    back = staticmethod(lambda array: array)

    @staticmethod
    def fill(mask, values):
        mask[...] = values


class Tensors:
    """SGLang's own; here on the CPU."""

    name = "torch"

    def __init__(self, torch):
        self.torch = torch

    def given(self, array):
        if array.dtype == BF16:
            return self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(array)

    def back(self, tensor):
        return tensor.view(self.torch.int16).numpy().view(BF16) if tensor.dtype == self.torch.bfloat16 else tensor.numpy()

    def fill(self, mask, values):
        mask.copy_(self.torch.from_numpy(values))


@pytest.fixture(params=["numpy", "torch"])
def kind(request):
    if request.param == "numpy":
        return Arrays
    return Tensors(pytest.importorskip("torch", reason="torch is not installed"))


class Gpu:
    """The experts of one layer on GPUS ranks: filled from the ranks' staging buffers, two slots each, used in float64."""

    def __init__(self):
        self.staging = [{name: np.full(shape, 0xAA, np.uint8) for name, shape in STAGING.items()} for _ in range(GPUS)]
        self.matrices = {}

    def addresses(self, name: str, slot: int) -> list[int]:
        return [rank[name][slot].ctypes.data for rank in self.staging]

    def take(self, expert: int, slot: int) -> None:
        """Put together from all ranks; then the slot is spoilt, as the next but one expert's writes may come at any time."""
        half = INTERMEDIATE // GPUS
        ranks = [{name: array[slot].copy() for name, array in rank.items()} for rank in self.staging]
        for rank in self.staging:
            for array in rank.values():
                array[slot] = 0xAA
        for projection, rows in (("gate", slice(0, half)), ("up", slice(half, None))):
            codes = np.concatenate([rank["w13"][rows] for rank in ranks])
            scales = np.concatenate([rank["w13 scales"][rows] for rank in ranks])
            self._keep(expert, projection, codes, scales)
        codes = np.concatenate([rank["w2"] for rank in ranks], axis=1)
        self._keep(expert, "down", codes, np.concatenate([rank["w2 scales"] for rank in ranks], axis=1))

    def _keep(self, expert, projection, codes, scales) -> None:
        bits = scales.view(np.uint16)[..., 0]
        assert not (bits & 0x7F).any()  # powers of two
        name, shape = f"{projection} of {expert} on the GPU", (len(codes), 2 * codes.shape[1])
        self.matrices[expert, projection] = Matrix(name, MXFP4, shape, codes, (bits >> 7).astype(np.uint8))

    def forward(self, x, ids, weights) -> np.ndarray:
        formats = dict.fromkeys(("gate", "up", "down"), MXFP4)
        read = self.matrices.__getitem__
        experts = ExpertWeights(EXPERTS, HIDDEN, INTERMEDIATE, lambda *key: read(key), formats, DEEPSEEK)
        return reference.forward(experts, x, ids, weights).y


class Layer:
    """Calls of one of SGLang's layers: construction and loading, decode or prefill on both sides, prefill on the GPU alone."""

    def __init__(self, kind, folder, index: int, on_gpu: np.ndarray, slots: np.ndarray | None):
        self.kind, self.on_gpu, self.gpu = kind, on_gpu.copy(), Gpu()
        self.slots = np.arange(EXPERTS) if slots is None else slots
        self.deferred = DEFERRED if index < LAYERS - 1 else 0
        self.wrapper = KTMoEWrapper(
            layer_idx=index,
            num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            hidden_size=HIDDEN,
            moe_intermediate_size=INTERMEDIATE,
            gpu_experts_mask=kind.given(on_gpu),
            cpuinfer_threads=2,
            threadpool_count=1,
            numa_nodes=None,
            weight_path=str(folder),
            chunked_prefill_size=MOST_TOKENS,
            swiglu_limit=10.0,
            swiglu_alpha=0.0,
            method="MXFP4",
            max_deferred_experts_per_token=self.deferred,
        )
        self.wrapper.load_weights(kind.given(self.slots))
        self.experts = load_experts(folder, index).with_activation(DEEPSEEK).take(self.slots)
        self.load_gpu()

    def load_gpu(self) -> None:
        """Every expert, whether it is on the GPU or not: e + 1 is written while e is taken."""

        def write(expert):
            names = ("w13", "w13 scales", "w2", "w2 scales")
            self.wrapper.submit_write_weight_scale_to_buffer(
                GPUS, expert, *(self.gpu.addresses(name, expert % 2) for name in names)
            )

        write(0)
        for expert in range(EXPERTS):
            self.wrapper.sync_write_weight_scale_to_buffer()
            if expert + 1 < EXPERTS:
                write(expert + 1)
            self.gpu.take(expert, expert % 2)

    def hybrid(self, staging: np.ndarray, x, ids, weights, before):
        """(result, what was deferred). x is spoilt as soon as the call was submitted. before: what the last layer deferred."""
        staged = staging[: len(x)]
        staged[...] = x
        given = [self.kind.given(array) for array in (staged, ids, weights)]
        self.wrapper.submit_forward(*given, 0)
        on_gpu = np.where((ids >= 0) & self.on_gpu[ids], ids, -1)
        gpu = self.gpu.forward(x, on_gpu, weights)
        kept, x[...] = x.copy(), np.nan
        cpu = self.kind.back(self.wrapper.sync_forward(given[0], 0)).astype(np.float64)
        now, later = self._split(ids, weights)
        assert np.array_equal(np.max([now, later, on_gpu], axis=0), np.maximum(ids, -1))  # each slot is somewhere, once
        self._check(cpu, kept, now, weights, before)
        return (gpu + cpu).astype(BF16), reference.forward(self.experts, kept, later, weights)

    def _split(self, ids, weights):
        """(ids that the CPU computes now, those that it defers), by kt-kernel's rule."""
        here = (ids >= 0) & ~self.on_gpu[ids]
        first = np.argsort(-weights, axis=1, kind="stable")[:, : TOP_K - self.deferred]
        urgent = np.isin(ids, np.take_along_axis(ids, first, axis=1))
        return np.where(here & urgent, ids, -1), np.where(here & ~urgent, ids, -1)

    def _check(self, cpu, x, ids, weights, before) -> None:
        """bf16(the experts that run now + bf16(what was deferred)), each within its bound."""
        own = reference.forward(self.experts, x, ids, weights, out_dtype="float32")
        y, eps = own.y, own.bound
        if before is not None:
            deferred = reference.round_bfloat16(before.y)
            y, eps = y + deferred, eps + before.bound + np.abs(deferred - before.y) + 2.0**-24 * np.abs(y + deferred)
        low, high = reference.round_bfloat16(y - eps), reference.round_bfloat16(y + eps)
        assert ((low <= cpu) & (cpu <= high)).all()

    def on_gpu_alone(self, x, ids, weights):
        """A long prefill: the layer's weights are brought over, and the experts that it used most stay there."""
        self.load_gpu()
        y = self.gpu.forward(x, ids, weights)
        expected = reference.forward(self.experts, x, ids, weights)
        assert np.array_equal(y, expected.y)
        used = np.bincount(ids[ids >= 0], minlength=EXPERTS)
        most = np.argsort(-used, kind="stable")[: self.on_gpu.sum()]
        self.on_gpu = np.isin(np.arange(EXPERTS), most)
        self.kind.fill(self.wrapper.gpu_experts_mask, self.on_gpu)
        return y.astype(BF16)


class Model:
    """A pass through all layers: a layer's result is the next one's input."""

    def __init__(self, kind, folder):
        self.rng = np.random.default_rng(5)
        used = self.rng.integers(0, 100, (LAYERS, EXPERTS)).astype(np.float32)
        used[:DENSE] = 0
        masks = kind.back(generate_gpu_experts_masks(kind.given(used), ON_GPU)).copy()
        assert masks.shape == used.shape
        assert masks.sum() == ON_GPU
        assert used[masks].min() >= used[DENSE:][~masks[DENSE:]].max()
        moved = [None, None, self.rng.permutation(EXPERTS), self.rng.integers(0, EXPERTS, EXPERTS)]  # the last with copies
        self.layers = [Layer(kind, folder, index, masks[index], moved[index]) for index in range(DENSE, LAYERS)]
        self.staging = np.empty((MOST_TOKENS, HIDDEN), BF16)

    def step(self, tokens: int) -> None:
        x, before = self.rng.standard_normal((tokens, HIDDEN)).astype(BF16), None
        for layer in self.layers:
            ids = np.stack([self.rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)])
            weights = self.rng.random((tokens, TOP_K), np.float32)
            ids[tokens // 2 :, -1] = np.where(self.rng.random(tokens - tokens // 2) < 0.1, -1, ids[tokens // 2 :, -1])
            if tokens >= MANY:
                y, before = layer.on_gpu_alone(x, ids, weights), None
            else:
                y, before = layer.hybrid(self.staging, x.copy(), ids, weights, before)
            x = (y.astype(np.float32) / np.float32(np.abs(y.astype(np.float32)).mean() + 1)).astype(BF16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "intermediate": INTERMEDIATE, "top_k": TOP_K}
    synthetic.write_deepseek_v4(path, **sizes, layers=LAYERS)
    return path


def test_a_layers_life(kind, folder):
    """Loading; prefill; decode in captured sizes and others, in turn; a long prefill that moves experts; decode again."""
    model = Model(kind, folder)
    try:
        KTMoEWrapper.set_capture_batch_sizes(CAPTURED)
        assert KTMoEWrapper.get_capture_batch_sizes() == CAPTURED
        model.step(17)
        for tokens in (1, 2, 3, 1, 4, 3, 2, 1, 1):
            model.step(tokens)
        before = [layer.on_gpu.copy() for layer in model.layers]
        model.step(MANY)
        assert any((layer.on_gpu != mask).any() for layer, mask in zip(model.layers, before, strict=True))
        for tokens in (4, 1, 17, 3, 2):
            model.step(tokens)
    finally:
        for layer in model.layers:
            layer.wrapper.close()
        KTMoEWrapper.set_capture_batch_sizes([])
        KTMoEWrapper.clear_buffer_cache()


def test_a_pass_that_ends_early(kind, folder):
    """What a layer deferred is not added to a later pass: one ends after the first layer, and others begin."""
    model = Model(kind, folder)
    try:
        whole = model.layers
        model.layers = whole[:1]
        model.step(2)
        model.layers = whole
        model.step(2)
        model.step(3)
    finally:
        for layer in whole:
            layer.wrapper.close()
        KTMoEWrapper.clear_buffer_cache()
