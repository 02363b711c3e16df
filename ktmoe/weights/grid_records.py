"""Records whose codes are no planes of bits: entries of a grid and signs, or digits to base 3.

They are packed as they stand, as families of their own. Here numpy says what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ktmoe.errors import FormatError
from ktmoe.weights.grids import Grid
from ktmoe.weights.records import Field, RecordOrder

_UINT8, _UINT16 = np.dtype(np.uint8), np.dtype(np.uint16)
#: Bits of a scale at most: 2 s + 1 is an integer of 8 bits to kernels, and as small as GGUF's.
_SCALE_BITS = 4
#: The signs of eight weights, the first one's the lowest bit, by the bits that are stored of them, by how many these are.
_SIGNS = {
    8: np.arange(256, dtype=np.uint8),
    7: np.array([bits | bits.bit_count() % 2 << 7 for bits in range(128)], np.uint8),
    1: np.array([0, 255], np.uint8),
}


@dataclass(frozen=True)
class GridRecords(RecordOrder):
    """An order of records of 256 weights, whose codes are entries of a grid, with a sign in bit 3 of each code.

    index: the numbers of entries, one after another along k. signs: an item for each eight weights. sign_bits: what it has: 8;
    7, and the eighth sign makes the number of set bits even; or 1 for all eight, which items may share.
    Raises FormatError where the fields are not those of such records.
    """

    name: str
    nbytes: int
    grid: Grid
    index: Field
    signs: Field
    sign_bits: int
    scales: Field
    super_scales: Field

    weights = 256
    code_bits = 4
    packed = "grid"

    def __post_init__(self) -> None:
        if self.sign_bits not in _SIGNS:
            known = ", ".join(map(str, _SIGNS))
            raise FormatError(f"records {self.name!r}: sign bits of eight weights must be of {known}, found {self.sign_bits}")
        for label, field, items, bits, dtype in (
            ("numbers of entries", self.index, self.weights // self.grid.weights, self.grid.index_bits, _UINT16),
            ("signs", self.signs, self.weights // 8, self.sign_bits, _UINT8),
        ):
            found = {sum(((1 << piece.bits) - 1) << piece.shift for piece in item) for item in field.items}
            apart = all(sum(piece.bits for piece in item) == bits for item in field.items)
            if len(field.items) != items or found != {(1 << bits) - 1} or not apart or field.plus or not field.fits(dtype):
                raise FormatError(f"records {self.name!r}: {label} must be {items} of {bits} bits")
        most = max(piece.shift + piece.bits for item in self.scales.items for piece in item)
        if most > _SCALE_BITS or self.scales.plus:
            raise FormatError(f"records {self.name!r}: scales must have {_SCALE_BITS} bits at most, found {most}")
        self._check_places()
        if self.spare.any():
            raise FormatError(f"records {self.name!r}: byte {int(np.argmax(self.spare != 0))} has bits that mean nothing")

    def _code_places(self) -> list[slice]:
        signs = self.signs.bits()
        if self.sign_bits == 1:
            signs = [at for i, at in enumerate(signs) if at not in signs[:i]]
        return self.index.bits() + signs

    def entry_words(self) -> np.ndarray:
        """The grid's entries as kernels have them, uint16: of eight weights, code i at bits 2 i and 2 i + 1; of four, codes 0
        and 2 in the low byte, 1 and 3 in the high one, low nibbles first."""
        return self.grid.words(self.grid.entries)

    def _read_codes(self, records: np.ndarray) -> np.ndarray:
        magnitudes = self.grid.entries[self.index.read(records, _UINT16)].reshape(len(records), -1)
        signs = _SIGNS[self.sign_bits][self.signs.read(records, _UINT8)]
        return magnitudes | np.unpackbits(signs, axis=1, bitorder="little") << 3

    def _write_codes(self, records: np.ndarray, codes: np.ndarray) -> None:
        groups = (codes & 7).reshape(len(records), -1, self.grid.weights)
        self.index.write(records, self.grid.numbers[self.grid.words(groups)])
        self.signs.write(records, np.packbits(codes >> 3, axis=1, bitorder="little"))


#: The digits to base 3 of each byte, uint8 [256, 5]: the first five behind the point of byte / 256.
_DIGITS = (np.arange(256)[:, None] * 3 ** np.arange(1, 6) // 256 % 3).astype(np.uint8)


@dataclass(frozen=True)
class TernaryRecords(RecordOrder):
    """An order of records of 256 weights, whose codes 0, 1 and 2 are digits to base 3, four or five a byte.

    runs: (offset, bytes, digits) of each; they stand one after another along k. Digit d of byte i is weight d * bytes + i of
    the run. A byte's digits are the first ones behind the point of byte / 256. Of the bytes that have the same digits,
    from_rows() writes the lowest, as llama.cpp does.
    Raises FormatError where runs and scales are not those of such records.
    """

    name: str
    nbytes: int
    runs: tuple[tuple[int, int, int], ...]
    scales: Field

    weights = 256
    code_bits = 4
    packed = "ternary"

    def __post_init__(self) -> None:
        found = sum(count * digits for _, count, digits in self.runs)
        if found != self.weights or not all(1 <= digits <= 5 for _, _, digits in self.runs):
            raise FormatError(f"records {self.name!r}: runs of at most 5 digits a byte must have 256 digits, found {found}")
        self._check_places()

    def _code_places(self) -> list[slice]:
        return [slice(8 * offset, 8 * (offset + count)) for offset, count, _ in self.runs]

    def _read_codes(self, records: np.ndarray) -> np.ndarray:
        runs = [_DIGITS[records[:, offset : offset + count], :digits] for offset, count, digits in self.runs]
        return np.concatenate([run.swapaxes(1, 2).reshape(len(records), -1) for run in runs], axis=1)

    def _write_codes(self, records: np.ndarray, codes: np.ndarray) -> None:
        first = 0
        for offset, count, digits in self.runs:
            run = codes[:, first : first + count * digits].reshape(len(records), digits, count)
            number = np.tensordot(run, 3 ** np.arange(4, 4 - digits, -1), (1, 0))
            records[:, offset : offset + count] = -(-number * 256 // 243)
            first += count * digits
