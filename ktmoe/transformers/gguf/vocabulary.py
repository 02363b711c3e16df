"""The vocabulary that a GGUF file's metadata states, checked: transformers would not say what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ktmoe.errors import CheckpointError
from ktmoe.messages import show
from ktmoe.transformers.gguf.known_tokens import CONTROL_ENDS, CONTROL_TEXTS

#: tokenizer.ggml.model: bytes merged as GPT-2 does, and SentencePiece's BPE, which merges by scores.
GPT_2, LLAMA = "gpt2", "llama"
#: tokenizer.ggml.token_type. Files may have 0, undefined, which stands for a normal one.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
#: The most tokens and merges; the largest known are 262 thousand and 515 thousand.
TOKENS_LIMIT, MERGES_LIMIT = 1 << 20, 1 << 21
#: The most tokens that are looked for in text before it is split, and the characters of all of them.
ADDED_LIMIT, ADDED_CHARACTERS_LIMIT = 1 << 16, 1 << 20
#: What transformers calls the tokens of these keys.
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
#: The ids of a SentencePiece vocabulary that states none.
_LLAMA_IDS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}


@dataclass(frozen=True)
class Vocabulary:
    """model: GPT_2 or LLAMA. tokens: their texts, each once. types: of each. special: ids by transformers' name.

    ids: of the tokens.
    """

    name: str
    model: str
    tokens: list[str]
    types: list[int]
    special: dict[str, int]
    ids: dict[str, int]

    def added(self) -> list[int]:
        """The ids of the tokens that are found in text before it is split. Raises CheckpointError for too many."""
        found = [id for id, kind in enumerate(self.types) if kind in (UNKNOWN, CONTROL, USER_DEFINED)]
        characters = sum(len(self.tokens[id]) for id in found)
        if len(found) > ADDED_LIMIT or characters > ADDED_CHARACTERS_LIMIT:
            raise CheckpointError(
                f"{self.name}: tokenizer.ggml.token_type: expected at most {ADDED_LIMIT} control and user-defined tokens of "
                f"{ADDED_CHARACTERS_LIMIT} characters, found {len(found)} of {characters}"
            )
        return found


def read_vocabulary(metadata: Mapping[str, object], name: str) -> Vocabulary:
    """metadata: of read_metadata(). name: the file, for messages. Raises CheckpointError for what is not possible."""
    model = metadata.get("tokenizer.ggml.model")
    if model not in (GPT_2, LLAMA):
        raise CheckpointError(f"{name}: tokenizer.ggml.model: expected 'gpt2' or 'llama', found {show(model)}")
    tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(texts(metadata, "tokenizer.ggml.tokens", name, TOKENS_LIMIT))]
    if not tokens:
        raise CheckpointError(f"{name}: tokenizer.ggml.tokens: expected a list of strings, found none")
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) < len(tokens):
        twice = next(token for id, token in enumerate(tokens) if ids[token] != id)
        raise CheckpointError(f"{name}: tokenizer.ggml.tokens: expected every token once, found {show(twice)} twice")
    types = _types(metadata, tokens, name)
    special = dict(_LLAMA_IDS) if model == LLAMA else {}
    special = {what: id for what, id in special.items() if id < len(tokens)}
    for what, key in SPECIAL.items():
        if (id := token_id(metadata, key, len(tokens), name)) is not None:
            special[what] = id
    return Vocabulary(name, model, tokens, types, special, ids)


def texts(metadata: Mapping[str, object], key: str, name: str, most: int) -> list[str]:
    """A list of strings; an empty one where the file has none. Raises CheckpointError for another value and for a long one."""
    found = metadata.get(key, [])
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise CheckpointError(f"{name}: {key}: expected a list of strings, found {show(found)}")
    if len(found) > most:
        raise CheckpointError(f"{name}: {key}: expected at most {most} strings, found {len(found)}")
    return found


def numbers(metadata: Mapping[str, object], key: str, name: str, count: int) -> np.ndarray | None:
    """So many numbers, [count]; None where the file has none. Raises CheckpointError for others."""
    if key not in metadata:
        return None
    found = metadata[key]
    if isinstance(found, list):
        found = np.asarray(found) if all(type(value) in (int, float) for value in found) else None
    if not isinstance(found, np.ndarray):
        raise CheckpointError(f"{name}: {key}: expected a list of {count} numbers, found {show(metadata[key])}")
    if len(found) != count:
        raise CheckpointError(f"{name}: {key}: expected {count} numbers, one for each token, found {len(found)}")
    return found


def token_id(metadata: Mapping[str, object], key: str, count: int, name: str) -> int | None:
    """The id that a key of tokenizer.ggml states; None where the file has none. Raises CheckpointError for another value."""
    key = f"tokenizer.ggml.{key}"
    found = metadata.get(key)
    if found is not None and (type(found) is not int or not 0 <= found < count):
        raise CheckpointError(f"{name}: {key}: expected the id of one of {count} tokens, found {show(found)}")
    return found


def flag(metadata: Mapping[str, object], key: str, default: bool, name: str) -> bool:
    """The boolean of a key of tokenizer.ggml. Raises CheckpointError for another value."""
    key = f"tokenizer.ggml.{key}"
    found = metadata.get(key, default)
    if type(found) is not bool:
        raise CheckpointError(f"{name}: {key}: expected a boolean, found {show(found)}")
    return found


def _types(metadata: Mapping[str, object], tokens: Sequence[str], name: str) -> list[int]:
    """The tokens' types, with what llama.cpp knows by their texts."""
    key = "tokenizer.ggml.token_type"
    found = numbers(metadata, key, name, len(tokens))
    if found is None:
        types = [NORMAL] * len(tokens)
    else:
        wrong = (found < 0) | (found > BYTE) | (found != found.astype(np.int64, copy=False))
        if wrong.any():
            id = int(np.argmax(wrong))
            raise CheckpointError(f"{name}: {key}: expected 0 to {BYTE}, found {show(found[id].item())} for token {id}")
        types = [kind or NORMAL for kind in found.astype(np.int64).tolist()]
    for id, token in enumerate(tokens):
        if token in CONTROL_TEXTS or (token in CONTROL_ENDS and types[id] == USER_DEFINED):
            types[id] = CONTROL
    return types
