"""Nothing is read or written outside a buffer: each array in turn ends, or begins, where the process may not go.

What is wrong here ends the process, so that it runs in a child.
"""

import ctypes
import faulthandler
import itertools
import multiprocessing
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from helpers import SUPER_SCALED, WEIGHTS, random_batch, random_experts
from linears import DENSE_KINDS, random_matrix

from ktmoe import ExpertWeights, Linear, LinearGroup, MoELayer, measuring, set_num_threads
from ktmoe._native import core
from ktmoe.backends import native
from ktmoe.backends.base import Plan
from ktmoe.errors import ClosedError, InputError
from ktmoe.experts import PROJECTIONS
from ktmoe.matrix import ARRAYS

PAGE = 4096
PROT_NONE, READ_WRITE, PRIVATE_ANONYMOUS = 0, 3, 0x22

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def fenced(array, side):
    """A copy that ends just before an inaccessible page, or begins just behind one. Never unmapped: the child exits."""
    inside = -(-array.nbytes // PAGE) * PAGE
    address = libc.mmap(None, inside + 2 * PAGE, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0)
    assert address not in (None, ctypes.c_void_p(-1).value)
    for page in (address, address + PAGE + inside):
        assert libc.mprotect(page, PAGE, PROT_NONE) == 0
    start = address + PAGE + (inside - array.nbytes if side == "end" else 0)
    copy = np.ctypeslib.as_array((ctypes.c_uint8 * array.nbytes).from_address(start)).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def exit_code(function):
    child = multiprocessing.get_context("fork").Process(target=function)
    child.start()
    child.join(60)
    child.kill()
    return child.exitcode


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_fence_holds():
    for side, outside in (("end", 100), ("start", -1)):
        array = fenced(np.zeros(100, np.uint8), side)
        assert not array.any()
        address = array.ctypes.data + outside

        def touch(address=address):
            faulthandler.disable()  # the fault is what we want
            ctypes.c_uint8.from_address(address).value += 1

        assert exit_code(touch) == -signal.SIGSEGV


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "call",
    [
        lambda packed: core.folded(packed),
        lambda packed: packed.packed_bytes(0, "up"),
        lambda packed: core.unpack(packed, 0, "up"),
        lambda packed: core.unpack(packed, 1, "gate"),
        lambda packed: core.unpack(packed, 10**9, "gate"),
        lambda packed: packed.packed_bytes(10**9, "gate"),
    ],
    ids=["kernels", "packed_bytes", "unpack", "expert 1", "expert 10**9", "its bytes"],
)
def test_a_matrix_that_was_not_packed_or_does_not_exist(call):
    """Of an unfinished layer with one expert, of which only the gate is packed."""
    experts = random_experts(np.random.default_rng(1), 1, 64, 64)

    def run():
        faulthandler.disable()
        table = native.load_table("portable")
        packed = core.PackedLayer(table, experts, Plan(), [(0, 64)], 1)
        packed.pack(0, {"gate": experts.matrix(0, "gate")})
        with pytest.raises(InputError):
            call(packed)

    assert exit_code(run) == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_reading_beyond_the_packed_bytes():
    """Sums that do not fit into 64 bits, too."""
    experts = random_experts(np.random.default_rng(1), 1, 256, 256)

    def run():
        faulthandler.disable()
        table = native.load_table("portable")
        with MoELayer(experts, "fp32_lut") as layer:
            packed, size = layer.packed, layer.nbytes
            wraps = (2**64 - 2**40, 2**40), (2**40, 2**64 - 2**40), (2**80, 1)
            for offset, nbytes in (*wraps, (1, size), (size + 1, 0), (-1, 1), (1, -1)):
                with pytest.raises(InputError, match="is not within"):
                    packed.read_seconds(table, offset, nbytes)
            for offset, nbytes, streams in itertools.product((0, 64, 4096), (0, 1, size // 2, size - 4096), measuring.STREAMS):
                assert packed.read_seconds(table, offset, nbytes, streams) >= 0
            assert packed.read_seconds(table, size, 0) >= 0
            with pytest.raises(InputError, match="streams must be 1, 2, 4 or 8, found 3"):
                packed.read_seconds(table, 0, size, 3)
        with pytest.raises(ClosedError):
            packed.read_seconds(table, 0, size)

    assert exit_code(run) == 0


USES = {
    "packed_bytes": lambda packed, _: packed.packed_bytes(0, "down"),
    "kernels": lambda packed, _: core.folded(packed),
    "read_seconds": lambda packed, table: packed.read_seconds(table, 0, packed.nbytes),
    "rounding": lambda packed, _: packed.rounding,
    "export": lambda packed, _: core.unpack(packed, 0, "up"),
}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("use", USES)
def test_close_while_packed_weights_are_looked_at(use):
    """By another thread, again and again: it gets what it asked for or ClosedError, and never what is not there any more."""
    experts = random_experts(np.random.default_rng(1), 4, 1024, 1024)

    def run():
        faulthandler.disable()
        table, wrong = native.load_table("portable"), []

        def look(packed, begun):
            try:
                while True:
                    USES[use](packed, table)
                    begun.set()
            except ClosedError:
                return
            except BaseException as error:
                wrong.append(error)
                begun.set()

        for turn in range(15):
            packed, begun = MoELayer(experts, "fp32_lut").packed, threading.Event()
            thread = threading.Thread(target=look, args=(packed, begun))
            thread.start()
            begun.wait()
            time.sleep(turn / 10000)
            packed.close()
            thread.join()
        assert not wrong

    assert exit_code(run) == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("use", USES)
def test_looking_at_packed_weights_waits_for_whoever_may_free_them(use):
    """The pool's lock is what close() takes: while another thread has it for half a second, nothing is looked at.

    Several times, since on a busy machine that thread may not have it yet.
    """
    experts = random_experts(np.random.default_rng(1), 1, 64, 64)
    table = native.load_table("portable")
    with MoELayer(experts, "fp32_lut") as layer:

        def waited():
            holder = threading.Thread(target=core.pool_wake, args=(500_000,))
            start = time.monotonic()
            holder.start()
            time.sleep(0.1)
            before = time.monotonic()
            USES[use](layer.packed, table)
            after = time.monotonic()
            holder.join()
            return before - start < 0.3 and after - start > 0.4

        assert any(waited() for _ in range(5))


def fence(matrix, side):
    """Its arrays and its bias, each by itself."""
    arrays = {name: getattr(matrix, name) for name in (*ARRAYS, "bias")}
    return replace(matrix, **{name: fenced(array, side) for name, array in arrays.items() if array is not None})


def fence_experts(experts, side):
    """Each matrix's codes, scales and bias by themselves."""
    matrices = {(e, p): fence(experts.matrix(e, p), side) for e in range(experts.num_experts) for p in PROJECTIONS}
    sizes = experts.num_experts, experts.hidden, experts.intermediate
    return ExpertWeights(*sizes, lambda *key: matrices[key], experts.formats)


SHAPES = [(64, 96), (100, 34), (2, 2), (288, 64)]
CASES = [
    *((shape, name) for shape in SHAPES for name in ("folded", "int4-64", "b16")),
    *((shape, name) for shape in SHAPES[1::2] for name in ("int4-32", "int4-128", "all three", "group lengths")),
    *(
        (shape, name)
        for shape in SHAPES[:2]
        for name in ("gptq-32", "awq-128", "nvfp4", "int4-fp16", "mxfp8", "fp8", "fp8-row", "int8-64", "int8-block")
    ),
    *((shape, name) for shape in ((64, 96), (288, 34)) for name in SUPER_SCALED),
    *(
        (shape, name) for shape in ((1, 1), (33, 7), (7, 289)) for name in ("b16", "mxfp8", "fp8-row", "int8-row")
    ),  # 4-bit codes have no odd k
    ((129, 259), "fp8-bf16"),
]


@pytest.mark.cover("values")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("side", ["end", "start"])
@pytest.mark.parametrize(("shape", "weights"), CASES, ids=str)
def test_every_array(backend, shape, weights, side):
    rng = np.random.default_rng(shape)
    experts = random_experts(rng, 2, *shape, biases=True, **WEIGHTS[weights])

    def run():
        set_num_threads(2)
        with MoELayer(fence_experts(experts, side), backend) as layer:
            layer.expert_mask = fenced(layer.expert_mask, side)
            for tokens, dtype in ((1, np.uint16), (3, np.uint16), (15, np.uint16), (2, np.float32)):
                x, ids, router_weights = random_batch(rng, experts, tokens, 2, np.float32)
                x = fenced((x.view(np.uint32) >> 16).astype(np.uint16) if dtype == np.uint16 else x, side)
                out = fenced(np.zeros_like(x), side)
                y = layer.forward(x, fenced(ids, side), fenced(router_weights, side), out=out)
                assert y is out
                assert y.any()

    assert exit_code(run) == 0


@pytest.mark.cover("values")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("side", ["end", "start"])
@pytest.mark.parametrize(
    ("shape", "kind"), [((70, 100), kind) for kind in DENSE_KINDS] + [((1, 1), "b16"), ((65, 33), "fp8")], ids=str
)
def test_every_array_of_a_dense_matrix(backend, shape, kind, side):
    """Those of the checkpoint, x, y; and of a group whose matrices take columns of x that are not whole blocks."""
    rng = np.random.default_rng(shape)
    matrix = fence(random_matrix(rng, *shape, bias=True, **DENSE_KINDS[kind]), side)

    def run():
        set_num_threads(2)
        n, k = matrix.shape
        with Linear(matrix, backend, "auto") as linear:
            group = LinearGroup([linear, linear], "own")
            for tokens, dtype in ((1, np.uint16), (3, np.uint16), (15, np.uint16), (2, np.float32)):
                x = rng.standard_normal((tokens, 2, k)).astype(np.float32)
                x = (x.view(np.uint32) >> 16).astype(np.uint16) if dtype == np.uint16 else x
                one = fenced(np.ascontiguousarray(x[:, 0]), side)
                for y_dtype in {dtype, np.float32}:
                    out, both = fenced(np.zeros((tokens, n), y_dtype), side), fenced(np.zeros((tokens, 2, n), y_dtype), side)
                    assert linear.forward(one, out=out) is out
                    group.forward(fenced(x, side), out=both)
                    assert out.any()
                    assert np.array_equal(both[:, 0], out)

    assert exit_code(run) == 0
