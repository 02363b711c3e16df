"""What stands before the tensors' data in a .gguf file, which is treated as hostile.

The rules are those of the format (docs/gguf.md of ggml) and of its readers, gguf.cpp and gguf-py: versions 2 and 3,
little-endian.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from ktmoe.errors import CheckpointError
from ktmoe.loaders.tensor_file import fill
from ktmoe.messages import show

#: Versions that are read. 1 has counts of 32 bits and was in use for some weeks of 2023.
VERSIONS = (2, 3)
#: Longest header in bytes. The longest parts known are vocabularies, of about 20 MB.
HEADER_LIMIT_BYTES = 1 << 25
#: The most keys of metadata, tensors, and items of arrays that are walked through or kept. Models have some thousand
#: tensors. Vocabularies and their merges have 0.8 million items. Together the limits bound the work, see docs/notes.
KEYS_LIMIT, TENSORS_LIMIT, ITEMS_LIMIT = 1 << 12, 1 << 16, 1 << 21
_SLOW_ITEMS = 16  # what an array in an array counts as, and a number that is kept: they take as long
#: Longest names of keys and of tensors, in bytes; ggml has at most 65535 and 63.
KEY_LIMIT_BYTES, NAME_LIMIT_BYTES = 65535, 255
#: Metadata of more items or bytes is passed over where not all of it is asked for: vocabularies, templates. So are arrays of
#: strings.
KEPT_ITEMS, KEPT_BYTES = 1024, 4096
#: How deep arrays may be in arrays.
DEPTH_LIMIT = 4
#: The most dimensions of a tensor.
DIMENSIONS_LIMIT = 4

_MAGIC = b"GGUF"
#: The types of numbers in metadata, by their number there: struct's code, which is numpy's, too.
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_COUNT_LIMIT = 2**63 - 1  # ggml counts in int64
_WINDOW_BYTES = 1 << 18
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
#: Extents, type and offset of a tensor's entry, by the number of its dimensions.
_ENTRIES = [struct.Struct(f"<{count}QIQ") for count in range(DIMENSIONS_LIMIT + 1)]
#: What a tensor's entry says: its name, the number of its type, its shape, and its offset in the data.
Entry = tuple[str, int, tuple[int, ...], int]


class GgufHeader:
    """A file's header, read from its beginning in windows: no count in it makes an allocation of its size.

    whole: keep metadata of any length, arrays of strings and long arrays of numbers, too.
    """

    def __init__(self, path: Path, fd: int, size: int, *, whole: bool = False):
        self._path, self._fd, self._whole = path, fd, whole
        self._size = min(size, HEADER_LIMIT_BYTES)
        self._of_file = size
        self._window, self._at, self._first = b"", 0, 0
        self._items = 0

    @property
    def offset(self) -> int:
        """The offset of what comes next, from the beginning of the file."""
        return self._first + self._at

    def counts(self) -> tuple[int, int]:
        """The numbers of tensors and of keys."""
        magic = self._take(4, "magic")
        if magic != _MAGIC:
            raise CheckpointError(f"{self._path}: magic: expected {_MAGIC!r}, found {magic!r}")
        version = self._number("<I", "version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in range(1, 256)
            about = ", which is that of a big-endian file" if swapped and version > 255 else ""
            raise CheckpointError(f"{self._path}: version: expected {' or '.join(map(str, VERSIONS))}, found {version}{about}")
        tensors = self._count("tensor count", TENSORS_LIMIT)
        return tensors, self._count("key count", KEYS_LIMIT)

    def metadata(self, count: int) -> dict[str, object]:
        """The keys whose values are kept, and these. All keys are read."""
        seen: set[str] = set()
        kept = {}
        for _ in range(count):
            key = self._string("key", KEY_LIMIT_BYTES)
            if key in seen:
                raise CheckpointError(f"{self._path}: expected every key once, found {show(key)} twice")
            seen.add(key)
            value = self._value(self._number("<I", f"type of {show(key)}"), key, 0)
            if value is not None:
                kept[key] = value
        return kept

    def tensor(self) -> Entry:
        """The next tensor's entry."""
        name = self._string("tensor name", NAME_LIMIT_BYTES)
        what = f"tensor {name!r}"  # not show(name), which takes as long as all else
        (count,) = _U32.unpack(self._take(4, what))
        if count > DIMENSIONS_LIMIT:
            raise CheckpointError(f"{self._path}: {what}: expected at most {DIMENSIONS_LIMIT} dimensions, found {count}")
        *extents, number, offset = _ENTRIES[count].unpack(self._take(_ENTRIES[count].size, what))
        if extents and max(extents) > _COUNT_LIMIT:
            raise CheckpointError(f"{self._path}: {what}: shape: expected less than 2**63, found {show(extents[::-1])}")
        return name, number, tuple(extents[::-1]), offset

    def _value(self, number: int, key: str, depth: int) -> object:
        """A value, or None where it is not kept."""
        what = f"value of {show(key)}"
        if number in _NUMBERS:
            return self._number(_NUMBERS[number], what)
        if number == _BOOL:
            return self._bool(what)
        if number == _STRING:
            return self._text(what)
        if number != _ARRAY:
            raise CheckpointError(f"{self._path}: type of {show(key)}: expected 0 to 12, found {number}")
        return self._array(key, what, depth)

    def _array(self, key: str, what: str, depth: int) -> list[Any] | np.ndarray | None:
        number, count = self._number("<I", what), self._number("<Q", what)
        if number in _NUMBERS or number == _BOOL:
            dtype = np.dtype(_NUMBERS.get(number, "u1"))
            if count > KEPT_ITEMS:
                return self._long_array(count, dtype, what)
            self._count_items(count * _SLOW_ITEMS, what)
            values = np.frombuffer(self._take(count * dtype.itemsize, what), dtype).tolist()
            return values if number != _BOOL else [value != 0 for value in values]
        self._count_items(count * (_SLOW_ITEMS if number == _ARRAY else 1), what)
        if number == _STRING and self._whole and depth == 0:
            return self._strings(count, what)
        if number == _STRING:
            self._skip_strings(count, what)
            return None
        if depth == DEPTH_LIMIT:
            raise CheckpointError(f"{self._path}: {what}: expected arrays in arrays {DEPTH_LIMIT} deep at most, found more")
        for _ in range(count):
            self._value(number, key, depth + 1)
        return None

    def _long_array(self, count: int, dtype: np.dtype, what: str) -> np.ndarray | None:
        if not self._whole:
            self._skip(count * dtype.itemsize, what)
            return None
        self._count_items(count, what)
        return np.frombuffer(self._take(count * dtype.itemsize, what), dtype)

    def _count_items(self, count: int, what: str) -> None:
        self._items += count
        if self._items > ITEMS_LIMIT:
            raise CheckpointError(f"{self._path}: {what}: expected at most {ITEMS_LIMIT} items in all arrays, found more")

    def _bool(self, what: str) -> bool:
        value = self._number("<B", what)
        if value > 1:
            raise CheckpointError(f"{self._path}: {what}: expected a boolean, 0 or 1, found {value}")
        return value == 1

    def _text(self, what: str) -> str | None:
        """A string of metadata, in which wrong UTF-8 is replaced."""
        length = self._number("<Q", what)
        if length > KEPT_BYTES and not self._whole:
            self._skip(length, what)
            return None
        return self._take(length, what).decode("utf-8", "replace")

    def _string(self, what: str, most: int) -> str:
        """A name of at most so many bytes, which must be UTF-8."""
        (length,) = _U64.unpack(self._take(8, what))
        if length > most:
            raise CheckpointError(f"{self._path}: {what} at {self.offset}: expected at most {most} bytes, found {length}")
        text = self._take(length, what)
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self._path}: {what}: expected UTF-8, found {show(text)}") from None

    def _count(self, what: str, most: int) -> int:
        count = self._number("<Q", what)
        if count > most:
            raise CheckpointError(f"{self._path}: {what}: expected at most {most}, found {count}")
        return count

    def _number(self, code: str, what: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code), what))[0]

    def _take(self, count: int, what: str) -> bytes:
        """The next so many bytes; the limits keep them below a window."""
        if self._at + count > len(self._window):
            self._fill(count, what)
        first = self._at
        self._at += count
        return self._window[first : self._at]

    def _skip(self, count: int, what: str) -> None:
        self._at += count  # maybe past the window's end
        if self.offset > self._size:
            raise self._truncated(count, self.offset - count, what)

    def _skip_strings(self, count: int, what: str) -> None:
        """Skip so many strings as _skip() would each; a vocabulary has so many that this must be quick."""
        while count:
            self._fill(8, what)
            window, at, last = self._window, self._at, len(self._window) - 8
            while count and at <= last:
                at += 8 + _U64.unpack_from(window, at)[0]
                count -= 1
            self._at = at
            if self.offset > self._size:
                raise self._truncated(0, self.offset, what)

    def _strings(self, count: int, what: str) -> list[str]:
        """So many strings as _text() would read each, as quickly as _skip_strings() does."""
        found: list[str] = []
        needed = 8  # bytes of the next string that the window must have
        while len(found) < count:
            self._fill(needed, what)
            window, at, last = self._window, self._at, len(self._window) - 8
            needed = 8
            while len(found) < count and at <= last:
                end = at + 8 + _U64.unpack_from(window, at)[0]
                if end > len(window):
                    needed = end - at
                    break
                found.append(window[at + 8 : end].decode("utf-8", "replace"))
                at = end
            self._at = at
        return found

    def _fill(self, count: int, what: str) -> None:
        """Move the window so that it begins with what comes next, and has at least so many bytes."""
        first = self.offset
        window = bytearray(min(max(count, _WINDOW_BYTES), max(0, self._size - first)))
        found = fill(self._fd, window, first, str(self._path)) if count <= len(window) else len(window)
        if found < count:
            raise self._truncated(count, first, what)
        self._window, self._first, self._at = bytes(window[:found]), first, 0

    def _truncated(self, count: int, offset: int, what: str) -> CheckpointError:
        if self._size < self._of_file:
            return CheckpointError(f"{self._path}: {what}: expected a header of at most {self._size} bytes, found more")
        return CheckpointError(
            f"{self._path}: truncated: {what}: expected {count} bytes at {offset}, found a file of {self._of_file}"
        )
