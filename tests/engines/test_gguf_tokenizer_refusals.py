"""Metadata that makes no tokenizer is refused with a name before anything is written; chat templates; how text is generated."""

from __future__ import annotations

import random

import numpy as np
import pytest
from gguf_vocabularies import byte_level, load, sentence_piece
from jinja2.exceptions import SecurityError
from transformers import AutoTokenizer, GenerationConfig

from ktmoe.errors import CheckpointError
from ktmoe.transformers.gguf import generation, tokenizer, vocabulary
from ktmoe.transformers.gguf.generation import generation_config
from ktmoe.transformers.gguf.tokenizer import write_tokenizer

TOKENS = byte_level()["tokenizer.ggml.tokens"]
COUNT = len(TOKENS)
SCORES = sentence_piece()["tokenizer.ggml.scores"]
PIECES = sentence_piece()["tokenizer.ggml.tokens"]
#: keys behind tokenizer.ggml -> what the message has. None takes a key away.
REFUSED = [
    *(({"model": model}, ["model", "'gpt2' or 'llama'", repr(model)]) for model in ("gemma4", "bert", "t5", "rwkv", "none", 7)),
    ({"model": None}, ["tokenizer.ggml.model", "found None"]),
    ({"pre": "own"}, ["tokenizer.ggml.pre: expected one of default, gpt-2", "found 'own'"]),
    ({"pre": 3}, ["tokenizer.ggml.pre", "found 3"]),
    ({"pre": ["gpt-2"]}, ["tokenizer.ggml.pre", "found ['gpt-2']"]),
    ({"tokens": None}, ["tokenizer.ggml.tokens", "found none"]),
    ({"tokens": "abc"}, ["tokenizer.ggml.tokens: expected a list of strings", "found 'abc'"]),
    ({"tokens": [1, 2]}, ["tokenizer.ggml.tokens: expected a list of strings", "found [1, 2]"]),
    ({"tokens": [*TOKENS[:-1], "a"]}, ["tokenizer.ggml.tokens: expected every token once", "found 'a' twice"]),
    ({"token_type": [1] * 5}, ["token_type", f"expected {COUNT} numbers", "found 5"]),
    ({"token_type": [*[1] * (COUNT - 1), 7]}, ["token_type", "expected 0 to 6", f"found 7 for token {COUNT - 1}"]),
    ({"token_type": [*[1] * (COUNT - 1), -1]}, ["token_type", "found -1"]),
    ({"token_type": np.full(COUNT, 0.5, np.float32)}, ["token_type", "found 0.5 for token 0"]),
    ({"token_type": np.full(COUNT, np.nan, np.float32)}, ["token_type", "found nan for token 0"]),
    ({"token_type": ["1"] * COUNT}, ["token_type", "a list of"]),
    ({"token_type": 1}, ["token_type", "found 1"]),
    ({"merges": None}, ["tokenizer.ggml.merges", "found none"]),
    ({"merges": [], "pre": "kimi-k2"}, ["tokenizer.ggml.merges", "found none"]),
    ({"merges": ["a b", 7]}, ["tokenizer.ggml.merges", "list of strings"]),
    ({"merges": ["ab"]}, ["tokenizer.ggml.merges: expected two tokens that make one", "found 'ab'"]),
    ({"merges": ["a z"]}, ["tokenizer.ggml.merges", "found 'a z'"]),
    ({"merges": ["a b c"]}, ["tokenizer.ggml.merges", "found 'a b c'"]),
    ({"merges": [""]}, ["tokenizer.ggml.merges", "found ''"]),
    ({"bos_token_id": COUNT}, ["bos_token_id: expected the id of one of", f"found {COUNT}"]),
    ({"eos_token_id": -1}, ["eos_token_id", "found -1"]),
    ({"padding_token_id": 2**32 - 1}, ["padding_token_id", str(2**32 - 1)]),
    ({"unknown_token_id": True}, ["unknown_token_id", "found True"]),
    ({"seperator_token_id": 1.0}, ["seperator_token_id", "found 1.0"]),
    ({"add_bos_token": 1}, ["add_bos_token: expected a boolean", "found 1"]),
    ({"pre": "llama-bpe", "bos_token_id": None}, ["bos_token_id: expected an id", "found none"]),
    ({"add_eos_token": True, "eos_token_id": None}, ["eos_token_id: expected an id", "found none"]),
]
REFUSED_PIECES = [
    ({"scores": None}, ["tokenizer.ggml.scores: expected numbers", "found none"]),
    ({"scores": SCORES[1:]}, ["tokenizer.ggml.scores", f"found {len(SCORES) - 1}"]),
    ({"scores": [float("nan"), *SCORES[1:]]}, ["tokenizer.ggml.scores", "found nan"]),
    ({"tokens": ["<0x0>" if token == "<0x00>" else token for token in PIECES]}, ["expected <0x00>"]),
    ({"tokens": ["q你好" if token == "He" else token for token in PIECES]}, ["every character", "found 'q你好'"]),
    ({"add_space_prefix": "yes"}, ["add_space_prefix: expected a boolean", "found 'yes'"]),
]


