"""A .safetensors file written tensor by tensor: its header first, so that no more than a piece of a tensor is in memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from ktmoe.errors import InputError
from ktmoe.files.atomic import AtomicFile
from ktmoe.loaders.safetensors_file import DTYPE_BITS


class SafetensorsWriter:
    """A new .safetensors file of these tensors, which lie in it in this order. It is there after commit(), whole.

    tensors: (name, dtype, shape) of each; dtype is the header's name of it, such as "BF16" or "F8_E8M0".
    metadata: strings. align: the data of the first tensor begin at a multiple of so many bytes of the file, itself a multiple
    of 8; spaces after the header see to it. overwrite: whether it may take the place of another file.
    offsets: of each tensor's first byte, from the start of the file, by name. nbytes: of the file.
    As a context manager it commits at the end, and aborts after an exception.
    Raises OutputError as AtomicFile does; InputError for two tensors of a name, a dtype that does not exist, and a tensor that
    would not begin at a multiple of its own numbers' size, which readers need.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Iterable[tuple[str, str, Iterable[int]]],
        metadata: Mapping[str, str] | None = None,
        *,
        align: int = 8,
        overwrite: bool = False,
    ):
        self.path = Path(path)
        if align < 8 or align % 8:
            raise InputError(f"align: expected a multiple of 8, found {align}")
        header, self._nbytes = _header(self.path, tensors, dict(metadata or {}))
        header += b" " * (-(8 + len(header)) % align)
        self.offsets, start = {}, 8 + len(header)
        for name, nbytes in self._nbytes.items():
            self.offsets[name] = start
            start += nbytes
        self.nbytes = start
        self._written = dict.fromkeys(self._nbytes, 0)
        self._next = iter(self._nbytes)
        self._current: str | None = None
        self._file = AtomicFile(self.path, overwrite=overwrite)
        try:
            self._file.write(len(header).to_bytes(8, "little") + header)
        except BaseException:
            self._file.abort()
            raise

    def write(self, array: np.ndarray, name: str | None = None) -> None:
        """Add the next bytes of a tensor: of the first that is not whole yet, or of the one of that name.

        array: C-contiguous, of any dtype and shape; all of a tensor, or so much of it as follows what was written of it.
        Raises InputError for more bytes than the tensor has, OutputError.
        """
        name = self._unfinished() if name is None else name
        if name is None or name not in self._nbytes:
            raise InputError(f"{self.path}: expected bytes of a tensor of this file, found {array.nbytes} of {name or 'none'}")
        left = self._nbytes[name] - self._written[name]
        if array.nbytes > left:
            raise InputError(f"{self.path}: tensor {name}: expected at most {left} bytes more, found {array.nbytes}")
        self._file.write(array, self.offsets[name] + self._written[name])
        self._written[name] += array.nbytes

    def finish(self) -> None:
        """Wait until all of it is on the disk: the last step that a full disk can end. Raises what commit() raises."""
        self._refuse_unfinished()
        self._file.finish()

    def commit(self) -> None:
        """Let the file be found under its name. Raises InputError if a tensor is not whole, OutputError."""
        self._refuse_unfinished()
        self._file.commit()

    def _refuse_unfinished(self) -> None:
        if (name := self._unfinished()) is not None:
            self._file.abort()
            raise InputError(
                f"{self.path}: tensor {name}: expected {self._nbytes[name]} bytes, found {self._written[name]} written"
            )

    def abort(self) -> None:
        """Remove what was written; nothing after commit()."""
        self._file.abort()

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()

    def _unfinished(self) -> str | None:
        """The first tensor that is not whole."""
        while self._current is None or self._written[self._current] == self._nbytes[self._current]:
            self._current = next(self._next, None)
            if self._current is None:
                return None
        return self._current


def nbytes_of(dtype: str, shape: Iterable[int]) -> int:
    """The bytes of a tensor. Raises InputError for a dtype that does not exist, and for a part of a byte."""
    if dtype not in DTYPE_BITS:
        raise InputError(f"dtype: expected one of {', '.join(DTYPE_BITS)}, found {dtype!r}")
    nbytes, rest = divmod(math.prod(shape) * DTYPE_BITS[dtype], 8)
    if rest:
        raise InputError(f"shape: expected whole bytes of {dtype}, found {list(shape)}")
    return nbytes


def item_bytes(dtype: str) -> int:
    """What a tensor's offset in its file must be a multiple of."""
    return max(1, DTYPE_BITS[dtype] // 8)


def _header(
    path: Path, tensors: Iterable[tuple[str, str, Iterable[int]]], metadata: dict[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The header's JSON, and the bytes of each tensor by name."""
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    sizes, start = {}, 0
    for name, dtype, shape in tensors:
        shape = [int(extent) for extent in shape]
        if name in sizes or name == "__metadata__":
            raise InputError(f"{path}: tensor {name}: expected every name once")
        size = nbytes_of(dtype, shape)
        if start % item_bytes(dtype):
            raise InputError(
                f"{path}: tensor {name}: {dtype} must begin at a multiple of {item_bytes(dtype)} bytes, found {start}"
            )
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
        sizes[name] = size
        start += size
    return json.dumps(entries, separators=(",", ":")).encode(), sizes
