"""A GGUF file as a folder that transformers reads."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.gguf_file import read_metadata
from ktmoe.transformers.gguf import architectures
from ktmoe.transformers.gguf.generation import generation_config
from ktmoe.transformers.gguf.metadata import GgufMetadata
from ktmoe.transformers.gguf.names import parameters
from ktmoe.transformers.gguf.tensors import write_tensors
from ktmoe.transformers.gguf.tokenizer import write_tokenizer

#: How the name of a split model's file ends.
_SPLIT = re.compile(r"-[0-9]{5}-of-[0-9]{5}$")


@contextmanager
def gguf_folder(path: str | os.PathLike, everything: bool = False) -> Iterator[Path]:
    """A temporary folder with what transformers reads of a GGUF model: all but the experts and the dense matrices.

    path: a .gguf file, the first of a split model, or a folder of them. config.json names ktmoe, which reads the rest from
    there, so ktmoe.transformers must have been imported by whoever loads it. The folder has the file's name without its ending.
    everything: the dense matrices, too, in bfloat16.
    Raises FormatError for an architecture, a tokenizer or a tensor that is not known, before a weight is read; CheckpointError.
    """
    with Checkpoint(path) as checkpoint, tempfile.TemporaryDirectory(prefix="ktmoe-gguf-") as root:
        folder = Path(root, model_name(path))
        folder.mkdir()
        found = parameters(checkpoint)
        config = architectures.find(checkpoint).config(GgufMetadata(checkpoint))
        ours = {"quant_method": "ktmoe", "path": os.path.abspath(path), "inner": None}
        class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]
        _write(folder / "config.json", config | {"architectures": [class_name], "quantization_config": ours})
        write_gguf_tokenizer(checkpoint, folder)
        of = getattr(transformers, class_name)
        kept = {*(of._keep_in_fp32_modules or ()), *(of._keep_in_fp32_modules_strict or ())}
        write_tensors(found, folder / "model.safetensors", str(path), everything, kept)
        yield folder


def write_gguf_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """Write tokenizer.json and the files beside it, and generation_config.json. Raises what write_tokenizer() raises."""
    first = checkpoint.files[0]
    metadata = read_metadata(first)
    write_tokenizer(metadata, folder, str(first))
    _write(folder / "generation_config.json", generation_config(metadata, str(first)))


def model_name(path: str | os.PathLike) -> str:
    """What a model is called after its file or folder. transformers' server takes what follows an @ for a revision."""
    name = os.path.basename(os.path.abspath(os.path.expanduser(path)))
    if not os.path.isdir(os.path.expanduser(path)):
        name = _SPLIT.sub("", os.path.splitext(name)[0])
    return name.replace("@", "-") or "model"


def _write(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")
