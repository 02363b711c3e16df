"""Kernels of amx with one mistake each, compiled from a changed copy: what tests compare must tell them from the right ones."""

import ctypes
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import ways
from amx_tiles import Tiles, counted, expected
from environments import COMPILER, NEEDS_COMPILER, run
from helpers import FORMATS, assert_right, crowd, random_experts, same_bits, unsigned

from ktmoe import MoELayer, backends, set_num_threads
from ktmoe._native import core, isa

pytestmark = [pytest.mark.parametrize("backend", ["amx"], indirect=True), NEEDS_COMPILER]
NATIVE = Path(core.__file__).parent
CAPSULE = b"ktmoe.isa"  # a capsule keeps the pointer
SHAPE = 160, 100  # five steps of k, and four: more than are decoded ahead
ROWS = {"wide": 5, "square": 20, "tall": 40}
#: The kernels for scales that cannot be folded: no layer here has any, but a backend without them refuses q4.
OTHER = "q4_f32"
#: OTHER, and the kernels in which mistakes are made.
KERNELS = ("q4_amx", "q4_amx_products", "q4_amx_terms", "f8_amx", "b16_amx", OTHER)


class Kernels:
    """Compiles KERNELS: less optimised than by setup.py, and with a name that can be found."""

    def __init__(self, folder):
        self.folder = folder / "right"
        shutil.copytree(NATIVE / "kernels", self.folder / "kernels")
        for source in isa.sources("amx"):
            self.compile(self.folder, source)
        self.right = self.link(self.folder)

    def compile(self, folder, source):
        row = "portable" if source == OTHER else "amx"  # which compiles in a third of the time
        flags = [*(flag for flag in isa.C_FLAGS if "visibility" not in flag), *isa.compile_flags(row)]
        flags += [*isa.definitions("amx", source), "-O0", "-fPIC", "-I", folder, "-I", NATIVE]
        run([*COMPILER, *flags, "-c", folder / f"kernels/{source}.c", "-o", folder / f"{source}.o"])

    def link(self, folder):
        """A kernel table."""
        library = folder / "amx.so"
        run([*COMPILER, "-shared", "-o", library, *sorted(folder.glob("*.o"))])
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        address = ctypes.addressof(ctypes.c_char.in_dll(ctypes.CDLL(str(library)), "kt_isa_amx"))
        return core.KernelTable(new(address, CAPSULE, None))

    def wrong(self, folder, mistake):
        """A kernel table with a mistake; of the objects, only the kernel's own is compiled anew."""
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        changed = folder / "kernels" / mistake.file
        text = changed.read_text()
        assert text.count(mistake.old) == mistake.times
        changed.write_text(text.replace(mistake.old, mistake.new))
        self.compile(folder, mistake.kernel)
        return self.link(folder)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(isa.ISAS, "amx", replace(isa.ISAS["amx"], kernels=KERNELS, shared=(), operands=()))
        yield Kernels(tmp_path_factory.mktemp("kernels"))


@dataclass(frozen=True)
class Mistake:
    """Text to replace in a file, how often it is there, the file to compile, and a format that its kernel serves.

    seen: names of ROWS with which it shows. rounding, tuned_for: of the layer that the kernel serves.
    """

    file: str
    old: str
    new: str
    kernel: str
    weights: str
    times: int = 1
    seen: tuple[str, ...] = tuple(ROWS)
    rounding: str = "folded"
    tuned_for: str = "decode"


TILES = "loops/tiles.h"
TERMS = {"file": "q4_amx_terms.c", "kernel": "q4_amx_terms", "weights": "int4-64", "rounding": "exact", "tuned_for": "prefill"}
STEPS = {"old": "step < steps; step++) {", "new": "step + 1 < steps; step++) {", "times": 3}
MISTAKES = {
    "even and odd k, ue8m0": Mistake(
        "q4_amx.c", "_mm512_subs_epu16(_mm512_permutexvar_epi16(down, w->table), *f)",
        "_mm512_subs_epu16(_mm512_permutexvar_epi16(_mm512_rol_epi32(down, 16), w->table), *f)", "q4_amx", "mxfp4"
    ),
    "even and odd k, bf16": Mistake(
        "q4_amx_products.c", "(__m512)odd, (__m512)even", "(__m512)even, (__m512)odd", "q4_amx_products", "int4-64"
    ),
    "a group without its scale, ue8m0": Mistake(
        "q4_amx.c",
        "ue8m0_fold(header_of(&w->at, step) + 16 * n, 253);",
        "step == 1 ? _mm512_set1_epi16((253 - 127) << 7) : ue8m0_fold(header_of(&w->at, step) + 16 * n, 253);",
        "q4_amx",
        "mxfp4",
    ),
    "a group without its scale, bf16": Mistake(
        "q4_amx_products.c",
        ".scale = load_scale(",
        ".scale = step >> w->at.group_shift == 1 ? (f32v){0} + 1 : load_scale(",
        "q4_amx_products",
        "int4-64",
    ),
    "a group with another's scale": Mistake(
        "q4_amx_products.c",
        "header = header_of(&w->at, step)",
        "header = header_of(&w->at, step / 3 * 3)",
        "q4_amx_products",
        "int4-32",
    ),
    "the last step, q4": Mistake(TILES, **STEPS, kernel="q4_amx", weights="mxfp4"),
    "the last step, b16": Mistake(TILES, **STEPS, kernel="b16_amx", weights="b16"),
    "the next step's tile": Mistake(
        TILES, "now = ring + step % PAIRS", "now = ring + (step + 1) % PAIRS", "q4_amx", "mxfp4", seen=("square", "tall"),
    ),
    "rows of another tile": Mistake(TILES, "DOT(3, 5, 7, ", "DOT(3, 4, 7, ", "b16_amx", "b16", seen=("square",)),
    "rows of a third tile": Mistake(TILES, "UP(1, 3, 5, 3)", "UP(1, 3, 3, 3)", "b16_amx", "b16", seen=("tall",)),
    "the first of two numbers twice": Mistake(
        old="permutexvar_epi16(down, w->low)", new="permutexvar_epi16(down, w->high)", **TERMS
    ),
    "two numbers, a group with another's scale": Mistake(
        old="(header_of(&w->at, step) + 32 * n)", new="(header_of(&w->at, step / 3 * 3) + 32 * n)", **TERMS
    ),
    "the sums of the scale group before": Mistake(
        TILES, "16 * sizeof(float)); \\\n    TILE_ZERO(t)", "16 * sizeof(float))", "f8_amx", "fp8"
    ),
    "a scale group with another's scale": Mistake(
        TILES, "load_scale(header_of(&w->at, step), n", "load_scale(header_of(&w->at, 0), n", "f8_amx", "fp8"
    ),
    "C of the pass before": Mistake(
        TILES, "        TILE_ZERO(t);                  \\\n", "", "q4_amx", "mxfp4"
    ),
}  # fmt: skip


