"""One .safetensors file: a header that is treated as hostile, and reads that never map memory.

The rules are those of the format and of its reference parser (the safetensors crate's `SafeTensors::read_metadata`): the
tensors lie end to end, without overlap or hole, and fill the file. Duplicate keys are refused, too.
"""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ktmoe import forks
from ktmoe.errors import CheckpointError, ClosedError, memory_for
from ktmoe.loaders.direct_io import DirectFile
from ktmoe.loaders.staging import Staging
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
#: Most commas and opening brackets in it, which is about the number of values. That index has 0.2 million; so many are in the
#: header of a file with 125,000 tensors. Together the limits bound the work: the worst file found takes 0.6 GB and 2 seconds.
JSON_LIMIT_VALUES = 1_000_000
_COUNT_LIMIT = 2**64 - 1  # sizes are unsigned 64-bit in the reference parser
_FOLIO_BYTES = 1 << 21  # the page cache's largest unit on x86-64


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says about one tensor.

    dtype: the header's name, such as "I8" or "F8_E8M0". shape: in elements (F4 counts elements too, two of them a byte).
    file: the file that holds it. offset: of its first byte, from the start of that file. nbytes: its length in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


class SafetensorsFile:
    """An open file whose header has been checked; its descriptor closes when the last reader is done.

    tensors: TensorInfo by name. Raises CheckpointError, which names the file, the tensor, the expected and the found.
    """

    def __init__(self, path: Path):
        self.path = path
        self.after_fork()
        self._closing = False
        self._fd = -1
        self._direct = None
        forks.watch(self)
        self._fd, size = _open_regular(path)
        self._direct = DirectFile(self._fd)
        try:
            self.tensors = _parse_header(path, self._fd, size)
        except BaseException:
            self.close()
            raise
        # tensors are read whole, by several threads: what the kernel read ahead of one would be released before it is used
        _advise(self._fd, 0, 0, "POSIX_FADV_RANDOM")

    def after_fork(self) -> None:
        """Nobody reads in the child yet."""
        self._lock = threading.Lock()
        self._readers = 0

    def read_into(self, out: np.ndarray, info: TensorInfo, *, start: int = 0, release: bool = False) -> None:
        """Fill `out`, C-contiguous uint8, with a tensor's bytes from `start` on; then release their pages if asked to.

        start + out.nbytes: at most info.nbytes.
        """
        stop = start + out.nbytes
        with self._descriptor() as fd:
            found = _fill(fd, out, info.offset + start, f"{self.path}: tensor {show(info.name)}")
            if release:
                _drop_pages(fd, info, start, stop)
        self._expect(info, start, out.nbytes, found)

    def take(self, info: TensorInfo, start: int, stop: int, staging: Staging) -> np.ndarray:
        """A tensor's bytes [start, stop) in memory of `staging`, uint8, of which none stay in the page cache."""
        with self._descriptor() as fd:
            with memory_for(f"{self.path}: tensor {show(info.name)}"):
                data = self._direct.read(info.offset + start, stop - start, staging)
            if data is not None:
                _drop_pages(fd, info, start, stop)  # looking whether it is there may have brought a page
        if data is None:
            with memory_for(f"{self.path}: tensor {show(info.name)}"):
                data = staging.take(stop - start)
            self.read_into(data, info, start=start, release=True)
        self._expect(info, start, stop - start, len(data))
        return data

    def release(self, info: TensorInfo, start: int, stop: int) -> None:
        """Let the kernel drop the pages of a tensor's bytes [start, stop) from its file cache; only ever a hint."""
        with self._descriptor() as fd:
            _drop_pages(fd, info, start, stop)

    def close(self) -> None:
        """Close the file as soon as no thread reads from it."""
        with self._lock:
            self._closing = True
            if not self._readers:
                self._close()

    def _expect(self, info: TensorInfo, start: int, expected: int, found: int) -> None:
        if found < expected:
            raise CheckpointError(
                f"{self.path}: truncated: tensor {show(info.name)}: expected {expected} bytes at {info.offset + start}, "
                f"found {found}"
            )

    @contextmanager
    def _descriptor(self) -> Iterator[int]:
        # counted, so that close() in another thread cannot hand this number to a different file under a read
        with self._lock:
            if self._closing:
                raise ClosedError(f"{self.path}: read after close()")
            self._readers += 1
        try:
            yield self._fd
        finally:
            with self._lock:
                self._readers -= 1
                if self._closing and not self._readers:
                    self._close()

    def _close(
        self, close: Callable[[int], None] = os.close
    ) -> None:  # when the interpreter ends, os may be gone before a file
        fd, self._fd = self._fd, -1
        if self._direct is not None:
            self._direct.close()
        if fd >= 0:
            close(fd)

    def __del__(self):
        self._close()


