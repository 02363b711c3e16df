"""Hostile bytes made of good ones: JSON changed value by value, GGUF metadata added, integers replaced, bytes changed.

All choices are a random.Random's, so that a case is the same in each run.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from random import Random

#: What an integer may be in the place of another one.
INTEGERS = (0, 1, 2, 3, 7, 8, 31, 32, 33, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53)
INTEGERS += (2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64)
_NAMES = ("", "a", ".", "..", "../x", "/dev/zero", "a\\b", "\0", "model.safetensors", "__metadata__", "weight_map", "dtype")
_NAMES += ("shape", "data_offsets", "text_config", "quantization_config", "model.layers.0.mlp.experts.0.up_proj.weight")
_NAMES += ("model.layers.99999.mlp.experts.99999.up_proj.weight", "blk.0.ffn_up_exps.weight", "mtp.0.mlp.experts.0.w1.weight")
_STRINGS = (*_NAMES, "U8", "F4", "I64", "BF16", "F8_E8M0", "silu", "swigluoai", "gptq", "re:(a+)+$", "0", "-1", "NaN", "true")
_STRINGS += ("\ud800", "\u202e\u0007", "\x1b[31m", "\U0001f600" * 60, "x" * 300, "y" * 5000, "e\u0301", "%s%n{}", "\u0661")
_SCALARS = (None, True, False, 0.5, -0.0, 1e300, 5e-324, -1, -(2**31), -(2**63), 10**30, 10**400, 10**4200)
#: JSON that Python does not write, or that is none.
_RAW = ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "-0", "1.0", "1E2", "01", "+1", ".5", "9" * 5000, "[" * 5000, "")
_RAW += ('{"a":' * 3000, "[" * 400 + "]" * 400, '"\\ud800"', '"\\u0000"', '"a\nb"', "'a'", "undefined", "// a\n1", '"\\x"')
_RAW += ('{"a":1,"a":1}', '{"a":' * 400 + "1" + "}" * 400, "[" + "1," * 300 + "1]", '{"":{}}')
_PLACE = "@raw@"
#: Bytes of numbers that are none, infinite, or the least and the largest, of 1, 2 and 4 bytes, as hexadecimal digits.
_NUMBERS = ("00", "7f", "80", "ff", "0080", "8000", "807f", "80ff", "817f", "81ff", "c07f", "007c", "017c", "007e", "0000807f")
_NUMBERS += ("000080ff", "0100807f", "010080ff", "0000c07f", "ffff7f7f", "01000000")


class _Twin(str):
    """A key that is equal to none, so that an object has another one of the same text."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def of_header(name: str, random: Random, seeds: Sequence[bytes]) -> bytes:
    """A hostile header for the parser of that name of hostile_parsers.py. One in 32 is a seed as it is."""
    data = seeds[random.randrange(len(seeds))]
    if not random.randrange(32):
        return data
    if name == "gguf":
        return of_gguf(random, data, seeds)
    if name == "safetensors":
        return of_safetensors(random, data, seeds)
    if name == "config":
        return data[:1] + of_json(random, data[1:], [seed[1:] for seed in seeds])
    return of_json(random, data, seeds)


