"""`reference_text.py LLAMA_CPP FOLDER NAME-TYPE...`: transformers, in float32 and in bfloat16, on what a GGUF file has.

The weights are those that llama.cpp's own package gguf dequantises, at the places of numbers.gguf and places.gguf (see
write_gguf_text.py). FOLDER/NAME/TYPE-reference.npz: logits, bf16, both float32 [tokens, vocabulary].
"""

from __future__ import annotations

import json
import shutil
import sys
import traceback
from pathlib import Path

LLAMA_CPP, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
sys.path.insert(0, str(LLAMA_CPP / "gguf-py"))

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
    made = folder / f"{file.stem}-dequantised"
    made.mkdir(exist_ok=True)
    for other in (folder / "checkpoint").glob("*.json"):
        shutil.copy(other, made)
    save_file(checkpoint(folder, file), made / "model.safetensors", {"format": "pt"})
    ids, found = torch.from_numpy(np.load(folder / "ids.npy"))[None], {}
    for name, dtype in (("logits", torch.float32), ("bf16", torch.bfloat16)):
        model = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=dtype, attn_implementation="eager").eval()
        model.set_experts_implementation("eager")
        with torch.no_grad():
            found[name] = model(ids).logits[0].float().numpy()
    shutil.rmtree(made)
    return found


def checkpoint(folder: Path, file: Path) -> dict[str, np.ndarray]:
    """Name -> float32, as the converter found it. Raises ValueError if a number of it is not in the file."""
    shapes = json.loads((folder / "names.json").read_text())
    names = list(shapes)
    numbers, places = read(folder / "numbers.gguf"), read(folder / "places.gguf")
    tensors = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
    for name, values in read(file).items():
        if name not in numbers:
            continue
        number, place = numbers[name], places[name]
        if name.endswith("ssm_a"):  # it has -exp(A_log)
            values, number, place = np.log(-values), np.log(-number), None
        elif "qwen3next" in file_kind(file) and name.endswith("norm.weight") and "ssm_norm" not in name:
            values, number, place = values - 1, number - 1, place - 1  # weights of a norm are written as 1 + weight
        values = values.reshape(number.shape)  # the quantiser writes no dimensions of 1
        number = number.round().astype(np.int64)
        place = np.arange(values.size).reshape(values.shape) if place is None else place.astype(np.int64)
        for tensor in np.unique(number):
            here = number == tensor
            tensors[names[tensor]].reshape(-1)[place[here]] = values[here]
    absent = [name for name, tensor in tensors.items() if np.isnan(tensor).any()]
    if absent:
        sys.stderr.write(f"{file}: no {absent}\n")
    return {name: tensor for name, tensor in tensors.items() if name not in absent}


def read(file: Path) -> dict[str, np.ndarray]:
    return {
        tensor.name: dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(tensor.shape[::-1])
        for tensor in GGUFReader(file).tensors
    }


def file_kind(file: Path) -> str:
    return bytes(GGUFReader(file).fields["general.architecture"].parts[-1]).decode()


if __name__ == "__main__":
    main()
