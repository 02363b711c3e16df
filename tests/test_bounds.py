"""Nothing is read or written outside a buffer: each array in turn ends, or begins, where the process may not go.

What is wrong here ends the process, so that it runs in a child.
"""

import ctypes
import faulthandler
import multiprocessing
import signal

import numpy as np
import pytest
from helpers import random_batch, random_experts

from ktmoe import ExpertWeights, MoELayer, set_num_threads
from ktmoe._native import core
from ktmoe.backends import native
from ktmoe.errors import InputError

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
        lambda packed: packed.kernels(),
        lambda packed: packed.packed_bytes(0, "up"),
        lambda packed: packed.unpack(0, "up"),
        lambda packed: packed.unpack(1, "gate"),
        lambda packed: packed.unpack(10**9, "gate"),
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
        packed = core.PackedLayer(table, 1, 64, 64, experts.formats, experts.activation, "down_output", "bf16")
        packed.pack(0, "gate", experts.matrix(0, "gate"))
        with pytest.raises(InputError):
            call(packed)

    assert exit_code(run) == 0


def fence_experts(experts, side):
    def matrices(projection):
        pairs = [experts._read(expert, projection) for expert in range(experts.num_experts)]
        return fenced(np.stack([m.codes for m in pairs]), side), fenced(np.stack([m.scales for m in pairs]), side)

    return ExpertWeights.from_arrays(*(matrices(projection) for projection in ("gate", "up", "down")))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("side", ["end", "start"])
@pytest.mark.parametrize("shape", [(64, 96), (100, 34), (2, 2), (288, 64)], ids=str)
def test_every_array(backend, shape, side):
    rng = np.random.default_rng(shape)
    experts = random_experts(rng, 2, *shape)

    def run():
        set_num_threads(2)
        with MoELayer(fence_experts(experts, side), backend) as layer:
            layer.expert_mask = fenced(layer.expert_mask, side)
            for tokens, dtype in ((1, np.uint16), (3, np.uint16), (15, np.uint16), (2, np.float32)):
                x, ids, weights = random_batch(rng, experts, tokens, 2, np.float32)
                x = fenced((x.view(np.uint32) >> 16).astype(np.uint16) if dtype == np.uint16 else x, side)
                out = fenced(np.zeros_like(x), side)
                y = layer.forward(x, fenced(ids, side), fenced(weights, side), out=out)
                assert y is out
                assert y.any()

    assert exit_code(run) == 0
