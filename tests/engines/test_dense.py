"""Dense matrices of whole models: where they come from, what they are packed as, and what is said of those that are wrong."""

import gc
import os
import shutil

import numpy as np
import pytest
import torch
from checkpoints import numbers
from engine_models import ARCHITECTURES, logits, make, prompts, save
from loading_models import own_threads, wait_for_threads
from quantized_checkpoints import PACKED, write
from safetensors.torch import load_file, save_file
from serving import assert_served, eager, packed
from transformers import AutoModelForCausalLM, core_model_loading
from whole_quantized import distance, formats

import ktmoe.transformers as served
from ktmoe.cache.packing import pack
from ktmoe.errors import InputError, KtmoeError
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.quantization import Quantizer
from ktmoe.torch import DenseEmbedding, DenseGroupedLinear, DenseLinear
from ktmoe.transformers.view import view


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_checkpoints_bytes_and_parameters(checkpoint, monkeypatch, name):
    """The same matrices are packed, whoever reads them; and by pack() they are those of the model in memory."""
    folder, ids = checkpoint(name), prompts()
    first = served.load(folder)
    monkeypatch.setattr("ktmoe.transformers.dense_from_checkpoint.stored_parameters", lambda *_: {})
    others = [served.load(folder), served.load(folder, source="parameters"), packed(folder)]
    expected = formats(first)
    assert expected
    for other in others:
        assert formats(other) == expected
        assert torch.equal(logits(other, ids), logits(first, ids))


@pytest.mark.parametrize("name", PACKED)
def test_through_a_view(checkpoint, name):
    """As `ktmoe serve` names a model: by a config.json."""
    with view(checkpoint(name), dense="packed") as made:
        model = AutoModelForCausalLM.from_pretrained(made.path, dtype="auto")
    other = served.load(checkpoint(name))
    assert formats(model) == formats(other)
    assert torch.equal(logits(model, prompts()), logits(other, prompts()))


@pytest.mark.smoke("one")
@pytest.mark.parametrize("name", ["DeepSeek-V3 FP8", "DeepSeek-V4 FP4"])
def test_fp8_stays_fp8(tmp_path, monkeypatch, name):
    """transformers reads no code and no scale, so no tensor of torch's ever has them.

    A group of DeepSeek-V4's wo_a must have whole blocks of scales, as that of the real models has.
    """
    changes = {"o_lora_rank": 128} if "V4" in name else {}
    folder = write(name, tmp_path, changes=changes)
    read = []
    copy = core_model_loading._materialize_copy

    def record(tensor, *arguments, **options):
        read.append(copy(tensor, *arguments, **options))
        return read[-1]

    monkeypatch.setattr(core_model_loading, "_materialize_copy", record)
    model = served.load(folder)
    assert read
    assert {tensor.dtype for tensor in read} <= {torch.bfloat16, torch.float32, torch.int64}
    narrow = [module for module, weight_format in formats(model).items() if weight_format.element.bits == 8]
    with Checkpoint(folder) as opened:
        stored = [each for each in opened.names() if each.endswith((".scale", ".weight_scale_inv")) and ".experts." not in each]
    assert len(narrow) == len(stored) > 12


@pytest.mark.parametrize("dense", ["int8", "mxfp8", "fp8"])
def test_formats_that_round(checkpoint, dense):
    """Each matrix has the error of ktmoe.quantize's own rule, and the logits are near."""
    folder, ids = checkpoint("qwen3_moe"), prompts()
    model, exact = served.load(folder, dense=dense), served.load(folder)
    options = {"group": 32, "scales": "fp16"} if dense == "int8" else {}
    modules = dict(exact.named_modules())
    assert set(formats(model)) == set(formats(exact))
    for name, weight_format in formats(model).items():
        expected, _ = Quantizer(dense, **options).matrix(modules[name].linear.export())
        assert weight_format == expected.format, name
        ours = model.get_submodule(name).linear.export()
        np.testing.assert_array_equal(numbers(ours), numbers(expected), err_msg=name)
    assert 0 < distance(logits(model, ids), logits(exact, ids)) < 0.1


@pytest.mark.parametrize("name", ["DeepSeek-V3 FP8", "DeepSeek-V4 FP4"])
def test_eight_bits_are_not_rounded_again(checkpoint, name):
    before, after = (formats(served.load(checkpoint(name), dense=dense)) for dense in ("packed", "int8"))
    assert before.keys() == after.keys()
    for module, weight_format in before.items():
        if weight_format.element.bits == 8:
            assert after[module] == weight_format
    assert {weight_format.element.bits for weight_format in after.values()} == {8}
    assert len(set(after.values())) == 2


def test_what_does_not_fit_stays_exact(tmp_path):
    """MXFP4 has two codes a byte: a matrix of an odd number of columns has no such bytes."""
    folder = save(make("qwen3_moe", {"layer_types": None}, hidden_size=65), tmp_path)
    found = formats(served.load(folder, source="parameters", dense="mxfp4"))
    assert {weight_format.element.bits for weight_format in found.values()} == {4, 16}
    assert all((weight_format.element.bits == 4) == name.endswith("o_proj") for name, weight_format in found.items())


