"""Where a model may lie, and what is said of files that are wrong."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from engine_models import logits, prompts, save
from safetensors.torch import load_file, save_file
from serving import assert_served, eager
from transformers import AutoModelForCausalLM

import ktmoe.transformers as served
from ktmoe.errors import CheckpointError, KtmoeError, MissingTensorError

#: An expert's weight, and one of no expert.
EXPERT, OTHER = "model.layers.1.mlp.experts.5.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def plain(checkpoint) -> Path:
    return checkpoint("qwen3_moe")


@pytest.fixture(scope="module")
def text(plain):
    return logits(served.load(plain), prompts())


def changed(plain: Path, folder: Path, change) -> Path:
    """A checkpoint in which some tensors are others. change: of {name: tensor}, in place."""
    tensors = load_file(plain / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(plain / "config.json", folder)
    return folder


@pytest.mark.parametrize("source", ["checkpoint", "parameters"])
def test_several_files(plain, text, tmp_path, source):
    eager(plain).save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(logits(served.load(tmp_path, source=source), prompts()), text)


@pytest.mark.parametrize("source", ["checkpoint", "parameters"])
def test_an_id_of_the_hub(plain, text, tmp_path, source):
    """Where transformers finds the files, as it keeps them after a download; nothing is downloaded here."""
    snapshot = tmp_path / "models--someone--a-model" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    for file in plain.iterdir():
        (snapshot / file.name).symlink_to(file)
    (tmp_path / "models--someone--a-model" / "refs").mkdir()
    (tmp_path / "models--someone--a-model" / "refs" / "main").write_text("0123abc")
    model = served.load("someone/a-model", cache_dir=tmp_path, source=source)
    assert torch.equal(logits(model, prompts()), text)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt-oss MXFP4", "DeepSeek-V4 FP4", "DeepSeek-V3 FP8", "Kimi INT4"])
def test_a_config_that_names_ktmoe(checkpoint, tmp_path, name):
    """Any tool of transformers takes a folder in which config.json names ktmoe as the quant_method."""
    folder = checkpoint(name)
    for file in folder.glob("*.safetensors"):
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    inner = config.get("quantization_config")
    config["quantization_config"] = served.Config(path=folder, inner=inner).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert_served(model)
    assert torch.equal(logits(model, prompts()), logits(served.load(folder), prompts()))


@pytest.mark.parametrize("path", ["/nothing", "./nothing", "../nothing", "one/two/three"])
def test_a_path_that_is_not_there(path):
    """It is no id of the Hub either, so the Hub is not asked."""
    with pytest.raises(CheckpointError, match=re.escape(f"{path!r}: expected a folder, or an id of the Hugging Face Hub")):
        served.load(path)


@pytest.fixture
def warned(caplog):
    """What transformers warned of."""
    transformers.logging.set_verbosity_warning()
    transformers.logging.add_handler(caplog.handler)
    yield lambda: caplog.text
    transformers.logging.remove_handler(caplog.handler)
    transformers.logging.set_verbosity_error()


@pytest.mark.parametrize("source", ["checkpoint", "parameters"])
def test_nothing_is_warned_of(plain, warned, source):
    """The experts' tensors fit no parameter, and ktmoe has them."""
    served.load(plain, source=source)
    assert warned() == ""


@pytest.mark.parametrize("source", ["checkpoint", "parameters"])
def test_others_tensors_are_still_warned_of(plain, warned, tmp_path, source):
    def change(tensors):
        tensors["model.layers.0.other.weight"] = torch.zeros(2, 2)
        del tensors[OTHER]

    served.load(changed(plain, tmp_path, change), source=source)
    found = warned()
    assert "model.layers.0.other.weight" in found
    assert OTHER in found


WRONG = {
    "missing": (lambda tensors: tensors.pop(EXPERT), "expected with experts 0-7, found no such tensor"),
    "shape": (
        lambda tensors: tensors.update({EXPERT: tensors[EXPERT][:48]}),
        r"expected BF16 \[96, 64\] .* found BF16 \[48, 64\]",
    ),
    "dtype": (lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(torch.int8)}), r"expected BF16 .* found I8"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_tensor(plain, tmp_path, wrong):
    change, message = WRONG[wrong]
    with pytest.raises(KtmoeError, match=rf"{re.escape(EXPERT)}: {message}"):
        served.load(changed(plain, tmp_path, change), source="checkpoint")


def test_a_missing_tensor_is_named(plain, tmp_path):
    """transformers is not asked to read what ktmoe's loaders know to be incomplete."""
    with pytest.raises(MissingTensorError, match=rf"{re.escape(EXPERT)}: expected with experts 0-7"):
        served.load(changed(plain, tmp_path, WRONG["missing"][0]))


@pytest.mark.parametrize(("wrong", "source"), [("missing", "parameters"), ("shape", "auto"), ("shape", "parameters")])
def test_a_wrong_tensor_that_transformers_reads(plain, tmp_path, wrong, source, warned):
    """It prints which it was."""
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        served.load(changed(plain, tmp_path, WRONG[wrong][0]), source=source)
    assert "model.layers.1.mlp.experts" in warned()


def test_wrong_codes(checkpoint, tmp_path):
    """What only reading the weights shows: a scale that is not a number. The rest of the folder was being loaded."""
    name = "model.layers.1.mlp.experts.down_proj"
    folder = checkpoint("gpt-oss MXFP4")
    broken = changed(folder, tmp_path, lambda tensors: tensors[f"{name}_scales"][3].fill_(255))
    with pytest.raises(KtmoeError, match=rf"{re.escape(name)}\[3\]: scale \[0, 0\] is byte 255"):
        served.load(broken)
    assert_served(served.load(folder))


def test_a_file_that_ends_early(plain, tmp_path):
    for file in plain.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    weights = tmp_path / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    with pytest.raises(Exception, match=r"(?i)incomplete|ends|truncated|bytes"):
        served.load(tmp_path)


def test_saved_again(plain, tmp_path):
    """A model's own class is kept, and eager still loads what ktmoe loaded from."""
    save(eager(plain), tmp_path)
    assert type(served.load(tmp_path)) is type(eager(tmp_path))
