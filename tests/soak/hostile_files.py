"""Small checkpoints of every scheme, packed caches, adapters and unfinished conversions: changed, then used as a user would."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path
from random import Random

import adapter_files
import checkpoints
import converting
import hostile_mutations
import numpy as np

from ktmoe import MoELayer, synthetic
from ktmoe.adapters.reading import import_adapter
from ktmoe.cache.packing import pack
from ktmoe.conversion import convert
from ktmoe.weights.ggml import GGML

_SHARD_BYTES = 12_000


class Sample(ABC):
    """A folder whose files are good until one is changed.

    kind: what it is counted as. label: which one it is. names: of these, a refusal must have one. changed: the file that is.
    """

    kind = "checkpoint"

    def __init__(self, folder: Path, label: str):
        self.folder, self.label = folder, label
        self.names: tuple[str, ...] = (str(folder), "layers.0.", "blk.0.", "layers.1.")
        self.changed: Path | None = None
        self._good: dict[Path, bytes] = {}
        folder.mkdir(parents=True)
        self.make()
        for path in sorted(self.open_to_change()):
            self._good[path] = path.read_bytes()
        self._likely = [path for path in self._good for _ in range(5 if path.suffix in (".safetensors", ".gguf") else 1)]

    @abstractmethod
    def make(self) -> None:
        """Write the folder's files."""

    def open_to_change(self) -> list[Path]:
        """The files of which one is changed."""
        return [path for path in self.folder.rglob("*") if path.is_file()]

    @abstractmethod
    def use(self) -> None:
        """Read the files, and compute a token. Raises KtmoeError."""

    def change(self, random: Random) -> None:
        """Change a file, but for one case in 32."""
        path = random.choice(self._likely)
        good = self._good[path]
        if not random.randrange(32):
            return
        if random.randrange(100) == 0:
            path.unlink()
            self.changed = path
            return
        others = [other for at, other in self._good.items() if at.suffix == path.suffix]
        data = _mutation(path)(random, good, others)
        if data != good:
            path.write_bytes(data)
            self.changed = path

    def restore(self) -> None:
        """Make the changed file good again."""
        if self.changed is not None:
            self.changed.write_bytes(self._good[self.changed])
            self.changed = None


def _mutation(path: Path):
    by_ending = {".safetensors": hostile_mutations.of_safetensors, ".gguf": hostile_mutations.of_gguf}
    return by_ending.get(path.suffix, hostile_mutations.of_json)


