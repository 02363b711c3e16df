"""One .safetensors file: a header that is treated as hostile.

The rules are those of the format and of its reference parser (the safetensors crate's `SafeTensors::read_metadata`): the
tensors lie end to end, without overlap or hole, and fill the file. Duplicate keys are refused, too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ktmoe.errors import CheckpointError, memory_for
from ktmoe.loaders import unchanged
from ktmoe.loaders.tensor_file import TensorFile, TensorInfo, fill, open_regular
from ktmoe.loaders.unchanged import FileStatus
from ktmoe.messages import show

#: Bits of one element, by the dtype names of a safetensors header.
DTYPE_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}

#: Longest header, index or config that is parsed, in bytes. The longest index known is Kimi-K2.5's, 23.5 MB.
JSON_LIMIT_BYTES = 40_000_000
#: Of that, how much may be text that is not ASCII alone: such text takes up to four times its bytes.
JSON_LIMIT_UNICODE = JSON_LIMIT_BYTES // 4
#: The most commas and opening brackets in such a file, about its number of values. Kimi-K2.5's index has 0.2 million; the
#: header of a file with 87,000 tensors has 0.7 million. docs/notes says what the worst file within the limits takes.
JSON_LIMIT_VALUES = 700_000
#: How deep objects and lists may be in each other. Published files have 10 levels at most; Python's own functions for what is
#: nested fail at some hundreds.
JSON_LIMIT_DEPTH = 64
_COUNT_LIMIT = 2**64 - 1  # sizes are unsigned 64-bit in the reference parser


class SafetensorsFile(TensorFile):
    """An open .safetensors file. metadata: the strings of its header's __metadata__."""

    metadata: dict[str, str]

    def _read_header(self, fd: int, size: int) -> dict[str, TensorInfo]:
        tensors, self.metadata = _parse_header(self.path, fd, size)
        return tensors


def read_json_object(path: Path) -> dict[str, Any]:
    """A file's JSON object. Raises what read_json() raises."""
    return read_json(path)[0]


def read_json(path: Path) -> tuple[dict[str, Any], FileStatus]:
    """A file's JSON object, in which no object has a key twice, and the file's status when it was read.

    Raises CheckpointError for more than one of the limits above and for a file that changes meanwhile, OutOfMemoryError.
    """
    fd, status = open_regular(path)
    size = status.nbytes
    try:
        if size > JSON_LIMIT_BYTES:
            raise CheckpointError(f"{path}: expected at most {JSON_LIMIT_BYTES} bytes of JSON, found {size}")
        with memory_for(f"{path}: {size} bytes of JSON"):
            text = bytearray(size)
            del text[fill(fd, text, 0, str(path)) :]
            unchanged.check(path, status, unchanged.look(path, fd))
            return _parse_object(text, path), status
    finally:
        os.close(fd)


