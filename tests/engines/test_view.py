"""Views: folders that transformers itself loads as models whose experts ktmoe computes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import huggingface_hub
import pytest
import torch
from helpers import POINTER
from transformers import AutoModelForCausalLM

import ktmoe.transformers
from ktmoe import synthetic
from ktmoe.errors import CheckpointError, InputError
from ktmoe.transformers.folder import folder_of
from ktmoe.transformers.view import view


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "Tiny-1.5"
    synthetic.write_chat_model(folder)
    return folder


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Where views are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_what_is_in_it(model, temporary):
    (model / "more").mkdir()
    own = json.loads((model / "config.json").read_text())
    with view(model, backend="fp32_lut", threads=2) as made:
        assert (made.name, made.folder, made.path) == ("Tiny-1.5", model, made.root / "Tiny-1.5")
        assert {file.name for file in made.path.iterdir()} == {file.name for file in model.iterdir()}
        for file in made.path.iterdir():
            assert file.name == "config.json" or file.resolve() == (model / file.name).resolve()
        written = json.loads((made.path / "config.json").read_text())
        ours = written.pop("quantization_config")
        assert written == own
        found = {name: ours[name] for name in ("quant_method", "path", "inner", "backend", "activations", "threads")}
        assert found == {
            "quant_method": "ktmoe",
            "path": str(model),
            "inner": None,
            "backend": "fp32_lut",
            "activations": "auto",
            "threads": 2,
        }
    assert list(temporary.iterdir()) == []
    assert (model / "more").is_dir()


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_a_pointer_of_git_lfs(model, name):
    (model / "consolidated.safetensors").write_bytes(POINTER)  # what nobody reads may stay one
    assert folder_of(model) == model
    (model / name).write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=rf"{name}: expected the file itself, found git-lfs's pointer to it"):
        folder_of(model)


def test_it_is_removed_after_an_error(model, temporary):
    with pytest.raises(KeyboardInterrupt), view(model):
        raise KeyboardInterrupt
    assert list(temporary.iterdir()) == []


@pytest.mark.smoke
@pytest.mark.parametrize("name", [None, "gpt-oss MXFP4", "DeepSeek-V4 FP4", "DeepSeek-V3 FP8", "Kimi INT4"])
def test_transformers_loads_it(model, checkpoint, name):
    """The model's logits are those of ktmoe.transformers.load(), and its experts are no parameters."""
    folder = checkpoint(name) if name else model
    ids = torch.arange(1, 12)[None]
    with view(folder) as made, torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(made.path, dtype="auto", device_map="cpu")  # as the server does
        layers = [module.ktmoe_layer for module in found.modules() if hasattr(module, "ktmoe_layer")]
        assert layers
        assert all(layers)
        assert not [parameter for parameter, _ in found.named_parameters() if ".experts." in parameter]
        logits, expected = (each(ids).logits for each in (found, ktmoe.transformers.load(folder)))
        assert torch.equal(logits, expected)


def test_the_checkpoints_own_quantization(model):
    own = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = json.loads((model / "config.json").read_text())
    for changed in (config | {"quantization_config": own}, config | {"text_config": {"quantization_config": own}}):
        (model / "config.json").write_text(json.dumps(changed))
        with view(model) as made:
            assert json.loads((made.path / "config.json").read_text())["quantization_config"]["inner"] == own


def test_names(model, tmp_path, monkeypatch):
    """A relative path has a name, too, and none has an @, which the server takes for a revision's."""
    monkeypatch.chdir(model)
    with view(".") as made:
        assert made.name == "Tiny-1.5"
        assert json.loads((made.path / "config.json").read_text())["quantization_config"]["path"] == str(model)
    (model / "more").mkdir()
    with view("more/..") as made:
        assert made.name == "Tiny-1.5"
    (tmp_path / "tiny@4bit").symlink_to(model)
    with view(tmp_path / "tiny@4bit") as made:
        assert made.name == "tiny-4bit"


def test_a_model_of_the_hub(model, tmp_path, monkeypatch, caplog):
    """One that was downloaded before; without it, nothing is asked of the network here. The log says so before."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"^some/tiny: expected a folder or a model that the Hub gives: \w+"):
        folder_of("some/tiny")
    assert caplog.messages == ["some/tiny is no folder here: asking the Hugging Face Hub for it"]
    repository = tmp_path / "hub" / "models--some--tiny"
    revision = "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    (repository / "snapshots").mkdir()
    os.symlink(model, repository / "snapshots" / revision)
    assert folder_of("some/tiny") == repository / "snapshots" / revision
    with view("some/tiny") as made:
        assert (made.name, made.path.is_dir()) == ("some/tiny", True)


def test_refusals(model, tmp_path, monkeypatch):
    monkeypatch.setattr("ktmoe.transformers.folder.snapshot_download", None)  # the Hub is not asked
    for path in (tmp_path / "absent", "a b", "one/two/three", "./name", "name/", "-name"):
        with pytest.raises(CheckpointError, match="expected a folder or the id of a model on the Hub, found neither"):
            folder_of(path)
    for path in ("x.gguf", "one/x.GGUF", "one/x.safetensors", model / "model.safetensors"):
        with pytest.raises(CheckpointError, match=r"a model's folder with config\.json, found (neither|another file)"):
            folder_of(path)
    with pytest.raises(CheckpointError, match=r"expected a model's folder with config\.json, found no such file"):
        folder_of(tmp_path)
    with pytest.raises(InputError, match="source"), view(model, source="elsewhere"):
        pass
    Path(model / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json"), view(model):
        pass
