"""Whole models whose dense layers are quantized, too: log-probabilities of vLLM with ktmoe, beside those of float32.

vLLM has no kernels for most of them without AMX. So the yardstick is vLLM without ktmoe on the same numbers in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import runs
import whole_models
from judged import Errors, Reference
from whole_models import MODELS

#: The largest error, and the root mean square, as multiples of vLLM's own.
AT_MOST = 1.2
#: The smallest share of positions at which all routers choose as in float32.
JUDGED = 0.9
#: Biases, integers, MLA, and attention of another kind.
SMOKE = ("gpt-oss MXFP4", "Qwen3-MoE GPTQ", "DeepSeek-V3 FP8", "DeepSeek-V4")
NAMES = [pytest.param(name, marks=[pytest.mark.smoke("all")] * (name in SMOKE), id=name) for name in MODELS]
TWIN = "AWQ of GPTQ's numbers"


@dataclass(frozen=True)
class Answers:
    """ours: of a quantized model, with the plug-in. theirs: of the same numbers in bfloat16, without it."""

    folder: Path
    ours: runs.Result
    theirs: runs.Result


@pytest.fixture(scope="module")
def answers(request, tmp_path_factory):
    """{a name of MODELS that some test here asks for: Answers}, all of one process."""
    folder = tmp_path_factory.mktemp("whole")
    tests = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params["name"] for item in tests if hasattr(item, "callspec")}
    models = {name: model for name, model in MODELS.items() if name in asked}
    if any(item.originalname == "test_two_layouts_of_the_same_numbers" for item in tests):
        models |= {"Qwen3-MoE GPTQ": MODELS["Qwen3-MoE GPTQ"], TWIN: whole_models.TWIN}
    folders = {name: whole_models.write(model, folder / str(i)) for i, (name, model) in enumerate(models.items())}
    jobs = [
        runs.Job(str(path), {"max_model_len": 256} | models[name].options, whole_models.prompts(models[name]), plugin)
        for plugin in (False, True)
        for name, path in ((name, path if plugin else path / "float32") for name, path in folders.items())
    ]
    found = runs.start(jobs, folder / "run", KTMOE_VLLM_DENSE="all")
    theirs, ours = found[: len(folders)], found[len(folders) :]
    return {name: Answers(*each) for name, *each in zip(folders, folders.values(), ours, theirs, strict=True)}


@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities(answers, name):
    """Of prompts and of the tokens after them, at every position where routers choose as in float32."""
    found, prompts = answers[name], whole_models.prompts(MODELS[name])
    assert (found.ours.error, found.theirs.error) == ("", "")
    reference = Reference(found.folder / "float32", MODELS[name].reference)
    ours, theirs = (reference.errors(prompts, result) for result in (found.ours, found.theirs))
    report(name, ours, theirs)
    assert min(ours.share, theirs.share) >= JUDGED
    assert ours.rms <= AT_MOST * theirs.rms
    assert ours.largest <= AT_MOST * theirs.largest


def report(name: str, ours: Errors, theirs: Errors) -> None:
    """For pytest -s, and for a test that fails."""
    shares, rms, largest = ((f(ours), f(theirs)) for f in (lambda e: e.share, lambda e: e.rms, lambda e: e.largest))
    print(
        f"\n{name}: judged {shares[0]:.1%} and {shares[1]:.1%}; "
        + "; ".join(f"{what} {a:.2e}, vLLM's {b:.2e}, {a / b:.2f} x" for what, (a, b) in (("rms", rms), ("largest", largest)))
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_is_ktmoes(answers, name):
    """The experts of every layer, each step, and all dense layers but the router's; nothing is kept twice."""
    result, model = answers[name].ours, MODELS[name]
    steps = len(whole_models.prompts(model)) * runs.NEW
    assert list(result.calls.values()) == [steps] * model.experts
    assert result.left == 0
    assert result.dense == model.dense
    assert [line.split(" (")[0] for line in result.log] == [f"ktmoe computes the experts of {model.experts} layers"]
    assert (answers[name].theirs.calls, answers[name].theirs.log) == ({}, [])


def test_two_layouts_of_the_same_numbers(answers):
    """GPTQ and AWQ: symmetric, with the same scales, and zero points of 8."""
    gptq, awq = answers["Qwen3-MoE GPTQ"].ours, answers[TWIN].ours
    assert awq.error == ""
    assert gptq.tokens == awq.tokens
    assert gptq.logprobs == awq.logprobs
