"""read_gguf_vocabulary.py FOLDER: what ktmoe's tokenizer makes of llama.cpp's own texts, as JSON.

FOLDER: of llama.cpp's ggml-vocab-*.gguf. For each, the ids of each text of its .inp, or the message of a refusal.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path

from transformers import AutoTokenizer

from ktmoe.errors import CheckpointError
from ktmoe.loaders.gguf_file import read_metadata
from ktmoe.transformers.gguf.tokenizer import write_tokenizer

SEPARATOR = b"\n__ggml_vocab_test__\n"


def texts(file: Path) -> list[str]:
    """Of an .inp: one behind its last separator counts where it has characters."""
    parts = file.read_bytes().split(SEPARATOR)
    return [part.decode() for part in (parts if parts[-1] else parts[:-1])]


def found(file: Path) -> list[list[int]] | str:
    """file: of a vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_tokenizer(read_metadata(file), Path(folder), file.name)
        except CheckpointError as error:
            return str(error)
        tokenizer = AutoTokenizer.from_pretrained(folder, split_special_tokens=True)
    pairs = file.with_name(f"{file.name}.inp")
    return tokenizer(texts(pairs), add_special_tokens=False).input_ids if pairs.exists() else []


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps({file.name: found(file) for file in sorted(Path(sys.argv[1]).glob("ggml-vocab-*.gguf"))}))
