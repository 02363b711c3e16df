"""A model's tokenizer: a folder's, the Hub's, or a GGUF file's."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ktmoe.errors import CheckpointError
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.transformers.folder import is_gguf_model
from ktmoe.transformers.gguf.folder import model_name, write_gguf_tokenizer
from ktmoe.transformers.refusals import in_one_line


def load_tokenizer(path: str | os.PathLike[str], **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with its chat template, as transformers has it.

    path: a folder, an id of the Hugging Face Hub, or a .gguf file. options: of AutoTokenizer.from_pretrained().
    Raises CheckpointError if there is none, FormatError for one of a GGUF file that is not known, and UnavailableError if
    transformers cannot read it.

    Examples:
        >>> tokenizer = ktmoe.transformers.load_tokenizer("Qwen3-30B-A3B")
        >>> tokenizer("Hello")["input_ids"]
        [72, 101, 108, 108, 111]
    """
    if not is_gguf_model(path):
        return _read(path, str(path), options)
    with Checkpoint(Path(path).expanduser()) as checkpoint, tempfile.TemporaryDirectory(prefix="ktmoe-gguf-") as root:
        folder = Path(root, model_name(path))
        folder.mkdir()
        write_gguf_tokenizer(checkpoint, folder)
        tokenizer = _read(folder, str(path), options)
    tokenizer.name_or_path = os.fspath(path)
    return tokenizer


def _read(path: str | os.PathLike[str], name: str, options: dict[str, Any]) -> PreTrainedTokenizerBase:
    with in_one_line(f"the tokenizer of {name}"):
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    if tokenizer.vocab_size <= 1:  # what transformers makes of no files
        raise CheckpointError(f"{name}: expected a tokenizer, found none")
    return tokenizer
