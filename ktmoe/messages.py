"""Text for messages: what a hostile file or a caller gave is shown in bounded work, escaped and cut."""

from __future__ import annotations

import itertools
import reprlib
from typing import Any

#: Longest message, and longest value in one, in characters.
MESSAGE_LIMIT, VALUE_LIMIT = 1500, 200


class _Brief(reprlib.Repr):
    """repr() of the first few items of the first few levels: bounded work, whatever JSON a value came from."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict = 3, 4
        self.maxstring = self.maxother = VALUE_LIMIT

    repr_bytes = repr_bytearray = reprlib.Repr.repr_str

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write very long ones in decimal
        return repr(x) if x.bit_length() <= 3 * VALUE_LIMIT else f"an integer of {x.bit_length()} bits"

    def repr_dict(self, x: dict[str, Any], level: int) -> str:
        if level <= 0 and x:
            return "{...}"
        first = itertools.islice(x.items(), self.maxdict)  # reprlib's own sorts all keys before it cuts
        items = [f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}" for key, value in first]
        return "{" + ", ".join(items + ["..."] * (len(x) > self.maxdict)) + "}"


_brief = _Brief()


def show(value: object) -> str:
    """repr() of a value, at most VALUE_LIMIT characters of it. The work is bounded for all that JSON can hold."""
    return _cut(_brief.repr(value), VALUE_LIMIT)


def printable(text: str) -> str:
    """A message that any terminal and log takes: cut in its middle, control characters and lone surrogates escaped."""
    text = _cut(text, MESSAGE_LIMIT)
    return text if text.isprintable() else _cut("".join(map(_escaped, text)), MESSAGE_LIMIT)


def install(extra: str) -> str:
    """How to install one of pyproject.toml's extras."""
    return f"pip install 'ktmoe[{extra}]', or '.[{extra}]' in a clone of ktmoe"


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = (most - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