@pytest.mark.smoke
def test_refused(tmp_path):
    for make, cases in ((byte_level, REFUSED), (sentence_piece, REFUSED_PIECES)):
        for more, words in cases:
            metadata = {key: value for key, value in make(**more).items() if value is not None}
            with pytest.raises(CheckpointError) as caught:
                write_tokenizer(metadata, tmp_path, "dir/m.gguf")
            message = str(caught.value)
            assert message.startswith("dir/m.gguf: ")
            assert all(word in message for word in words), message
            assert not list(tmp_path.iterdir())


def test_limits(tmp_path, monkeypatch):
    """The work that a file can cause is bounded."""
    for module, limit, value, make, words in (
        (vocabulary, "TOKENS_LIMIT", 9, byte_level, f"tokens: expected at most 9 strings, found {COUNT}"),
        (tokenizer, "MERGES_LIMIT", 9, byte_level, "merges: expected at most 9 strings"),
        (vocabulary, "ADDED_LIMIT", 2, byte_level, "at most 2 control and user-defined tokens"),
        (vocabulary, "ADDED_CHARACTERS_LIMIT", 20, byte_level, "found 3 of 27"),
        (tokenizer, "_SQUARES_LIMIT", 100, sentence_piece, "expected shorter ones"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, limit, value)
            with pytest.raises(CheckpointError, match=words):
                write_tokenizer(make(), tmp_path, "m.gguf")


def test_no_pre_tokenizer(tmp_path):
    """Files of before May of 2024 have none; llama.cpp reads them, and warns."""
    metadata = byte_level()
    del metadata["tokenizer.ggml.pre"]
    with pytest.warns(RuntimeWarning, match=r"m\.gguf: no tokenizer\.ggml\.pre"):
        write_tokenizer(metadata, tmp_path, "m.gguf")
    assert (tmp_path / "tokenizer.json").read_text() == _written(tmp_path / "default", byte_level("default"))


def _written(folder, metadata) -> str:
    folder.mkdir()
    write_tokenizer(metadata, folder, "m.gguf")
    return (folder / "tokenizer.json").read_text()


def test_any_values(tmp_path):
    """Values that are not what they should be: an error of ours, or files that transformers reads."""
    rng = random.Random(7)
    values = [None, True, 0, -1, 3, 2**63, 0.5, float("nan"), "", "x", "default", "llama", [], [0], ["a"], ["a", "b", ""]]
    values += [np.zeros(2000, np.float32), np.arange(COUNT), np.zeros(len(PIECES)), "\0{{", [True] * COUNT, ["a"] * COUNT]
    read = 0
    for number in range(150):
        metadata = rng.choice([byte_level, sentence_piece])()
        for key in rng.sample([*metadata, "tokenizer.chat_template", "tokenizer.ggml.add_bos_token"], rng.randint(1, 2)):
            metadata[key] = rng.choice(values)
        folder = tmp_path / str(number)
        try:
            loaded = load(metadata, folder)
            GenerationConfig(**generation_config(metadata, "m.gguf"))
        except CheckpointError:
            continue
        assert loaded.encode("a b")
        read += 1
    assert 10 < read < 120


@pytest.mark.smoke
def test_chat_templates(tmp_path):
    """The usual one and named ones; special tokens are there by their names."""
    metadata = byte_level() | {"tokenizer.chat_templates": ["tool_use"]}
    metadata["tokenizer.chat_template"] = "{{ eos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    metadata["tokenizer.chat_template.tool_use"] = "tools: {{ messages[0].content }}"
    loaded = load(metadata, tmp_path)
    messages = [{"role": "user", "content": "ΑΒΓ"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == "<|endoftext|>ΑΒΓ"
    assert loaded.apply_chat_template(messages, tokenize=False, chat_template="tool_use") == "tools: ΑΒΓ"
    assert load(byte_level(), tmp_path / "none").chat_template is None


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
    ],
)
def test_a_template_that_reaches_for_python_is_not_run(tmp_path, template):
    """transformers renders templates in Jinja's sandbox, whose objects cannot be changed either."""
    loaded = load(byte_level() | {"tokenizer.chat_template": template}, tmp_path)
    with pytest.raises(SecurityError):
        loaded.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("", 7, "'tokenizer.chat_template': expected a string, found 7"),
        ("", ["x"], "expected a string"),
        (".x", b"x", "'tokenizer.chat_template.x': expected a string"),
        ("", "x" * (tokenizer.TEMPLATE_LIMIT + 1), "expected at most 1048576 characters, found 1048577"),
        *((f".{name}", "x", "expected a template's name") for name in ("", "../x", "a/b", "/etc/x", "a.b", "a\0", "x" * 101)),
    ],
)
def test_wrong_templates(tmp_path, key, value, words):
    folder = tmp_path / "in"
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"^m\.gguf: ") as caught:
        write_tokenizer(byte_level() | {f"tokenizer.chat_template{key}": value}, folder, "m.gguf")
    assert words in str(caught.value)
    assert [path.name for path in tmp_path.rglob("*")] == ["in"]