@cache
def _batch(hidden: int, num_experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A token of ones, to the first and the last expert."""
    return np.ones((1, hidden), np.float32), np.array([[0, num_experts - 1]]), np.full((1, 2), 0.5, np.float32)


def _forward(layer: MoELayer) -> None:
    """Compute a token; the numbers may be any."""
    found = layer.forward(*_batch(layer.hidden, layer.num_experts))
    assert found.shape == (1, layer.hidden)
    assert found.dtype == np.float32


class Checkpoint(Sample):
    """One of SCHEMES of tests/checkpoints.py, in one file or in two with an index."""

    def __init__(self, folder: Path, scheme: str, files: int):
        self._scheme, self._files = checkpoints.SCHEMES[scheme], files
        super().__init__(folder, scheme)

    def make(self) -> None:
        tensors = self._scheme.layer("model.layers.0")
        stated = {"hidden_act": "silu", self._scheme.count: checkpoints.EXPERTS}
        if self._scheme.module == "feed_forward.experts":
            stated["model_type"] = "llama4"
        names, index = list(tensors), {}
        for number in range(self._files):
            file = f"model-{number}.safetensors"
            mine = names[number :: self._files]
            checkpoints.write(self.folder, {name: tensors[name] for name in mine}, stated, file).close()
            index |= dict.fromkeys(mine, file)
        if self._files > 1:
            checkpoints.write_index(self.folder, index)

    def use(self) -> None:
        with MoELayer.from_checkpoint(self.folder, 0) as layer:
            _forward(layer)


class GgufCheckpoint(Sample):
    """A type of GGML."""

    kind = "gguf"

    def make(self) -> None:
        synthetic.write_gguf(self.folder, types=self.label, num_experts=2, hidden=256, intermediate=256, top_k=2)

    def use(self) -> None:
        with MoELayer.from_checkpoint(self.folder, 0) as layer:
            _forward(layer)


class PackedCache(Sample):
    """A packed cache, which is changed, of a checkpoint, which is not."""

    kind = "cache"

    def make(self) -> None:
        scheme = checkpoints.SCHEMES[self.label]
        (self.folder / "model").mkdir()
        stated = {"hidden_act": "silu", scheme.count: checkpoints.EXPERTS}
        checkpoints.write(self.folder / "model", scheme.layer("model.layers.0"), stated).close()
        pack(self.folder / "model", self.folder / "cache", layers=[0], matrices=[])

    def open_to_change(self) -> list[Path]:
        return [path for path in (self.folder / "cache").iterdir() if path.stat().st_size]

    def use(self) -> None:
        with MoELayer.from_checkpoint(self.folder / "model", 0, cache=self.folder / "cache") as layer:
            _forward(layer)


class Adapter(Sample):
    """An adapter of PEFT: of parameters in a dtype, of gpt-oss's alternating rows, or of each expert's modules."""

    kind = "adapter"

    def make(self) -> None:
        dtype = {"float16": np.float16, "bfloat16": adapter_files.BF16}.get(self.label, np.float32)
        tensors = adapter_files.tensors_of(dtype=dtype)
        self._model = {"gpt_oss": adapter_files.GPT_OSS, "mixtral": adapter_files.MIXTRAL}.get(self.label, adapter_files.QWEN)
        if self.label == "mixtral":
            random, tensors = np.random.default_rng(0), {}
            for expert in range(adapter_files.EXPERTS):
                for stem, projection in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
                    n, k = adapter_files.shape_of(projection)
                    base = f"{adapter_files.PREFIX}model.layers.0.mlp.experts.{expert}.{stem}"
                    tensors[f"{base}.lora_A.weight"] = random.standard_normal((2, k)).astype(np.float32)
                    tensors[f"{base}.lora_B.weight"] = random.standard_normal((n, 2)).astype(np.float32)
        adapter_files.write(self.folder, tensors)

    def use(self) -> None:
        for lora in import_adapter(self.folder, self._model).values():
            for a, b in lora.pairs.values():
                assert a.ndim == b.ndim == 3


class Conversion(Sample):
    """A conversion that was interrupted: its journal and its first file are changed, then it goes on."""

    kind = "journal"

    def make(self) -> None:
        self._source, self._out, self._kept = (self.folder / name for name in ("source", "out", "kept"))
        converting.write(self._source, layers=1)

        def stop(done: int, total: int) -> None:
            if done > total / 2:
                raise InterruptedError

        try:
            convert(self._source, self._out, self.label, shard_bytes=_SHARD_BYTES, progress=stop)
        except InterruptedError:
            shutil.copytree(self._out, self._kept)

    def open_to_change(self) -> list[Path]:
        first = min(path for path in self._out.iterdir() if path.suffix == ".safetensors")
        return [first, *[path for path in self._out.iterdir() if path.suffix == ".json"] * 4]

    def use(self) -> None:
        convert(self._source, self._out, self.label, shard_bytes=_SHARD_BYTES)

    def restore(self) -> None:
        shutil.rmtree(self._out)
        shutil.copytree(self._kept, self._out)
        self.changed = None


def samples(folder: Path) -> list[Sample]:
    """All of them, and some often: those of which there are few kinds."""
    found: list[Sample] = []
    for number, scheme in enumerate(checkpoints.SCHEMES):
        found.append(Checkpoint(folder / f"checkpoint-{number}", scheme, 2 if number % 8 == 3 else 1))
    found += [GgufCheckpoint(folder / f"gguf-{name}", name) for name in (*GGML, "Q4_K_M")]
    found += 2 * [PackedCache(folder / f"cache-{number}", name) for number, name in enumerate(("bf16", "nvfp4", "gptq"))]
    adapters = ("float32", "float16", "bfloat16", "gpt_oss", "mixtral")
    found += 2 * [Adapter(folder / f"adapter-{name}", name) for name in adapters]
    return [*found, Conversion(folder / "conversion", "mxfp4")]
