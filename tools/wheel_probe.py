"""wheel_probe.py FOLDER [write]: prints, as JSON, what an installed ktmoe makes of the checkpoints and the batch in a folder.

It runs with nothing installed but ktmoe and what it depends on. write: make the folder first.
"""

import hashlib
import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

import ktmoe

#: Sizes of the layers: small, since an emulator computes them, too.
HIDDEN, INTERMEDIATE, EXPERTS, TOKENS, TOP_K = 256, 256, 4, 3, 2


def write(folder: Path) -> None:
    """Checkpoints in 4, 8 and 16 bits, and a batch."""
    from ktmoe.synthetic import GGUF, write_deepseek_v4, write_fp8, write_qwen3

    sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "num_experts": EXPERTS, "layers": 1}
    for name, writer in {"mxfp4": write_deepseek_v4, "bf16": write_qwen3, "fp8": write_fp8}.items():
        writer(folder / name, **sizes)
    GGUF["GGUF Q4_K"].write(folder / "gguf", **sizes)
    random = np.random.default_rng(1)
    x = random.standard_normal((TOKENS, HIDDEN)).astype(ml_dtypes.bfloat16).view(np.uint16)
    ids = np.array([random.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    np.savez(folder / "batch.npz", x=x, ids=ids, weights=random.random((TOKENS, TOP_K), np.float32))


def digests(folder: Path) -> dict[str, str]:
    """{checkpoint and backend: a digest of the output's bits}."""
    batch, found = np.load(folder / "batch.npz"), {}
    for checkpoint in sorted(path for path in folder.iterdir() if path.is_dir()):
        for backend in ktmoe.backends.available():
            with ktmoe.MoELayer.from_checkpoint(checkpoint, layer=0, backend=backend, activations="bf16") as layer:
                y = layer.forward(batch["x"], batch["ids"], batch["weights"])
            assert y.any(), checkpoint
            found[f"{checkpoint.name} {backend}"] = hashlib.sha256(y.tobytes()).hexdigest()
    return found


if __name__ == "__main__":
    if "write" in sys.argv[2:]:
        write(Path(sys.argv[1]))
    said = {"where": ktmoe.__file__, "version": ktmoe.__version__, "backends": ktmoe.backends.available()}
    print(json.dumps(said | {"numpy": np.__version__, "digests": digests(Path(sys.argv[1]))}))
