"""Text from one GGUF file of llama.cpp's converter and quantiser: ktmoe's logits and tokens, and llama.cpp's.

Both are compared with transformers in float32 on the numbers that the file has. ktmoe is to be as near as llama.cpp is, or as
transformers itself in bfloat16, in which ktmoe's model computes what is between the matrices.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import gguf_models
import gguf_tokenizers
import numpy as np
import pytest
from conftest import ENVIRONMENTS

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 600
#: What llama.cpp takes of the distance that transformers has in bfloat16.
ROOM = 1.05
SMOKE = ("gpt_oss_published-F16", "deepseek_v3-Q4_K_M", "qwen3_next-MXFP4")
CASES = [f"{name}-{kind}" for name in gguf_models.MODELS for kind in gguf_models.FEWER.get(name, gguf_models.TYPES)]

#: Models that llama.cpp does not convert or load, and a part of what it says.
REFUSED = {
    # the published config.json has this value
    "dots1_published": ("error", "Unsupported expert score gating function value: noaux_tc"),
    # without q_lora_rank it takes models of 26 or 27 layers, as DeepSeek-V2-Lite is
    "deepseek_v2_small": ("F16-llama.error", "key not found in model: deepseek2.attention.q_lora_rank"),
}
RUN = [case for case in CASES if case.rpartition("-")[0] not in REFUSED]
#: Models of which llama.cpp computes something else than transformers does, and what: see gguf_models.AS_LLAMA_CPP.
WRONG = {
    "gpt_oss": "YaRN's first and last dimension are rounded to whole ones, though the config says truncate: false",
    "gpt_oss_published": "likewise",
    "deepseek_v2_groups": "a group's score is the sum of its two best experts, as in DeepSeek-V3, not its best one",
}
#: (value of tokenizer.ggml.pre, text) of which llama.cpp makes other tokens than the models' own tokenizers do, and why.
OTHER_TOKENS = {(pre, 4): "its expression takes no combining marks as letters" for pre in ("gpt-4o", "minimax-m2")}


@pytest.fixture(scope="session")
def made(request, tmp_path_factory) -> Path:
    """A folder with one for each model that a test of this run needs. Each engine is started once, for all."""
    for environment in ("llama-converter", "llama", "engines"):
        if not (Path(ENVIRONMENTS or "none") / environment / "installed").exists():
            pytest.skip(f"{environment} is not installed: make test-writers")
    folder = tmp_path_factory.mktemp("gguf_text")
    items = [item for item in request.session.items if item.path == Path(__file__)]
    cases = {item.callspec.params["case"]: None for item in items if "case" in item.callspec.params}
    names = {item.callspec.params["name"]: None for item in items if "name" in item.callspec.params}
    names |= {case.rpartition("-")[0]: None for case in cases}
    (folder / "texts.json").write_text(json.dumps(gguf_tokenizers.TEXTS + gguf_tokenizers.CHATS))
    converter = Path(ENVIRONMENTS) / "llama-converter"
    llama_cpp = next(converter.glob("lib/*/site-packages/llama.cpp"))
    _run("llama-converter", "write_gguf_text", llama_cpp, folder, *names)
    _run("llama", "llama_text", folder, "quantise", *(case for case in cases if not case.endswith("-F16")))
    _run("llama-converter", "reference_text", llama_cpp, folder, *cases)
    _run("llama", "llama_text", folder, "run", *cases)
    _run("engines", "ktmoe_text", folder, *cases, *(f"{name}-split" for name in gguf_models.SPLIT if name in names))
    return folder


def _run(environment: str, script: str, *arguments) -> None:
    command = [Path(ENVIRONMENTS) / environment / "bin" / "python", Path(__file__).with_name(f"{script}.py"), *arguments]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]


def _arrays(made: Path, case: str, of: str) -> dict[str, np.ndarray]:
    name, _, kind = case.rpartition("-")
    error = made / name / f"{kind}-{of}.error"
    assert not error.exists(), error.read_text()[-3000:]
    with np.load(made / name / f"{kind}-{of}.npz") as arrays:
        return dict(arrays)


def _said(made: Path, case: str, of: str) -> dict:
    name, _, kind = case.rpartition("-")
    return json.loads((made / name / f"{kind}-{of}.json").read_text())


def _distance(found: np.ndarray, reference: np.ndarray) -> float:
    return float(np.linalg.norm(found - reference) / np.linalg.norm(reference))


def _params(cases):
    return [pytest.param(case, marks=[pytest.mark.smoke("all")] if case in SMOKE else []) for case in cases]


@pytest.mark.parametrize("case", _params(CASES))
def test_logits(made, case):
    """At every position of a text: no farther from the reference than llama.cpp, or than transformers in bfloat16.

    Where llama.cpp computes another model, its distance is that from this model's reference.
    """
    reference, ours = _arrays(made, case, "reference"), _arrays(made, case, "ktmoe")["logits"]
    expected = reference["logits"]
    bounds = {"transformers in bfloat16": ROOM * _distance(reference["bf16"], expected)}
    if case in RUN:
        bounds["llama.cpp"] = _distance(_arrays(made, case, "llama")["logits"], reference.get("as_llama", expected))
    assert _distance(ours, expected) <= max(bounds.values()), bounds
    # the token is the same wherever the reference's two best are farther apart than the errors of both
    best, second = np.sort(expected, 1)[:, :-3:-1].T
    sure = best - second > 2 * np.abs(ours - expected).max(1)
    assert (ours.argmax(1) == expected.argmax(1))[sure].all()
    assert sure.mean() > 0.3


@pytest.mark.parametrize("case", _params(RUN))
def test_tokens(made, case):
    """Of many scripts and of chats: llama.cpp's, with the special tokens that the file wants before a text; and those that end
    a text."""
    theirs, ours = _said(made, case, "llama"), _said(made, case, "ktmoe")
    texts, pre = range(len(theirs["tokens"])), gguf_models.MODELS[case.rpartition("-")[0]][3]
    others = [text for text in texts if theirs["tokens"][text] != ours["tokens"][text]]
    assert others == [text for text in texts if (pre, text) in OTHER_TOKENS]
    assert ours["ends"] == theirs["ends"]
    assert ours["chat"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", gguf_models.SPLIT)
def test_split(made, name):
    """A split file gives the same bits and tokens."""
    assert len(list((made / name / "split").iterdir())) > 1
    whole, split = f"{name}-F16", f"{name}-split"
    np.testing.assert_array_equal(_arrays(made, split, "ktmoe")["logits"], _arrays(made, whole, "ktmoe")["logits"])
    assert _said(made, split, "ktmoe") == _said(made, whole, "ktmoe")


@pytest.mark.parametrize("case", _params(case for case in CASES if case.endswith("-F16")))
def test_reference(made, case):
    """The reference finds of an F16 file what transformers finds in the checkpoint, whose numbers float16 has nearly all."""
    expected = np.load(made / case.rpartition("-")[0] / "logits.npy")
    assert _distance(_arrays(made, case, "reference")["counted"], expected) < 1e-5


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_refuses(made, name):
    file, says = REFUSED[name]
    assert says in (made / name / file).read_text()


@pytest.mark.parametrize("case", [case for case in RUN if case.endswith("-F16")])
def test_where_llama_cpp_is_wrong(made, case):
    """It is as near as its rounding explains, but for what WRONG says; and as near to what that says."""
    name = case.rpartition("-")[0]
    reference, theirs = _arrays(made, case, "reference"), _arrays(made, case, "llama")["logits"]
    rounding = 0.02 if name in gguf_models.MXFP4 else 0.002  # of what it multiplies: to int8, or to float16
    assert (_distance(theirs, reference["logits"]) > rounding) == (name in WRONG)
    assert _distance(theirs, reference.get("as_llama", reference["logits"])) < rounding
