"""What the tests of Linear share: random matrices of every format, float64 references of y and of gradients, and rows alone."""

from __future__ import annotations

import ggml_records
import numpy as np
from helpers import BF16, FORMATS, SCALES, random_arrays, same_bits

from ktmoe import Linear, Matrix, reference, set_num_threads
from ktmoe.machine import numa
from ktmoe.modes import mode_of
from ktmoe.reference import Reference, round_bfloat16
from ktmoe.reference.errors import MAX_FLOAT32, gamma
from ktmoe.reference.operands import flush_to_zero
from ktmoe.reference.transposed import gradient_rows, together, transposed
from ktmoe.weights.records import RecordOrder

#: Every format that kernels have: those of safetensors and GGUF's records.
DENSE_FORMATS = FORMATS | {f"gguf {name}": weight_format for name, weight_format in ggml_records.IN_RECORDS.items()}
#: One for each kind of kernel: arguments of random_matrix().
DENSE_KINDS = {
    "mxfp4": {},
    "mxfp4 unfolded": {"fold": False},
    **{
        name: {"weight_format": FORMATS[name]}
        for name in ("int4-64", "gptq-128", "nvfp4", "super-32 minima", "mxfp8", "fp8", "int8-row", "int6 super-16")
    },
    **{
        name: {"weight_format": FORMATS[name]}
        for name in ("int5 super-32 minima", "int3 super-16", "int2 super-16 minima", "int2 super-256", "b16", "f32")
    },
}


def random_matrix(rng, n, k, weight_format=FORMATS["mxfp4"], *, scales=SCALES, fold=True, bias=False, name="w") -> Matrix:
    """Of n outputs and k inputs, rounded up to whole items of the arrays. scales, fold: as random_experts() has them."""
    n, k = (-(-size // unit) * unit for size, unit in zip((n, k), weight_format.code_unit, strict=True))
    if isinstance(weight_format.order, RecordOrder):
        stored = {"codes": ggml_records.random_codes(rng, weight_format, 1, n, k)[0]}
        if weight_format.factor:
            stored["factor"] = rng.uniform(0.5, 2, weight_format.factor.shape(n)).astype(np.float32)
    else:
        arrays = random_arrays(rng, weight_format, 1, n, k, scales, fold)
        stored = {label: np.ascontiguousarray(array[0]) for label, array in arrays.items()}
    added = rng.standard_normal(n).astype(np.float32) if bias else None
    return Matrix(name, weight_format, (n, k), bias=added, **stored)


def random_x(rng, tokens, k, dtype=BF16) -> np.ndarray:
    return rng.standard_normal((tokens, k)).astype(dtype)


def expected(linear: Linear, matrix: Matrix, x: np.ndarray, dtype) -> Reference:
    """What y has to be, in float64, and how far from it a backend may be that rounds y to dtype."""
    mode = mode_of(linear.activations)
    side = mode.name if "bf16" not in mode.forms else mode.x or "bf16"
    with np.errstate(all="ignore"):
        a = round_bfloat16(x.astype(np.float64))
        y, eps = reference.linear(
            matrix,
            *reference.operand(a, a, a, side),
            activations=linear.activations,
            rounding=linear.rounding,
            tuned_for=linear.tuned_for,
        )
        if dtype == BF16:
            eps = np.maximum(round_bfloat16(y + eps) - y, y - round_bfloat16(y - eps)) + flush_to_zero(y, eps)
        return Reference(y, np.where(np.isfinite(y) & np.isfinite(eps), eps, np.inf))


def assert_within(linear: Linear, matrix: Matrix, x: np.ndarray, dtype=None, finite: bool = True) -> np.ndarray:
    """forward() against expected(); returns y. finite: all bounds have to be, or something was not compared."""
    y = linear.forward(x, dtype=dtype)
    wanted = expected(linear, matrix, x, y.dtype)
    assert y.shape == wanted.y.shape
    assert np.isfinite(wanted.bound).all() or not finite
    worst = wanted.worst(y)
    assert worst <= 1, f"error is {worst:.3g} of its bound at {np.unravel_index(wanted.error(y).argmax(), y.shape)}"
    return y


def cuts(linear: Linear) -> list[tuple[int, int]]:
    """What each shard has of the outputs."""
    return numa.split(linear.shape[0], linear.spec.shard_unit, linear.placement.shards)


def expected_gradient(linears, matrices, grads, dtype) -> Reference:
    """The sum of grad W of all, and how far off what is rounded to dtype may be: one chain for each shard, which are added."""
    value, eps, size = 0.0, 0.0, 0.0
    with np.errstate(all="ignore"):
        for shard in range(linears[0].placement.shards):
            sums = []
            for linear, matrix, grad in zip(linears, matrices, grads, strict=True):
                n = slice(*cuts(linear)[shard])
                v = round_bfloat16(grad[:, n].astype(np.float64))
                sums.append(transposed(matrix, *gradient_rows(matrix, v, v, v, n), linear.rounding, n))
            of_shard, eps_shard = together(sums)
            value, eps, size = value + of_shard, eps + eps_shard, size + np.abs(of_shard) + eps_shard
        eps = np.where(size < MAX_FLOAT32, eps + gamma(linears[0].placement.shards - 1) * size, np.inf)
        if dtype == BF16:
            eps = np.maximum(round_bfloat16(value + eps) - value, value - round_bfloat16(value - eps)) + flush_to_zero(
                value, eps
            )
    return Reference(value, eps)


class RowsAlone:
    """A Linear, rows of x, and the y of each when it is alone in its batch, on one thread, under the default settings: what it
    has to be, bit for bit, in any other."""

    def __init__(self, matrix: Matrix, *args, rows: int = 24, dtype=np.float32, **settings):
        self.linear = Linear(matrix, *args, **settings)
        self.x = random_x(np.random.default_rng(1), rows, matrix.shape[1], dtype)
        set_num_threads(1)
        self.alone = np.concatenate([self.linear.forward(row[None]) for row in self.x])

    def __enter__(self) -> RowsAlone:
        return self

    def __exit__(self, *_) -> None:
        self.linear.close()

    def check(self, rows) -> None:
        assert same_bits(self.linear.forward(self.x[rows]), self.alone[rows])