def layer_with(monkeypatch, backend, table, name, rounding="folded", tuned_for="decode"):
    """A layer on these kernels, and its experts; scales are positive, so that a weight may be the sum of two numbers."""
    monkeypatch.setattr(backends.get(backend), "load", lambda isa: table)
    set_num_threads(1)  # a worker of many may make one pass, before which tiles are 0
    experts = random_experts(np.random.default_rng(1), 1, *SHAPE, formats=FORMATS[name])
    experts = unsigned(experts) if tuned_for == "prefill" else experts
    return MoELayer(experts, backend, rounding=rounding, tuned_for=tuned_for), experts


@pytest.mark.parametrize("name", dict.fromkeys(mistake.weights for mistake in MISTAKES.values()))
def test_an_unchanged_copy_is_right(backend, kernels, monkeypatch, name):
    """And has the bits of those that were built."""
    with MoELayer(
        random_experts(np.random.default_rng(1), 1, *SHAPE, formats=FORMATS[name]), backend, rounding="folded"
    ) as built:
        batches = [crowd(built, rows) for rows in ROWS.values()]
        bits = [built.forward(*batch) for batch in batches]
    layer, experts = layer_with(monkeypatch, backend, kernels.right, name)
    with layer:
        for batch, expected_bits in zip(batches, bits, strict=True):
            assert same_bits(assert_right(layer, experts, *batch), expected_bits)


#: Of each kernel, and of each kind of mistake in any, one is enough by default: the rest are the same in another kernel.
SAME = {
    "even and odd k, bf16",
    "a group without its scale, bf16",
    "the last step, b16",
    "rows of a third tile",
    "two numbers, a group with another's scale",
    "a scale group with another's scale",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if name in SAME else name for name in MISTAKES]
)
def test_a_mistake_is_seen(backend, kernels, monkeypatch, tmp_path, name):
    mistake = MISTAKES[name]
    how = mistake.weights, mistake.rounding, mistake.tuned_for
    layer, experts = layer_with(monkeypatch, backend, kernels.wrong(tmp_path, mistake), *how)
    with layer:
        for shape, rows in ROWS.items():
            batch = crowd(layer, rows)
            if shape in mistake.seen:
                with pytest.raises(AssertionError, match="of its bound"):
                    assert_right(layer, experts, *batch)
            else:
                assert_right(layer, experts, *batch)


@pytest.mark.skipif(ways.WAYS["amx"] == "native", reason="this CPU has the instructions")
def test_stores_that_nobody_needs_are_counted(backend, kernels, monkeypatch, tmp_path):
    """The results are right."""
    mistake = Mistake(
        TILES, "TILE_DOT(n, 4, b);", "TILE_DOT(n, 4, b); TILE_STORE(n, ring + RING_BYTES, OUT_BYTES);",
        "q4_amx", "mxfp4",
    )  # fmt: skip
    layer, experts = layer_with(monkeypatch, backend, kernels.right, "mxfp4")
    with layer:
        assert counted(layer, 5) == expected(layer, 5)
    layer, experts = layer_with(monkeypatch, backend, kernels.wrong(tmp_path, mistake), "mxfp4")
    with layer:
        assert_right(layer, experts, *crowd(layer, 5))
        counts, right = counted(layer, 5), expected(layer, 5)
        assert counts.pop("tilestored") > right.pop("tilestored")
        assert counts == right


def test_tiles_that_are_kept_are_seen(backend, kernels, monkeypatch, tmp_path, tmp_path_factory):
    tiles = Tiles(tmp_path_factory.mktemp("tiles"))
    mistake = Mistake("table.c", "#define LEAVE tiles_release", "#define LEAVE NULL", "table", "mxfp4")
    layer, experts = layer_with(monkeypatch, backend, kernels.wrong(tmp_path, mistake), "mxfp4")
    with layer:
        assert_right(layer, experts, *crowd(layer, 5))
        assert tiles.read()[0] == 1
    layer, _ = layer_with(monkeypatch, backend, kernels.right, "mxfp4")
    with layer:
        layer.forward(*crowd(layer, 5))
        assert not tiles.read().any()