def of_json(random: Random, text: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Hostile JSON: a few values are others, or a few bytes."""
    if random.randrange(4):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return of_bytes(random, text, others)
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            value = _edited(random, value, 0)
        ascii_alone, close = random.random() < 0.7, random.random() < 0.5
        try:
            made = json.dumps(value, ensure_ascii=ascii_alone, separators=(",", ":") if close else None)
        except RecursionError:  # a seed that is nested deep
            return of_bytes(random, text, others)
        if _PLACE in made:
            made = made.replace(f'"{_PLACE}"', random.choice(_RAW))
        return made.encode("utf-8", "surrogatepass")
    return of_bytes(random, text, others)


def of_safetensors(random: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """A hostile file: its JSON, the header's length, or how many bytes follow."""
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        return of_bytes(random, data, others)
    text, tensors = data[8 : 8 + length], data[8 + length :]
    way = random.randrange(20)
    if way == 0:  # the length alone
        length = random.choice((*INTEGERS[:-1], length - 1, length + 1, len(data), len(data) - 8))
        return struct.pack("<Q", length % 2**64) + text + tensors
    if way == 1:
        return data[: random.randrange(len(data) + 1)]
    if way == 2:
        return data + bytes(random.choice((1, 7, 8, 4096)))
    if way == 3:
        return of_bytes(random, data, others)
    if way < 8 and tensors:  # numbers alone: it stays a file that is read
        found = bytearray(tensors)
        for _ in range(random.choice((1, 4, 64))):
            number = bytes.fromhex(random.choice(_NUMBERS)) if random.random() < 0.9 else random.randbytes(1)
            at = random.randrange(len(found)) // len(number) * len(number)
            found[at : at + len(number)] = number[: len(found) - at]
        return data[: 8 + length] + found
    text = of_json(random, text, [seed[8 : 8 + int.from_bytes(seed[:8], "little")] for seed in others])
    return struct.pack("<Q", len(text)) + text + tensors


def of_gguf(random: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """A hostile GGUF file."""
    way = random.randrange(10)
    if way < 4 and len(data) >= 24:  # keys begin at 24; their number stands at 16
        added = _gguf_key(random)
        if random.randrange(4):  # what follows stays a multiple of the alignment, so that only the value may be wrong
            space = -(len(added) + 8 + 4 + 1 + 4) % 64
            added += struct.pack("<Q", 4 + space) + b"pad." + b"x" * space + struct.pack("<IB", 0, 1)
            count = int.from_bytes(data[16:24], "little") + 2
        else:
            count = int.from_bytes(data[16:24], "little") + random.choice((1, 1, 0, 2))
        return data[:16] + struct.pack("<Q", count % 2**64) + added + data[24:]
    if way == 4:
        return data[: random.randrange(len(data) + 1)]
    if way == 5:
        return data + bytes(random.choice((1, 31, 32, 4096)))
    if way < 9 and len(data) >= 32:
        found = bytearray(data)
        for _ in range(random.choice((1, 1, 2))):
            at = random.choice((4, 8, 16, random.randrange(24, min(len(data), 2048) - 7), random.randrange(len(data) - 7)))
            size = random.choice((1, 4, 8))
            found[at : at + size] = (random.choice(INTEGERS) % 256**size).to_bytes(size, "little")
        return bytes(found)
    return of_bytes(random, data, others)


def of_bytes(random: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Bits turned, bytes left out, doubled or added, a file cut off, or two that are one."""
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(len(found) + 1)
        end = min(len(found), at + random.choice((1, 2, 8, 64)))
        way = random.randrange(8)
        if way < 2 and found:
            found[at % len(found)] ^= 1 << random.randrange(8)
        elif way == 2:
            del found[at:end]
        elif way == 3:
            found[at:at] = found[at:end] * random.choice((1, 2, 100))
        elif way == 4:
            found[at:end] = random.randbytes(end - at)
        elif way == 5:
            found[at:at] = random.choice((b"\xef\xbb\xbf", b"\xff", b"\0", b"{", b"}", b"[", b",", b'"', b"\\", b" " * 1000))
        elif way == 6:
            del found[at:]
        elif others:
            other = others[random.randrange(len(others))]
            found[at:] = other[random.randrange(len(other) + 1) :]
    return bytes(found)


def _edited(random: Random, value: object, depth: int) -> object:
    """A value that is another one in one place."""
    if isinstance(value, dict) and value and random.random() < 0.92:
        key = random.choice(list(value))
        way = random.randrange(16)
        if way < 9:
            return {**value, key: _edited(random, value[key], depth + 1)}
        if way == 9:
            return {other: found for other, found in value.items() if other is not key}
        if way == 10:
            return {(_name(random) if other is key else other): found for other, found in value.items()}
        if way == 11:
            return {**value, _Twin(key): value[key] if random.random() < 0.5 else _hostile(random, value[key])}
        if way == 12:
            return {**value, _name(random): _hostile(random, value[key])}
        if way == 13:
            return {**value, _name(random): value[key]}
        if way == 14:
            return {**value, key: value[random.choice(list(value))]}
        return dict(random.sample(list(value.items()), len(value)))
    if isinstance(value, list) and value and random.random() < 0.8:
        at = random.randrange(len(value))
        way = random.randrange(8)
        if way < 5:
            return [*value[:at], _edited(random, value[at], depth + 1), *value[at + 1 :]]
        if way == 5:
            return value[:at] + value[at + 1 :]
        if way == 6:
            return [*value[:at], _hostile(random, value[at]), *value[at:]]
        return random.sample(value, len(value))
    return _hostile(random, value)


def _name(random: Random) -> str:
    return random.choice(_NAMES if random.random() < 0.6 else _STRINGS)


def _hostile(random: Random, value: object) -> object:
    """Any JSON, or something near the value."""
    way = random.randrange(12)
    if way < 3 and type(value) in (int, float):
        number = float(value) if abs(value) < 2**60 else 0.0
        return random.choice((value + 1, value - 1, -value, value * 2, number, str(value)[:40]))
    if way == 3:
        return _PLACE
    if way == 4:
        return {_name(random): _hostile(random, value) for _ in range(random.choice((0, 1, 2)))}
    if way == 5:
        return [_hostile(random, value) for _ in range(random.choice((0, 1, 2, 3)))]
    if way == 6:
        found: object = []
        for _ in range(random.choice((5, 40, 150, 450))):
            found = [found] if random.random() < 0.7 else {"a": found}
        return found
    if way < 9:
        return random.choice(INTEGERS)
    return random.choice(_SCALARS if way == 9 else _STRINGS)


def _gguf_key(random: Random) -> bytes:
    name = random.choice((*_STRINGS, "general.architecture", "general.alignment", "split.count", "qwen3moe.expert_count"))
    data = name.encode("utf-8", "surrogatepass")
    kind = random.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 10, 11, 12, 13, 2**32 - 1))
    return struct.pack("<Q", len(data)) + data + struct.pack("<I", kind) + _gguf_value(random, kind, 0)


def _gguf_value(random: Random, kind: int, depth: int) -> bytes:
    size = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 10: 8, 11: 8, 12: 8}.get(kind)
    if size:
        return (random.choice(INTEGERS) % 256**size).to_bytes(size, "little")
    if kind == 7:
        return bytes([random.choice((0, 1, 1, 2, 255))])
    if kind == 8:
        data = random.choice(_STRINGS).encode("utf-8", "surrogatepass")
        return struct.pack("<Q", random.choice((len(data), len(data), len(data), 2**63, 2**32))) + data
    if kind != 9 or depth > 6:
        return b""
    inner = random.choice((0, 4, 6, 7, 8, 8, 9, 9, 9, 12, 99))
    count = random.choice((0, 1, 2, 3, 20))
    items = b"".join(_gguf_value(random, inner, depth + 1) for _ in range(count))
    return struct.pack("<IQ", inner, random.choice((count, count, count, count, *INTEGERS)) % 2**64) + items
