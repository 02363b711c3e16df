"""A Linear in use: replaced while it computes, exported, submitted, forked, called by several threads at once."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from helpers import BF16, TURNED, bits, in_child, same_bits
from linears import DENSE_FORMATS, assert_within, random_matrix, random_x

from ktmoe import Linear, LinearGroup, set_num_threads
from ktmoe._native import core
from ktmoe.dequantization import dequantize
from ktmoe.errors import ClosedError, FormatError, InputError
from ktmoe.machine import numa

pytestmark = pytest.mark.usefixtures("three_nodes")


@pytest.mark.cover("values")
@pytest.mark.parametrize("name", DENSE_FORMATS | TURNED)
@pytest.mark.parametrize("nodes", [None, [1, 0]], ids=str)
def test_export_is_the_checkpoints_bytes(name, nodes):
    """Of shards put together again, with and without a bias; after another matrix took its place, those of that one."""
    rng, weight_format = np.random.default_rng(1), (DENSE_FORMATS | TURNED)[name]
    n = 70 + max(128, weight_format.unit[0])
    first, second = (random_matrix(rng, n, 160, weight_format, bias=bias) for bias in (True, False))
    with Linear(first, "fp32_lut", numa_nodes=nodes) as linear:
        for matrix in (first, second):
            if matrix is second:
                linear.replace(second)
            found = linear.export()
            assert found.stored.keys() == matrix.stored.keys()
            assert all(same_bits(array, found.stored[label]) for label, array in matrix.stored.items())
            assert (found.bias is None) == (matrix.bias is None)
            assert found.bias is None or same_bits(found.bias, matrix.bias)
            assert (found.shape, found.format) == (matrix.shape, weight_format)


def test_a_replaced_matrix_is_as_if_it_had_always_been_there(backend):
    rng = np.random.default_rng(2)
    old, new = (random_matrix(rng, 200, 100, bias=bias) for bias in (True, False))
    x = random_x(rng, 7, 100)
    with Linear(old, backend, "auto", numa_nodes=[0, 1]) as linear, Linear(new, backend, "auto") as fresh:
        before = linear.forward(x)
        linear.replace(new)
        assert same_bits(assert_within(linear, new, x), fresh.forward(x))
        linear.replace(old)
        assert same_bits(linear.forward(x), before)


def test_what_is_refused_leaves_the_old_matrix():
    rng = np.random.default_rng(3)
    matrix, x = random_matrix(rng, 70, 64), random_x(rng, 3, 64)
    nan = matrix.scales.copy()
    nan[3, 1] = 255
    with Linear(matrix, "fp32_lut") as linear:
        y = linear.forward(x)
        for wrong, error, message in (
            (replace(matrix, scales=nan), FormatError, r"w: scale \[3, 1\] is byte 255"),
            (random_matrix(rng, 64, 64), FormatError, r"w: weight must be .* \[70, 64\], found .* \[64, 64\]"),
            (random_matrix(rng, 70, 64, DENSE_FORMATS["b16"]), FormatError, r"w: weight must be E2M1.*, found BF16"),
            (matrix.codes, InputError, "weight .* must be a Matrix, found ndarray"),
        ):
            with pytest.raises(error, match=message):
                linear.replace(wrong)
            assert same_bits(linear.forward(x), y)


@pytest.mark.cover("any backend")
@pytest.mark.parametrize("nodes", [None, [0, 1]], ids=str)
def test_calls_see_the_old_matrix_or_the_new_and_nothing_between(backend, nodes):
    """Also calls of a group, and export(); a bias stays with its matrix."""
    rng = np.random.default_rng(4)
    matrices = [random_matrix(rng, 200, 64, bias=True) for _ in range(2)]
    x = random_x(rng, 5, 64, np.float32)
    with Linear(matrices[0], backend, numa_nodes=nodes) as linear:
        outputs = [linear.forward(x)]
        linear.replace(matrices[1])
        outputs.append(linear.forward(x))
        group, stop, torn, seen = LinearGroup([linear, linear]), threading.Event(), [], set()

        def call():
            while not stop.is_set():
                for pair in ([linear.forward(x)], group.forward(x)):
                    which = {i for i, known in enumerate(outputs) for y in pair if same_bits(y, known)}
                    seen.update(which)
                    if len(which) != 1:
                        torn.append(pair)

        def look():
            while not stop.is_set():
                found = linear.export()
                if not any(same_bits(found.codes, m.codes) and same_bits(found.bias, m.bias) for m in matrices):
                    torn.append(found)

        running = [threading.Thread(target=target) for target in (call, call, look)]
        for thread in running:
            thread.start()
        for turn in range(2000):
            linear.replace(matrices[turn % 2])
            if turn >= 60 and seen == {0, 1}:
                break
        stop.set()
        for thread in running:
            thread.join()
        assert not torn
        assert seen == {0, 1}


def test_jobs_run_in_the_order_of_submission():
    """Each takes what the one before has written."""
    rng = np.random.default_rng(5)
    matrices = [random_matrix(rng, 64, 64, scales=(121, 123)) for _ in range(2)]
    first, second = (Linear(matrix, "fp32_lut") for matrix in matrices)
    with first, second:
        x = random_x(rng, 4, 64)
        wanted, y, z = x, np.empty_like(x), np.empty_like(x)
        for _ in range(5):
            wanted = second.forward(first.forward(wanted))
        jobs, source = [], x
        for _ in range(5):
            jobs += [first.submit(source, y), second.submit(y, z)]
            source = z
        assert all(job.result() is out for job, out in zip(jobs, [y, z] * 5, strict=True))
        assert same_bits(z, wanted)
        assert second.submit(x, dtype=np.float32).result().dtype == np.float32
        with pytest.raises(InputError, match="x must have shape"):
            first.submit(x[:, 1:]).result()


def test_jobs_of_groups_and_of_linears_run_in_one_order():
    """Each takes what the one before has written, whichever it is."""
    rng = np.random.default_rng(9)
    with Linear(random_matrix(rng, 64, 64, scales=(121, 123)), "fp32_lut") as linear:
        group, x = LinearGroup([linear, linear]), random_x(rng, 40, 64)
        wanted, ys, z = x, [np.empty_like(x) for _ in range(2)], np.empty_like(x)
        for _ in range(10):
            wanted = linear.forward(wanted)
        jobs, source = [], x
        for _ in range(5):
            jobs += [group.submit(source, ys), linear.submit(ys[1], z)]
            source = z
        assert all(job.result() is out for job, out in zip(jobs, [ys, z] * 5, strict=True))
        assert same_bits(z, wanted)
        assert [y.dtype for y in group.submit(x, dtype=np.float32).result()] == [np.float32] * 2


# On nodes


@pytest.fixture
def dispatches(monkeypatch):
    """The numbers of matrices of what was dispatched."""
    found = []

    def counting(real):
        def counted(packed, *arguments):
            found.append(len(packed))
            real(packed, *arguments)

        return counted

    for name in ("linear_forward", "linear_backward"):
        monkeypatch.setattr(core, name, counting(getattr(core, name)))
    return found


@pytest.fixture
def uneven(three_nodes):
    """Linears of one x which by default lie on three nodes, on none, on two, on none and on three; and their matrices."""
    rng = np.random.default_rng(10)
    matrices = [random_matrix(rng, n, 96, bias=True, name=f"w{i}") for i, n in enumerate((200, 64, 128, 8, 192))]
    linears = [Linear(matrix, "fp32_lut") for matrix in matrices]
    assert [len(linear.placement.nodes) for linear in linears] == [3, 0, 2, 0, 3]
    yield linears, matrices
    for linear in linears:
        linear.close()


@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
def test_a_group_of_matrices_that_lie_on_different_nodes(uneven, dispatches, dtype):
    """One dispatch for all that lie on the same, and the bits of each alone."""
    linears, _ = uneven
    group = LinearGroup(linears)
    for tokens in (0, 1, 7):
        x = random_x(np.random.default_rng(tokens), tokens, 96, dtype)
        for wanted in (None, np.float32):
            alone = [linear.forward(x, dtype=wanted) for linear in linears]
            dispatches.clear()
            assert all(map(same_bits, group.forward(x, dtype=wanted), alone))
            assert dispatches == ([2, 2, 1] if tokens else [])


@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
def test_the_gradient_of_such_a_group_is_rounded_once(uneven, dispatches, dtype):
    linears, matrices = uneven
    rng = np.random.default_rng(11)
    grads = [random_x(rng, 7, linear.shape[0], dtype) for linear in linears]
    found = LinearGroup(linears).backward(grads)
    assert dispatches == [2, 2, 1]
    wide = np.zeros((7, 96), np.float32)
    for part in ((0, 4), (1, 3), (2,)):
        one = np.empty_like(wide)
        LinearGroup([linears[i] for i in part]).backward([grads[i] for i in part], one)
        wide += one
    assert same_bits(found, wide.astype(dtype))
    terms = [(grad.astype(BF16).astype(np.float64), dequantize(m)) for grad, m in zip(grads, matrices, strict=True)]
    exact, size = sum(g @ w for g, w in terms), sum(np.abs(g) @ np.abs(w) for g, w in terms)
    assert (np.abs(wide - exact) <= 2.0**-14 * size).all()
    out = np.empty_like(wide)
    assert LinearGroup(linears).backward(grads, out) is out
    assert same_bits(out, wide)
    assert not LinearGroup(linears).backward([grad[:0] for grad in grads]).size


@pytest.mark.usefixtures("three_nodes")
def test_such_a_group_with_an_x_each(dispatches):
    rng = np.random.default_rng(12)
    nodes = ([0, 1], None, [1, 0], [0, 1])
    linears = [Linear(random_matrix(rng, 200, 40), "fp32_lut", numa_nodes=given) for given in nodes]
    assert len({linear.placement for linear in linears}) == 3
    group = LinearGroup(linears, "own")
    x, grads = (rng.standard_normal((5, 4, size)).astype(BF16) for size in (40, 200))
    y, grad_x = group.forward(x), group.backward(grads)
    assert dispatches == [2, 1, 1] * 2
    for i, linear in enumerate(linears):
        assert same_bits(y[:, i].copy(), linear.forward(x[:, i]))
        assert same_bits(grad_x[:, i].copy(), linear.backward(grads[:, i]))
        linear.close()


def test_nothing_of_such_a_group_is_written_if_one_is_closed(uneven):
    linears, _ = uneven
    group, out = LinearGroup(linears), [np.full((3, linear.shape[0]), 7, BF16) for linear in linears]
    assert linears[2].placement != numa.UNBOUND  # of the last dispatch
    linears[2].close()
    with pytest.raises(ClosedError, match=r"w2: forward after close\(\)"):
        group.forward(random_x(np.random.default_rng(13), 3, 96), out)
    assert all((each == 7).all() for each in out)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork():
    """After use, with workers and the thread of submit() about, and while another thread computes."""
    rng = np.random.default_rng(6)
    x = random_x(rng, 9, 64)
    with Linear(random_matrix(rng, 136, 64), "fp32_lut") as linear:
        set_num_threads(2)
        y = linear.submit(x).result()
        stop = threading.Event()

        def call():
            while not stop.is_set():
                linear.forward(x)

        def compute():
            results = [linear.forward(x), linear.submit(x).result(), *LinearGroup([linear]).forward(x)]
            return [same_bits(result, y) for result in results]

        caller = threading.Thread(target=call)
        caller.start()
        try:
            for _ in range(3):
                assert in_child(compute) == [True] * 3
        finally:
            stop.set()
            caller.join()
        assert same_bits(linear.submit(x).result(), y)


def test_callers_at_once(backend):
    """They take turns: each gets what it would have got alone, of Linears and groups."""
    rng = np.random.default_rng(7)
    linears = [Linear(random_matrix(rng, 72, 64, bias=True), backend, "auto") for _ in range(3)]
    xs = [random_x(rng, tokens, 64) for tokens in (1, 4, 20)]
    wanted = [[linear.forward(x) for linear in linears] for x in xs]
    wrong = []

    def call(x, ys):
        for _ in range(5):
            group = LinearGroup(linears).forward(x)
            for linear, y, of_group in zip(linears, ys, group, strict=True):
                if not same_bits(linear.forward(x), y) or not np.array_equal(bits(of_group), bits(y)):
                    wrong.append(linear)

    running = [threading.Thread(target=call, args=given) for given in zip(xs, wanted, strict=True)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not wrong


def test_what_it_takes():
    """At most 1 % more than the checkpoint's bytes, and progress of all of them."""
    calls = []
    matrix = random_matrix(np.random.default_rng(8), 2048, 2880)
    with Linear(matrix, "fp32_lut", progress=lambda *given: calls.append(given)) as linear:
        assert linear.nbytes <= 1.01 * sum(array.nbytes for array in matrix.stored.values())
    assert calls[-1][0] == calls[-1][1] == sum(array.nbytes for array in matrix.stored.values())
