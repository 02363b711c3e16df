"""Metadata of GGUF files with small vocabularies, trained here, and texts of many scripts."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from ktmoe.transformers.gguf.tokenizer import write_tokenizer

#: Some repeat, so that there are tokens that lie across the pieces of every way of splitting.
TEXTS = (
    "Hello, World! I'M sure we'll say: it's 12345 or 3.14, isn't IT?  THEY'VE camelCase HTTPServer snake_case",
    "for (i = 0; i != 10; ++i) {\n\t\treturn a[i] == b;\n}\n\n\n  // ===\r\n\r\n/* x */ #!/bin/sh +=\n/y",
    "naïve café Straße ΑΒΓ αβγ Привет МИР ПРИвет ǅ ﬁ Ⅷ ² ½ \u017f's '\u017f e\u0301 e\u0301te\u0301",
    "नमस्ते दुनिया १२३ สวัสดีชาวโลก مرحبا بالعالم ٣٤٥ שלום עולם 안녕하세요 각",
    "你好世界 漢字 字 こんにちは カタカナ 。\uff01「」 \uff46\uff55\uff4c\uff4c\u3000\uff57",
    "🚀 👨\u200d👩\u200d👧 🇩🇪 😶\u200d🌫️ ✅ \U0001f9ff \U0010ffff \ue000 \ufeff",
    "   leading, trailing   \t \t\n \n\n\x0b\x0c \u00a0\u2003\u2028\u3000 \x85 \0\x01\x7f end    ",
    "<|user|> <|other|> <tool> [EMPTY_3] <unk> </s> <0x41> ▁ Ġ",
)
SPLIT = ("a", " ", "  ", "\n", "'s", "1234567", "\0", " \n \n")


@functools.cache
def trained() -> tuple[list[str], list[str]]:
    """(tokens, merges) of bytes, merged also across words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False, min_frequency=2)
    halves = [text[at : at + 12] for text in TEXTS for at in range(0, len(text), 4)]
    tokenizer.train_from_iterator([*TEXTS, *halves], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [" ".join(pair) for pair in model["merges"]]


def byte_level(pre: str = "gpt-2", **more: object) -> dict[str, object]:
    """A vocabulary of tokenizer.ggml.model gpt2. more: keys behind tokenizer.ggml, over those that are here.

    <|user|> is a control token, <tool> a user-defined one, <|other|> an unused one.
    """
    tokens, merges = trained()
    tokens = ["<|endoftext|>", *tokens, "<|user|>", "<tool>", "<|other|>"]
    own = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3, *[1] * (len(tokens) - 4), 3, 4, 5],
        "merges": merges,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return _metadata(own | more)


def sentence_piece(**more: object) -> dict[str, object]:
    """A vocabulary of tokenizer.ggml.model llama: pieces of the texts, whose scores differ. Two characters are no tokens."""
    texts = [text.replace(" ", "▁") for text in TEXTS[:5]]
    pieces = dict.fromkeys(text[at : at + n] for text in texts for n in (2, 3, 4) for at in range(0, len(text) - n, 2))
    normal = [text for text in dict.fromkeys([*pieces, *"".join(texts)]) if not set(text) & set("你م")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *normal, "<|user|>", "<tool>", "  "]
    own = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(normal), 3, 4, 4],
        "scores": [0.0] * 259 + [-float(place * 7919 % len(normal)) for place in range(len(normal))] + [0.0] * 3,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return _metadata(own | more)


def _metadata(own: dict[str, object]) -> dict[str, object]:
    return {"general.architecture": "qwen3moe"} | {f"tokenizer.ggml.{key}": value for key, value in own.items()}


def load(metadata: dict[str, object], folder: Path, **options):
    """What transformers makes of it. options: of AutoTokenizer."""
    folder.mkdir(exist_ok=True)
    write_tokenizer(metadata, folder, "m.gguf")
    return AutoTokenizer.from_pretrained(folder, **options)
