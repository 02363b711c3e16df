"""A vocabulary for random models: the 256 bytes, one pair of them, and made-up tokens. No token ends a text."""

from __future__ import annotations

import json
from pathlib import Path

MERGE = ("t", "h")


def tokens(count: int, characters: bool = False) -> list[str]:
    """The bytes as GPT-2 writes them, the pair, and what no text becomes; count of them.

    characters: without the bytes that are no character alone. A server would keep such a token back until its character is
    complete, and random models like to repeat one token.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    names = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + place) for place, byte in enumerate(others)}
    known = [*(name for byte, name in names.items() if byte < 0x80 or not characters), "".join(MERGE)]
    return (known + [f"<unused{number}>" for number in range(len(known), count)])[:count]


def write(folder: Path, count: int) -> None:
    """The files of transformers' tokenizer beside a model's, for a server."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocabulary = {token: place for place, token in enumerate(tokens(count, characters=True))}
    parts = {"normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [list(MERGE)]}
    made = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], **parts, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(made))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
