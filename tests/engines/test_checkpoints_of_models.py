"""Where a model may lie, and what is said of files that are wrong."""

import json
import os
import re
import shutil
from pathlib import Path

import engine_models
import pytest
import torch
import transformers
from engine_models import logits, prompts, save
from helpers import POINTER
from safetensors.torch import load_file, save_file
from serving import assert_served, eager
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import ktmoe.transformers as served
from ktmoe import synthetic
from ktmoe.errors import CheckpointError, KtmoeError, MissingTensorError, UnavailableError
from ktmoe.transformers.view import view

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


@pytest.mark.smoke
@pytest.mark.parametrize("source", ["checkpoint", "parameters"])
def test_several_files(plain, text, tmp_path, source):
    eager(plain).save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(logits(served.load(tmp_path, source=source), prompts()), text)


def test_pointers_of_files_that_loading_does_not_read(plain, text, tmp_path):
    """Whoever fetched the weights alone by git-lfs has a model, without its tokenizer."""
    eager(plain).save_pretrained(tmp_path, max_shard_size="300KB")
    for name in ("tokenizer.json", "notes.txt", "other.safetensors"):
        (tmp_path / name).write_bytes(POINTER)
    assert torch.equal(logits(served.load(tmp_path), prompts()), text)
    for name in ("model-00001-of-", "model.safetensors.index"):
        file = next(file for file in tmp_path.iterdir() if file.name.startswith(name))
        file.write_bytes(POINTER)
        with pytest.raises(CheckpointError, match=rf"{file.name}: expected the file itself, found git-lfs's pointer"):
            served.load(tmp_path)


def test_pickled_weights(plain, text, tmp_path):
    """Where transformers reads them, no other file beside them says how many layers there are."""
    torch.save(load_file(plain / "model.safetensors"), tmp_path / "pytorch_model.bin")
    shutil.copy(plain / "config.json", tmp_path)
    (tmp_path / "other.gguf").touch()
    assert torch.equal(logits(served.load(tmp_path), prompts()), text)
    save_file({"projection.0.weight": torch.zeros(4)}, tmp_path / "projection.safetensors")
    assert torch.equal(logits(served.load(tmp_path), prompts()), text)


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


@pytest.mark.parametrize("path", ["/nothing", "./nothing", "../nothing", "one/two/three", "someone/a--model", "name/"])
def test_a_path_that_is_not_there(path):
    """It is no id of the Hub either, so the Hub is not asked."""
    message = f"{path}: expected a folder or the id of a model on the Hub, found neither"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        served.load(path)


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors", "model"])
def test_a_file_is_no_folder(tmp_path, monkeypatch, name):
    """Nor an id of the Hub, even where it is absent, if it has such an ending."""
    monkeypatch.chdir(tmp_path)
    for found in ("neither", "another file"):
        if found == "another file":
            (tmp_path / name).touch()
            found = "truncated: magic" if name == "model.gguf" else found
        elif name == "model":
            continue
        for path in (name, tmp_path / name):
            with pytest.raises(CheckpointError, match=found):
                served.load(path)


@pytest.mark.parametrize("with_config", [False, True])
def test_a_folder_of_gguf(plain, tmp_path, with_config):
    """It needs no config.json, and the one that is there is not read. These files have experts alone."""
    synthetic.write_gguf(tmp_path, types="Q4_0", num_experts=2, hidden=256, intermediate=256)
    if with_config:
        shutil.copy(plain / "config.json", tmp_path)
    with pytest.raises(KtmoeError, match=rf"{tmp_path}: .*(attention.head_count|general.architecture): expected"):
        served.load(tmp_path)


