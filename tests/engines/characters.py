"""A text, and a tokenizer for the small models that has a token for each ASCII character."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def add_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def text(length: int) -> str:
    """A text of so many characters, each a token, the same each time."""
    return "".join(random.Random(5).choices("abcdefghijklmnopqrstuvwxyz ,.\n", k=length))


def with_tokenizer(model: Path, folder: Path) -> Path:
    """The folder, which becomes the model with a tokenizer: copies of its files, since links are not converted."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    add_tokenizer(folder)
    return folder
