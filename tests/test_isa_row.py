"""What a new instruction set costs: one row in isa.py. Here it is a made-up one, compiled from that row alone. And what a new
activation mode costs: a form of rows, which kernels share that know nothing of it."""

import ctypes

import numpy as np
import pytest
import trained
from environments import COMPILER, NEEDS_COMPILER, run
from exact import forward, visible_layer, weights_of
from helpers import BF16, WEIGHTS, assert_right, random_batch, random_experts, same_bits

import ktmoe
from ktmoe import MoELayer, backends
from ktmoe._native import core, isa
from ktmoe.backends.native import NativeBackend

pytestmark = NEEDS_COMPILER
CAPSULE = b"ktmoe.isa"  # a capsule keeps the pointer
#: The first kernel of q4_f32 for UE8M0 scales, once more, with rows that cut x and h to 2 bits after the leading one.
ROUNDING = """
#include <string.h>

#include "ktmoe.h"
extern const kt_isa kt_isa_made_up;
static void cut(const uint16_t *x, size_t first, size_t count, size_t k, void *row) {
    (void)k;
    for (size_t i = 0; i < count; i++) ((uint32_t *)row)[first + i] = (uint32_t)(x[i] & 0xFFE0) << 16;
}
static kt_rows rows;
static kt_kernel own[2];
static const kt_kernel *kernels[64];
kt_isa kt_isa_cut;
/* And what has no weights of float32. */
static const kt_kernel *without_f32[64];
kt_isa kt_isa_without_f32;
__attribute__((constructor)) static void make(void) {
    size_t n = 0, without = 0;
    for (const kt_kernel *const *k = kt_isa_made_up.kernels; *k; k++) {
        kernels[n++] = *k;
        if (strcmp((*k)->family, "f32")) without_f32[without++] = *k;
        for (const kt_kernel *one = *k; one->family && !own[0].family; one++)
            if (one->scale[0] == 'u' && one->family[0] == 'q') own[0] = *one;
    }
    rows = *own[0].rows;
    rows.form = "cut";
    rows.encode = cut;
    own[0].rows = &rows;
    kernels[n] = own;
    kt_isa_cut = kt_isa_made_up;
    kt_isa_cut.kernels = kernels;
    kt_isa_without_f32 = kt_isa_made_up;
    kt_isa_without_f32.kernels = without_f32;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The kernel table of a row that has what portable has, under another name; and ROUNDING's."""
    folder = tmp_path_factory.mktemp("row")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            isa.ISAS,
            "made_up",
            isa.Isa(
                1, kernels=("b16_f32", "f16_f32", "f32_f32", "int_f32", "f8_f32", "q4_f32", "grid_f32"), implies=("portable",)
            ),
        )
        for source in isa.sources("made_up"):
            flags = [*(flag for flag in isa.C_FLAGS if "visibility" not in flag), *isa.compile_flags("made_up"), "-O0"]
            flags += [*isa.definitions("made_up", source), "-fPIC", "-I", ktmoe.get_include()]
            run([*COMPILER, *flags, "-c", f"{ktmoe.get_include()}/kernels/{source}.c", "-o", folder / f"{source}.o"])
    (folder / "rounding.c").write_text(ROUNDING)
    run([*COMPILER, "-std=c11", "-fPIC", "-I", ktmoe.get_include(), "-c", folder / "rounding.c", "-o", folder / "rounding.o"])
    run([*COMPILER, "-shared", "-o", folder / "made_up.so", *sorted(folder.glob("*.o"))])
    return ctypes.CDLL(str(folder / "made_up.so"))


def table_of(library, name):
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return core.KernelTable(new(ctypes.addressof(ctypes.c_char.in_dll(library, name)), CAPSULE, None))


@pytest.fixture(scope="module")
def table(library):
    return table_of(library, "kt_isa_made_up")


@pytest.fixture
def backend(table):
    backends.register("made_up", NativeBackend({"bf16": ("made_up",)}, lambda isa: table, rank=1))
    yield "made_up"
    backends.unregister("made_up")


def test_its_table(table):
    assert table.name == "made_up"
    assert sorted(core.kernels(table)) == sorted(core.kernels(core.kernel_table("portable")))


@pytest.mark.parametrize("weights", ["folded", "int4-64", "nvfp4", "fp8", "int8-64", "b16"])
def test_its_kernels_have_the_bits_of_portables(backend, monkeypatch, weights):
    experts = random_experts(np.random.default_rng(1), 3, 96, 160, **WEIGHTS[weights])
    batch = random_batch(np.random.default_rng(2), experts, 9, 2)
    portable = NativeBackend({"bf16": ("portable",)})
    with MoELayer(experts, backend) as layer:
        y = assert_right(layer, experts, *batch)
    backends.register("made_up", portable, overwrite=True)
    with MoELayer(experts, backend) as layer:
        assert same_bits(y, layer.forward(*batch))


def test_training_needs_the_product_of_its_own_weights_alone(library):
    """A table without f32 computes gradients of b16."""
    table = table_of(library, "kt_isa_without_f32")
    assert {"b16", "f32"} & {family for family, *_ in core.kernels(table)} == {"b16"}
    backends.register("no_f32", NativeBackend({"bf16": ("made_up",)}, lambda isa: table, rank=1))
    try:
        rng = np.random.default_rng(3)
        experts = random_experts(rng, 2, 96, 64, **WEIGHTS["b16"])
        with MoELayer(experts, "no_f32") as layer:
            trained.assert_right(layer, experts, *trained.training_batch(rng, experts, 5))
    finally:
        backends.unregister("no_f32")


@pytest.mark.parametrize("tokens", [1, 9])
def test_a_mode_that_rounds_x_and_h(library, tokens):
    table = table_of(library, "kt_isa_cut")
    backends.register("cut", NativeBackend({"bf16": ("made_up",), "cut": ("made_up",)}, lambda isa: table, rank=1))
    try:
        rng = np.random.default_rng(tokens)
        codes, scales = rng.integers(0, 16, (96, 96), dtype=np.uint8), np.full((96, 3), 127, np.uint8)
        weights, x = weights_of(codes, scales), rng.integers(-99, 100, (tokens, 96)).astype(float)
        with visible_layer("cut", "up", codes, scales, activations="cut") as layer:
            assert layer.activations == "cut"
            y = forward(layer, x)
        assert np.array_equal(y, cut(cut(x) @ weights.T))
        assert not np.array_equal(y, x @ weights.T)
    finally:
        backends.unregister("cut")


def cut(numbers):
    """What ROUNDING does to them; exact numbers of at most 24 bits are rounded to bfloat16 before, to nearest even."""
    words = numbers.astype(np.float32).astype(BF16).view(np.uint16) & 0xFFE0
    return words.view(BF16).astype(float)
