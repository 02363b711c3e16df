"""One .gguf file: a header that is treated as hostile.

The rules are those of the format (docs/gguf.md of ggml) and of its readers, gguf.cpp and gguf-py: versions 2 and 3,
little-endian. As gguf.cpp demands, tensors lie in the header's order, each where the one before it ends, padded to the
alignment. So a wrong type or shape shows: it would leave a hole. Behind the last one, the file has padding at most.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from ktmoe.errors import CheckpointError, memory_for
from ktmoe.loaders import unchanged
from ktmoe.loaders.gguf_header import Entry, GgufHeader
from ktmoe.loaders.tensor_file import TensorFile, TensorInfo, open_regular
from ktmoe.messages import show
from ktmoe.weights.ggml import TYPES, GgmlType


class GgufFile(TensorFile):
    """An open .gguf file.

    metadata: its keys and values: int, float, bool, str, and lists of numbers. What is long is left out, see KEPT_ITEMS.
    A tensor's dtype is the name of its ggml type, and its shape that of numpy: a matrix is [n, k], experts are [E, n, k].
    A type that ktmoe does not know is "type 99", say; such a tensor's bytes are all up to the next one.
    """

    metadata: dict[str, object]

    def _read_header(self, fd: int, size: int) -> dict[str, TensorInfo]:
        with memory_for(f"{self.path}: a GGUF header"):
            header = GgufHeader(self.path, fd, size)
            tensor_count, key_count = header.counts()
            self.metadata = header.metadata(key_count)
            found = [header.tensor() for _ in range(tensor_count)]
            return _placed(self.path, found, _alignment(self.path, self.metadata), header.offset, size)


def read_metadata(path: Path) -> dict[str, object]:
    """All metadata of one .gguf file: also its vocabulary and its templates, which GgufFile.metadata leaves out.

    Values are int, float, bool, str, lists of str, and lists of numbers, which are numpy arrays where they are longer than
    KEPT_ITEMS. Wrong UTF-8 in a value is replaced. Arrays in arrays are left out. The file's tensors are not looked at.
    Raises CheckpointError.
    """
    fd, status = open_regular(path)
    try:
        with memory_for(f"{path}: a GGUF header"):
            header = GgufHeader(path, fd, status.nbytes, whole=True)
            _, key_count = header.counts()
            found = header.metadata(key_count)
            unchanged.check(path, status, unchanged.look(path, fd))
            return found
    finally:
        os.close(fd)


def _dtype(number: int) -> str:
    return TYPES[number].name if number in TYPES else f"type {number}"


def _alignment(path: Path, metadata: dict[str, object]) -> int:
    """Bytes of which every tensor's offset is a multiple, and the beginning of the data, too."""
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment < 2**31 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment: expected a power of two, found {show(alignment)}")
    return alignment


def _placed(path: Path, found: list[Entry], alignment: int, header_end: int, size: int) -> dict[str, TensorInfo]:
    """Tensors by name, in the header's order, with offsets from the beginning of the file of `size` bytes."""
    start = header_end + -header_end % alignment
    tensors: dict[str, TensorInfo] = {}
    end = 0  # of the tensors so far, with padding, in the data
    for place, (name, number, shape, offset) in enumerate(found):
        what = f"{path}: tensor {name!r}"
        if name in tensors:
            raise CheckpointError(f"{path}: expected every tensor once, found {show(name)} twice")
        if offset != end:
            why = f"where tensor {show(found[place - 1][0])} ends, padded to {alignment}" if place else "for the first tensor"
            raise CheckpointError(f"{what}: offset: expected {end}, {why}, found {offset}")
        if number in TYPES:
            nbytes = _nbytes(what, TYPES[number], shape)
        else:  # its size is not known
            following = found[place + 1][3] if place + 1 < len(found) else size - start
            nbytes = max(0, following - offset)
        if start + offset + nbytes > size:
            raise CheckpointError(
                f"{path}: truncated: tensor {show(name)}: expected {nbytes} bytes at {start + offset}, found a file of {size}"
            )
        tensors[name] = TensorInfo(name, _dtype(number), shape, path, start + offset, nbytes)
        end = offset + nbytes + -nbytes % alignment
    if found and size > start + end:
        expected = f"at most {start + end} bytes, where tensor {show(found[-1][0])} ends"
        raise CheckpointError(f"{path}: expected {expected}, found a file of {size}")
    return tensors


def _nbytes(what: str, record: GgmlType, shape: tuple[int, ...]) -> int:
    if (shape[-1] if shape else 1) % record.weights:
        raise CheckpointError(
            f"{what}: shape: expected a last dimension of whole records of {record.weights} weights for {record.name}, "
            f"found {show(list(shape))}"
        )
    return math.prod(shape) // record.weights * record.nbytes