def ends(*texts: str, types: tuple[int, ...] = (), **more: object) -> list[str]:
    """What ends an answer, of a file that has these tokens, too."""
    tokens = [*TOKENS, *texts]
    kinds = [*byte_level()["tokenizer.ggml.token_type"], *(types or (3,) * len(texts))]
    found = generation_config(byte_level(tokens=tokens, token_type=kinds, **more), "m.gguf")["eos_token_id"]
    return [tokens[id] for id in found]


@pytest.mark.smoke
def test_what_ends_an_answer():
    """As llama.cpp's llama_vocab_is_eog() says, but for </s> where it is a normal token."""
    assert ends() == ["<|endoftext|>"]
    assert ends("<|eot_id|>", "<|eom_id|>", "other") == ["<|endoftext|>", "<|eot_id|>", "<|eom_id|>"]
    assert ends("own", eot_token_id=COUNT) == ["<|endoftext|>", "own"]
    assert ends("<|im_end|>", eos_token_id=COUNT) == ["<|im_end|>", "<|endoftext|>"]
    assert ends("<|fim_pad|>", "<|repo_name|>", "<|fim_prefix|>") == ["<|endoftext|>", "<|fim_pad|>", "<|repo_name|>"]
    assert ends("<|end|>", "<|return|>") == ["<|endoftext|>", "<|end|>", "<|return|>"]
    assert ends("<|end|>", "<|return|>", "<|call|>", eos_token_id=COUNT + 1) == ["<|return|>", "<|endoftext|>", "<|call|>"]
    assert ends("</s>", types=(3,)) == ["<|endoftext|>", "</s>"]
    assert ends("</s>", types=(1,)) == ["<|endoftext|>"]


@pytest.mark.smoke
def test_how_text_is_generated():
    def found(**sampling: object) -> dict:
        metadata = byte_level(padding_token_id=3) | {f"general.sampling.{key}": value for key, value in sampling.items()}
        return generation_config(metadata, "m.gguf")

    ids = {"bos_token_id": 0, "eos_token_id": [0], "pad_token_id": 3}
    assert found() == ids
    every = found(temp=0.7, top_k=20, top_p=0.8, min_p=0.05, penalty_repeat=1.05, mirostat=1, sequence="k")
    usual = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.05}
    assert every == ids | usual
    GenerationConfig(**every).validate(strict=True)
    assert found(temp=0.0, top_k=20) == ids | {"do_sample": False}
    assert found(top_k=-1) == ids | {"do_sample": True, "top_k": 0}
    for wrong in (
        {"temp": -1.0},
        {"temp": float("nan")},
        {"top_p": 1.5},
        {"top_k": 0.5},
        {"min_p": "x"},
        {"penalty_repeat": 0.0},
    ):
        with pytest.raises(CheckpointError, match=f"m.gguf: general.sampling.{next(iter(wrong))}: expected"):
            found(**wrong)
    assert generation.generation_config(sentence_piece(), "m.gguf") == {"bos_token_id": 1, "eos_token_id": [2]}


def test_a_tokenizer_that_transformers_saves(tmp_path):
    """It is the same one."""
    loaded = load(byte_level("llama-bpe"), tmp_path)
    loaded.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.encode("<|user|> Hello <tool>") == loaded.encode("<|user|> Hello <tool>")
