"""Records of grids and of digits to base 3: the grids' entries, what has no bits, and what is refused. Numpy's part."""

from dataclasses import replace

import numpy as np
import pytest
from ggml_golden import FILE
from ggml_records import random_bits, random_codes

from ktmoe import ExpertWeights, Matrix, WeightFormat
from ktmoe._native import core
from ktmoe.dequantization import dequantize
from ktmoe.errors import FormatError
from ktmoe.synthetic.gguf import weights
from ktmoe.weights.elements import INT8
from ktmoe.weights.ggml import GRIDS
from ktmoe.weights.grid_records import GridRecords, TernaryRecords
from ktmoe.weights.grids import Grid
from ktmoe.weights.records import Field, Piece, plain, span
from ktmoe.weights.scales import SCALE_KINDS, Scale

GOLDEN = np.load(FILE)
OF_GRIDS = {name: weight_format for name, weight_format in GRIDS.items() if isinstance(weight_format.order, GridRecords)}
#: What llama.cpp's numbers are of an element's values, by the element.
UNITS = {"IQ2": 8, "IQ3_XXS": 4, "IQ3_S": 1, "IQ1": 1}
every_grid = pytest.mark.parametrize("name", OF_GRIDS)
every_type = pytest.mark.parametrize("name", GRIDS)


def rows_of(name, seed=1):
    """The rows of two records of random bits of each of two rows."""
    weight_format = GRIDS[name]
    records = random_bits(np.random.default_rng(seed), weight_format.order, 4)
    return weight_format.rows({"codes": records.reshape(2, -1)}, 2, 512)


def codes_of(rows):
    """Codes, one an item, of rows of nibbles."""
    return np.stack([rows & 15, rows >> 4], axis=-1).reshape(len(rows), -1)


def refused(name, rows, label="codes"):
    with pytest.raises(FormatError, match=f"^{label}: records '{name}' have no bits for some of these numbers"):
        GRIDS[name].from_rows(rows, 2, 512)


def with_codes(rows, change):
    """Rows whose codes, one an item, are changed in place."""
    codes = codes_of(rows["codes"])
    change(codes)
    return rows | {"codes": codes[:, 0::2] | codes[:, 1::2] << 4}


@every_grid
def test_entries_are_those_of_the_gguf_package(name):
    weight_format = GRIDS[name]
    grid, element = weight_format.order.grid, weight_format.element
    delta = 1 / 8 if element.name == "IQ1" else 0
    numbers = (element.numbers(grid.entries) - delta) * UNITS[element.name]
    np.testing.assert_array_equal(numbers, GOLDEN[f"{name} grid"])
    assert grid.entries.shape == (1 << grid.index_bits, grid.weights)
    assert grid.entries.max() == grid.magnitudes - 1


@every_grid
def test_words(name):
    """Each entry has its own, and is found by it."""
    grid, words = GRIDS[name].order.grid, GRIDS[name].order.entry_words()
    assert words.dtype == np.uint16
    assert len(set(words.tolist())) == len(words)
    np.testing.assert_array_equal(grid.numbers[words], np.arange(len(words)))
    places = (0, 2, 4, 6, 8, 10, 12, 14) if grid.weights == 8 else (0, 8, 4, 12)
    mask = 3 if grid.weights == 8 else 7
    np.testing.assert_array_equal(np.stack([words >> place & mask for place in places], axis=-1), grid.entries)


@every_type
def test_families(name):
    """Such a matrix is packed as a family of its own; its codes are q4's."""
    weight_format = GRIDS[name]
    assert weight_format.family == ("ternary" if name == "TQ1_0" else "grid")
    assert weight_format.element.family == "q4"
    assert not weight_format.order.spare.any()
    assert weight_format.order.spare_field is None


@every_grid
def test_a_group_that_is_no_entry_is_refused(name):
    """Of those of the magnitudes that there are, and of others."""
    rows, grid = rows_of(name), GRIDS[name].order.grid
    entries = {tuple(entry) for entry in grid.entries.tolist()}
    every = np.stack(np.meshgrid(*[np.arange(grid.magnitudes)] * grid.weights), axis=-1).reshape(-1, grid.weights)
    none = next(group for group in every.tolist() if tuple(group) not in entries)

    def change(codes):
        of_group = codes[1, 256 : 256 + grid.weights]
        of_group[:] = of_group & 8 | none

    refused(name, with_codes(rows, change))
    for magnitude in range(grid.magnitudes, 8):

        def change(codes, magnitude=magnitude):
            codes[0, 37] = codes[0, 37] & 8 | magnitude

        refused(name, with_codes(rows, change))


