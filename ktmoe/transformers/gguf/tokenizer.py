"""The tokenizer of a GGUF file, as the files that transformers reads: AutoTokenizer gives the ids that llama.cpp does."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ktmoe.errors import CheckpointError
from ktmoe.messages import show
from ktmoe.transformers.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from ktmoe.transformers.gguf.vocabulary import (
    LLAMA,
    MERGES_LIMIT,
    NORMAL,
    USER_DEFINED,
    Vocabulary,
    flag,
    numbers,
    read_vocabulary,
    texts,
)

_TEMPLATE = "tokenizer.chat_template"
#: Characters of a chat template; the longest known have some ten thousand.
TEMPLATE_LIMIT = 1 << 20
_TEMPLATE_NAME = re.compile("[A-Za-z0-9_-]{1,100}")
_SPACE = "▁"  # SentencePiece's
#: What making merges of scores may cost: the sum of the squares of the tokens' lengths. Known ones have 3 million.
_SQUARES_LIMIT = 1 << 28


def write_tokenizer(metadata: Mapping[str, object], folder: Path, name: str) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat templates, where the file has any.

    metadata: of read_metadata(). folder: exists. name: the file, for messages. encode() of the tokenizer has the ids of
    llama_tokenize(), with add_special_tokens as add_special, and split_special_tokens as the opposite of parse_special.
    Raises CheckpointError for a tokenizer that is not read, and for metadata that no tokenizer has; nothing is written then.
    """
    vocabulary = read_vocabulary(metadata, name)
    templates = _templates(metadata, name)
    added = {id: _added(vocabulary, id) for id in vocabulary.added()}
    parts = _sentence_piece(metadata, vocabulary) if vocabulary.model == LLAMA else _byte_level(metadata, vocabulary)
    add_bos = parts.pop("add_bos")
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id, **token} for id, token in added.items()],
        **parts,
        "post_processor": _post_processor(metadata, vocabulary, add_bos),
    }
    config = {
        "tokenizer_class": "TokenizersBackend",
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": added,
        **{what: vocabulary.tokens[id] for what, id in vocabulary.special.items()},
    }
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if type(length) is int and length > 0:
        config["model_max_length"] = length
    for file, text in templates.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _byte_level(metadata: Mapping[str, object], vocabulary: Vocabulary) -> dict:
    """The parts of a tokenizer.json that merges bytes as GPT-2 does."""
    row = _pre_tokenizer(metadata, vocabulary.name)
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": row.steps},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": _bpe(vocabulary, _merges(metadata, vocabulary), ignore_merges=row.ignore_merges),
        "add_bos": row.add_bos,
    }


def _sentence_piece(metadata: Mapping[str, object], vocabulary: Vocabulary) -> dict:
    """The parts of a tokenizer.json that merges as SentencePiece does: whole texts, and bytes of what is no token."""
    prefix = flag(metadata, "add_space_prefix", True, vocabulary.name)
    missing = next((byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary.ids), None)
    if missing is not None:
        raise CheckpointError(f"{vocabulary.name}: tokenizer.ggml.tokens: expected <0x{missing:02X}>, found no such token")
    if "unk_token" not in vocabulary.special:
        raise CheckpointError(f"{vocabulary.name}: tokenizer.ggml.unknown_token_id: expected an id, found none")
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    before: list[dict] = []
    if prefix:
        before.append({"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocabulary.tokens[vocabulary.special["unk_token"]]
    options = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, replaced]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocabulary, _merges_of_scores(metadata, vocabulary), **options),
        "add_bos": True,
    }


def _pre_tokenizer(metadata: Mapping[str, object], name: str) -> PreTokenizer:
    if "tokenizer.ggml.pre" not in metadata:
        warnings.warn(
            f"{name}: no tokenizer.ggml.pre, as in files of before May of 2024: text is split as llama.cpp's default does it, "
            "which may not be the model's way",
            RuntimeWarning,
            stacklevel=4,
        )
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise CheckpointError(f"{name}: tokenizer.ggml.pre: expected one of {', '.join(PRE_TOKENIZERS)}, found {show(pre)}")
    return PRE_TOKENIZERS[pre]


def _bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]], **options: object) -> dict:
    usual = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    usual |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **usual, **options, "vocab": vocabulary.ids, "merges": merges}


