"""The pipeline against float64 that rounds at the same points, at the shapes of GPU kernels' tests; wrong kernels fail.

Three gates: the difference, 1 - 2 xy / (xx + yy), the reference's bound for each element, and the cosine to the same weights
and x without rounding h.
"""

import functools

import numpy as np
import pytest
from two_stage_pipeline import WRONG, Experts, Kernel, batch, cosine, decoded, difference

from ktmoe import MXFP4, ExpertWeights, Matrix, MoELayer, reference, two_stage

#: (tokens, hidden, intermediate, experts, top_k)
SHAPES = [(128, 1024, 256, 8, 2), (256, 1024, 256, 8, 2)]
#: Modes with what x and h become, and the least cosine to the mode that leaves h as it is.
MODES = {"mxfp4": ("mxfp4", "mxfp4", 0.985), "mxfp8": ("mxfp8", "mxfp8", 0.9995)}
MOST = 2e-3


@functools.cache
def case(tokens, hidden, intermediate, num_experts, top_k):
    rng = np.random.default_rng(tokens)
    return Experts.random(rng, hidden, intermediate, num_experts), *batch(rng, tokens, hidden, num_experts, top_k)


@functools.cache
def right(shape, x_to, h_to):
    return Kernel()(*case(*shape), x_to, h_to)


@functools.cache
def bound_of(shape, mode):
    raw, x, ids, weights = case(*shape)
    experts = two_stage.experts(*raw.arrays)
    return reference.forward(experts, x, ids, weights, activations=mode, out_dtype="float32")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right(shape, mode, record_property):
    x_to, h_to, least = MODES[mode]
    raw, x, ids, weights = case(*shape)
    experts = two_stage.experts(*raw.arrays)
    sorting = two_stage.moe_sorting(ids, weights, shape[3])

    def stages(mode):
        with MoELayer(experts, "auto", mode) as layer:
            h = two_stage.gemm1(layer, x, sorting)
            return h, two_stage.gemm2(layer, h, sorting, "float32")

    h, y = stages(mode)
    plain_h, plain_y = right(shape, x_to, h_to)
    assert difference(two_stage.dequantize(h)[: len(plain_h)], plain_h) <= MOST
    assert difference(y, plain_y) <= MOST
    expected = bound_of(shape, mode)
    assert np.isfinite(expected.bound).all()
    assert expected.worst(y) <= 1
    assert cosine(y, stages(f"{mode}/bf16")[1]) >= least
    record_property("cosine to unquantised activations", float(cosine(y, stages("bf16")[1])))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mistake", WRONG)
def test_wrong(mistake, mode):
    """Each gate alone would see it; without the mistake, the same numpy code passes all."""
    x_to, h_to, least = MODES[mode]
    shape = SHAPES[0]
    h, y = right(shape, x_to, h_to)
    expected = bound_of(shape, mode)
    _, without = right(shape, x_to, "bf16")
    assert expected.worst(y) <= 1
    assert cosine(y, without) >= least
    wrong_h, wrong = WRONG[mistake](*case(*shape), x_to, h_to)
    assert difference(wrong, y) > MOST
    assert expected.worst(wrong) > 1
    assert cosine(wrong, without) < least
    assert difference(wrong_h, h) > MOST


@functools.lru_cache(maxsize=4)  # gate and up are read one after the other
def seeded(expert, rows, columns):
    """MXFP4 codes and scales of products whose size is about that of x."""
    rng = np.random.default_rng([expert, rows])
    middle = 127 - round(np.log2(3 * columns**0.5))  # a code's root mean square is 3
    codes = np.frombuffer(rng.bytes(rows * columns // 2), np.uint8).reshape(rows, -1)
    return codes, rng.integers(middle - 1, middle + 1, (rows, columns // 32), dtype=np.uint8, endpoint=True)


class Seeded:
    """Experts that are made when they are asked for, since all of them are large: any codes, and scales of near sizes."""

    def __init__(self, hidden, intermediate, count):
        self.hidden, self.intermediate, self.count = hidden, intermediate, count

    def stored(self, expert, stage):
        return seeded(expert, *((2 * self.intermediate, self.hidden) if stage == 1 else (self.hidden, self.intermediate)))

    def matrix(self, expert, stage):
        return decoded(*self.stored(expert, stage))

    def weights(self):
        def read(expert, projection):
            codes, scales = self.stored(expert, 2 if projection == "down" else 1)
            rows = {"gate": slice(self.intermediate), "up": slice(self.intermediate, None), "down": slice(None)}[projection]
            codes, scales = codes[rows], scales[rows]
            return Matrix(f"{expert}.{projection}", MXFP4, (len(codes), 2 * codes.shape[1]), codes, scales)

        return ExpertWeights(self.count, self.hidden, self.intermediate, read)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", MODES)
def test_many_experts(mode):
    """The layer has all tokens; three of them are compared, each with 16 experts of 896."""
    x_to, h_to, least = MODES[mode]
    raw = Seeded(3584, 512, 896)
    x, ids, weights = batch(np.random.default_rng(1), 128, 3584, 896, 16)
    with MoELayer(raw.weights(), "auto", mode) as layer:
        sorting = two_stage.moe_sorting(ids, weights, 896)
        y = two_stage.gemm2(layer, two_stage.gemm1(layer, x, sorting), sorting, "float32")
        assert np.array_equal(y, layer.forward(x.astype(np.float32), ids, weights))
    some = np.array([0, 64, 127])
    given = x[some], ids[some], weights[some]
    assert difference(y[some], Kernel()(raw, *given, x_to, h_to)[1]) <= MOST
    expected = reference.forward(raw.weights(), *given, activations=mode, out_dtype="float32")
    assert np.isfinite(expected.bound).all()
    assert expected.worst(y[some]) <= 1
    assert cosine(y[some], Kernel()(raw, *given, x_to, "bf16")[1]) >= least
