"""`write_gguf_text.py LLAMA_CPP FOLDER NAME...`: tiny models, of which llama.cpp's own converter makes GGUF files.

LLAMA_CPP: the folder of llama.cpp's sources, whose converter runs with its own package gguf. FOLDER/NAME has then the
checkpoint, F16.gguf or `error`, and logits.npy: what transformers finds in the checkpoint for tokens 0, 1, ..., in float32.

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

EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
LLAMA_CPP, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
sys.path[:0] = [str(LLAMA_CPP), str(LLAMA_CPP / "gguf-py")]

import gguf_models  # noqa: E402
import gguf_tokenizers  # noqa: E402
import gguf_weights  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from conversion.base import TextModel  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

#: Of a code in MXFP4.
LEVELS = torch.tensor([sign * level for sign in (1, -1) for level in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])


def main() -> None:
    torch.set_num_threads(2)
    for name in sys.argv[3:]:
        folder = FOLDER / name
        checkpoint = folder / "checkpoint"
        checkpoint.mkdir(parents=True)
        try:
            write_checkpoint(name, checkpoint)
            write_maps(name, checkpoint, folder)
            if name in gguf_models.MXFP4:
                pack_experts(checkpoint)
            convert(name, checkpoint, folder / "F16.gguf", "f16")
            if name in gguf_models.SPLIT:
                (folder / "split").mkdir()
                convert(name, checkpoint, folder / "split" / "model.gguf", "f16", "--split-max-tensors", "20")
        except (Exception, SystemExit):
            (folder / "error").write_text(traceback.format_exc())


def write_checkpoint(name: str, folder: Path) -> None:
    _, _, published, pre = gguf_models.MODELS[name]
    model = gguf_weights.make(name)
    if name in gguf_models.MXFP4:
        with torch.no_grad():
            for key, value in model.named_parameters():
                if key.endswith(EXPERTS):
                    codes, exponents = mxfp4(value)
                    value.copy_((LEVELS[codes] * exponents.exp2()[..., None]).flatten(-2).transpose(1, 2))
    model.save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | published, indent=1))
    gguf_tokenizers.write(folder, pre)
    tensors = load_file(folder / "model.safetensors")
    if more := gguf_weights.beside(name, tensors):
        save_file(tensors | more, folder / "model.safetensors", {"format": "pt"})
    ids = torch.arange(gguf_models.TOKENS)[None]
    with torch.no_grad():
        np.save(folder.parent / "logits.npy", model.float()(ids).logits[0].numpy())


def pack_experts(folder: Path) -> None:
    """The experts of gpt-oss, which are MXFP4 numbers, as published: two codes a byte, and a byte of each exponent."""
    tensors = {}
    for key, value in load_file(folder / "model.safetensors").items():
        if key.endswith(EXPERTS):
            codes, exponents = mxfp4(value)
            tensors[f"{key}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
            tensors[f"{key}_scales"] = (exponents + 127).to(torch.uint8)
        else:
            tensors[key] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def mxfp4(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[experts, inputs, outputs] -> codes, int64 [experts, outputs, groups, 32], and exponents [experts, outputs, groups]."""
    groups = weights.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor() - 2
    scaled = groups * (-exponents).exp2()[..., None]
    return (scaled.abs()[..., None] - LEVELS[:8]).abs().argmin(-1) + 8 * (scaled < 0), exponents


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


def convert(name: str, folder: Path, file: Path, kind: str, *more: str) -> None:
    """By llama.cpp's script. It knows a pre-tokenizer by a hash of a text's tokens, which a tokenizer of here does not have."""
    TextModel.get_vocab_base_pre = lambda *_: gguf_models.MODELS[name][3]
    sys.argv = ["convert_hf_to_gguf.py", str(folder), "--outfile", str(file), "--outtype", kind, *more]
    runpy.run_path(str(LLAMA_CPP / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main()
