"""What the tests of `ktmoe convert` share: a small source of several tensors, and what its result must be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import checkpoints
import numpy as np
from checkpoints import EXPERTS, HIDDEN, SCHEMES, numbers

from ktmoe.errors import KtmoeError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.quantization import Quantizer

#: What is no expert, in dtypes whose numbers have 8, 4 and 2 bytes, and of no numbers.
REST = {
    "lm_head.weight": ["BF16", (16, HIDDEN)],
    "model.embed_tokens.weight": ["BF16", (16, HIDDEN)],
    "model.layers.0.self_attn.q_proj.weight": ["F32", (8, HIDDEN)],
    "model.layers.0.input_layernorm.weight": ["BF16", (HIDDEN,)],
    "model.layers.0.mlp.odd": ["I16", (3,)],
    "model.layers.1.mlp.table": ["I64", (4,)],
    "model.layers.1.mlp.nothing": ["F32", (0, 3)],
}
_BITS = {"BF16": np.uint16, "I16": np.uint16, "F32": np.uint32, "I64": np.uint64}


def write(folder: Path, scheme: str = "bf16", layers: int = 2, config: dict | None = None, model: str = "model") -> dict:
    """A source in that folder: experts of one of SCHEMES in each layer, and REST. Its experts' tensors, by layer."""
    folder.mkdir(parents=True, exist_ok=True)
    random, made = np.random.default_rng(5), SCHEMES[scheme]
    rest = {name: [dtype, random.integers(0, 2**16, shape).astype(_BITS[dtype])] for name, (dtype, shape) in REST.items()}
    of_layers = {layer: made.layer(f"{model}.layers.{layer}", layer) for layer in range(layers)}
    stated = {"hidden_act": "silu", made.count: EXPERTS, **(config or {})}
    if scheme.startswith("llama4"):
        stated["model_type"] = "llama4"
    checkpoints.write(folder, {name: tensor for of in of_layers.values() for name, tensor in of.items()} | rest, stated)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "templates" / "more").mkdir(parents=True, exist_ok=True)
    (folder / "templates" / "more" / "tools.jinja").write_text("{{ tools }}")
    return of_layers


def tree(folder: Path) -> dict[str, bytes]:
    """A folder's files, and those of folders in it, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def experts_of(folder: Path, layer: int):
    checkpoint = Checkpoint(folder)
    return find_loader(checkpoint, layer=layer).load(checkpoint, layer)


def check_rest(source: Path, out: Path, experts: set[str]) -> None:
    """All tensors but those of these experts are the same, and the index says where each is."""
    before, after = Checkpoint(source), Checkpoint(out)
    kept = set(before.names()) - experts
    for name in kept:
        assert (after.info(name).dtype, after.info(name).shape) == (before.info(name).dtype, before.info(name).shape)
        np.testing.assert_array_equal(after.read(name), before.read(name))
    assert all(".experts." in name for name in set(after.names()) - kept)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == set(after.names())
    assert index["metadata"]["total_size"] == sum(after.info(name).nbytes for name in after.names())
    for name in ("tokenizer.json", "templates/more/tools.jinja"):
        assert (out / name).read_bytes() == (source / name).read_bytes()


def check_layer(source: Path, out: Path, layer: int, quantizer: Quantizer) -> float:
    """Experts of the result are those of the source, rounded. What that changed, by their numbers: relative, RMS."""
    before, after = experts_of(source, layer), experts_of(out, layer)
    for name in ("num_experts", "hidden", "intermediate", "activation", "router_weight"):
        assert getattr(before, name) == getattr(after, name)
    error = total = 0.0
    for expert in range(before.num_experts):
        matrices = {projection: before.matrix(expert, projection) for projection in PROJECTIONS}
        exact = {projection: numbers(matrix) for projection, matrix in matrices.items()}
        shared = max(np.abs(exact["gate"]).max(), np.abs(exact["up"]).max())  # of a factor that both have
        for projection, matrix in matrices.items():
            largest = np.abs(exact["down"]).max() if projection == "down" else shared
            found = after.matrix(expert, projection)
            np.testing.assert_array_equal(numbers(found), numbers(quantizer.matrix(matrix, largest=float(largest))[0]))
            if matrix.bias is None:
                assert found.bias is None
            else:
                np.testing.assert_array_equal(found.bias, matrix.bias)
            error += np.square(numbers(found) - exact[projection]).sum()
            total += np.square(exact[projection]).sum()
    return (error / total) ** 0.5


def refused(folder: Path) -> str:
    """What is said when a folder is to be loaded, which must not work."""
    try:
        checkpoint = Checkpoint(folder)
        find_loader(checkpoint)
    except KtmoeError as error:
        return str(error)
    raise AssertionError(f"{folder} was read: {names(folder)}")
