"""MX modes inside transformers: by each entrance, in a view for other tools, and in `ktmoe accuracy`."""

from __future__ import annotations

import json
from contextlib import nullcontext

import characters
import pytest
import torch
from engine_models import experts, logits, prompts
from layer_checks import check_layers
from serving import packed
from transformers import AutoModelForCausalLM

import ktmoe.transformers as served
from ktmoe import cli
from ktmoe.errors import UnavailableError
from ktmoe.transformers.accuracy import RunMode, accuracy
from ktmoe.transformers.view import view

MXFP4, PLAIN = "gpt-oss MXFP4", "qwen3_moe"
NAME, SHORT = "mxfp8:ceil/mxfp4:even", "mxfp8/mxfp4:even"
CONTEXT, TEXT = 64, characters.text(200)


def step(description, total=None):
    return nullcontext(lambda done, total: None)


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory):
    """An MXFP4 checkpoint with a tokenizer."""
    made = tmp_path_factory.mktemp("with-tokenizer")
    for file in checkpoint(MXFP4).iterdir():
        (made / file.name).symlink_to(file)
    characters.add_tokenizer(made)
    return made


def modes_of(model) -> set[str]:
    return {module.ktmoe_layer.activations for _, module in experts(model)}


@pytest.mark.smoke
def test_every_entrance(checkpoint):
    """All give the same logits, which are not those of bf16."""
    folder, ids = checkpoint(PLAIN), prompts()
    config = served.Config(activations=NAME)
    with view(folder, activations=NAME) as made:
        models = [
            served.load(folder, activations=NAME),
            packed(folder, activations=NAME),
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config),
            AutoModelForCausalLM.from_pretrained(made.path, dtype=torch.bfloat16),
        ]
    assert [modes_of(model) for model in models] == [{SHORT}] * len(models)
    first, *others = (logits(model, ids) for model in models)
    assert all(torch.equal(other, first) for other in others)
    assert not torch.equal(logits(served.load(folder, activations="bf16"), ids), first)


@pytest.mark.parametrize("load", [served.load, packed])
def test_a_name_that_does_not_exist(checkpoint, load):
    with pytest.raises(UnavailableError, match=r"bf16, int16, int8, mxfp8, mxfp4, or X/H .*, found 'mxfp5'"):
        load(checkpoint(PLAIN), activations="mxfp5")


@pytest.mark.parametrize("mode", ["mxfp4", SHORT])
def test_accuracy_beside_the_reference(folder, mode):
    found = accuracy(folder, TEXT, activations=[mode], context=CONTEXT, step=step)
    assert found.runs[1].scores.kl.sum() > 0
    check_layers(folder, found, activations=mode)


def test_names_of_the_same_mode_run_once(folder):
    names = ["bf16/bf16", "mxfp4", "mxfp4/mxfp4", NAME, "mxfp4:ceil", SHORT]
    found = accuracy(folder, TEXT, activations=names, context=CONTEXT, layers=False, step=step)
    assert [run.mode for run in found.runs] == [RunMode("bf16"), RunMode("mxfp4"), RunMode(SHORT)]


def test_by_default_all_modes_that_lists_name(checkpoint, folder, tmp_path, capsys):
    """In tables of 80 columns; bfloat16 weights have no kernels of integers."""
    file = tmp_path / "text"
    file.write_text(TEXT)
    arguments = ["accuracy", "--text", str(file), "--context", str(CONTEXT)]
    assert cli.main([*arguments, str(folder), "--backend", "avx2"]) == 0
    tables = capsys.readouterr().out.split("text: 200 tokens")[0]
    heads = [line.split() for line in tables.splitlines() if "activations" in line or "layer" in line]
    assert heads == [
        ["activations", "bf16", "int16", "int8"],
        ["activations", "bf16", "mxfp8", "mxfp4"],
        ["layer", "bf16", "of", "bound", "int16", "largest", "int8", "largest"],
        ["layer", "bf16", "of", "bound", "mxfp8", "largest", "mxfp4", "largest"],
    ]
    assert max(map(len, tables.splitlines())) <= 80
    for other in folder.glob("token*"):
        if not (checkpoint(PLAIN) / other.name).exists():
            (tmp_path / other.name).symlink_to(other)
    for other in checkpoint(PLAIN).iterdir():
        (tmp_path / other.name).symlink_to(other)
    assert cli.main([*arguments, str(tmp_path), "--no-layers", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [run["activations"] for run in data["runs"]] == ["bf16", "mxfp8", "mxfp4"]


def test_chat_has_the_mode(checkpoint, tmp_path, capsys, monkeypatch):
    """The option reaches load()."""
    asked = []
    monkeypatch.setattr(served, "load", lambda folder, **options: asked.append(options["activations"]) or 1 / 0)
    characters.add_tokenizer(tmp_path)
    for file in checkpoint(PLAIN).iterdir():
        if not (tmp_path / file.name).exists():
            (tmp_path / file.name).symlink_to(file)
    assert cli.main(["chat", str(tmp_path), "hello", "--activations", NAME]) == 1
    assert asked == [NAME]
