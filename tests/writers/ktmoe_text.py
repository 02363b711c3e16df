"""`ktmoe_text.py FOLDER NAME-TYPE...`: what ktmoe makes of FOLDER/NAME/TYPE.gguf.

TYPE-ktmoe.npz, TYPE-ktmoe.json and TYPE-ktmoe.error, as llama_text.py has them.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import numpy as np
import torch

import ktmoe.transformers

FOLDER = Path(sys.argv[1])


def main() -> None:
    torch.set_num_threads(1)
    for case in sys.argv[2:]:
        name, _, kind = case.rpartition("-")
        try:
            run(FOLDER / name, kind)
        except Exception:
            (FOLDER / name / f"{kind}-ktmoe.error").write_text(traceback.format_exc())


def run(folder: Path, kind: str) -> None:
    model = ktmoe.transformers.load(folder / f"{kind}.gguf", threads=2)
    with np.load(folder / f"{kind}-reference.npz") as reference, torch.no_grad():
        logits = model(torch.from_numpy(reference["ids"])[None]).logits[0].float().numpy()
    np.savez(folder / f"{kind}-ktmoe.npz", logits=logits)
    tokenizer = ktmoe.transformers.load_tokenizer(folder / f"{kind}.gguf")
    texts = json.loads((FOLDER / "texts.json").read_text())
    (folder / f"{kind}-ktmoe.json").write_text(json.dumps([tokenizer(text)["input_ids"] for text in texts]))


if __name__ == "__main__":
    main()
