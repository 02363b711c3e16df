"""Records: an order in which codes and their scales stand together, so many weights along k in so many bytes.

A record is what GGUF's files call a block or a super-block. All of it is data: planes say where the bits of codes stand, fields
where those of scales and minima do. Here numpy says what that means, and the inverse, bit for bit. Records whose codes are no
planes of bits are in ktmoe.weights.grid_records.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ktmoe.errors import FormatError
from ktmoe.forks import cached_property
from ktmoe.weights.elements import NUMBERS
from ktmoe.weights.order import Arrays, Components, Shapes, SourceOrder


@dataclass(frozen=True)
class Plane:
    """Some bits of each code of a record.

    offset: the record's byte where they begin. bits: of each code. shift: the bit of the code where they stand.
    run: a byte has 8/bits pieces. Of each `run` bytes, all first pieces, from the lowest bits up, come before all second ones:
    piece p of byte i of chunk c is of weight (c * 8/bits + p) * run + i.
    """

    offset: int
    bits: int
    run: int
    shift: int = 0

    @property
    def pieces(self) -> int:
        """The pieces of a byte: codes that have bits in it."""
        return 8 // self.bits

    def read(self, records: np.ndarray, weights: int) -> np.ndarray:
        """The plane's bits of all codes at their place, uint8 [records, weights], of uint8 [records, bytes]."""
        stored = records[:, self.offset : self.offset + weights * self.bits // 8].reshape(len(records), -1, 1, self.run)
        shifts = np.arange(0, 8, self.bits, dtype=np.uint8).reshape(-1, 1)
        pieces = stored >> shifts & np.uint8((1 << self.bits) - 1)
        return (pieces << np.uint8(self.shift)).reshape(len(records), weights)

    def write(self, records: np.ndarray, codes: np.ndarray) -> None:
        """The inverse of read()."""
        weights = codes.shape[1]
        pieces = codes.reshape(len(records), -1, self.pieces, self.run) >> np.uint8(self.shift) & np.uint8((1 << self.bits) - 1)
        shifts = np.arange(0, 8, self.bits, dtype=np.uint8).reshape(-1, 1)
        stored = np.bitwise_or.reduce(pieces << shifts, axis=2).reshape(len(records), -1)
        records[:, self.offset : self.offset + weights * self.bits // 8] = stored


@dataclass(frozen=True)
class Piece:
    """Some bits of a byte of a record, from bit `first` up; bit `shift` of an item is the lowest of them."""

    byte: int
    first: int
    bits: int
    shift: int = 0


@dataclass(frozen=True)
class Field:
    """Numbers of a record: scales or minima, or what multiplies them.

    items: the pieces of each, along k. plus: what is added to an item's bits; then it is an integer of 8 bits.
    """

    items: tuple[tuple[Piece, ...], ...]
    plus: int = 0

    def fits(self, dtype: np.dtype) -> bool:
        """Whether the pieces are bits of bytes, and the items numbers of that dtype."""
        pieces = [piece for item in self.items for piece in item]
        within = all(p.first >= 0 < p.bits and p.first + p.bits <= 8 and p.shift + p.bits <= 8 * dtype.itemsize for p in pieces)
        return within and (not self.plus or dtype.itemsize == 1)

    def read(self, records: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Items of that dtype [records, items], of uint8 [records, bytes]."""
        unsigned = np.dtype(f"u{dtype.itemsize}")
        items = np.full((len(records), len(self.items)), self.plus % (1 << 8 * dtype.itemsize), unsigned)
        for i, pieces in enumerate(self.items):
            for p in pieces:
                bits = records[:, p.byte] >> np.uint8(p.first) & np.uint8((1 << p.bits) - 1)
                items[:, i] += bits.astype(unsigned) << unsigned.type(p.shift)
        return items.view(dtype)

    def write(self, records: np.ndarray, items: np.ndarray) -> None:
        """The inverse of read(). Other bits of the records stay."""
        unsigned = np.dtype(f"u{items.dtype.itemsize}")
        stored = np.ascontiguousarray(items).view(unsigned) - unsigned.type(self.plus % (1 << 8 * unsigned.itemsize))
        for i, pieces in enumerate(self.items):
            for p in pieces:
                bits = (stored[:, i] >> unsigned.type(p.shift) & unsigned.type((1 << p.bits) - 1)).astype(np.uint8)
                others = np.uint8(255 - (((1 << p.bits) - 1) << p.first))
                records[:, p.byte] = records[:, p.byte] & others | bits << np.uint8(p.first)

    def bits(self) -> list[slice]:
        """The bits of a record that its pieces are, each as often as a piece has it."""
        pieces = [piece for item in self.items for piece in item]
        return [slice(8 * p.byte + p.first, 8 * p.byte + p.first + p.bits) for p in pieces]

    def moves(self, itemsize: int) -> list[tuple[int, int, int, int, int, int]]:
        """The moves of bits to items of so many bytes.

        A move is (byte of the record, byte of its items, how many such bytes side by side, bit of the record's byte, bits, bit
        of the item's byte). 1, 2, 4 or 8 bytes are side by side.
        """
        single = []
        for i, pieces in enumerate(self.items):
            for p in pieces:
                first, shift, left = p.first, p.shift, p.bits
                while left:  # in an item, they may stand in two bytes
                    taken = min(left, 8 - shift % 8)
                    single.append((p.byte, i * itemsize + shift // 8, first, taken, shift % 8))
                    first, shift, left = first + taken, shift + taken, left - taken
        single.sort(key=lambda move: (move[2:], move[1] - move[0], move[0]))
        moves = []
        while single:
            byte, to, first, bits, shift = single[0]
            count = 1
            while count < 8 and single[: 2 * count] == [(byte + i, to + i, first, bits, shift) for i in range(2 * count)]:
                count *= 2
            moves.append((byte, to, count, first, bits, shift))
            single = single[count:]
        return moves


#: The fields that records may have, by the names of a Matrix's arrays.
FIELDS = ("scales", "super_scales", "offsets", "super_offsets")


class RecordOrder(SourceOrder):
    """What all orders of records have: the matrix is one array, its records as bytes [n, k / weights * nbytes].

    weights, nbytes: of a record. code_bits: of a code in rows, 4 or 8. The fields are attributes of the names in FIELDS.
    """

    weights: int
    nbytes: int
    code_bits: int

    @abstractmethod
    def _read_codes(self, records: np.ndarray) -> np.ndarray:
        """The codes of records [records, nbytes], uint8 [records, weights]."""

    @abstractmethod
    def _write_codes(self, records: np.ndarray, codes: np.ndarray) -> None:
        """The inverse of _read_codes(), for new records; anything for a code that they have no bits for."""

    @abstractmethod
    def _code_places(self) -> list[slice]:
        """The bits of a record that are its codes'."""

    @property
    def fields(self) -> dict[str, Field]:
        """The fields that the records have, by the names of a Matrix's arrays."""
        return {label: field for label in FIELDS if (field := getattr(self, label, None))}

    def _places(self) -> list[slice]:
        """All bits of a record that mean something."""
        return self._code_places() + [bits for field in self.fields.values() for bits in field.bits()]

    def _check_places(self) -> None:
        """Raise FormatError for bits that are not within a record, and for those that are used twice."""
        used = np.zeros(8 * self.nbytes, np.int64)
        for bits in self._places():
            if not 0 <= bits.start < bits.stop <= len(used):
                raise FormatError(f"records {self.name!r}: bits {bits.start} to {bits.stop} are not within {self.nbytes} bytes")
            used[bits] += 1
        if (used > 1).any():
            raise FormatError(f"records {self.name!r}: byte {int(np.argmax(used > 1)) // 8} is used twice")

    @cached_property
    def spare(self) -> np.ndarray:
        """Bits of a record that mean nothing, uint8 [bytes]. They must be 0."""
        used = np.zeros(8 * self.nbytes, bool)
        for bits in self._places():
            used[bits] = True
        return np.packbits(~used, bitorder="little")

    def first_spare(self, stored: np.ndarray) -> tuple[list[int], int, int] | None:
        """Where the first bit is set that means nothing: [row, record], its byte, and what that is."""
        records = stored.reshape(len(stored), -1, self.nbytes)
        for byte in np.flatnonzero(self.spare).tolist():
            wrong = np.argwhere(records[:, :, byte] & self.spare[byte])
            if wrong.size:
                return wrong[0].tolist(), byte, int(records[*wrong[0], byte])
        return None

    @cached_property
    def spare_field(self) -> Field | None:
        """The bits that mean nothing as a field of bytes; None if every bit means something."""
        items = []
        for byte in np.flatnonzero(self.spare).tolist():
            bits = [int(bit) for bit in np.flatnonzero(np.unpackbits(self.spare[byte], bitorder="little"))]
            firsts = [bit for bit in bits if bit - 1 not in bits]
            ends = [bit + 1 for bit in bits if bit + 1 not in bits]
            items.append(tuple(Piece(byte, first, end - first, first) for first, end in zip(firsts, ends, strict=True)))
        return Field(tuple(items)) if items else None

    @property
    def description(self) -> str:
        return f"in {self.name} records"

    def check(self, components: Components) -> None:
        element = components.element
        if self.code_bits != element.row_bits or element.family in NUMBERS or components.points:
            raise FormatError(f"{self.name} records have codes of {self.code_bits} bits and no zero points")
        for label, scale in components.scales.items():
            if label in self.fields and not self.fields[label].fits(scale.dtype):
                raise FormatError(f"{self.name} records have {label} that are no {scale.kind} numbers")
        expected = {label: (1, self.weights // len(field.items)) for label, field in self.fields.items()}
        found = {label: scale.extent for label, scale in components.scales.items()}
        if found != expected:
            raise FormatError(f"{self.name} records have numbers of extents {expected}, found {found}")

    def unit(self, components: Components) -> tuple[int, int]:
        return 1, self.weights

    def arrays(self, components: Components, n: int, k: int) -> Shapes:
        """The records alone, as bytes."""
        return {"codes": (np.dtype(np.uint8), (n, k // self.weights * self.nbytes))}

    def shape(self, components: Components, codes_shape: tuple[int, int]) -> tuple[int, int]:
        n, nbytes = codes_shape
        return n, nbytes // self.nbytes * self.weights

    def to_rows(self, components: Components, stored: Mapping[str, np.ndarray], n: int, k: int) -> Arrays:
        codes = self._read_codes(stored["codes"].reshape(-1, self.nbytes)).reshape(n, k)
        rows = codes[:, 0::2] | codes[:, 1::2] << 4 if self.code_bits == 4 else codes
        return {"codes": rows} | self.group_rows(components, stored)

    def group_rows(self, components: Components, stored: Mapping[str, np.ndarray]) -> Arrays:
        """The numbers of each field, [n, those of a row], by name."""
        codes = stored["codes"]
        records = codes.reshape(-1, self.nbytes)
        fields = {label: field.read(records, components.scales[label].dtype) for label, field in self.fields.items()}
        return {label: numbers.reshape(len(codes), -1) for label, numbers in fields.items()}

    def stored_groups(self, components: Components, arrays: Mapping[str, np.ndarray]) -> Arrays:
        """None: they stand with the codes."""
        return {}

    def from_rows(self, components: Components, arrays: Mapping[str, np.ndarray], n: int, k: int) -> Arrays:
        """Records of these arrays."""
        rows = arrays["codes"]
        codes = np.stack([rows & 15, rows >> 4], axis=-1) if self.code_bits == 4 else rows
        codes = codes.reshape(-1, self.weights)
        records = np.zeros((len(codes), self.nbytes), np.uint8)
        self._write_codes(records, codes)
        for label, field in self.fields.items():
            field.write(records, arrays[label].reshape(len(records), -1))
        stored = {"codes": records.reshape(n, -1)}
        for label, array in self.to_rows(components, stored, n, k).items():
            if array.tobytes() != np.ascontiguousarray(arrays[label]).tobytes():
                raise FormatError(f"{label}: records {self.name!r} have no bits for some of these numbers")
        return stored


@dataclass(frozen=True)
class Records(RecordOrder):
    """An order of codes and their scales in records along k, whose codes are planes of bits.

    weights, nbytes: of a record. code_bits: of a code in rows, 4 or 8. planes: the bits of codes.
    scales, super_scales, offsets, super_offsets: the fields of those that the format has.
    Raises FormatError where planes and fields are not within a record, or two have the same bits.
    """

    name: str
    weights: int
    nbytes: int
    code_bits: int
    planes: tuple[Plane, ...]
    scales: Field | None = None
    super_scales: Field | None = None
    offsets: Field | None = None
    super_offsets: Field | None = None

    def __post_init__(self) -> None:
        if self.code_bits not in (4, 8):
            raise FormatError(f"records {self.name!r}: codes must have 4 or 8 bits, found {self.code_bits}")
        for plane in self.planes:
            if plane.bits not in (1, 2, 4, 8) or plane.run < 1 or self.weights * plane.bits % (8 * plane.run):
                raise FormatError(f"records {self.name!r}: {self.weights} weights are no whole runs of {plane}")
        if not self.planes or self.weights % 2 or self._top >= 1 << self.code_bits:
            raise FormatError(
                f"records {self.name!r}: {len(self.planes)} planes make no codes of {self.code_bits} bits, up to {self._top}"
            )
        self._check_places()

    @cached_property
    def _top(self) -> int:
        """The largest code that the planes have bits for."""
        return sum((1 << plane.bits + plane.shift) - (1 << plane.shift) for plane in self.planes)

    def check(self, components: Components) -> None:
        super().check(components)
        element = components.element
        if self._top >= 1 << element.bits:
            raise FormatError(f"{self.name} records have codes up to {self._top}, {element.name} has {element.bits} bits")

    def _code_places(self) -> list[slice]:
        return [slice(8 * plane.offset, 8 * plane.offset + plane.bits * self.weights) for plane in self.planes]

    def _read_codes(self, records: np.ndarray) -> np.ndarray:
        codes = np.zeros((len(records), self.weights), np.uint8)
        for plane in self.planes:
            codes += plane.read(records, self.weights)
        return codes

    def _write_codes(self, records: np.ndarray, codes: np.ndarray) -> None:
        for plane in self.planes:
            plane.write(records, codes)


def span(byte: int, first: int, bits: int, shift: int = 0) -> tuple[Piece, ...]:
    """So many bits, from bit `first` of a byte on and then of the next ones: pieces of an item, from its bit `shift` up."""
    pieces, at, end = [], 8 * byte + first, 8 * byte + first + bits
    while at < end:
        taken = min(8 - at % 8, end - at)
        pieces.append(Piece(at // 8, at % 8, taken, shift))
        at, shift = at + taken, shift + taken
    return tuple(pieces)


def plain(byte: int, count: int, itemsize: int, bits: int | None = None) -> Field:
    """Items of so many bytes one after another, of which they may have fewer bits."""
    return Field(tuple(span(byte + i * itemsize, 0, bits or 8 * itemsize) for i in range(count)))
