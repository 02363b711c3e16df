"""The tokenizer of a GGUF file: its ids, the tokens it adds and finds, and how it decodes."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import pytest
from gguf_vocabularies import SPLIT, TEXTS, byte_level, load, sentence_piece
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, CohereTokenizer, GPT2Tokenizer, GPTNeoXTokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from ktmoe.transformers.gguf.pre_tokenizers import PRE_TOKENIZERS

TOKENS = byte_level()["tokenizer.ggml.tokens"]
#: A text, and how each row of the table splits it, by what the models' own regular expressions say.
TEXT = "I'M we'll 12345 aBC สวัสดี字 好\n\n  x +=\n/y"
PIECES = {
    "I|'|M| we|'|ll| |123|45| aBC| สว|ั|สด|ี|字| 好|\n\n | x| |+=|\n|/|y": "default falcon",
    "I|'|M| we|'ll| 12345| aBC| สว|ั|สด|ี|字| 好|\n\n | x| +=|\n|/|y": (
        "gpt-2 phi-2 gigachat mellum exaone4 trillion jais mpt olmo granite-docling"
    ),
    "I|'|M| we|'ll| |1|2|3|4|5| aBC| สว|ั|สด|ี|字| 好|\n\n | x| +=|\n|/|y": (
        "starcoder refact smollm codeshell exaone minerva-7b mellum2 command-r"
    ),
    "I|'M| we|'ll| |123|45| aBC| สว|ัสด|ี字| 好|\n\n| | x| +=\n|/y": (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe chatglm-bpe glm4 glm5"
    ),
    "I|'M| we|'ll| |1|2|3|4|5| aBC| สว|ัสด|ี字| 好|\n\n| | x| +=\n|/y": (
        "qwen2 megrez deepseek-r1-qwen f2llmv2 hunyuan stablelm2 grok-2 solar-open kormo bailingmoe bailingmoe2 llada-moe"
    ),
    "I|'M| we|'ll| |1|2|3|4|5| aBC| สวัสดี字| 好|\n\n| | x| +=\n|/y": "qwen35",
    "I'M| we'll| |123|45| a|BC| สวัสดี字| 好|\n\n| | x| +=\n/|y": "gpt-4o llama4 kanana2 minimax-m2",
    "I|'M| we|'ll| |1|2|3|4|5| a|BC| สวัสดี字| 好|\n\n| | x| +=\n/|y": "tekken",
    "I'M| we'll| |123|45| a|BC| สวัสดี|字| |好|\n\n| | x| +=\n|/y": "kimi-k2",
    "I|'|M| we|'|ll| |12345| aBC| |สวัสดี字| |好|\n|\n| | x| +=|\n|/|y": "deepseek-llm",
    "I|'|M| we|'|ll| |1|2|3|4|5| aBC| |สว|ั|สด|ี|字| |好|\n|\n| | x| +=|\n|/|y": "deepseek-coder",
    "I|'M| we|'ll| |123|45| aBC| สวัสดี|字| |好|\n\n| | x| +=\n|/y": "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    "I|'M| we|'ll| |1|2|3|4|5| aBC| สว|ัสด|ี字| 好|\n\n| | x| +=|\n|/y": "seed-coder",
}
#: pre -> transformers' own tokenizer of the model's, from a vocabulary and merges.
OWN = {
    "gpt-2": GPT2Tokenizer,
    "qwen2": Qwen2Tokenizer,
    "qwen35": Qwen3_5Tokenizer,
    "olmo": GPTNeoXTokenizer,
    "command-r": CohereTokenizer,
}
#: What config.json may say: a model of each architecture of the table.
MODEL_TYPES = (
    *("gpt_oss", "qwen2_moe", "qwen3_moe", "glm4_moe", "minimax_m2", "deepseek_v2", "deepseek_v3", "qwen3_next", "mixtral"),
    *("olmoe", "granitemoe", "dots1"),
)


@pytest.mark.smoke
def test_pieces():
    assert sorted(PRE_TOKENIZERS) == sorted(name for names in PIECES.values() for name in names.split())
    for pieces, names in PIECES.items():
        for name in names.split():
            empty = {"type": "BPE", "vocab": {}, "merges": []}
            steps = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[name].steps}
            splitter = Tokenizer.from_str(json.dumps({"version": "1.0", "model": empty, "pre_tokenizer": steps})).pre_tokenizer
            found = [TEXT[first:last] for _, (first, last) in splitter.pre_tokenize_str(TEXT)]
            assert found == pieces.split("|"), name


@pytest.mark.smoke("one")
@pytest.mark.parametrize("pre", OWN)
def test_ids_of_the_models_own_tokenizer(tmp_path, pre):
    """On texts that are composed: the own tokenizers of some models compose them, llama.cpp does not."""
    metadata = byte_level(pre)
    ours = load(metadata, tmp_path, split_special_tokens=True)
    vocab = {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs = OWN[pre](vocab=vocab, merges=merges, add_bos_token=False, bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    theirs.backend_tokenizer.normalizer = None
    for text in [*TEXTS, *SPLIT, *mixed(200)]:
        text = text.replace("<", "(")  # they have other special tokens
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), text


def test_a_regular_expression_of_transformers():
    """That of Llama 3, and of most that have followed it."""
    own = TikTokenConverter(extra_special_tokens=[]).pattern
    assert PRE_TOKENIZERS["llama-bpe"].steps[0]["pattern"]["Regex"] == own


def mixed(count: int) -> list[str]:
    """Parts of the texts, in any order."""
    rng = random.Random(count)
    pieces = [text[at : at + rng.randrange(1, 6)] for text in TEXTS for at in range(0, len(text), 3)]
    return ["".join(rng.choices(pieces, k=rng.randrange(1, 12))) for _ in range(count)]


@pytest.mark.smoke
def test_sentence_piece_merges_the_best_pair_first(tmp_path):
    """As SentencePiece's paper has it, without a list of merges: the best token that neighbours make, the leftmost of these."""
    metadata = sentence_piece()
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    ids = {token: id for id, token in enumerate(tokens)}
    scores = {token: metadata["tokenizer.ggml.scores"][id] for token, id in ids.items() if types[id] == 1}

    def expected(text: str) -> list[int]:
        symbols = list("▁" + text.replace(" ", "▁"))
        while True:
            made = [(-scores[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
            if not made:
                break
            at = min(made)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        found = []
        for symbol in symbols:
            found += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        return found

    tokenizer = load(metadata, tmp_path, split_special_tokens=True)
    for text in [*TEXTS, *SPLIT, *mixed(100)]:
        text = re.sub(" +", " ", text.replace("<tool>", ""))  # both are user-defined, tool and two spaces
        assert tokenizer.encode(text, add_special_tokens=False) == expected(text), text
        assert tokenizer.encode(text) == [1, *expected(text)]
        assert tokenizer.decode(expected(text)) == text.replace("▁", " ")  # which it takes for a space
    # a space before each stretch of text, as llama.cpp adds it
    assert tokenizer.encode("x<tool>x") == [1, *expected("x"), ids["<tool>"], *expected("x")]
    assert tokenizer.encode("x  x") == [1, *expected("x"), ids["  "], *expected("x")]
    without = load(sentence_piece(add_space_prefix=False), tmp_path / "without")
    assert without.encode("x ", add_special_tokens=False) == [ids["x"], ids["▁"]]


@pytest.mark.smoke
def test_special_tokens(tmp_path):
    """A user-defined token is found in any text, a control token where special ones are, an unused one nowhere."""
    metadata = byte_level()
    tokens = metadata["tokenizer.ggml.tokens"]
    end, user, tool, other = (tokens.index(token) for token in ("<|endoftext|>", "<|user|>", "<tool>", "<|other|>"))
    text = "a<|user|><tool> <|other|><|endoftext|>"
    parsed, not_parsed = load(metadata, tmp_path), load(metadata, tmp_path, split_special_tokens=True)
    found = parsed.encode(text)
    assert [id for id in found if id in (end, user, tool, other)] == [user, tool, end]
    assert [id for id in not_parsed.encode(text) if id in (end, user, tool, other)] == [tool]
    assert parsed.decode(found) == not_parsed.decode(not_parsed.encode(text)) == text
    assert parsed.decode(found, skip_special_tokens=True) == "a<tool> <|other|>"
    assert (parsed.bos_token, parsed.eos_token, parsed.pad_token, len(parsed)) == (tokens[0], tokens[0], None, len(tokens))
    for text in [*TEXTS, *SPLIT]:
        assert not_parsed.decode(not_parsed.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "more", "first", "last"),
    [
        ("gpt-2", {}, [], []),
        ("llama-bpe", {}, [7], []),
        ("tekken", {}, [7], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [7], [8]),
        ("gpt-2", {"add_eos_token": True}, [], [8]),
    ],
)
def test_first_and_last_token(tmp_path, pre, more, first, last):
    tokenizer = load(byte_level(pre, bos_token_id=7, eos_token_id=8, **more), tmp_path)
    ids = tokenizer.encode("x", add_special_tokens=False)
    assert len(ids) == 1
    assert tokenizer.encode("x") == [*first, *ids, *last]
    assert tokenizer("x", "x").input_ids == 2 * [*first, *ids, *last]
    assert tokenizer.encode("") == [*first, *last]


def test_a_piece_that_is_a_token(tmp_path):
    """It is not merged where the model says so. No merges make the token that is added here."""
    more = {"tokens": [*byte_level()["tokenizer.ggml.tokens"], "zqzqz"]}
    more["token_type"] = [*byte_level()["tokenizer.ggml.token_type"], 1]
    for pre, whole in (("llama-bpe", True), ("tekken", True), ("glm4", True), ("dbrx", False), ("qwen2", False)):
        tokens = load(byte_level(pre, **more), tmp_path / pre).tokenize("zqzqz")
        assert (tokens == ["zqzqz"]) == whole, pre


def test_what_llama_cpp_knows_by_texts(tmp_path):
    """A token that ends an answer is a control token, also where the file has it as a normal one; so is a user-defined </s>."""
    tokens, types = (byte_level()[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    for kind, special in ((1, False), (4, True)):
        more = {"tokens": [*tokens, "<|im_end|>", "</s>", ""], "token_type": [*types, 1, kind, 1]}
        tokenizer = load(byte_level(**more), tmp_path / str(kind))
        added = tokenizer.added_tokens_decoder
        assert added[len(tokens)].special
        assert (len(tokens) + 1 in added) == special
        assert tokenizer.convert_ids_to_tokens(len(tokens) + 2) == f"[EMPTY_{len(tokens) + 2}]"


@pytest.mark.smoke("one")
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_beside_any_config(tmp_path, model_type):
    """transformers chooses a class of tokenizers by the model's type, and some build their own: not here."""
    expected = load(byte_level("kimi-k2"), tmp_path / "alone").encode(TEXT)
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    tokenizer = load(byte_level("kimi-k2"), tmp_path)
    assert type(tokenizer).__name__ == "TokenizersBackend"
    assert tokenizer.encode(TEXT) == expected
    assert AutoTokenizer.from_pretrained(Path(tmp_path)).backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_a_normal_token_stays_one(tmp_path):
    """Also where the file says that texts begin or end with it."""
    tokenizer = load(byte_level(bos_token_id=TOKENS.index("o"), eos_token_id=TOKENS.index("e"), add_bos_token=True), tmp_path)
    usual = load(byte_level(), tmp_path / "usual")
    assert tokenizer.encode("Hello") == [TOKENS.index("o"), *usual.encode("Hello")]
    assert tokenizer.decode(tokenizer.encode("Hello"), skip_special_tokens=True) == "oHello"
    assert list(tokenizer.added_tokens_decoder) == list(usual.added_tokens_decoder)


def test_the_first_of_equal_merges_counts(tmp_path):
    """As in llama.cpp; the library takes the last."""
    tokens = ["a", "b", "c", "ab", "bc"]
    more = {"tokens": tokens, "token_type": [1] * 5, "merges": ["a b", "b c", "a b"], "bos_token_id": 0, "eos_token_id": 0}
    assert load(byte_level(**more), tmp_path).tokenize("abc") == ["ab", "c"]


def test_unknown_and_undefined_tokens(tmp_path):
    """<unk> is found where special tokens are. A token of type 0 is a normal one."""
    metadata = sentence_piece()
    types = metadata["tokenizer.ggml.token_type"]
    more = sentence_piece(token_type=[0 if kind == 1 else kind for kind in types])
    parsed = load(metadata, tmp_path / "parsed")
    not_parsed = load(more, tmp_path / "not", split_special_tokens=True)
    assert 0 in parsed.encode("a<unk>")
    assert 0 not in not_parsed.encode("a<unk>")
    assert not_parsed.encode(TEXTS[0]) == parsed.encode(TEXTS[0])
