"""`reference_text.py LLAMA_CPP FOLDER NAME-TYPE...`: transformers, in float32 and in bfloat16, on what a GGUF file has.

The weights are those that llama.cpp's own package gguf dequantises, at the places of numbers.gguf and places.gguf (see
write_gguf_text.py). FOLDER/NAME/TYPE-reference.npz: ids of a text, whose experts no rounding changes; logits, bf16, as_llama of
what llama.cpp computes instead; counted, of tokens 0, 1, .... All float32 [tokens, vocabulary].
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
import traceback
from pathlib import Path

LLAMA_CPP, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
sys.path.insert(0, str(LLAMA_CPP / "gguf-py"))

import gguf_models  # noqa: E402
import gguf_weights  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from gguf import GGUFReader, dequantize  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402


def main() -> None:
    torch.set_num_threads(2)
    transformers.logging.set_verbosity_error()
    for case in sys.argv[3:]:
        name, _, kind = case.rpartition("-")
        folder = FOLDER / name
        try:
            np.savez(folder / f"{kind}-reference.npz", **run(folder, folder / f"{kind}.gguf"))
        except Exception:
            (folder / f"{kind}-reference.error").write_text(traceback.format_exc())


def run(folder: Path, file: Path) -> dict[str, np.ndarray]:
    config = json.loads((folder / "checkpoint" / "config.json").read_text())
    config.pop("quantization_config", None)
    made = folder / f"{file.stem}-dequantised"
    made.mkdir(exist_ok=True)
    save_file(checkpoint(folder, file), made / "model.safetensors", {"format": "pt"})
    ways = {"logits": (torch.float32, {}), "bf16": (torch.bfloat16, {})}
    groups = gguf_models.GROUP_SCORES.get(folder.name)
    if groups or folder.name in gguf_models.AS_LLAMA_CPP:
        ways["as_llama"] = (torch.float32, gguf_models.AS_LLAMA_CPP.get(folder.name, {}))
    found = {}
    for way, (dtype, changes) in ways.items():
        changed = config | {key: config[key] | value for key, value in changes.items()}
        (made / "config.json").write_text(json.dumps(changed))
        model = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=dtype, attn_implementation="eager").eval()
        model.set_experts_implementation("eager")
        if groups and way == "as_llama":
            gguf_weights.score_groups(model, groups)
        if way == "logits":
            found["ids"] = gguf_weights.text(model)
            found["counted"] = logits(model, np.arange(gguf_models.TOKENS))
        found[way] = logits(model, found["ids"])
    shutil.rmtree(made)
    return found


def logits(model, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(ids)[None]).logits[0].float().numpy()


def checkpoint(folder: Path, file: Path) -> dict[str, np.ndarray]:
    """Name -> float32, of what is in the file. Raises ValueError if a part of a tensor is not."""
    shapes = json.loads((folder / "names.json").read_text())
    tensors = {}
    numbers, places = read(folder / "numbers.gguf"), read(folder / "places.gguf")
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    begins = np.cumsum([0, *sizes])
    flat = np.full(begins[-1], np.nan, np.float32)
    qwen3_next = "linear_attn" in " ".join(shapes)
    for name, values in read(file).items():
        values, number, place = values.reshape(-1), numbers[name].reshape(-1), places[name].reshape(-1)
        if name.endswith("ssm_a"):  # -exp(A_log)
            values, number, place = np.log(-values), np.log(-number), np.arange(values.size)
        elif qwen3_next and name.endswith("norm.weight") and "ssm_norm" not in name:  # 1 + weight
            values, number, place = values - 1, number - 1, place - 1
        flat[begins[number.round().astype(np.int64)] + place.astype(np.int64)] = values
    for name, begin, size in zip(shapes, begins, sizes, strict=False):
        tensor = flat[begin : begin + size].reshape(shapes[name])
        absent = np.isnan(tensor)
        if absent.any() and not absent.all():
            raise ValueError(f"{file}: expected all of {name}, found {absent.mean():.0%} of it absent")
        if not absent.any():
            tensors[name] = tensor
    return tensors


@functools.lru_cache(8)
def read(file: Path) -> dict[str, np.ndarray]:
    found = {}
    for tensor in GGUFReader(file).tensors:
        found[tensor.name] = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(tensor.shape[::-1])
    return found


if __name__ == "__main__":
    main()
