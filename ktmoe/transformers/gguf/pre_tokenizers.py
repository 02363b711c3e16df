"""How text is split before it is merged: a row for each value of tokenizer.ggml.pre.

A row has the regular expressions of the models' own tokenizer.json, in the form of the `tokenizers` library. llama.cpp adapts
some of them to its own engine, so that its ids may differ for rare characters. No row normalizes text: llama.cpp does not,
though the own tokenizers of some models compose it (NFC). A value that is not here is refused. What llama.cpp makes of each
stands in llama_vocab::impl::load() and in llm_tokenizer_bpe.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PreTokenizer:
    """How a vocabulary of byte-level BPE takes text.

    steps: of a pre-tokenizer, as tokenizer.json has them. ignore_merges: a piece that is a token is not merged. add_bos: what
    holds where the file does not say.
    """

    steps: list[dict] = field(repr=False)
    ignore_merges: bool = False
    add_bos: bool = False


def _split(pattern: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _bytes(*, use_regex: bool = False) -> dict:
    """The last step: bytes become printable characters. use_regex: the text is split as GPT-2's, too."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _splits(*patterns: str) -> list[dict]:
    return [*map(_split, patterns), _bytes()]


_DIGITS = {"type": "Digits", "individual_digits": True}
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA_3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_REST}"
_QWEN_2 = rf"{_WORDS}|\p{{N}}|{_SIGNS}|{_REST}"
_QWEN_35 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}"
#: Words whose capitals stand in front, and words of capitals; of GPT-4o, in which more may follow.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{short}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{short}"
_GPT_4O = (
    _CASED.format(upper=_UPPER, lower=_LOWER, short=f"{_SHORT}?") + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
)
_TEKKEN = _CASED.format(upper=_UPPER, lower=_LOWER, short="") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI = (
    r"[\p{Han}]+|"
    + _CASED.format(upper=_UPPER[:-1] + _NOT_HAN, lower=_LOWER[:-1] + _NOT_HAN, short=f"{_SHORT}?")
    + rf"|\p{{N}}{{1,3}}|{_SIGNS}|{_REST}"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = rf"{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_REST}"
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _REST,
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
#: Letters with case, and signs: deepseek-llm's lists.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)

_GPT_2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_GPT_2 = PreTokenizer([_bytes(use_regex=True)])
_STARCODER = PreTokenizer([_DIGITS, _bytes(use_regex=True)])
_LLAMA = PreTokenizer(_splits(_LLAMA_3), ignore_merges=True, add_bos=True)
_OF_DEEPSEEK_3 = PreTokenizer(_splits(*_DEEPSEEK_3))
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT_2_WORDS, "[0-9][0-9][0-9]")
#: What llama.cpp does for files that name none, which are of before May of 2024.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(_splits(*_DEFAULT)),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "gigachat", "mellum", "exaone4", "trillion", "jais", "mpt", "olmo", "granite-docling"), _GPT_2
    ),
    **dict.fromkeys(("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2", "command-r"), _STARCODER),
    "falcon": PreTokenizer(_splits(*_FALCON)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer(_splits(_LLAMA_3))),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer(_splits(_LLAMA_3), ignore_merges=True)),
    **dict.fromkeys(("qwen2", "megrez", "deepseek-r1-qwen", "f2llmv2"), PreTokenizer(_splits(_QWEN_2))),
    **dict.fromkeys(("hunyuan", "stablelm2", "grok-2", "solar-open", "kormo"), PreTokenizer(_splits(_QWEN_2))),
    "qwen35": PreTokenizer(_splits(_QWEN_35)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), PreTokenizer(_splits(_GPT_4O))),
    "tekken": PreTokenizer(_splits(_TEKKEN), ignore_merges=True, add_bos=True),
    "kimi-k2": PreTokenizer(_splits(_KIMI)),
    "deepseek-llm": PreTokenizer(_splits(*_DEEPSEEK_LLM)),
    "deepseek-coder": PreTokenizer(_splits("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _OF_DEEPSEEK_3),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenizer(_splits(_BAILING))),
    "seed-coder": PreTokenizer(_splits(_SEED)),
}
