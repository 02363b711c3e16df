"""Environment variables: read when they are needed, and strictly."""

from __future__ import annotations

import os
from typing import TypeVar

from ktmoe.errors import InputError

D = TypeVar("D", int, None)

#: What a key may be, in words.
KEY = "1 to 1000 characters of ASCII, without spaces"


def _whole_number(name: str, default: D, low: int, high: int) -> int | D:
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and low <= int(text) <= high):
        raise InputError(f"environment variable {name} must be a whole number from {low} to {high}, found {text!r}")
    return int(text)


def backend_override() -> str | None:
    """KTMOE_BACKEND: the backend that "auto" means."""
    return os.environ.get("KTMOE_BACKEND")


def num_threads() -> int | None:
    """KTMOE_NUM_THREADS: threads of the pool, the caller's included."""
    return _whole_number("KTMOE_NUM_THREADS", None, 1, 4096)


def spin_us() -> int:
    """KTMOE_SPIN_US: microseconds for which an idle worker spins before it sleeps."""
    return _whole_number("KTMOE_SPIN_US", 100, 0, 1_000_000)


def scratch_bytes() -> int:
    """KTMOE_SCRATCH_MB: bound of the scratch memory that all layers share, for forward calls and again for backward calls.
    Larger batches go in chunks."""
    return _whole_number("KTMOE_SCRATCH_MB", 256, 1, 2**20) << 20


def api_key() -> str | None:
    """KTMOE_API_KEY: what clients of `ktmoe serve` must know. It is not shown in messages."""
    text = os.environ.get("KTMOE_API_KEY")
    if text is not None and not is_key(text):
        raise InputError(f"environment variable KTMOE_API_KEY must be {KEY}")
    return text


def is_key(text: str) -> bool:
    """Whether it can be sent in a header of HTTP as it is."""
    return 0 < len(text) <= 1000 and all("!" <= character <= "~" for character in text)


def tracebacks() -> bool:
    """KTMOE_TRACEBACK: whether a command that fails shows where, before its one line."""
    return bool(_whole_number("KTMOE_TRACEBACK", 0, 0, 1))
