"""A Linear in use: replaced while it computes, exported, submitted, forked, called by several threads at once."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from helpers import TURNED, bits, in_child, same_bits
from linears import DENSE_FORMATS, assert_within, random_matrix, random_x

from ktmoe import Linear, LinearGroup, set_num_threads
from ktmoe.errors import FormatError, InputError

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
