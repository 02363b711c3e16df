"""Weights in records, as GGUF files have them: what their bits mean, the inverse, and what is refused. Numpy's part."""

from dataclasses import replace

import numpy as np
import pytest
from ggml_golden import FILE, WEIGHTS
from ggml_records import IN_RECORDS, random_bits, random_codes, random_experts

from ktmoe import Matrix, WeightFormat
from ktmoe.dequantization import read
from ktmoe.errors import FormatError, InputError
from ktmoe.weights.elements import BFLOAT16, INT4, INT8, UINT4
from ktmoe.weights.ggml import GGML, TYPES
from ktmoe.weights.offsets import ZeroPoint
from ktmoe.weights.records import Field, Piece, Plane, Records, plain
from ktmoe.weights.scales import Scale

GOLDEN = np.load(FILE)
every_type = pytest.mark.parametrize("name", IN_RECORDS)


def factor_of(weight_format):
    return {"factor": np.ones(1, np.float32)} if weight_format.factor else {}


@every_type
def test_values_are_those_of_the_gguf_package(name):
    """Exactly, but for minima, which it subtracts, or adds, in float32. Its products have at most 24 bits: 11 of an fp16
    number, and 13 of a scale and a value together."""
    weight_format = IN_RECORDS[name]
    matrix = Matrix("w", weight_format, (1, WEIGHTS), GOLDEN[f"{name} records"], **factor_of(weight_format))
    found, expected = read(matrix), GOLDEN[f"{name} values"].astype(float)
    minima = 0 if found.minima is None else found.minima
    error = np.abs(found.scaled - minima - expected)
    assert (error <= 2.0**-24 * np.abs(found.scaled - minima) if weight_format.offset else error == 0).all()
    assert len(np.unique(expected)) > (8 if name in ("TQ1_0", "TQ2_0") else 20)


def test_sizes_are_those_of_the_gguf_package():
    """But for Q8_1, which no file has, and whose two floats are of 16 bits in llama.cpp."""
    for (number, weights, nbytes), name in zip(GOLDEN["sizes"].tolist(), GOLDEN["names"], strict=True):
        found = TYPES[number]
        assert (found.name, found.weights) == (name, weights)
        assert found.nbytes == (nbytes if name != "Q8_1" else 36)


@pytest.mark.parametrize("name", GGML)
def test_a_types_format_has_its_size(name):
    of = next(of for of in TYPES.values() if of.name == name)
    weight_format = GGML[name]
    dtype, shape = weight_format.arrays(3, 512)["codes"]
    assert np.prod(shape) * dtype.itemsize == 3 * 512 // of.weights * of.nbytes
    assert weight_format.shape(shape) == (3, 512)
    assert weight_format.code_unit == (1, of.weights)
    assert weight_format.arrays(3, 512).keys() == {"codes"} | ({"factor"} if name == "NVFP4" else set())