@pytest.mark.smoke
def test_names(checkpoint):
    for wrong in ("q8_0", "", None, 8):
        with pytest.raises(InputError, match=r"dense must be one of packed, torch, .*int8.*, found"):
            served.load(checkpoint("qwen3_moe"), dense=wrong)
    model = served.load(checkpoint("qwen3_moe"), dense="torch")
    assert_served(model)
    assert not formats(model)
    assert type(model.lm_head) is torch.nn.Linear


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """The folders of a model whose embedding is its output layer, too, and of the same with a copy of it."""
    model = make("qwen3_moe", {"tie_word_embeddings": True})
    folders = tmp_path_factory.mktemp("tied"), tmp_path_factory.mktemp("untied")
    save(model, folders[0])
    tensors = load_file(folders[0] / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folders[1] / "model.safetensors", {"format": "pt"})
    config = (folders[0] / "config.json").read_text()
    assert config.count('"tie_word_embeddings": true') == 1
    (folders[1] / "config.json").write_text(config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    return folders


@pytest.mark.smoke
def test_tied_embeddings(tied):
    """There is one matrix of that size, which is no tensor; and the bits are those of two."""
    expected = logits(served.load(tied[1]), prompts())
    for way in (served.load, packed):
        model = way(tied[0])
        assert isinstance(model.get_input_embeddings(), DenseEmbedding)
        assert model.get_input_embeddings().linear is model.lm_head.linear
        sizes = {tensor.numel() for tensor in (*model.parameters(), *model.buffers())}
        assert model.lm_head.linear.shape[0] * model.lm_head.linear.shape[1] not in sizes
        assert torch.equal(logits(model, prompts()), expected)
        model.tie_weights()
        assert torch.equal(logits(model, prompts()), expected)
        text = model.generate(prompts(), max_new_tokens=4, do_sample=False)
        assert text.shape == (2, 28)


@pytest.mark.parametrize("name", ["qwen3_moe", "DeepSeek-V4 FP4"])
def test_caches(checkpoint, tmp_path, name):
    """`ktmoe pack` packs dense matrices, too, and load() maps them. Caches without them, and rounded ones, work as well."""
    folder, ids = checkpoint(name), prompts()
    expected = logits(served.load(folder), ids)
    for dense in (True, False):
        pack(folder, tmp_path / str(dense), matrices=None if dense else ())
        model = served.load(folder, cache=tmp_path / str(dense))
        linears = {name: module.linear for name, module in model.named_modules() if isinstance(module, DenseLinear)}
        mapped = [name for name, linear in linears.items() if linear.mapped]
        assert bool(mapped) == dense
        assert not dense or len(mapped) > len(linears) / 2
        assert torch.equal(logits(model, ids), expected)
    rounded = served.load(folder, cache=tmp_path / "True", dense="int8")
    assert torch.equal(logits(rounded, ids), logits(served.load(folder, dense="int8"), ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(checkpoint, dtype):
    """Unquantized matrices are torch's. Quantized ones are packed."""
    assert not formats(served.load(checkpoint("qwen3_moe"), dtype=dtype))
    found = formats(served.load(checkpoint("DeepSeek-V3 FP8"), dtype=dtype))
    assert found
    assert {weight_format.element.bits for weight_format in found.values()} == {8}


def test_matrices_that_are_elsewhere(checkpoint):
    """Those on another device stay torch's: a model cannot have some there and none of them."""
    model = eager(checkpoint("qwen3_moe"))
    model.lm_head.to("meta")
    model.model.layers[1].self_attn.to("meta")
    served.pack(model)
    found = formats(model)
    assert found
    assert not [name for name in found if name == "lm_head" or "layers.1.self_attn" in name]
    assert type(model.lm_head) is torch.nn.Linear


def _changed(source, folder, change):
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(source / "config.json", folder)
    return folder


def _absent(tensors, name):
    del tensors[name]


def _not_a_number(tensors, name):
    tensors[name][0, 0] = float("nan")


WRONG = {
    "no scale": ("DeepSeek-V3 FP8", "o_proj.weight_scale_inv", _absent),
    "NaN as a scale": ("DeepSeek-V3 FP8", "o_proj.weight_scale_inv", _not_a_number),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(checkpoint, tmp_path, case):
    """And nothing of what was begun is left."""
    name, last, change = WRONG[case]
    tensor = f"model.layers.1.self_attn.{last}"
    folder = _changed(checkpoint(name), tmp_path, lambda tensors: change(tensors, tensor))
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KtmoeError, match=r"layers\.1\.self_attn\.o_proj"):
        served.load(folder)
    gc.collect()
    wait_for_threads()
    assert own_threads() == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors


#: Modules whose rows do not depend on what else is computed.
INVARIANT = (DenseLinear, DenseGroupedLinear, DenseEmbedding)


@pytest.mark.smoke("one")
@pytest.mark.parametrize("name", [*ARCHITECTURES, *PACKED])
def test_rows_alone(checkpoint, name):
    """What each packed module is given in a batch of 192 tokens has the same bits in batches of 1, 3 and 17."""
    model, calls = served.load(checkpoint(name), activations="bf16"), {}

    def record(module, given, y):
        calls[module] = [each.clone() for each in given], y.clone()

    modules = [module for module in model.modules() if isinstance(module, INVARIANT) or hasattr(module, "ktmoe_layer")]
    handles = [module.register_forward_hook(record) for module in modules]
    logits(model, prompts(batch=8))
    for handle in handles:
        handle.remove()
    assert len(calls) > len(modules) / 2
    for module, (given, y) in calls.items():
        row = (
            0 if isinstance(module, DenseEmbedding) else 2 if isinstance(module, DenseGroupedLinear) else 1
        )  # dimensions of x's
        rows = [each.reshape(-1, *each.shape[each.ndim - row :]) for each in given]
        expected = y.reshape(-1, *y.shape[y.ndim - max(row, 1) :])
        with torch.no_grad():
            for size in (1, 3, 17):
                found = module(*(each[-size:].contiguous() for each in rows))
                assert torch.equal(found, expected[-size:]), (module, size)
