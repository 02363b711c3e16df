"""Gradients of what dense matrices take: against float64 with a bound, and bit by bit against other calls."""

import itertools
import resource
from pathlib import Path

import numpy as np
import pytest
import ways
from helpers import BF16, FORMATS, in_child, same_bits
from linears import DENSE_FORMATS, DENSE_KINDS, cuts, expected_gradient, random_matrix

from ktmoe import Linear, LinearGroup, Matrix, set_num_threads
from ktmoe._native import core
from ktmoe.backends.base import PackedMatrix
from ktmoe.dequantization import dequantize
from ktmoe.errors import ClosedError, InputError, LackingError, OutOfMemoryError, UnavailableError
from ktmoe.reference import round_bfloat16

#: Outputs of a packed panel; sums of matrices that end with one go on as those of one matrix would.
PANEL = 64


@pytest.fixture(scope="module", params=[name for name, subject in ways.SUBJECTS.items() if subject.activations == "bf16"])
def backend(request, emulator_folder):
    """A backend in the mode bf16, which alone has gradients."""
    with ways.chosen(ways.SUBJECTS[request.param], emulator_folder) as name:
        yield name


def assert_within(linears, matrices, grads, found):
    wanted = expected_gradient(linears, matrices, grads, found.dtype)
    assert found.shape == wanted.y.shape
    assert np.isfinite(wanted.bound).all()
    worst = wanted.worst(found)
    assert worst <= 1, f"error is {worst:.3g} of its bound"


def random_grad(rng, tokens, n, dtype=np.float32):
    return rng.standard_normal((tokens, n)).astype(dtype)


@pytest.mark.cover("values")
@pytest.mark.parametrize("weight_format", DENSE_FORMATS.values(), ids=DENSE_FORMATS)
def test_every_format(backend, weight_format):
    rng = np.random.default_rng(1)
    matrix = random_matrix(rng, 150, 70, weight_format, bias=True)
    with Linear(matrix, backend) as linear:
        grad = random_grad(rng, 3, matrix.shape[0])
        found = linear.backward(grad)
        assert_within([linear], [matrix], [grad], found)
        # by no rule of the reference's: a factor rounds by 2^-9 at most, and float32 much less
        v, w = round_bfloat16(grad.astype(np.float64)), dequantize(matrix)
        assert (np.abs(found - v @ w) <= 2.0**-8 * (np.abs(v) @ np.abs(w))).all()


