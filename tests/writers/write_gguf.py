"""write_gguf.py FOLDER: files of gguf's own writer, and what its reader and its own dequantize() make of them."""

from functools import partial
from pathlib import Path

import gguf
import numpy as np
import writing
from gguf import GGMLQuantizationType as Type
from gguf import quants

EXPERTS, HIDDEN, INTERMEDIATE = 3, 512, 256
SHAPES = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
#: Types that gguf can read and not make: where their records have fp16 numbers.
HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"), (0,)),
}
MADE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4", "BF16", "F16", "F32")


def stored(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Weights of a type, [E, n, bytes of a row]; of F16 and F32 numbers."""
    if name in MADE:
        return quants.quantize(random.normal(0, shape[-1] ** -0.5, shape).astype(np.float32), Type[name])
    weights, nbytes = gguf.GGML_QUANT_SIZES[Type[name]]
    records = random.integers(0, 256, (*shape[:-1], shape[-1] // weights, nbytes), np.uint8)
    if name == "NVFP4":
        records[..., :4] %= 0x7F  # no sign, and no NaN
    if name == "IQ1_M":  # its fp16 number is in the upper nibbles of four bytes
        halves = random.uniform(-0.1, 0.1, records.shape[:-1]).astype(np.float16).view(np.uint16)
        for i in range(4):
            records[..., 49 + 2 * i] = records[..., 49 + 2 * i] & 15 | (halves >> 4 * i & 15) << 4
    for byte in HALVES.get(name, ()):
        halves = random.uniform(-0.1, 0.1, records.shape[:-1]).astype(np.float16)
        records[..., byte : byte + 2] = halves[..., None].view(np.uint8)
    return records.reshape(*shape[:-1], -1)


def write(folder: Path, names: tuple[str, str, str], **writer) -> dict[str, np.ndarray]:
    """Names, types, shapes, offsets and bytes of tensors, as the reader has them; w.{projection}: of layer 1, float32."""
    out = gguf.GGUFWriter(folder / "model.gguf", "qwen3moe", **writer)
    out.add_block_count(2)
    out.add_expert_count(EXPERTS)
    out.add_expert_used_count(2)
    out.add_token_list(["a", "größe", "b" * 40] * 100)
    out.add_token_scores([0.5] * 300)
    random = np.random.default_rng(5)
    expected = {}
    for layer in range(2):
        for (projection, shape), name in zip(SHAPES.items(), names, strict=True):
            data = stored(name, (EXPERTS, *shape), random)
            raw = {} if data.dtype in (np.float16, np.float32) else {"raw_dtype": Type[name]}
            out.add_tensor(f"blk.{layer}.ffn_{projection}_exps.weight", data, **raw)
            expected[f"w.{projection}"] = quants.dequantize(data, Type[name]).reshape(EXPERTS, *shape)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    tensors = [tensor for file in sorted(folder.glob("*.gguf")) for tensor in gguf.GGUFReader(file).tensors]
    expected["names"] = np.array([tensor.name for tensor in tensors])
    expected["types"] = np.array([tensor.tensor_type.name for tensor in tensors])
    expected["shapes"] = np.array([tensor.shape[::-1] for tensor in tensors], np.int64)
    expected["offsets"] = np.array([tensor.data_offset for tensor in tensors])
    for tensor in tensors:
        expected[f"bytes.{tensor.name}"] = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1)
    return expected


if __name__ == "__main__":
    cases = {name: partial(write, names=(name,) * 3) for name in (*MADE, *HALVES, "IQ1_M", "NVFP4")}
    cases["Q4_K_M"] = partial(write, names=("Q4_K", "Q4_K", "Q6_K"))
    cases["split"] = partial(write, names=("Q8_0", "Q4_0", "Q5_0"), split_max_tensors=2)
    writing.main(cases)
