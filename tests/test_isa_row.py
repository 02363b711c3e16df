"""What a new instruction set costs: one row in isa.py. Here it is a made-up one, compiled from that row alone."""

import ctypes

import numpy as np
import pytest
from environments import COMPILER, NEEDS_COMPILER, run
from helpers import WEIGHTS, assert_right, random_batch, random_experts, same_bits

import ktmoe
from ktmoe import MoELayer, backends
from ktmoe._native import core, isa
from ktmoe.backends.native import NativeBackend

pytestmark = NEEDS_COMPILER
CAPSULE = b"ktmoe.isa"  # a capsule keeps the pointer


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """The kernel table of a row that has what portable has, under another name."""
    folder = tmp_path_factory.mktemp("row")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(isa.ISAS, "made_up", isa.Isa(1, kernels=("b16_f32", "f8_f32", "q4_f32"), implies=("portable",)))
        for source in isa.sources("made_up"):
            flags = [*(flag for flag in isa.C_FLAGS if "visibility" not in flag), *isa.compile_flags("made_up"), "-O1"]
            flags += [*isa.definitions("made_up", source), "-fPIC", "-I", ktmoe.get_include()]
            run([*COMPILER, *flags, "-c", f"{ktmoe.get_include()}/kernels/{source}.c", "-o", folder / f"{source}.o"])
    run([*COMPILER, "-shared", "-o", folder / "made_up.so", *sorted(folder.glob("*.o"))])
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    library = ctypes.CDLL(str(folder / "made_up.so"))
    return core.KernelTable(new(ctypes.addressof(ctypes.c_char.in_dll(library, "kt_isa_made_up")), CAPSULE, None))


@pytest.fixture
def backend(table):
    backends.register("made_up", NativeBackend({"bf16": ("made_up",)}, lambda isa: table, rank=1))
    yield "made_up"
    backends.unregister("made_up")


def test_its_table(table):
    assert table.name == "made_up"
    assert sorted(table.kernels()) == sorted(core.kernel_table("portable").kernels())


@pytest.mark.parametrize("weights", ["folded", "int4-64", "nvfp4", "fp8", "b16"])
def test_its_kernels_have_the_bits_of_portables(backend, monkeypatch, weights):
    experts = random_experts(np.random.default_rng(1), 3, 96, 160, **WEIGHTS[weights])
    batch = random_batch(np.random.default_rng(2), experts, 9, 2)
    portable = NativeBackend({"bf16": ("portable",)})
    with MoELayer(experts, backend) as layer:
        y = assert_right(layer, experts, *batch)
    backends.register("made_up", portable, overwrite=True)
    with MoELayer(experts, backend) as layer:
        assert same_bits(y, layer.forward(*batch))