@pytest.mark.parametrize(
    "found",
    ["Qwen3MoeForCausalLM", ["pipeline"], ["Qwen3MoeConfig"], ["__name__"], [1], [["Qwen3MoeForCausalLM"]], 5, {}, None],
)
def test_the_class_is_a_models(plain, tmp_path, found):
    """Whatever config.json names: transformers has more than models."""
    for file in plain.iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((plain / "config.json").read_text()) | {"architectures": found}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_served(served.load(tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "most"),
    [
        ("num_hidden_layers", 2**31, 8),  # the highest number in a tensor's name is the last expert's
        ("num_hidden_layers", 9, 8),
        ("num_labels", 2**31, 100_000),
        ("num_experts", 2**31, 100_000),
        ("head_dim", 2**31, 2**24),
        ("text_config", {"num_hidden_layers": 9}, 8),
        ("vision_config", {"depth": 10**6}, 1000),
        ("vision_config", {"more": {"hidden_size": 10**9}}, 2**24),
    ],
)
def test_numbers_that_no_model_has(plain, tmp_path, monkeypatch, key, value, most):
    """transformers would count up to them for minutes, or fill the memory. It is asked for nothing."""
    for file in plain.iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((plain / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("ktmoe.transformers.loading.AutoConfig", None)
    with pytest.raises(CheckpointError, match=rf"config\.json: \w+: expected at most {most}, found \d+"):
        served.load(tmp_path)


@pytest.mark.parametrize("source", ["auto", "parameters"])
def test_sizes_that_the_files_cannot_have(plain, tmp_path, monkeypatch, source):
    """transformers would fill such parameters at random before it says that they do not fit."""
    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", None)
    config = AutoConfig.from_pretrained(plain)
    config.head_dim = 10**6
    with pytest.raises(CheckpointError, match=r"expected at most 4 parameters for each of \d+ bytes, found \d+ by config.json"):
        served.load(plain, config=config, source=source)


def other_type(plain: Path, folder: Path) -> Path:
    """Experts of a dtype that no loader reads."""
    return changed(plain, folder, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(torch.int8)}))


def other_sizes(plain: Path, folder: Path) -> Path:
    return save(engine_models.make("qwen3_moe", num_experts=4, num_local_experts=4), folder)


def other_activation(plain: Path, folder: Path) -> Path:
    config = json.loads((shutil.copytree(plain, folder, dirs_exist_ok=True) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    return folder


#: A folder that is made of the model's -> why it does not serve its experts.
NAMED = {
    "absent": (lambda plain, folder: folder / "absent", "expected a folder"),
    "no checkpoint": (lambda plain, folder: folder, "safetensors"),
    "type": (other_type, "found I8"),
    "sizes": (other_sizes, "num_experts 8, found 4"),
    "activation": (other_activation, "gelu"),
}


@pytest.mark.parametrize("source", ["auto", "checkpoint"])
@pytest.mark.parametrize("name", NAMED)
def test_what_is_named_is_used_or_refused(plain, tmp_path, name, source):
    """Never the experts of the folder that transformers reads in its place."""
    make, message = NAMED[name]
    config = served.Config(experts=make(plain, tmp_path), source=source)
    with pytest.raises(KtmoeError, match=message):
        AutoModelForCausalLM.from_pretrained(plain, dtype="auto", quantization_config=config)


def test_experts_of_another_checkpoint(plain, text, tmp_path):
    def change(tensors):
        tensors[EXPERT] *= 2

    other = changed(plain, tmp_path, change)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype="auto", quantization_config=served.Config(experts=other))
    found = logits(model, prompts())
    assert not torch.equal(found, text)
    for loaded in (served.load(other), served.load(plain, experts=other), served.load(plain, experts=str(other))):
        assert torch.equal(found, logits(loaded, prompts()))
    config = served.Config(experts=other, source="parameters")
    with pytest.raises(UnavailableError, match='source="parameters": expected the folder that transformers reads'):
        AutoModelForCausalLM.from_pretrained(plain, dtype="auto", quantization_config=config)


@pytest.mark.parametrize("source", ["auto", "checkpoint"])
def test_a_named_cache_is_used_or_refused(plain, tmp_path, source):
    with pytest.raises(KtmoeError, match="absent"):
        served.load(plain, cache=tmp_path / "absent", source=source)


def test_the_folder_itself_by_another_path(plain, text, tmp_path, monkeypatch):
    """A view's links are the checkpoint's own files: where no loader reads them, transformers does."""

    def find_loader(checkpoint, layer):
        raise UnavailableError("no loader")

    monkeypatch.setattr("ktmoe.transformers.from_checkpoint.find_loader", find_loader)
    with view(plain) as made:
        model = AutoModelForCausalLM.from_pretrained(made.path, dtype="auto")
    assert torch.equal(logits(model, prompts()), text)


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


@pytest.mark.smoke("one")
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
