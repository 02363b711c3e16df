"""`llama_text.py FOLDER quantise NAME-TYPE...`: llama.cpp's quantiser makes FOLDER/NAME/TYPE.gguf of F16.gguf beside it.
`llama_text.py FOLDER run NAME-TYPE...`: its engine runs the file.

TYPE-llama.npz: logits, float32 [tokens, vocabulary], of the ids of TYPE-reference.npz. TYPE-llama.json: tokens of the texts of
FOLDER/texts.json, and the tokens that end a text. TYPE-llama.error: why there is nothing, with what llama.cpp wrote.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import llama_cpp as llama
import numpy as np

TYPES = {
    "Q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_K_M": llama.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "MXFP4": llama.LLAMA_FTYPE_MOSTLY_MXFP4_MOE,
}
FOLDER = Path(sys.argv[1])
said: list[str] = []


@llama.llama_log_callback
def _log(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    if level >= 3:
        said.append(text.decode(errors="replace"))


def main() -> None:
    llama.llama_log_set(_log, None)
    llama.llama_backend_init()
    for case in sys.argv[3:]:
        name, _, kind = case.rpartition("-")
        said.clear()
        try:
            {"quantise": quantise, "run": run}[sys.argv[2]](FOLDER / name, kind)
        except Exception as error:
            (FOLDER / name / f"{kind}-llama.error").write_text(f"{error}\n{''.join(said)}")


def quantise(folder: Path, kind: str) -> None:
    settings = llama.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = TYPES[kind], 2
    files = [str(folder / f"{of}.gguf").encode() for of in ("F16", kind)]
    if status := llama.llama_model_quantize(*files, settings):
        raise RuntimeError(f"llama_model_quantize returned {status}")


def run(folder: Path, kind: str) -> None:
    model = llama.llama_model_load_from_file(str(folder / f"{kind}.gguf").encode(), llama.llama_model_default_params())
    if not model:
        raise RuntimeError("llama_model_load_from_file returned nothing")
    vocabulary = llama.llama_model_get_vocab(model)
    with np.load(folder / f"{kind}-reference.npz") as reference:
        np.savez(folder / f"{kind}-llama.npz", logits=logits(model, vocabulary, reference["ids"]))
    texts = json.loads((FOLDER / "texts.json").read_text())
    ends = [token for token in range(llama.llama_vocab_n_tokens(vocabulary)) if llama.llama_vocab_is_eog(vocabulary, token)]
    said_of = {"tokens": [tokens(vocabulary, text) for text in texts], "ends": ends}
    (folder / f"{kind}-llama.json").write_text(json.dumps(said_of))
    llama.llama_model_free(model)


def logits(model, vocabulary, ids: np.ndarray) -> np.ndarray:
    """After every token; all are read at once."""
    settings = llama.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = 256, 256, 256
    settings.n_threads = settings.n_threads_batch = 2
    context = llama.llama_init_from_model(model, settings)
    if not context:
        raise RuntimeError("llama_init_from_model returned nothing")
    batch = llama.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for place, token in enumerate(ids):
        batch.token[place], batch.pos[place] = int(token), place
        batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, True
    if status := llama.llama_decode(context, batch):
        raise RuntimeError(f"llama_decode returned {status}")
    found = np.ctypeslib.as_array(llama.llama_get_logits(context), (len(ids), llama.llama_vocab_n_tokens(vocabulary))).copy()
    llama.llama_batch_free(batch)
    llama.llama_free(context)
    return found


def tokens(vocabulary, text: str) -> list[int]:
    """With special tokens before, as the file says, and added tokens in the text read as such."""
    raw = text.encode()
    room = (llama.llama_token * (len(raw) + 8))()
    count = llama.llama_tokenize(vocabulary, raw, len(raw), room, len(room), True, True)
    return list(room[:count])


if __name__ == "__main__":
    main()