@pytest.mark.cover("values")
@pytest.mark.parametrize("kind", DENSE_KINDS.values(), ids=DENSE_KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (64, 64), (33, 290), (97, 129), (600, 34)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
def test_shapes(backend, shape, kind, dtype):
    rng = np.random.default_rng(shape)
    matrix = random_matrix(rng, *shape, **kind)
    with Linear(matrix, backend) as linear:
        for tokens in (0, 1, 19):
            grad = random_grad(rng, tokens, matrix.shape[0], dtype)
            found = linear.backward(grad)
            assert found.dtype == dtype
            assert_within([linear], [matrix], [grad], found)


@pytest.mark.cover("values")
@pytest.mark.parametrize("kind", DENSE_KINDS.values(), ids=DENSE_KINDS)
def test_no_bit_depends_on_batch_threads_and_memory(backend, kind, is_emulated):
    rng = np.random.default_rng(2)
    matrix = random_matrix(rng, 160, 200, **kind)
    tokens = 18 if is_emulated else core.ROWS_MAX + 30  # more rows than one call has
    with Linear(matrix, backend) as linear:
        grad = random_grad(rng, tokens, matrix.shape[0])
        whole = linear.backward(grad)
        for rows in (slice(0, 1), slice(3, 5), slice(tokens - 17, tokens)):
            assert same_bits(linear.backward(grad[rows]), whole[rows])
        if is_emulated:
            return
        for scratch_bytes in (1, 3 << 20):  # a token at a time, and some
            core.tune(scratch_bytes=scratch_bytes)
            assert same_bits(linear.backward(grad[:40]), whole[:40])
        core.tune(scratch_bytes=256 << 20, only_many=True)
        assert same_bits(linear.backward(grad), whole)
        for threads in range(1, 9):
            set_num_threads(threads)
            core.tune(by_turns=threads > 1, only_many=False)
            assert same_bits(linear.backward(grad), whole)


def test_what_is_written_is_rounded_once():
    rng = np.random.default_rng(3)
    matrix = random_matrix(rng, 80, 100, FORMATS["fp8"])
    with Linear(matrix, activations="bf16") as linear:
        grad = random_grad(rng, 5, 80, BF16)
        wide = np.full((5, 100), np.nan, np.float32)
        assert linear.backward(grad, out=wide) is wide
        assert same_bits(linear.backward(grad.astype(np.float32)), wide)
        assert same_bits(linear.backward(grad), wide.astype(BF16))
        assert same_bits(linear.backward(grad.view(np.uint16)), wide.astype(BF16).view(np.uint16))


@pytest.mark.usefixtures("three_nodes")
@pytest.mark.parametrize("kind", ["mxfp4", "int8-row", "b16"])
def test_shards_sum_their_own_outputs(kind):
    """Each in one chain, as a matrix of its rows alone has it; then all of them in their order."""
    rng = np.random.default_rng(4)
    matrix = random_matrix(rng, 300, 130, **DENSE_KINDS[kind])
    grad = random_grad(rng, 33, 300)
    with Linear(matrix, numa_nodes=[0, 2, 1]) as linear:
        assert linear.placement.shards == 3
        whole = linear.backward(grad)
        assert_within([linear], [matrix], [grad], whole)
        assert same_bits(linear.backward(grad.astype(BF16)), whole.astype(BF16))
        for threads in (1, 2, 3, 8):
            set_num_threads(threads)
            assert same_bits(linear.backward(grad), whole)
            assert same_bits(linear.backward(grad[7:9]), whole[7:9])
        core.tune(scratch_bytes=1)
        assert same_bits(linear.backward(grad), whole)
        total = None
        for first, last in cuts(linear):
            stored = {name: array[first:last] if len(array) == 300 else array for name, array in matrix.stored.items()}
            with Linear(Matrix("part", matrix.format, (last - first, 130), **stored), numa_nodes=[0]) as part:
                of_shard = part.backward(grad[:, first:last].copy())
            total = of_shard if total is None else total + of_shard
        assert same_bits(whole, total)


def test_a_group_of_one_x_is_one_chain():
    """As that of a matrix that has all rows, one matrix after another."""
    rng = np.random.default_rng(5)
    sizes = (PANEL, 3 * PANEL, 40)
    matrix = random_matrix(rng, sum(sizes), 150, FORMATS["int8-row"])
    edges = np.cumsum((0, *sizes))
    parts = [
        Matrix(f"part {first}", matrix.format, (last - first, 150), **{k: v[first:last] for k, v in matrix.stored.items()})
        for first, last in itertools.pairwise(edges)
    ]
    grad = random_grad(rng, 20, sum(sizes), BF16)
    grads = [grad[:, first:last] for first, last in itertools.pairwise(edges)]
    linears = [Linear(part) for part in (matrix, *parts)]
    group = LinearGroup(linears[1:])
    assert same_bits(group.backward(grads), linears[0].backward(grad))
    out = np.empty((20, 150), np.float32)
    assert group.backward(grads, out) is out
    assert same_bits(out.astype(BF16), linears[0].backward(grad))
    assert not group.backward([grad[:0] for grad in grads]).size
    for linear in linears:
        linear.close()


@pytest.mark.parametrize("nodes", [None, [0, 2, 1]], ids=str)
def test_a_group_of_several_formats(nodes, request):
    rng = np.random.default_rng(6)
    if nodes:
        request.getfixturevalue("three_nodes")
    formats = [FORMATS[name] for name in ("b16", "mxfp4", "gptq-128", "fp8", "int8-row")]
    matrices = [random_matrix(rng, 272 + 16 * i, 128, each, name=f"w{i}") for i, each in enumerate(formats)]
    linears = [Linear(matrix, numa_nodes=nodes) for matrix in matrices]
    group = LinearGroup(linears)
    grads = [random_grad(rng, 21, matrix.shape[0]) for matrix in matrices]
    found = group.backward(grads)
    assert_within(linears, matrices, grads, found)
    core.tune(scratch_bytes=1)
    assert same_bits(group.backward(grads), found)
    for linear in linears:
        linear.close()


@pytest.mark.parametrize("nodes", [None, [0, 2, 1]], ids=str)
def test_a_group_that_takes_an_x_each_has_a_gradient_each(nodes, request):
    rng = np.random.default_rng(7)
    if nodes:
        request.getfixturevalue("three_nodes")
    linears = [Linear(random_matrix(rng, 300, 150, FORMATS["fp8"]), numa_nodes=nodes) for _ in range(3)]
    group = LinearGroup(linears, inputs="own")
    grads = rng.standard_normal((9, 3, 300)).astype(BF16)
    found = group.backward(grads)
    assert found.shape == (9, 3, 150)
    out = np.empty((9, 3, 150), np.float32)
    assert group.backward(grads, out=out) is out
    assert same_bits(out.astype(BF16), found)
    for i, linear in enumerate(linears):
        assert same_bits(found[:, i].copy(), linear.backward(grads[:, i]))
        linear.close()


def test_nan_stays_with_its_token():
    rng = np.random.default_rng(8)
    with Linear(random_matrix(rng, 70, 64)) as linear:
        grad = random_grad(rng, 20, 70)
        clean = linear.backward(grad)
        grad[7, 3] = np.nan
        found = linear.backward(grad)
        others = np.arange(20) != 7
        assert same_bits(found[others], clean[others])
        assert np.isnan(found[7]).all()


def test_a_replaced_matrix_counts():
    rng = np.random.default_rng(9)
    old, new = (random_matrix(rng, 70, 64, FORMATS["fp8-row"]) for _ in range(2))
    grad = random_grad(rng, 4, 70)
    with Linear(old) as linear, Linear(new) as fresh:
        linear.replace(new)
        assert same_bits(linear.backward(grad), fresh.backward(grad))


class Plain(PackedMatrix):
    """What another backend may pack a matrix into: float32 products of numpy's."""

    def __init__(self, weights):
        self.weights = weights

    def forward(self, x, out):
        raise LackingError("computes gradients only")

    def backward(self, grad_y, grad_x):
        assert grad_y.flags.c_contiguous
        wide = grad_y.view(BF16).astype(np.float32) if grad_y.dtype == np.uint16 else grad_y
        grad_x[...] = wide @ self.weights

    def close(self):
        pass


@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
def test_a_group_of_another_backend_is_rounded_once_too(dtype):
    rng = np.random.default_rng(10)
    matrices = [random_matrix(rng, 64, 32, FORMATS["b16"]) for _ in range(3)]
    linears = [Linear(matrix) for matrix in matrices]
    for linear, matrix in zip(linears, matrices, strict=True):
        linear.close()
        linear.packed = Plain(matrix.codes.astype(np.float32))
    grads = rng.standard_normal((5, 3, 64)).astype(dtype)
    each = [grads[:, i].astype(np.float32) @ linear.packed.weights for i, linear in enumerate(linears)]
    assert same_bits(
        LinearGroup(linears).backward([grads[:, i] for i in range(3)]), (each[0] + each[1] + each[2]).astype(dtype)
    )
    assert same_bits(LinearGroup(linears, "own").backward(grads), np.stack(each, axis=1).astype(dtype))


@pytest.mark.parametrize("mode", ["int8", "mxfp8"])
def test_other_modes_are_refused_by_name(mode):
    with Linear(random_matrix(np.random.default_rng(0), 64, 64, name="head"), activations=mode) as linear:
        for backward in (linear.backward, lambda grad: LinearGroup([linear]).backward([grad])):
            with pytest.raises(UnavailableError, match='head: it cannot be trained: only activations="bf16"'):
                backward(np.zeros((0, 64), np.float32))


def test_memory_that_the_system_refuses():
    linear = Linear(random_matrix(np.random.default_rng(0), 64, 64))
    grad = np.ones((40, 64), np.float32)
    linear.backward(grad)

    def starved():
        core.release()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 18), resource.RLIM_INFINITY))
        with pytest.raises(OutOfMemoryError, match="backward of 40 tokens: the operating system refused memory"):
            linear.backward(grad)
        return True

    with linear:
        assert in_child(starved)


