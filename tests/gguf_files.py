"""GGUF files made byte by byte, after the format's own page; they may be as wrong as a test wants."""

from __future__ import annotations

import struct

import numpy as np

#: Numbers of ggml's types, and (weights, bytes) of their records.
F32, F16, Q4_0, Q8_0, Q4_K, Q6_K, BF16, MXFP4, NVFP4, Q1_0 = 0, 1, 2, 8, 12, 14, 30, 39, 40, 41
RECORDS = {
    F32: (1, 4),
    F16: (1, 2),
    Q4_0: (32, 18),
    Q8_0: (32, 34),
    Q4_K: (256, 144),
    Q6_K: (256, 210),
    BF16: (1, 2),
    MXFP4: (32, 17),
    NVFP4: (64, 36),
    Q1_0: (128, 18),
}


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def string(value) -> bytes:
    """A value of metadata, as the others below are."""
    return struct.pack("<I", 8) + text(value)


def u32(value: int) -> bytes:
    return struct.pack("<II", 4, value)


def f32(value: float) -> bytes:
    return struct.pack("<If", 6, value)


def array(kind: int, items: list[bytes], count: int | None = None) -> bytes:
    return struct.pack("<IIQ", 9, kind, len(items) if count is None else count) + b"".join(items)


def tensor(name, kind: int, shape, offset: int) -> bytes:
    """A tensor's entry. shape: as numpy has it."""
    return text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}QIQ", *shape[::-1], kind, offset)


def header(keys: list[bytes], entries: list[bytes], version=3, magic=b"GGUF", tensors=None, count=None) -> bytes:
    """keys: each a text() and a value. tensors, count: of tensors and of keys, where they are not the true ones."""
    tensors, count = len(entries) if tensors is None else tensors, len(keys) if count is None else count
    return magic + struct.pack("<IQQ", version, tensors, count) + b"".join(keys) + b"".join(entries)


def nbytes(kind: int, shape) -> int:
    weights, size = RECORDS[kind]
    return int(np.prod(shape, dtype=object)) // weights * size


def write(path, metadata: dict[str, bytes], tensors: dict[str, tuple], alignment=32, version=3):
    """tensors: name -> (kind, shape, bytes), one after another in the file."""
    entries, data = [], b""
    for name, (kind, shape, stored) in tensors.items():
        data += bytes(-len(data) % alignment)
        entries.append(tensor(name, kind, shape, len(data)))
        data += stored
    head = header([text(key) + value for key, value in metadata.items()], entries, version)
    path.write_bytes(head + bytes(-len(head) % alignment) + data)
    return path


def records(seed: int, kind: int, shape) -> bytes:
    """Random ones."""
    return np.random.default_rng([seed, kind, *shape]).bytes(nbytes(kind, shape))


def layer(number: int, kinds: dict[str, int], experts=2, hidden=256, intermediate=512, seed=0) -> dict[str, tuple]:
    """The tensors of a layer's experts. kinds: of gate, up and down."""
    tensors = {}
    for place, (projection, kind) in enumerate(kinds.items()):
        shape = (experts, hidden, intermediate) if projection == "down" else (experts, intermediate, hidden)
        stored = records(seed + 10 * number + place, kind, shape)
        tensors[f"blk.{number}.ffn_{projection}_exps.weight"] = (kind, shape, stored)
    return tensors


def metadata(architecture="qwen3moe", **numbers: int) -> dict[str, bytes]:
    return {"general.architecture": string(architecture)} | {f"{architecture}.{key}": u32(n) for key, n in numbers.items()}