@pytest.mark.parametrize("name", [name for name in OF_GRIDS if OF_GRIDS[name].order.sign_bits != 8])
def test_signs_that_do_not_go_together_are_refused(name):
    """Of seven stored ones the eighth follows. IQ1_M has one for eight weights, IQ1_S for 32."""
    rows = rows_of(name)

    def one(codes):
        codes[1, 300] ^= 8

    def eight(codes):
        codes[1, 296:304] ^= 8

    refused(name, with_codes(rows, one))
    changed = with_codes(rows, eight)
    if name == "IQ1_S":
        refused(name, changed)
    else:
        records = GRIDS[name].from_rows(changed, 2, 512)
        np.testing.assert_array_equal(GRIDS[name].rows(records, 2, 512)["codes"], changed["codes"])


@pytest.mark.parametrize("name", [name for name in OF_GRIDS if OF_GRIDS[name].order.sign_bits == 7])
def test_an_even_number_of_signs_is_set(name):
    codes = codes_of(rows_of(name)["codes"])
    assert not ((codes >> 3).reshape(-1, 8).sum(axis=1) % 2).any()


@every_grid
def test_a_scale_that_has_no_bits_is_refused(name):
    rows, bits = rows_of(name), 3 if name.startswith("IQ1") else 4
    rows["scales"][1, 3] = (1 << bits) - 1
    GRIDS[name].from_rows(rows, 2, 512)
    rows["scales"][1, 3] += 1
    refused(name, rows, "scales")


def test_odd_scales():
    stored = np.arange(16, dtype=np.uint8)
    kind = SCALE_KINDS["odd"]
    np.testing.assert_array_equal(kind.numbers(stored), np.arange(1, 32, 2))
    np.testing.assert_array_equal(kind.of_numbers(kind.numbers(stored)), stored)
    assert (kind.one, kind.field, kind.magnitude) == (0, 0, 255)
    assert int(kind.numbers(stored).max()).bit_length() == kind.bits


def test_a_super_scale_of_four_nibbles_that_is_no_number_is_refused():
    weight_format = GRIDS["IQ1_M"]
    codes = random_codes(np.random.default_rng(2), weight_format, 1, 3, 512)[0]
    weight_format.order.super_scales.write(codes[1, 56:].reshape(1, -1), np.array([[-np.inf]], np.float16))
    assert (codes[1, 56 + 49 : 56 + 56 : 2] >> 4).tolist() == [0x0, 0x0, 0xC, 0xF]
    with pytest.raises(FormatError, match=r"^w: super_scale \[1, 1\] is -inf; expected a finite number"):
        Matrix("w", weight_format, (3, 512), codes).refuse()