@every_type
def test_every_bit_comes_back(name):
    """Whatever is in the records, numbers or not."""
    weight_format = IN_RECORDS[name]
    records = random_bits(np.random.default_rng(1), weight_format.order, 5 * 768 // weight_format.order.weights)
    stored = {"codes": records.reshape(5, -1)} | factor_of(weight_format)
    back = weight_format.from_rows(weight_format.rows(stored, 5, 768), 5, 768)
    assert back.keys() == stored.keys()
    assert all(np.array_equal(back[label], stored[label]) for label in stored)


def test_a_number_that_records_have_no_bits_for_is_refused():
    q4_k = GGML["Q4_K"]
    rows = q4_k.rows({"codes": np.zeros((2, 144), np.uint8)}, 2, 256)
    rows["scales"][1, 3] = 64
    with pytest.raises(FormatError, match="scales: records 'Q4_K' have no bits for some of these numbers"):
        q4_k.from_rows(rows, 2, 256)


#: Places of a record's floats, and what they are called.
FLOATS = {
    "Q4_0": [(0, "scale [2, 1]")],
    "Q5_1": [(0, "scale [2, 1]"), (2, "offset [2, 1]")],
    "Q2_K": [(80, "super_scale [2, 1]"), (82, "super_offset [2, 1]")],
    "Q6_K": [(208, "super_scale [2, 1]")],
    "IQ4_XS": [(0, "super_scale [2, 1]")],
    "IQ2_XXS": [(0, "super_scale [2, 1]")],
    "IQ3_S": [(0, "super_scale [2, 1]")],
    "TQ1_0": [(52, "scale [2, 1]")],
    "TQ2_0": [(64, "scale [2, 1]")],
}


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("word", [0x7C00, 0xFE01], ids=["inf", "nan"])
def test_a_float_that_is_no_number_is_refused_by_its_place(name, word):
    weight_format = IN_RECORDS[name]
    weights, nbytes = weight_format.order.weights, weight_format.order.nbytes
    for byte, place in FLOATS[name]:
        codes = random_codes(np.random.default_rng(2), weight_format, 1, 4, 3 * weights)[0]
        codes[2, nbytes + byte : nbytes + byte + 2] = np.array([word], np.uint16).view(np.uint8)
        with pytest.raises(FormatError, match=rf"^w: {place.replace('[', chr(92) + '[')} is (inf|nan); expected a finite"):
            Matrix("w", weight_format, (4, 3 * weights), codes).refuse()


def test_other_bytes_that_are_no_number_are_refused():
    for name, byte, wrong, place in (("MXFP4", 0, 255, r"scale \[1, 2\]"), ("NVFP4", 3, 0x7F, r"scale \[1, 11\]")):
        weight_format = GGML[name]
        codes = random_codes(np.random.default_rng(3), weight_format, 1, 2, 3 * weight_format.order.weights)[0]
        codes[1, 2 * weight_format.order.nbytes + byte] = wrong
        matrix = Matrix("w", weight_format, (2, 3 * weight_format.order.weights), codes, **factor_of(weight_format))
        with pytest.raises(FormatError, match=rf"^w: {place} is byte {wrong}, which is NaN"):
            matrix.refuse()


def test_a_bit_that_means_nothing_is_refused():
    """UE4M3 has no sign, but its byte has a bit for one."""
    codes = random_codes(np.random.default_rng(4), GGML["NVFP4"], 1, 2, 128)[0]
    codes[1, 36 + 2] |= 0x80
    with pytest.raises(
        FormatError, match=rf"^w: record \[1, 1\] has bits that mean nothing in byte 2, which is {codes[1, 38]}"
    ):
        Matrix("w", GGML["NVFP4"], (2, 128), codes, **factor_of(GGML["NVFP4"])).refuse()


def test_k_is_whole_records():
    with pytest.raises(
        FormatError, match=r"in Q4_K records needs n and k of at least 1, k a multiple of 256, found \(2, 384\)"
    ):
        Matrix("w", GGML["Q4_K"], (2, 384), np.zeros((2, 216), np.uint8))
    with pytest.raises(FormatError, match=r"w codes: expected shape \[2, 144\], found \[2, 143\]"):
        Matrix("w", GGML["Q4_K"], (2, 256), np.zeros((2, 143), np.uint8))


def test_experts_are_cut_at_whole_records():
    experts = random_experts(np.random.default_rng(5), 1, 256, 1024, {"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K"})
    assert experts.shard_unit == 256
    with pytest.raises(InputError, match="parts must divide the intermediate size, 1024, into multiples of 256, found 8"):
        experts.part(8, "parts")
    assert experts.part(4, "parts").intermediate == 256


def test_records_that_cannot_be():
    plane = Plane(2, 4, 16)
    made = {"name": "mine", "weights": 32, "nbytes": 18, "code_bits": 4, "planes": (plane,), "scales": plain(0, 1, 2)}
    Records(**made)
    for change, message in (
        ({"code_bits": 6}, "codes must have 4 or 8 bits, found 6"),
        ({"planes": (Plane(2, 3, 16),)}, "32 weights are no whole runs of"),
        ({"planes": (Plane(2, 4, 12),)}, "32 weights are no whole runs of"),
        ({"planes": (Plane(3, 4, 16),)}, "bits 24 to 152 are not within 18 bytes"),
        ({"planes": (Plane(1, 4, 16),)}, "byte 1 is used twice"),
        ({"planes": ()}, "0 planes make no codes of 4 bits"),
        ({"planes": (plane, Plane(18, 1, 1, 4)), "nbytes": 22}, "2 planes make no codes of 4 bits, up to 31"),
    ):
        with pytest.raises(FormatError, match=f"records 'mine': {message}"):
            Records(**made | change)


def test_parts_that_do_not_go_with_records():
    order, half = GGML["Q4_0"].order, Scale("fp16", (1, 32))
    for parts, message in (
        ((INT8, half), "Q4_0 records have codes of 4 bits and no zero points"),
        ((BFLOAT16,), "Q4_0 records have codes of 4 bits and no zero points"),
        ((UINT4, half, None, ZeroPoint((1, 32))), "Q4_0 records have codes of 4 bits and no zero points"),
        ((INT4,), "Q4_0 records have numbers of extents"),
        ((INT4, Scale("fp16", (1, 16))), "Q4_0 records have numbers of extents"),
        ((INT4, Scale("ue8m0", (1, 32))), "Q4_0 records have scales that are no ue8m0 numbers"),
    ):
        with pytest.raises(FormatError, match=message):
            WeightFormat(*parts, order=order)
    added = replace(order, scales=replace(order.scales, plus=1))
    with pytest.raises(FormatError, match="Q4_0 records have scales that are no fp16 numbers"):
        WeightFormat(INT4, half, order=added)


def test_pieces_of_an_item_that_stand_in_two_of_its_bytes():
    """moves() is what the driver gets: each ends at a byte of the item."""
    field = Field(((Piece(5, 2, 6, 4), Piece(6, 0, 4)),))
    assert sorted(field.moves(2)) == [(5, 0, 1, 2, 4, 4), (5, 1, 1, 6, 2, 0), (6, 0, 1, 0, 4, 0)]
    assert plain(4, 3, 2).moves(2) == [(4, 0, 4, 0, 8, 0), (8, 4, 2, 0, 8, 0)]
