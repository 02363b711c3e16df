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
    file = folder / "split" if kind == "split" else folder / f"{kind}.gguf"
    model = ktmoe.transformers.load(file, threads=2)
    of = "F16" if kind == "split" else kind
    with np.load(folder / f"{of}-reference.npz") as reference, torch.no_grad():
        logits = model(torch.from_numpy(reference["ids"])[None]).logits[0].float().numpy()
    np.savez(folder / f"{kind}-ktmoe.npz", logits=logits)
    tokenizer = ktmoe.transformers.load_tokenizer(file)
    texts = json.loads((FOLDER / "texts.json").read_text())
    messages = [{"role": "user", "content": "Hi"}]
    said = {
        "tokens": [tokenizer(text)["input_ids"] for text in texts],
        "ends": sorted(np.atleast_1d(model.generation_config.eos_token_id).tolist()),
        "chat": tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
    }
    (folder / f"{kind}-ktmoe.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