def new_bytes(count: int, what: str) -> np.ndarray:
    """uint8 [count]. Raises OutOfMemoryError, which says what for."""
    with memory_for(what):
        return np.empty(count, np.uint8)


def read_json_object(path: Path) -> dict:
    """A file's JSON object, in which no object has a key twice.

    Raises CheckpointError for more than JSON_LIMIT_BYTES or JSON_LIMIT_VALUES, OutOfMemoryError.
    """
    fd, size = _open_regular(path)
    try:
        if size > JSON_LIMIT_BYTES:
            raise CheckpointError(f"{path}: expected at most {JSON_LIMIT_BYTES} bytes of JSON, found {size}")
        with memory_for(f"{path}: {size} bytes of JSON"):
            text = bytearray(size)
            del text[_fill(fd, text, 0, str(path)) :]
            return _parse_object(text, path)
    finally:
        os.close(fd)


def _open_regular(path: Path) -> tuple[int, int]:
    """Descriptor and size of a regular file; a symlink to one is normal (the Hugging Face cache is made of them)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # nonblocking: a FIFO in the file's place must not hang
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL or a lone surrogate
        found = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: expected a readable file, found {found}") from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise CheckpointError(f"{path}: expected a regular file, found {stat.filemode(status.st_mode)}")
    return fd, status.st_size


def _fill(fd: int, out: np.ndarray | bytearray, offset: int, what: str) -> int:
    """Fill `out` from a file's offset on; the number of bytes that were there."""
    view, done = memoryview(out), 0
    if not view.nbytes:
        return 0
    view = view.cast("B")
    try:
        while done < len(view):  # one preadv returns at most 2 GiB, and less where a signal or a network comes between
            count = os.preadv(fd, [view[done:]], offset + done)
            if not count:
                break
            done += count
    except OSError as error:
        raise CheckpointError(f"{what}: expected {len(view)} bytes at offset {offset}, found {error} after {done}") from error
    return done


def _drop_pages(fd: int, info: TensorInfo, start: int, stop: int) -> None:
    if start == stop:
        return
    # the kernel keeps a folio that is covered in part: widen to the largest folio's bounds, at worst a neighbour is read again.
    # A part's last folio is left to the part behind it, which is likely to be read next and may be there already.
    first = (info.offset + start) // _FOLIO_BYTES * _FOLIO_BYTES
    end = info.offset + stop
    end += -end % _FOLIO_BYTES if stop == info.nbytes else -(end % _FOLIO_BYTES)
    if first < end:
        _advise(fd, first, end - first, "POSIX_FADV_DONTNEED")


def _advise(fd: int, offset: int, length: int, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # a hint that some file systems refuse
            os.posix_fadvise(fd, offset, length, getattr(os, advice))


def _parse_object(text: bytearray, path: Path) -> dict:
    if (found := sum(map(text.count, b",[{"))) > JSON_LIMIT_VALUES:
        raise CheckpointError(f"{path}: expected at most {JSON_LIMIT_VALUES} JSON values, found about {found}")

    def unique(pairs: list) -> dict:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise CheckpointError(f"{path}: expected every JSON key once, found {show(twice)} twice")
        return table

    malformed = None
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # which has the whole text
        malformed = str(error)
    if malformed is not None:
        raise CheckpointError(f"{path}: expected a JSON object, found malformed JSON: {malformed}")
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {show(value)}")
    return value


def _parse_header(path: Path, fd: int, size: int) -> dict[str, TensorInfo]:
    """The tensors of a file of `size` bytes: u64 little-endian length, JSON of that length, then the tensors end to end."""
    prefix = bytearray(8)
    if (found := _fill(fd, prefix, 0, str(path))) < 8:
        raise CheckpointError(f"{path}: truncated: expected at least 8 bytes, found {found}")
    length, limit = int.from_bytes(prefix, "little"), min(JSON_LIMIT_BYTES, size - 8)
    if length > limit:
        raise CheckpointError(f"{path}: header length: expected at most {limit} in a file of {size} bytes, found {length}")
    with memory_for(f"{path}: a header of {length} bytes"):
        text = bytearray(length)
        if (found := _fill(fd, text, 8, str(path))) < length:
            raise CheckpointError(f"{path}: truncated: expected a header of {length} bytes, found {found}")
        return parse_tensors(_parse_object(text, path), path, 8 + length, size)


def parse_tensors(header: dict, path: Path, start: int, size: int) -> dict[str, TensorInfo]:
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
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise wrong("dtype", f"one of {', '.join(DTYPE_BITS)}", dtype)
    if not (isinstance(shape, list) and all(map(_is_count, shape))):
        raise wrong("shape", "a list of counts", shape)
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_count, offsets))):
        raise wrong("data_offsets", "two counts", offsets)
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