def _merges(metadata: Mapping[str, object], vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The file's pairs of tokens, in order; the first of equal ones counts."""
    key, ids, name = "tokenizer.ggml.merges", vocabulary.ids, vocabulary.name
    found: dict[tuple[str, str], None] = {}
    merges = texts(metadata, key, name, MERGES_LIMIT)
    if not merges:
        raise CheckpointError(f"{name}: {key}: expected a list of strings, found none")
    for merge in merges:
        space = merge.find(" ", 1)  # a token may begin with one
        left, right = merge[:space], merge[space + 1 :]
        if space < 0 or left not in ids or right not in ids or left + right not in ids:
            raise CheckpointError(f"{name}: {key}: expected two tokens that make one, found {show(merge)}")
        found[left, right] = None
    return list(found)


def _merges_of_scores(metadata: Mapping[str, object], vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """All pairs of tokens that make one, the best first, as SentencePiece merges them."""
    key, tokens, ids = "tokenizer.ggml.scores", vocabulary.tokens, vocabulary.ids
    scores = numbers(metadata, key, vocabulary.name, len(tokens))
    if scores is None or np.isnan(scores).any():
        found = "none" if scores is None else "nan"
        raise CheckpointError(f"{vocabulary.name}: {key}: expected numbers, by which tokens are merged, found {found}")
    made = [id for id, kind in enumerate(vocabulary.types) if kind == NORMAL and len(tokens[id]) > 1]
    squares = sum(len(tokens[id]) ** 2 for id in made)
    if squares > _SQUARES_LIMIT:
        longest = max(len(tokens[id]) for id in made)
        raise CheckpointError(
            f"{vocabulary.name}: tokenizer.ggml.tokens: expected shorter ones, found {len(made)} of up to {longest} characters"
        )
    merges = []
    for id in sorted(made, key=lambda id: -scores[id]):
        token = tokens[id]
        for at in range(1, len(token)):
            if token[:at] in ids and token[at:] in ids:
                merges.append((token[:at], token[at:]))
    return merges


def _added(vocabulary: Vocabulary, id: int) -> dict:
    """A token that is found in text before it is split; one that is not special is found also where special ones are not."""
    special = vocabulary.types[id] != USER_DEFINED
    return {
        "content": vocabulary.tokens[id],
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _post_processor(metadata: Mapping[str, object], vocabulary: Vocabulary, add_bos: bool) -> dict | None:
    """What adds the first and the last token."""
    parts: dict[str, list[dict]] = {}
    special = {}
    for what, default in (("bos_token", add_bos), ("eos_token", False)):
        parts[what] = []
        if flag(metadata, f"add_{what}", default, vocabulary.name):
            if what not in vocabulary.special:
                raise CheckpointError(
                    f"{vocabulary.name}: tokenizer.ggml.{what}_id: expected an id, as the token is added to texts, found none"
                )
            id = vocabulary.special[what]
            token = vocabulary.tokens[id]
            special[token] = {"id": token, "ids": [id], "tokens": [token]}
            parts[what] = [{"SpecialToken": {"id": token, "type_id": 0}}]
    if not special:
        return None
    first, second = ([*parts["bos_token"], {"Sequence": {"id": id, "type_id": 0}}, *parts["eos_token"]] for id in "AB")
    return {"type": "TemplateProcessing", "single": first, "pair": first + second, "special_tokens": special}


def _templates(metadata: Mapping[str, object], name: str) -> dict[str, str]:
    """The chat templates' texts, by the names of the files that transformers takes them from."""
    found = {}
    for key, text in metadata.items():
        if key != _TEMPLATE and not key.startswith(f"{_TEMPLATE}."):
            continue
        if not isinstance(text, str):
            raise CheckpointError(f"{name}: {show(key)}: expected a string, found {show(text)}")
        if len(text) > TEMPLATE_LIMIT:
            raise CheckpointError(f"{name}: {show(key)}: expected at most {TEMPLATE_LIMIT} characters, found {len(text)}")
        if key == _TEMPLATE:
            found["chat_template.jinja"] = text
            continue
        which = key.removeprefix(f"{_TEMPLATE}.")
        if not _TEMPLATE_NAME.fullmatch(which):  # it is a file's name
            raise CheckpointError(f"{name}: {show(key)}: expected a template's name of letters and digits, found {show(which)}")
        found[f"additional_chat_templates/{which}.jinja"] = text
    return found
