"""ktmoe accuracy --against: what rounding the experts costs, beside the two models' own logits and two float64 references."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import characters
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import ktmoe
from ktmoe import cli, conversion, reference
from ktmoe.errors import CheckpointError, InputError
from ktmoe.transformers import accuracy as module
from ktmoe.transformers import load
from ktmoe.transformers.accuracy import ORIGINAL, ROUNDED, RunMode, accuracy

CONTEXT, TEXT = 64, characters.text(300)
PLAIN = "qwen3_moe"


def step(description, total=None):
    return nullcontext(lambda done, total: None)


@pytest.fixture(scope="module")
def original(checkpoint, tmp_path_factory):
    return characters.with_tokenizer(checkpoint(PLAIN), tmp_path_factory.mktemp("original"))


@pytest.fixture(scope="module")
def rounded(original, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted") / "rounded"
    conversion.convert(original, folder, "mxfp4")
    return folder


@pytest.fixture(scope="module")
def found(original, rounded):
    return accuracy(rounded, TEXT, against=original, activations=["int8"], context=CONTEXT, step=step)


def logs(path: Path, windows, mode: str = "bf16") -> torch.Tensor:
    """Log-probabilities of what follows each scored token's place, float64, of a model that is loaded anew."""
    model, rows = load(path, activations=mode), []
    tokens = AutoTokenizer.from_pretrained(path)(TEXT, return_tensors="pt").input_ids[0]
    for window in windows:
        with torch.no_grad():
            logits = model(tokens[None, window.first : window.last]).logits[0, :-1]
        rows.append(logits[-window.scored :].double())
    return torch.cat(rows).log_softmax(-1)


@pytest.mark.smoke
def test_the_text(original, rounded, found):
    """Perplexity, divergence and agreement, beside torch's own functions."""
    assert [run.mode for run in found.runs] == [
        RunMode("bf16", model=ORIGINAL),
        RunMode("bf16", model=ROUNDED),
        RunMode("int8", model=ROUNDED),
    ]
    assert [run.mode.label for run in found.runs] == ["original", "rounded", "rounded, int8"]
    tokens = AutoTokenizer.from_pretrained(original)(TEXT, return_tensors="pt").input_ids[0]
    exact = logs(original, found.windows)
    for run, other in zip(found.runs[1:], (logs(rounded, found.windows), logs(rounded, found.windows, "int8")), strict=True):
        kl = torch.nn.functional.kl_div(other, exact, reduction="batchmean", log_target=True).item()
        assert run.scores.mean(run.scores.kl).value == pytest.approx(kl, rel=1e-9)
        assert kl > 0
        nll = [torch.nn.functional.nll_loss(each, tokens[1:]).item() for each in (exact, other)]
        assert found.lost(run).value == pytest.approx(nll[1] - nll[0], rel=1e-9)
        same = (exact.argmax(-1) == other.argmax(-1)).double().mean().item()
        assert run.scores.mean(run.scores.same_top).value == pytest.approx(same, rel=1e-12)


@pytest.mark.smoke
def test_the_layers(original, rounded, found):
    """Both checkpoints' experts by the reference, on what enters the original's layers."""
    assert len(found.layers) > 1
    for number, (layer, difference) in enumerate(zip(found.layers, found.runs[1].layers, strict=True)):
        batch = layer.sample.x.float().numpy(), layer.sample.ids.numpy(), layer.sample.weights.numpy()
        ours, exact = (
            reference.forward(ktmoe.load_experts(path, int(layer.name.split(".")[2])), *batch, out_dtype="float32")
            for path in (rounded, original)
        )
        size = np.linalg.norm(exact.y)
        expected = np.linalg.norm(ours.y - exact.y) / size
        bound = (np.linalg.norm(ours.bound) + np.linalg.norm(exact.bound)) / size
        assert abs(difference.relative - expected) <= bound * (1 + difference.relative)
        assert bound < 0.5 * expected  # or it would be no test
        assert found.runs[2].layers[number].relative != difference.relative
        assert (layer.formats, found.runs[1].formats[number]) == ("BF16", "E2M1 with ue8m0 scales per 1x32")


def test_the_original_beside_itself(original):
    """Nothing is lost, bit for bit."""
    found = accuracy(original, TEXT[:100], against=original, context=CONTEXT, step=step)
    assert len(found.runs) == 2
    assert (found.runs[1].scores.kl == 0).all()
    assert (found.runs[1].scores.same_top == found.runs[1].scores.tokens).all()
    assert [layer.relative for layer in found.runs[1].layers] == [0.0] * len(found.layers)


def test_experts_of_another_checkpoint(original, rounded):
    """--experts and --dense are the rounded one's alone."""
    options = {"against": original, "context": CONTEXT, "layers": False, "step": step}
    expected = accuracy(rounded, TEXT[:100], **options)
    found = accuracy(original, TEXT[:100], experts=rounded, dense="int8", **options)
    assert [run.mode.label for run in found.runs] == ["original", "rounded", "rounded, dense int8"]
    assert (found.runs[1].scores.nll == expected.runs[1].scores.nll).all()
    assert (found.runs[0].scores.nll == expected.runs[0].scores.nll).all()
    assert (found.runs[2].scores.nll != expected.runs[1].scores.nll).any()


@pytest.fixture
def file(tmp_path):
    (tmp_path / "text").write_text(TEXT)
    return str(tmp_path / "text")


def test_the_command(original, rounded, file, capsys):
    command = ["accuracy", str(rounded), "--against", str(original), "--text", file, "--context", str(CONTEXT)]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    for line in (
        f"original: {original}",
        f"rounded: {rounded}",
        "KL: mean divergence of the next token's distribution from that of the original",
        "layers 0-2: BF16, rounded: E2M1 with ue8m0 scales per 1x32",
    ):
        assert line in printed
    assert cli.main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["path"], data["against"]) == (str(rounded), str(original))
    assert [run["model"] for run in data["runs"]] == ["original", "rounded"]
    assert [layer["runs"][0]["formats"] for layer in data["layers"]] == ["E2M1 with ue8m0 scales per 1x32"] * len(
        data["layers"]
    )


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "moe_intermediate_size"])
def test_another_shape(original, monkeypatch, tmp_path, key):
    """It is refused by name, before anything is loaded."""
    monkeypatch.setattr(module, "load", None)
    other = characters.with_tokenizer(original, tmp_path)
    config = json.loads((original / "config.json").read_text())
    (other / "config.json").unlink()
    (other / "config.json").write_text(json.dumps(config | {key: config[key] + 2}))
    with pytest.raises(
        CheckpointError, match=rf"{other}: {key} is {config[key] + 2}, expected {config[key]}, as in {original}"
    ):
        accuracy(other, TEXT, against=original, context=CONTEXT, step=step)


def test_another_architecture(original, checkpoint, monkeypatch):
    monkeypatch.setattr(module, "load", None)
    with pytest.raises(CheckpointError, match="model_type is 'gpt_oss', expected 'qwen3_moe'"):
        accuracy(checkpoint("gpt-oss MXFP4"), TEXT, against=original, context=CONTEXT, step=step)


def test_rounding_twice(original, rounded):
    with pytest.raises(InputError, match="rounding must be 'exact'"):
        accuracy(rounded, TEXT, against=original, rounding="folded", context=CONTEXT, step=step)
