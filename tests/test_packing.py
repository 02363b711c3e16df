"""The packed layouts: their addressing formulas, golden bytes, exact inverses, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    B16,
    BF16,
    FORMATS,
    LONGEST,
    MIXED,
    SUPER_SCALED,
    TURNED,
    WEIGHTS,
    WHOLE,
    bits,
    random_arrays,
    random_experts,
)

from ktmoe import MXFP4, SILU, ExpertWeights, Matrix, MoELayer, int4, set_num_threads
from ktmoe._native import core
from ktmoe.backends import native
from ktmoe.backends.base import Plan
from ktmoe.dequantization import dequantize
from ktmoe.errors import FormatError
from ktmoe.quantization import source
from ktmoe.weights.elements import E2M1, FAMILIES, Element
from ktmoe.weights.formats import F16, F32, MXFP8, WeightFormat, fp8, int8, uint4
from ktmoe.weights.ggml import GRIDS
from ktmoe.weights.offsets import Minimum
from ktmoe.weights.order import Order
from ktmoe.weights.scales import Scale

GOLDEN = Path(__file__).parent / "golden"
PANEL, BLOCK = 64, 32


def pack(weight_format, shape, **stored):
    """A layer of one expert whose gate is the matrix of those arrays."""
    n, k = shape
    formats = dict.fromkeys(("gate", "up", "down"), weight_format)
    experts = ExpertWeights(1, k, n, None, formats, SILU)
    layer = core.PackedLayer(native.load_table("portable"), experts, Plan(), [(0, n)], 1)
    layer.pack(0, {"gate": Matrix("w", weight_format, (n, k), **stored)})
    return layer


#: The bit of k % 8 in its column's dword: k0 k2 k4 k6 | k1 k3 k5 k7; of k % 4 of f8, its byte: k0 k2 k1 k3; of k % 8
#: of int, its byte in two dwords: k0 k4 k1 k5 | k2 k6 k3 k7.
NIBBLES, BYTES = np.array([0, 16, 4, 20, 8, 24, 12, 28]), np.array([0, 2, 1, 3])
BYTES_OF_EIGHT = np.array([0, 2, 4, 6, 1, 3, 5, 7])
#: The bits of the planes of int's codes, by those of a code.
PLANES = {2: (2,), 3: (2, 1), 5: (4, 1), 6: (4, 2), 8: (8,)}
#: The bits of scales that are packed in fewer than 8, by kind.
PACKED_BITS = {"uint4": 4, "int6": 6}


def place(family, c, kk):
    """(byte in its block, bit in the byte) of the code of column c and k kk, from LAYOUT of pack/layout.h."""
    if family == "q4":
        bit = NIBBLES[kk % 8]
        return (c // 16) * 256 + (kk % 32 // 8) * 64 + (c % 16) * 4 + bit // 8, bit % 8
    if family == "f8":
        return (c // 16) * 512 + (kk % 32 // 4) * 64 + (c % 16) * 4 + BYTES[kk % 4], 0 * kk
    if family == "f32":
        return (kk % 32) * 256 + c * 4, 0 * kk
    return (kk % 32 // 2) * 256 + c * 4 + (kk % 2) * 2, 0 * kk


def place_in_plane(plane, c, kk):
    """The same in a plane of so many bits. Of 8 dwords of a column, neighbours are pieces of a dword's bytes."""
    dword, byte = np.divmod(kk % 32 // 8 * 8 + BYTES_OF_EIGHT[kk % 8], 4)
    line, piece = np.divmod(dword, 8 // plane)
    return (c // 16) * 64 * plane + line * 64 + (c % 16) * 4 + byte, piece * plane


def planes_of(weight_format, codes, c, kk):
    """(pieces of codes, bytes in the block, bits in these) of what a code is in pieces, but for bytes above the first."""
    if weight_format.family != "int":
        return [(codes, *place(weight_format.family, c, kk))]
    found, shift, start = [], 0, 0
    for plane in PLANES[weight_format.element.bits]:
        byte, bit = place_in_plane(plane, c, kk)
        found.append((codes >> shift & (1 << plane) - 1, start + byte, bit))
        shift, start = shift + plane, start + 256 * plane
    return found


def codes_of(weight_format, stored, n, k):
    """Codes one by one, [n, k], by what an order says of each."""
    codes = stored["codes"]
    if weight_format.family != "q4":
        codes = np.ascontiguousarray(codes.T) if weight_format.order.transposed else codes
    if not weight_format.element.values:
        return bits(codes)
    if weight_format.family == "f8":
        return codes
    if weight_format.family == "int":
        return codes.astype(np.uint16) + (128 if weight_format.element.name == "INT8" else 0) & 255
    order = weight_format.order
    if not order.transposed:
        return np.stack([codes & 15, codes >> 4], -1).reshape(n, k)
    dwords, at = codes.view(np.uint32), np.argsort(order.nibbles)
    nn, kk = np.mgrid[:n, :k]
    if order.along == "k":
        return dwords[kk // 8, nn] >> 4 * at[kk % 8].astype(np.uint32) & 15
    return dwords[kk, nn // 8] >> 4 * at[nn % 8].astype(np.uint32) & 15


def by_formula(weight_format, stored, n, k):
    """The packed bytes, number by number, from LAYOUT of pack/layout.h."""
    block_bytes = {"q4": 1024, "f8": 2048, "b16": 4096, "f16": 4096, "f32": 8192}.get(weight_format.family)
    block_bytes = block_bytes or 256 * weight_format.element.bits
    panels, blocks = -(-n // PANEL), -(-k // BLOCK)
    scale, offset, minima = weight_format.scale, weight_format.offset, isinstance(weight_format.offset, Minimum)
    small = PACKED_BITS.get(scale.kind) if scale else None
    per, above, header, upper, of_256 = 0, 0, 0, 128 * (1 + minima), "super_scales"
    if scale and scale.extent[1] == 256:  # as super-scales stand
        of_256, scale, above = "scales", None, 128
    if scale:
        rows, group = scale.extent
        scales = stored["scales"].T if weight_format.order.transposed else stored["scales"]
        one = scale.stored(np.ones(1, np.float32))
        if rows > 1:
            scales, one = scale.numbers(scales).astype(np.float32), np.ones(1, np.float32)
        halves, per = (2, 1) if group == 16 else (1, group // BLOCK)
        row_bytes = 64 if rows > 1 else 64 * scale.dtype.itemsize
        header = (1 if small else halves) * row_bytes * (1 + minima) + (64 if offset and not minima else 0)
        above = upper + (256 if small == 6 else 0) if weight_format.super_scale else 0
    headers, supers = -(-blocks // per) if per else 0, -(-blocks // 8) if above else 0
    packed = np.zeros((panels, blocks * block_bytes + headers * header + supers * above), np.uint8)
    padding = 128 if weight_format.element.name.startswith("INT8") else weight_format.element.padding
    codes = np.full((panels * PANEL, blocks * BLOCK), padding, np.uint32)
    codes[:n, :k] = codes_of(weight_format, stored, n, k)
    all_panels, all_c = np.divmod(np.arange(panels * PANEL)[:, None], PANEL)
    kk = np.arange(blocks * BLOCK)
    before = kk // BLOCK * block_bytes + (kk // BLOCK // per + 1 if per else 0) * header + (kk // 256 + 1) * above
    for pieces, byte, bit in planes_of(weight_format, codes, all_c, kk):
        byte = byte + before
        for first in np.unique(bit):  # each byte once
            column, k_of = np.nonzero(np.broadcast_to(bit == first, codes.shape))
            packed[all_panels[column, 0], byte[column, k_of]] |= (pieces[column, k_of] << first & 255).astype(np.uint8)
    for more in range(1, weight_format.element.bits // 8):
        packed[all_panels, byte + more] = codes >> 8 * more & 255
    for column in range(panels * PANEL):
        panel, c = divmod(column, PANEL)
        for b in range(0, blocks, per) if per else ():
            at = b * block_bytes + b // per * header + (b // 8 + 1) * above
            for half in range(halves):
                g = b // per * halves + half
                inside = column < n and g < -(-k // group)
                value = scales[column // rows, g] if inside else one[0]
                if rows > 1 and (column >= n or c >= 16):
                    continue  # a line has 16 copies, by any of the panel's columns
                if small:
                    number = int(value) + (32 if small == 6 else 0)
                    packed[panel, at + c] |= (number & 15) << 4 * half
                    if small == 6:
                        above_all = b // 8 * (8 * (header + block_bytes) + above) + upper + 4 * c
                        packed[panel, above_all + b % 8 // 2] |= number >> 4 << (b % 2 * 4 + 2 * half)
                    if minima and inside:
                        packed[panel, at + row_bytes + c] |= int(stored["offsets"][column, g]) << 4 * half
                    continue
                stored_bytes = np.array([value]).view(np.uint8)
                first = at + half * row_bytes + c * len(stored_bytes)
                packed[panel, first : first + len(stored_bytes)] = stored_bytes
                if minima and inside:
                    stored_bytes = np.array([subtracted(weight_format, stored, "offsets")[column, g]]).view(np.uint8)
                    first += halves * row_bytes
                    packed[panel, first : first + len(stored_bytes)] = stored_bytes
            if offset and not minima and column < n:
                z = zero_points(weight_format, stored, n)[column, b // per]
                packed[panel, at + row_bytes + c] = (z + offset.plus) % 16
        for s in range(supers):
            at = s * (8 * block_bytes + (8 // per if per else 0) * header + above) + 2 * c
            of_scales = stored[of_256].T if weight_format.order.transposed else stored[of_256]
            packed[panel, at : at + 2] = np.array([of_scales[column, s] if column < n else 1], np.float16).view(np.uint8)
            if minima and column < n:
                of_minima = subtracted(weight_format, stored, "super_offsets")[column, s : s + 1]
                packed[panel, at + 128 : at + 130] = of_minima.view(np.uint8)
    if scale and rows > 1:  # a panel of fewer than 16 columns has the whole line, too
        for panel in range(panels):
            for h in range(-(-blocks // per)):
                at = h * (header + per * block_bytes)
                packed[panel, at : at + 64] = np.full(16, scales[panel * PANEL // rows, h]).view(np.uint8)
    return packed


def subtracted(weight_format, stored, label):
    """Minima, or their super-scales, of which the last level has another sign where they are added."""
    last = "super_offsets" if weight_format.super_scale else "offsets"
    array = stored[label]
    return (array.view(np.uint16) ^ 0x8000).view(np.float16) if weight_format.offset.added and label == last else array


def zero_points(weight_format, stored, n):
    if not weight_format.order.transposed:
        return stored["offsets"]
    at = np.argsort(weight_format.order.nibbles)
    columns = [stored["offsets"].view(np.uint32)[:, i // 8] >> int(4 * at[i % 8]) & 15 for i in range(n)]
    return np.stack(columns)


def random_stored(rng, n, k, weight_format):
    """Any numbers that are finite."""
    return {label: array[0] for label, array in random_arrays(rng, weight_format, 1, n, k, scales=(0, 254)).items()}


def fits(weight_format, n, k):
    """The nearest shape, not below that one, of whole items of the format's arrays."""
    rows, columns = weight_format.code_unit
    return -(-n // rows) * rows, -(-k // columns) * columns


def same_stored(a, b):
    assert a.keys() == b.keys()
    assert all(a[label].dtype == b[label].dtype and np.array_equal(bits(a[label]), bits(b[label])) for label in b)


SHAPES = [(1, 2), (64, 32), (63, 32), (65, 34), (1, 258), (100, 100), (66, 288), (130, 62), (3, 320), (68, 512)]
ODD_SHAPES = [(1, 1), (65, 33), (3, 7), (64, 31), (5, 289)]
PACKED = FORMATS | TURNED
CASES = {f"{name}-{n}x{k}": (name, *fits(w, n, k)) for name, w in FORMATS.items() for n, k in SHAPES}
ODD = (
    "b16",
    "f16",
    "f32",
    "mxfp8",
    "fp8",
    "fp8-row",
    "int8-row",
    "int8+128",
    *(name for name in FORMATS if re.match(r"int\d ", name)),
)
CASES |= {f"{name}-{n}x{k}": (name, n, k) for name in ODD for n, k in ODD_SHAPES}
CASES |= {f"{name}-{n}x{k}": (name, n, k) for name in TURNED for n, k in [*ODD_SHAPES, (64, 64), (130, 100)]}
every_case = pytest.mark.parametrize(("name", "n", "k"), CASES.values(), ids=CASES)


@every_case
def test_layout(name, n, k):
    weight_format = PACKED[name]
    stored = random_stored(np.random.default_rng((n, k)), n, k, weight_format)
    assert np.array_equal(
        pack(weight_format, (n, k), **stored).packed_bytes(0, "gate"), by_formula(weight_format, stored, n, k)
    )


def golden_source(weight_format, n, k):
    """Free of any random generator: an arithmetic progression of words, without those that are no numbers. [65, 66]: tails of
    panel, group and octet; [65, 35]: an odd k."""

    def words(dtype, shape, step, last):
        numbers = (np.arange(np.prod(shape)) * step % last).astype(f"u{dtype.itemsize}").reshape(shape)
        numbers = numbers.view(dtype)
        if dtype == np.uint8:
            return numbers
        with np.errstate(invalid="ignore"):  # a signalling NaN is one of these
            return np.where(np.isfinite(numbers), numbers, dtype.type(1))

    order = weight_format.order
    of_codes = {"b16": (28657, 65536), "f16": (28657, 65536), "f32": (2654435761, 2**32)}
    steps = {"codes": of_codes.get(weight_format.family, (89, 256)), "scales": (28657, 65536)}
    if weight_format == MXFP4:
        steps["scales"] = 37, 255
    if weight_format == NVFP4_LIKE:
        steps["scales"] = 37, 127
    if weight_format.family == "f8":
        steps |= {"codes": (89, 127), "scales": (37, 255)}
    steps |= dict.fromkeys(("super_scales", "offsets", "super_offsets"), (46368, 65536))
    for label, scale in weight_format.scales.items():
        if scale.kind in PACKED_BITS:
            steps[label] = 5 if label == "scales" else 3, 1 << PACKED_BITS[scale.kind]
    arrays = {label: words(*array, *steps[label]) for label, array in weight_format.arrays(n, k).items()}
    if order.packed:
        upper = (order.scales if order.packed == "ternary" else order.super_scales).items[0][-1]
        arrays["codes"].reshape(-1, order.nbytes)[:, upper.byte] &= 0xBF
    if weight_format.family == "int":
        arrays["codes"] >>= 8 - weight_format.element.bits
    less = {label: WHOLE[scale.kind][0] for label, scale in weight_format.scales.items() if scale.kind in PACKED_BITS}
    return {label: array + array.dtype.type(less.get(label, 0)) if label in less else array for label, array in arrays.items()}


NVFP4_LIKE = WeightFormat(E2M1, Scale("e4m3", (1, 16)))
GOLDEN_FORMATS = {
    "q4": (MXFP4, 66),
    "q4_bf16": (int4(64), 66),
    "q4_e4m3": (NVFP4_LIKE, 66),
    "f8": (MXFP8, 35),
    "int8": (int8(64), 35),
    "int6": (SUPER_SCALED["int6 super-16"], 35),
    "int5": (SUPER_SCALED["int5 fp16 minima"], 35),
    "int3": (SUPER_SCALED["int3 super-16"], 291),
    "int2": (SUPER_SCALED["int2 super-16 minima"], 291),
    "int2_alone": (SUPER_SCALED["int2 super-256"], 291),
    "b16": (B16, 35),
    "f16": (F16, 35),
    "f32": (F32, 35),
    "grid": (GRIDS["IQ2_XS"], 512),
    "ternary": (GRIDS["TQ1_0"], 512),
}


@pytest.mark.parametrize("name", GOLDEN_FORMATS)
def test_golden_bytes(name):
    """A layout that changes needs a new version of its family's in ktmoe.h and a new file beside the old one."""
    weight_format, k = GOLDEN_FORMATS[name]
    golden = json.loads((GOLDEN / f"{name}_layout_v{core.LAYOUT_VERSIONS[weight_format.family]}.json").read_text())
    stored = golden_source(weight_format, 65, k)
    assert (golden["n"], golden["k"]) == (65, k)
    assert {label: array.tobytes().hex() for label, array in stored.items()} == {label: golden[label] for label in stored}
    packed = pack(weight_format, (65, k), **stored).packed_bytes(0, "gate")
    assert [row.tobytes().hex() for row in packed] == golden["packed"]


def test_layout_versions():
    """One of each family, and a golden file of each version that there was."""
    for name, (weight_format, _) in GOLDEN_FORMATS.items():
        version = core.LAYOUT_VERSIONS[weight_format.family]
        assert all((GOLDEN / f"{name}_layout_v{v}.json").exists() for v in range(1, version + 1))
    assert {weight_format.family for weight_format, _ in GOLDEN_FORMATS.values()} == set(core.LAYOUT_VERSIONS)
    sizes = {weight_format.element.bits for weight_format, _ in GOLDEN_FORMATS.values() if weight_format.family == "int"}
    assert sizes == set(FAMILIES["int"]) == set(PLANES)


@pytest.mark.cover("values")
@every_case
def test_unpacking_gives_the_checkpoints_bytes(name, n, k):
    stored = random_stored(np.random.default_rng((n, k)), n, k, PACKED[name])
    same_stored(core.unpack(pack(PACKED[name], (n, k), **stored), 0, "gate"), stored)


def test_an_order_that_only_permutes_nibbles():
    """Rows of bytes, high nibble first."""
    high_first = replace(int4(32), order=Order("high first", nibbles=(1, 0, 3, 2, 5, 4, 7, 6)))
    stored = random_stored(np.random.default_rng(9), 70, 104, high_first)
    packed = pack(high_first, (70, 104), **stored)
    same_stored(core.unpack(packed, 0, "gate"), stored)
    low_first = stored | {"codes": stored["codes"] >> 4 | stored["codes"] << 4}
    assert np.array_equal(packed.packed_bytes(0, "gate"), pack(int4(32), (70, 104), **low_first).packed_bytes(0, "gate"))


def test_every_code_byte_with_every_scale_byte_comes_back():
    """Row b: all 256 code bytes, all its scales b."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (255, 1))
    stored = {"codes": codes, "scales": np.repeat(np.arange(255, dtype=np.uint8)[:, None], 16, axis=1)}
    same_stored(core.unpack(pack(MXFP4, (255, 512), **stored), 0, "gate"), stored)


@pytest.mark.parametrize("kind", ["ue8m0", "bf16", "fp32"])
def test_scales_of_many_rows_come_back(kind):
    """They are packed as float32: every byte, and every 16-bit number that is finite."""
    numbers = np.arange(256, dtype=np.uint8) if kind == "ue8m0" else np.arange(1 << 16, dtype=np.uint16)
    scales = numbers.view(Scale(kind, (1, 1)).dtype) if kind != "fp32" else (numbers.astype(np.uint32) << 16).view(np.float32)
    weight_format = fp8(kind, (64, 32))
    scales = scales[np.isfinite(weight_format.scale.numbers(scales))]
    stored = {"codes": np.zeros((64, 32 * len(scales)), np.uint8), "scales": scales[None]}
    same_stored(core.unpack(pack(weight_format, (64, 32 * len(scales)), **stored), 0, "gate"), stored)


def test_every_finite_bfloat16_comes_back():
    """As a scale and as a weight, zeros of both signs and denormals included."""
    words = np.arange(1 << 16, dtype=np.uint16)
    words = words[words & 0x7F80 != 0x7F80].reshape(255, 256)
    same_stored(core.unpack(pack(B16, words.shape, codes=words.view(BF16)), 0, "gate"), {"codes": words.view(BF16)})
    scales = words.reshape(-1, 32)
    stored = {"codes": np.zeros((len(scales), 16 * 32), np.uint8), "scales": scales.view(BF16)}
    same_stored(core.unpack(pack(int4(32), (len(scales), 32 * 32), **stored), 0, "gate"), stored)


@pytest.mark.parametrize("weights", [*WEIGHTS.values(), *MIXED.values()], ids=[*WEIGHTS, *MIXED])
def test_every_expert_and_projection_has_its_own_place(weights):
    experts = random_experts(np.random.default_rng(1), 3, 100, 72, **weights)
    for threads in (1, 3):
        set_num_threads(threads)
        with MoELayer(experts, "fp32_lut") as layer:
            for expert in range(3):
                for projection in ("gate", "up", "down"):
                    same_stored(core.unpack(layer.packed, expert, projection), experts.matrix(expert, projection).stored)


@pytest.mark.parametrize("scale", [MXFP4.scale, int4(128).scale], ids=["ue8m0", "bf16"])
def test_padding_is_the_code_of_zero(scale):
    """Zero may have any code; without one, padding is what is nearest."""
    rotated = WeightFormat(Element("rotated", "q4", tuple(np.roll(E2M1.values, 5).tolist())), scale)
    stored = random_stored(np.random.default_rng(2), 65, 34, rotated)
    packed = pack(rotated, (65, 34), **stored).packed_bytes(0, "gate")
    assert np.array_equal(packed, by_formula(rotated, stored, 65, 34))
    assert (packed[1, -4:] == 0x55).all()  # the last column's
    none = Element("no zero", "q4", tuple(float(v) for v in (*range(-9, -1), *range(1, 9))))
    assert none.values[none.padding] == 1


@pytest.mark.parametrize("at", [(0, 0), (64, 2), (37, 1)])
def test_the_nan_scale_is_refused_by_name_and_position(backend, at):
    experts = random_experts(np.random.default_rng(3), 2, 66, 68)
    experts.matrix(1, "up").scales[at] = 255
    with pytest.raises(
        FormatError, match=rf"experts\.1\.up: scale \[{at[0]}, {at[1]}\] is byte 255, .*NaN.*expected a finite number"
    ):
        MoELayer(experts, backend)


BAD_WORDS = {"nan": 0x7FC0, "-nan": 0xFF81, "inf": 0x7F80, "-inf": 0xFF80}


@pytest.mark.parametrize("word", BAD_WORDS.values(), ids=BAD_WORDS)
def test_a_bfloat16_that_is_not_finite_is_refused_by_name_and_position(backend, word):
    """In whole blocks and in tails of panel, group and k."""
    name = r"(nan|-?inf)"
    for weight_format, places in (
        (int4(32), ((0, 0), (37, 1), (65, 2))),
        (LONGEST, ((0, 0), (64, 0))),
        (B16, ((0, 0), (37, 33), (64, 66), (65, 65), (3, 64))),
    ):
        for at in places:
            k = 67 if weight_format == B16 else 68
            experts = random_experts(np.random.default_rng(3), 2, k, 66, formats=weight_format)
            matrix = experts.matrix(1, "up")
            spoilt = matrix.codes if weight_format == B16 else matrix.scales
            spoilt.view(np.uint16)[at] = word
            what = "weight" if weight_format == B16 else "scale"
            message = rf"experts\.1\.up: {what} \[{at[0]}, {at[1]}\] is {name}; expected a finite number"
            with pytest.raises(FormatError, match=message):
                MoELayer(experts, backend)


#: What is no number, by the kind of a scale or an element.
WRONG = {"ue8m0": [255], "e4m3": [0x7F, 0xFF], "E4M3": [0x7F, 0xFF], "BF16": [np.nan, -np.inf]}
WRONG |= dict.fromkeys(("FP16", "FP32"), WRONG["BF16"])
LOOKED_AT = {
    **{
        name: ("scales", FORMATS[name].scale.kind)
        for name in ("mxfp4", "int4-32", "nvfp4", "mxfp8", "fp8", "fp8-bf16", "gptq-32")
    },
    "fp8-row": ("codes", "E4M3"),
    "b16": ("codes", "BF16"),
    "f16": ("codes", "FP16"),
    "f32": ("codes", "FP32"),
}


@pytest.mark.parametrize("name", LOOKED_AT)
def test_every_scale_and_every_weight_is_looked_at(name):
    """Each in turn is the only one that is wrong."""
    weight_format, (label, kind) = FORMATS[name], LOOKED_AT[name]
    shape = fits(weight_format, *((7, 67) if label == "codes" else (67, 102)))
    stored = random_stored(np.random.default_rng(8), *shape, weight_format)
    looked_at = stored[label]
    pack(weight_format, shape, **stored)
    for wrong in WRONG.get(kind, [np.inf]):
        for at in np.ndindex(looked_at.shape):
            kept = looked_at[at].copy()
            looked_at[at] = wrong
            with pytest.raises(FormatError, match=rf"^w: (scale|weight) \[{at[0]}, {at[1]}\] is "):
                pack(weight_format, shape, **stored)
            looked_at[at] = kept


@pytest.mark.parametrize(
    ("name", "wrong"), [("fp8-row", np.nan), ("nvfp4", np.inf), ("nvfp4 divided", np.nan), ("nvfp4 divided", 0)]
)
def test_a_factor_that_is_no_number_or_divides_by_zero_is_refused(backend, name, wrong):
    weight_format = FORMATS[name]
    experts = random_experts(np.random.default_rng(3), 2, 64, 64, formats=weight_format)
    at = 40 if weight_format.factor.per_row else 0
    experts.matrix(1, "down").factor[at] = wrong
    with pytest.raises(FormatError, match=rf"experts\.1\.down: factor \[{at}\] is "):
        MoELayer(experts, backend)


INTEGERS_IN_PLANES = [name for name, weight_format in SUPER_SCALED.items() if weight_format.family == "int"]


@pytest.mark.parametrize("at", [(0, 0), (37, 31), (64, 66), (66, 290)])
@pytest.mark.parametrize("name", INTEGERS_IN_PLANES)
def test_a_code_that_has_more_bits_is_refused(name, at):
    """By each of the bits that its element has not. The greatest code is taken."""
    weight_format, shape = FORMATS[name], (67, 291)
    stored = random_stored(np.random.default_rng(3), *shape, weight_format)
    element, codes = weight_format.element, stored["codes"]
    codes[at] = (1 << element.bits) - 1
    same_stored(core.unpack(pack(weight_format, shape, **stored), 0, "gate"), stored)
    for bit in range(element.bits, 8):
        codes[at] = 1 << bit
        with pytest.raises(FormatError, match=rf"^w: weight \[{at[0]}, {at[1]}\] is byte {1 << bit}"):
            pack(weight_format, shape, **stored)
    matrix = Matrix("w", weight_format, shape, **stored)
    with pytest.raises(FormatError, match=rf"^w: weight \[{at[0]}, {at[1]}\] is byte 128"):
        dequantize(matrix)
    if not (weight_format.super_scale or weight_format.offset):  # these are rounded by way of dequantize()
        assert core.weights_extremes(source.read(matrix), 1, 1) is None  # quantize() refuses it then


@pytest.mark.parametrize("at", [(0, 0), (37, 1), (64, 16), (66, 18)])
@pytest.mark.parametrize(
    ("name", "label"), [("int3 super-16", "scales"), ("int2 super-16 minima", "scales"), ("int2 super-16 minima", "offsets")]
)
def test_a_packed_scale_out_of_range_is_refused(name, label, at):
    """Its least and its greatest are taken; every other number is no number of its kind."""
    weight_format, shape = FORMATS[name], (67, 291)
    stored = random_stored(np.random.default_rng(3), *shape, weight_format)
    kind, numbers = weight_format.scale.kind, stored[label]
    least, most = WHOLE[kind]
    for number in (least, most):
        numbers[at] = number
        same_stored(core.unpack(pack(weight_format, shape, **stored), 0, "gate"), stored)
    of_dtype = np.iinfo(numbers.dtype)
    for number in (*range(of_dtype.min, least), *range(most + 1, of_dtype.max + 1)):
        numbers[at] = number
        with pytest.raises(FormatError, match=rf"^w: {label.removesuffix('s')} \[{at[0]}, {at[1]}\] is (byte )?{number}"):
            pack(weight_format, shape, **stored)


def test_a_zero_point_beyond_15_is_refused():
    rows = uint4(32)
    stored = random_stored(np.random.default_rng(3), 64, 64, rows)
    stored["offsets"][37, 1] = 16
    with pytest.raises(FormatError, match=r"w: zero point \[37, 1\] is 16; expected 0 to 15"):
        pack(rows, (64, 64), **stored)


def test_the_greatest_bfloat16_numbers_are_taken(backend):
    """Finite, by one bit."""
    for weight_format in (int4(64), B16):
        experts = random_experts(np.random.default_rng(3), 1, 68, 66, formats=weight_format)
        matrix = experts.matrix(0, "down")
        (matrix.codes if weight_format == B16 else matrix.scales).view(np.uint16)[:] = 0xFF7F
        with MoELayer(experts, backend) as layer:
            same_stored(core.unpack(layer.packed, 0, "down"), matrix.stored)