def _parse_object(text: bytearray, path: Path) -> dict[str, Any]:
    """The object that a text is, of which nothing is left."""
    if (found := sum(map(text.count, b",[{"))) > JSON_LIMIT_VALUES:
        raise CheckpointError(f"{path}: expected at most {JSON_LIMIT_VALUES} JSON values, found about {found}")
    if len(text) > JSON_LIMIT_UNICODE and not text.isascii():
        raise CheckpointError(
            f"{path}: expected at most {JSON_LIMIT_UNICODE} bytes of JSON that is not ASCII, found {len(text)}"
        )

    def unique(pairs: list[Any]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise CheckpointError(f"{path}: expected every JSON key once, found {show(key)} twice")
                seen.add(key)
        return table

    malformed = None
    try:
        decoded = text.decode("utf-8")
        text.clear()  # its memory is free for what is made of it
        value = json.loads(decoded, object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # which has the whole text
        malformed = str(error)
    if malformed is not None:
        raise CheckpointError(f"{path}: expected a JSON object, found malformed JSON: {malformed}")
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {show(value)}")
    _check_depth(value, path)
    return value


def _check_depth(value: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError for more than JSON_LIMIT_DEPTH levels."""
    level: list[dict[str, Any] | list[Any]] = [value]
    for _ in range(JSON_LIMIT_DEPTH):
        insides = (each.values() if isinstance(each, dict) else each for each in level)
        level = [inner for inside in insides for inner in inside if isinstance(inner, dict | list)]
        if not level:
            return
    raise CheckpointError(f"{path}: expected JSON of at most {JSON_LIMIT_DEPTH} levels, found more")


def _parse_header(path: Path, fd: int, size: int) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors and the metadata of a file of `size` bytes: u64 little-endian length, JSON of that length, then the tensors
    end to end."""
    prefix = bytearray(8)
    if (found := fill(fd, prefix, 0, str(path))) < 8:
        raise CheckpointError(f"{path}: truncated: expected at least 8 bytes, found {found}")
    length, limit = int.from_bytes(prefix, "little"), min(JSON_LIMIT_BYTES, size - 8)
    if length > limit:
        why = "; it is damaged, or no .safetensors file" if length > size - 8 else ""
        expected = f"expected at most {limit} in a file of {size} bytes"
        raise CheckpointError(f"{path}: header length: {expected}, found {length}{why}")
    with memory_for(f"{path}: a header of {length} bytes"):
        text = bytearray(length)
        if (found := fill(fd, text, 8, str(path))) < length:
            raise CheckpointError(f"{path}: truncated: expected a header of {length} bytes, found {found}")
        header = _parse_object(text, path)
        metadata = header.get("__metadata__") or {}
        return parse_tensors(header, path, 8 + length, size), metadata


def parse_tensors(header: dict[str, Any], path: Path, start: int, size: int) -> dict[str, TensorInfo]:
    """The tensors of a header; their bytes begin at `start` of the file of `size` bytes."""
    metadata = header.pop("__metadata__", None)
    if not (metadata is None or (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values()))):
        raise CheckpointError(f"{path}: __metadata__: expected an object of strings, found {show(metadata)}")
    tensors = {name: _parse_entry(path, name, entry, start) for name, entry in header.items()}
    end = start
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != end:
            fault = "overlap" if info.offset < end else "hole"
            expected, found = end - start, info.offset - start
            raise CheckpointError(
                f"{path}: {fault}: tensor {show(info.name)}: expected at data offset {expected}, found {found}"
            )
        end += info.nbytes
    if end != size:
        fault = "truncated" if size < end else "trailing data"
        raise CheckpointError(f"{path}: {fault}: expected {end} bytes by its header, found {size}")
    return tensors


def _parse_entry(path: Path, name: str, entry: object, start: int) -> TensorInfo:
    def wrong(label: str, expected: str, found: object) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {show(name)}: {label}: expected {expected}, found {show(found)}")

    if not isinstance(entry, dict):
        raise wrong("entry", "an object", entry)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise wrong("dtype", f"one of {', '.join(DTYPE_BITS)}", dtype)
    if not (isinstance(shape, list) and all(map(_is_count, shape))):
        raise wrong("shape", "a list of counts", shape)
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_count, offsets))):
        raise wrong("data_offsets", "two counts", offsets)
    bits = DTYPE_BITS[dtype]
    for extent in shape:
        bits *= extent
        if bits > _COUNT_LIMIT:
            raise wrong("shape", "fewer than 2**64 bits", shape)
    nbytes, begin, end = bits // 8, *offsets
    if bits % 8:
        raise wrong("shape", f"whole bytes of {dtype}", shape)
    if end - begin != nbytes:
        raise wrong("data_offsets", f"{nbytes} bytes for {dtype} {show(shape)}", offsets)
    return TensorInfo(name, dtype, tuple(shape), path, start + begin, nbytes)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _COUNT_LIMIT  # type(): bool is an int, too
