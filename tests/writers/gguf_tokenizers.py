"""Byte-level BPE tokenizers, trained here, with the pre-tokenizers of published ones, and texts to try them on."""

from __future__ import annotations

import json
from pathlib import Path

#: Tokens that training makes; added tokens follow.
TRAINED = 600
SPECIAL = (
    "<|endoftext|>",
    "<|begin_of_text|>",
    "<|im_start|>",
    "<|im_end|>",
    "[gMASK]",
    "<sop>",
    "<|user|>",
    "<|observation|>",
)
#: Added tokens that are no special ones.
OTHER = ("<think>", "</think>")
#: Stands for no value of `tokenizer.ggml.pre`: a tokenizer.model of sentencepiece.
SENTENCEPIECE = "sentencepiece"
#: Those of `tokenizer.ggml.pre` whose texts begin with SPECIAL[1].
BEGINS = ("llama-bpe", "deepseek-llm", "deepseek-v3")

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and 3 33 333 3333 dogs don't care; they've seen IT'S worse.",
    "Über die Straße ging ein Mädchen; l'été où naïveté coûte 1.234,56 €.\n\n\tEinrückung  zwei   drei    vier\r\nEnde \n",
    "Привет, мир! Съешь ещё этих мягких французских булок да выпей чаю. Καλημέρα κόσμε, τι κάνεις;",
    "我想在apple工作1314151天\uff5e 今天天气很好。東京へ行きました、カタカナも。안녕하세요 세계, 반갑습니다.",
    "مرحبا بالعالم كيف حالك؟ שלום עולם नमस्ते दुनिया สวัสดีชาวโลก កាន់តែពិសេសអាច Xin chào thế giới",
    "🚀 (normal) 😶‍🌫️ (multiple emojis concatenated) ✅ 🦙🦙 e\u0301 n\u0303 \u1e9b\u0323 ﬁ ½ ²",
    "def f(x):\n    return x**2 + 1  # comment\n\nfor i in range(10):\n\tprint(f(i), '\\n', sep=\"\")\n",
    "I'VE 'told HE'S there, 'RE you sure? WE'LL see. CamelCase HTMLParser iPhone ﷺ Ǆungla \u02bcn",
    "------======= ......!!!!!!?????? \u00a0\u2003\u3000 a\u200bb \x00\x7f \ufffd",
)
#: With added tokens in it.
CHATS = (
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nHi <|endoftext|>",
    "[gMASK]<sop><|user|> x <|observation|><think>no</think>",
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
#: tokenizer.ggml.pre -> regular expressions, one after the other, and whether digits are split, as published.
#: No expression: GPT-2's own.
SPLITS: dict[str, tuple[tuple[str, ...], bool]] = {
    "qwen2": ((_QWEN2,), False),
    "gpt-4o": ((_O200K,), False),
    "minimax-m2": ((_O200K,), False),
    "glm4": ((_QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|"),), False),
    "llama-bpe": ((_QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|"),), False),
    "deepseek-llm": (
        (
            "[\r\n]",
            rf"\s?[{_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        ),
        True,
    ),
    "deepseek-v3": (
        (
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
            r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        False,
    ),
    "olmo": ((), False),
    "refact": ((), True),
}


def write(folder: Path, pre: str) -> None:
    """tokenizer.json or tokenizer.model, tokenizer_config.json and chat_template.jinja, as they are published."""
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    if pre == SENTENCEPIECE:
        _write_sentencepiece(folder)
    else:
        _write_bpe(folder, pre)


def _write_sentencepiece(folder: Path) -> None:
    """As Mixtral's: BPE with a token for each byte."""
    import io

    from sentencepiece import SentencePieceTrainer

    made = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in TEXTS for line in text.splitlines()] * 2),
        model_writer=made,
        model_type="bpe",
        vocab_size=TRAINED,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(made.getvalue())
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "legacy": True,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _write_bpe(folder: Path, pre: str) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    splits, digits = SPLITS[pre]
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    parts = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
    parts += [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    parts += [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=TRAINED, initial_alphabet=alphabet, show_progress=False, min_frequency=1)
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    if tokenizer.get_vocab_size() != TRAINED:
        raise ValueError(f"{pre}: expected {TRAINED} tokens, found {tokenizer.get_vocab_size()}")
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens(list(OTHER))
    begins = pre in BEGINS
    if begins:
        begin = (SPECIAL[1], tokenizer.token_to_id(SPECIAL[1]))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{SPECIAL[1]} $A", special_tokens=[begin])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
    }
    config |= {"bos_token": SPECIAL[1], "add_bos_token": True} if begins else {"bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