def ternary(byte):
    """Five digits of 0, 1 and 2 of byte / 256, without the package's table."""
    digits = []
    for _ in range(5):
        byte *= 3
        digits.append(byte // 256)
        byte %= 256
    return digits


def test_digits_of_every_byte():
    """Of the bytes with the same digits, the lowest comes back; it means the same."""
    weight_format = GRIDS["TQ1_0"]
    records = np.zeros((8, 54), np.uint8)
    records[:, :32] = np.arange(256).reshape(8, 32)
    records[:, 48:52] = np.arange(224, 256).reshape(8, 4)
    rows = weight_format.rows({"codes": records}, 8, 256)
    codes = codes_of(rows["codes"])
    for record in range(8):
        for i in range(32):
            assert codes[record, i:160:32].tolist() == ternary(32 * record + i)
        for i in range(4):
            assert codes[record, 240 + i :: 4].tolist() == ternary(224 + 4 * record + i)[:4]
    back = weight_format.from_rows(rows, 8, 256)
    again = weight_format.rows(back, 8, 256)
    assert all(np.array_equal(again[label], rows[label]) for label in rows)
    lowest = [min(other for other in range(256) if ternary(other) == ternary(byte)) for byte in range(256)]
    np.testing.assert_array_equal(back["codes"][:, :32].reshape(-1), lowest)
    assert len(set(lowest)) == 243


def test_a_digit_above_two_is_refused():
    for code in (3, 8, 15):

        def change(codes, code=code):
            codes[1, 511] = code

        refused("TQ1_0", with_codes(rows_of("TQ1_0"), change))


def test_records_of_grids_that_cannot_be():
    order = GRIDS["IQ3_S"].order
    shared = Field((*order.signs.items[:-1], order.signs.items[0]))
    for change, message in (
        ({"sign_bits": 6}, "sign bits of eight weights must be of 8, 7, 1, found 6"),
        ({"sign_bits": 7}, "signs must be 32 of 7 bits"),
        ({"signs": plain(74, 16, 1)}, "signs must be 32 of 8 bits"),
        ({"signs": shared}, "byte 74 is used twice"),
        ({"index": plain(2, 64, 1)}, "numbers of entries must be 64 of 9 bits"),
        ({"index": Field(tuple((Piece(0, 0, 9),) for _ in range(64)))}, "numbers of entries must be 64 of 9 bits"),
        ({"scales": plain(0, 8, 1, bits=4)}, "byte 0 is used twice"),
        ({"nbytes": 109}, "bits 872 to 876 are not within 109 bytes"),
        ({"nbytes": 111}, "byte 110 has bits that mean nothing"),
        ({"signs": replace(order.signs, plus=1)}, "signs must be 32 of 8 bits"),
        ({"scales": replace(order.scales, plus=1)}, "scales must have 4 bits at most"),
        ({"scales": Field(((Piece(106, 0, 5),), *order.scales.items[1:]))}, "scales must have 4 bits at most, found 5"),
    ):
        with pytest.raises(FormatError, match=f"records 'IQ3_S': {message}"):
            replace(order, **change)


def test_grids_that_cannot_be():
    text = GRIDS["IQ3_S"].order.grid.text
    for codes, magnitudes in ((16, 2), (0, 2), (8, 5), (4, 9), (4, 1)):
        message = f"grid 'mine': .*found {codes} codes below {magnitudes}"
        with pytest.raises(FormatError, match=message):
            Grid("mine", codes, magnitudes, 9, text)
    with pytest.raises(FormatError, match="grid 'mine': 11 bits need as many entries, found 512"):
        Grid("mine", 4, 8, 11, text).entries.sum()


def test_only_known_orders_are_packed_as_they_stand():
    """A kernel reads what C knows of the order, not what a subclass makes of it."""

    class Other(GridRecords):
        packed = "q4"

    weight_format = GRIDS["IQ2_XXS"]
    order = Other(**{name: getattr(weight_format.order, name) for name in GridRecords.__dataclass_fields__})
    experts = ExpertWeights(1, 256, 256, None, replace(weight_format, order=order))
    with pytest.raises(FormatError, match=r"only GridRecords and .* found a Other of the family 'q4'"):
        core.expert_nbytes(experts, [(0, 256)])


def test_ternary_records_that_cannot_be():
    for runs, scale, message in (
        (((0, 52, 5),), 52, "runs of at most 5 digits a byte must have 256 digits, found 260"),
        (((0, 40, 6), (40, 4, 4)), 52, "runs of at most 5 digits a byte must have 256 digits, found 256"),
        (((0, 51, 5), (50, 1, 1)), 52, "byte 50 is used twice"),
        (((0, 48, 5), (48, 4, 4)), 51, "byte 51 is used twice"),
        (((0, 48, 5), (48, 4, 4)), 53, "bits 432 to 440 are not within 54 bytes"),
    ):
        with pytest.raises(FormatError, match=f"records 'mine': {message}"):
            TernaryRecords("mine", 54, runs, plain(scale, 1, 2))


def test_parts_that_do_not_go_with_records_of_grids():
    weight_format = GRIDS["IQ2_XS"]
    element, order, scale, super_scale = (
        weight_format.element,
        weight_format.order,
        weight_format.scale,
        weight_format.super_scale,
    )
    for parts, message in (
        ((INT8, scale, super_scale), "IQ2_XS records have codes of 4 bits and no zero points"),
        ((element, scale), "IQ2_XS records have numbers of extents"),
        ((element, Scale("odd", (1, 32)), super_scale), "IQ2_XS records have numbers of extents"),
        ((element, scale, Scale("ue8m0", (1, 256))), "IQ2_XS records have super_scales that are no ue8m0 numbers"),
    ):
        with pytest.raises(FormatError, match=message):
            WeightFormat(*parts, order=order)
    with pytest.raises(
        FormatError, match=r"in IQ2_XS records needs n and k of at least 1, k a multiple of 256, found \(2, 384\)"
    ):
        Matrix("w", weight_format, (2, 384), np.zeros((2, 111), np.uint8))
    with pytest.raises(FormatError, match=r"w codes: expected shape \[2, 74\], found \[2, 73\]"):
        Matrix("w", weight_format, (2, 256), np.zeros((2, 73), np.uint8))


def test_a_span_of_bits_of_several_bytes():
    assert span(4, 14, 7) == (Piece(5, 6, 2), Piece(6, 0, 5, 2))
    assert span(4, 0, 8, 8) == (Piece(4, 0, 8, 8),)
    assert span(2, 4, 20, 1) == (Piece(2, 4, 4, 1), Piece(3, 0, 8, 5), Piece(4, 0, 8, 13))


@every_type
def test_synthetic_weights_have_their_size(name):
    weight_format, k = GRIDS[name], 1024
    codes = np.random.default_rng(4).integers(0, 256, (64, k // 256 * weight_format.order.nbytes), np.uint8)
    weights(weight_format, k)(codes.reshape(-1))
    found = dequantize(Matrix("w", weight_format, (64, k), codes))
    assert 0.9 < found.std() * k**0.5 < 1.1
    assert abs(found.mean()) * k**0.5 < 0.05
