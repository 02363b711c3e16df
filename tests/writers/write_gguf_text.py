"""`write_gguf_text.py LLAMA_CPP FOLDER NAME...`: checkpoints of tiny models, and llama.cpp's own converter makes a GGUF file of each.

LLAMA_CPP: the folder of llama.cpp's sources, whose converter runs with its own package gguf. FOLDER/NAME has then the checkpoint,
F16.gguf or `error`, the texts' tokens, and `logits.npy`: what transformers finds for the checkpoint, in float32.

The converter also says where each number goes: it converts two more checkpoints of that model, in one of which each tensor's
numbers are the tensor's own number, in the other each number is its place in the tensor. numbers.gguf and places.gguf are what
comes out.
"""

from __future__ import annotations

import json
import runpy
import sys
import traceback
from pathlib import Path

LLAMA_CPP, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
sys.path[:0] = [str(LLAMA_CPP), str(LLAMA_CPP / "gguf-py")]

import gguf_models  # noqa: E402
import gguf_tokenizers  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from conversion.base import TextModel  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402


def main() -> None:
    torch.set_num_threads(2)
    for name in sys.argv[3:]:
        folder = FOLDER / name
        checkpoint = folder / "checkpoint"
        checkpoint.mkdir(parents=True)
        try:
            write_checkpoint(name, checkpoint)
            convert(name, checkpoint, folder / "F16.gguf", "f16")
            write_maps(name, checkpoint, folder)
        except (Exception, SystemExit):
            (folder / "error").write_text(traceback.format_exc())


def write_checkpoint(name: str, folder: Path) -> None:
    _, _, published, pre = gguf_models.MODELS[name]
    model = gguf_models.make(name)
    model.save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | published, indent=1))
    gguf_tokenizers.write(folder, pre)
    tensors = load_file(folder / "model.safetensors")
    more = gguf_models.beside(name, tensors)
    if more:
        save_file(tensors | more, folder / "model.safetensors", {"format": "pt"})
    model.float()
    np.save(folder.parent / "ids.npy", ids := gguf_models.text(model))
    with torch.no_grad():
        np.save(folder.parent / "logits.npy", model(torch.from_numpy(ids)[None]).logits[0].numpy())


def write_maps(name: str, checkpoint: Path, folder: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    names = sorted(tensors)
    (folder / "names.json").write_text(json.dumps({key: list(tensors[key].shape) for key in names}))
    made = {
        "numbers": {key: torch.full(tensors[key].shape, float(number)) for number, key in enumerate(names)},
        "places": {key: torch.arange(tensors[key].numel()).float().view(tensors[key].shape) for key in names},
    }
    for kind, numbers in made.items():
        other = folder / kind
        other.mkdir()
        for file in checkpoint.iterdir():
            if file.suffix != ".safetensors":
                (other / file.name).write_bytes(file.read_bytes())
        save_file(numbers, other / "model.safetensors", {"format": "pt"})
        convert(name, other, folder / f"{kind}.gguf", "f32")
        (other / "model.safetensors").unlink()


def convert(name: str, folder: Path, file: Path, kind: str) -> None:
    """By llama.cpp's script. It knows a pre-tokenizer by a hash of a text's tokens, which a tokenizer of here does not have."""
    TextModel.get_vocab_base_pre = lambda self, tokenizer: gguf_models.MODELS[name][3]
    sys.argv = ["convert_hf_to_gguf.py", str(folder), "--outfile", str(file), "--outtype", kind]
    runpy.run_path(str(LLAMA_CPP / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main()
