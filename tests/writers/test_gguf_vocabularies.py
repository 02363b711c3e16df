"""ktmoe's tokenizer of a GGUF file has the ids that llama.cpp states for its own vocabularies and texts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import ENVIRONMENTS

#: Those that have texts and ids.
READ = (
    *(
        "command-r",
        "deepseek-coder",
        "deepseek-llm",
        "falcon",
        "gpt-2",
        "llama-bpe",
        "llama-spm",
        "mpt",
        "phi-3",
        "qwen2",
        "qwen35",
    ),
    *("refact", "starcoder"),
)
REFUSED = {"bert-bge": "bert", "gemma-4": "gemma4", "nomic-bert-moe": "t5"}
#: Those that have none, of before llama.cpp's keys for pre-tokenizers.
WITHOUT = ("aquila", "baichuan", "gpt-neox")


@pytest.fixture(scope="module")
def models() -> Path:
    """llama.cpp's folder of vocabularies, with its sources."""
    home = Path(ENVIRONMENTS or "none") / "llama-converter"
    if not (home / "installed").exists():
        pytest.skip("llama-converter is not installed: make test-writers")
    return next(home.glob("lib/python3*/site-packages/llama.cpp/models"))


@pytest.fixture(scope="module")
def ids(models):
    """The name of a vocabulary -> the ids of its texts, or a message."""
    home = Path(ENVIRONMENTS or "none") / "engines"
    if not (home / "installed").exists():
        pytest.skip("engines is not installed: make test-writers")
    command = [home / "bin" / "python", Path(__file__).with_name("read_gguf_vocabulary.py"), models]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name.removeprefix("ggml-vocab-").removesuffix(".gguf"): found for name, found in json.loads(done.stdout).items()}


def test_every_vocabulary(ids):
    """None is left out here."""
    assert sorted(ids) == sorted([*READ, *REFUSED, *WITHOUT])
    assert all(ids[name] == [] for name in WITHOUT)


@pytest.mark.smoke("one")
@pytest.mark.parametrize("name", READ)
def test_ids(ids, models, name):
    lines = (models / f"ggml-vocab-{name}.gguf.out").read_text().splitlines()
    assert len(lines) > 40
    assert ids[name] == [[int(id) for id in line.split()] for line in lines]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(ids, name):
    assert ids[name] == (f"ggml-vocab-{name}.gguf: tokenizer.ggml.model: expected 'gpt2' or 'llama', found {REFUSED[name]!r}")