def test_what_is_refused():
    rng = np.random.default_rng(0)
    linears = [Linear(random_matrix(rng, n, 64, FORMATS["b16"], name=f"w{n}")) for n in (64, 96)]
    grads = [np.zeros((2, linear.shape[0]), np.float32) for linear in linears]
    group, linear, grad = LinearGroup(linears), linears[0], grads[0]
    own = LinearGroup([linear, linear], "own")
    shared = np.zeros((4, 64), np.float32)
    for call, message in (
        (lambda: linear.backward(grads[1]), r"grad_y must have shape \[any, 64\], found \[2, 96\]"),
        (lambda: linear.backward(grad, np.zeros((3, 64), np.float32)), r"out must have shape \[2, 64\]"),
        (lambda: linear.backward(grad, np.zeros((2, 64), BF16)), "out must be of grad_y's kind, a float32 array, or float32"),
        (lambda: linear.backward(shared[:2], shared[1:3]), "out must not overlap grad_y"),
        (lambda: group.backward(grads[:1]), "grads must be a sequence of 2 arrays"),
        (lambda: group.backward(1.0), "grads must be a sequence of 2 arrays, found 1.0"),
        (lambda: group.backward([grad, grads[1][:1]]), r"grads\[1\] must have shape \[2, 96\], found \[1, 96\]"),
        (lambda: group.backward([grad, grads[1].astype(BF16)]), r"grads\[1\] must be of grads\[0\]'s dtype"),
        (lambda: group.backward([shared[:2], grads[1]], shared[1:3]), r"out must not overlap grads\[0\]"),
        (lambda: own.backward(grad), r"grads must have shape \[any, 2, 64\]"),
        (lambda: core.linear_backward([linear.packed], [grad], []), "one out or as many"),
        (
            lambda: core.linear_backward([linear.packed], [grad], [grads[1]]),
            r"out must be float32 \[2, 64\], found .* \[2, 96\]",
        ),
        (lambda: core.linear_backward([linear.packed], [grads[1]], [grad]), r"w64: grads must be float32 \[2, 64\]"),
    ):
        with pytest.raises(InputError, match=message):
            call()
    packed = [each.packed for each in linears]
    for each in linears:
        each.close()
    with pytest.raises(ClosedError, match="w64: backward after close"):
        linear.backward(grad)
    with pytest.raises(ClosedError):
        core.linear_backward(packed, grads, [np.zeros((2, 64), np.float32)])
