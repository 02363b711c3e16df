"""Whole models from GGUF files: ktmoe.transformers.load("model.gguf"), and what is refused."""

from __future__ import annotations

import engine_models
import gguf
import numpy as np
import pytest
import torch
import whole_gguf
from engine_models import logits, prompts
from transformers import AutoModelForCausalLM
from whole_gguf import BF16

import ktmoe.transformers as served
from ktmoe.cache.packing import pack
from ktmoe.errors import CheckpointError, FormatError, KtmoeError
from ktmoe.torch import DenseEmbedding, DenseLinear
from ktmoe.transformers.view import view

Q8_0, Q4_0 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0
GRANITE = {
    "shared_intermediate_size": 96,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.2,
}
MODELS = {
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_moe tied": {"norm_topk_prob": True, "tie_word_embeddings": True},
    "mixtral": {},
    "gpt_oss": {},
    "granitemoeshared": GRANITE,
    "deepseek_v3": {"n_shared_experts": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "rope_interleave": True},
}


def make(name: str) -> torch.nn.Module:
    kind = name.split()[0]
    return engine_models.make(kind, MODELS[name] | ({"num_key_value_heads": 4} if kind == "deepseek_v3" else {}))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A Qwen3-MoE as a .gguf file."""
    return whole_gguf.write(make("qwen3_moe"), tmp_path_factory.mktemp("gguf") / "tiny-BF16.gguf")


@pytest.mark.smoke("qwen3_moe-False")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_of_the_same_numbers(tmp_path, name, fused):
    """In bfloat16: of transformers' own folder, and of one GGUF file, whatever the converter does to names, rows and heads."""
    model, ids = make(name), prompts()
    folder = engine_models.save(model, tmp_path / "folder")
    made = whole_gguf.write(model, tmp_path / "model.gguf", fused=fused)
    found = served.load(made)
    assert torch.equal(logits(found, ids), logits(served.load(folder), ids))
    assert not [each for each, parameter in found.named_parameters() if parameter.ndim > 1 and len(parameter) > 16]
    assert found.name_or_path == str(made)


@pytest.mark.parametrize("types", [{"shexp": Q8_0, "gate_shexp": BF16}, {"gate_shexp": BF16, "up_shexp": Q4_0}])
def test_gate_and_up_of_different_types(tmp_path, types):
    """Granite has them in one module: its rows are of two packed matrices."""
    types = dict(reversed(types.items()))
    model = make("granitemoeshared")
    found = served.load(whole_gguf.write(model, tmp_path / "model.gguf", types=types))
    for name, parameter in model.state_dict().items():
        if "shared_mlp" in name:
            parts = [parameter] if "output" in name else parameter.chunk(2)
            stems = ["ffn_down_shexp"] if "output" in name else ["ffn_gate_shexp", "ffn_up_shexp"]
            kinds = [next((kind for part, kind in types.items() if part in stem), BF16) for stem in stems]
            rounded = [gguf.dequantize(gguf.quantize(p.float().numpy(), k), k) for p, k in zip(parts, kinds, strict=True)]
            parameter.data.copy_(torch.from_numpy(np.concatenate(rounded)))
    expected, exact = logits(model, prompts()), logits(model.float(), prompts())
    limit = 1.3 * (expected - exact).norm()
    assert (logits(found, prompts()) - exact).norm() <= limit


def test_the_embedding_stays_packed(tmp_path):
    """Rows of the file's own records, rounded once to bfloat16; the output layer is another matrix."""
    model = make("qwen3_moe")
    types = {"token_embd": Q4_0, "output.weight": Q8_0}
    found = served.load(whole_gguf.write(model, tmp_path / "model.gguf", types=types))
    assert isinstance(found.get_input_embeddings(), DenseEmbedding)
    assert found.lm_head.linear.format.element.bits == 8
    ids = torch.arange(2, 90)
    expected = whole_gguf.dequantised(make("qwen3_moe"), types)
    assert torch.equal(found.get_input_embeddings()(ids), expected.get_input_embeddings()(ids))


def test_one_matrix_for_a_tied_embedding(tmp_path):
    found = served.load(whole_gguf.write(make("qwen3_moe tied"), tmp_path / "model.gguf", types={"token_embd": Q8_0}))
    assert found.get_input_embeddings().linear is found.lm_head.linear


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "granitemoeshared", "qwen3_moe tied"])
def test_torch_computes_the_dense_part(tmp_path, name):
    """From the same file, dequantised."""
    model = make(name)
    found = served.load(whole_gguf.write(model, tmp_path / "model.gguf"), dense="torch")
    assert not [module for module in found.modules() if isinstance(module, DenseLinear)]
    expected = served.load(engine_models.save(model, tmp_path / "folder"), dense="torch")
    assert torch.equal(logits(found, prompts()), logits(expected, prompts()))


def test_int8(tmp_path):
    model = make("qwen3_moe")
    found = served.load(whole_gguf.write(model, tmp_path / "model.gguf"), dense="int8")
    expected = served.load(engine_models.save(model, tmp_path / "folder"), dense="int8")
    assert found.lm_head.linear.format == expected.lm_head.linear.format
    same = [f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"]
    for name in same:
        x = torch.randn(3, 64, dtype=torch.bfloat16)
        assert torch.equal(found.get_submodule(name)(x), expected.get_submodule(name)(x))


@pytest.mark.smoke
def test_experts_of_a_file_and_the_rest_of_a_folder(tmp_path):
    model = make("qwen3_moe")
    folder = engine_models.save(model, tmp_path / "folder")
    made = whole_gguf.write(model, tmp_path / "model.gguf", types={"_exps": Q8_0})
    found, alone = served.load(folder, experts=made), served.load(made)
    assert torch.equal(logits(found, prompts()), logits(alone, prompts()))
    assert not torch.equal(logits(found, prompts()), logits(served.load(folder), prompts()))
    other = whole_gguf.write(make("gpt_oss"), tmp_path / "other.gguf")
    with pytest.raises(KtmoeError, match=r"blk\.0: expected as in model\.layers\.0\.mlp\.experts"):
        served.load(folder, experts=other)


def test_through_a_view(file):
    with view(file) as made:
        assert made.name == "tiny-BF16"
        found = AutoModelForCausalLM.from_pretrained(made.path, dtype="auto", device_map="cpu")
    assert torch.equal(logits(found, prompts()), logits(served.load(file), prompts()))


def test_a_split_file_and_a_folder(tmp_path, file):
    """Any file of the model names it, and so does its folder."""
    whole_gguf.write(make("qwen3_moe"), tmp_path / "tiny.gguf", split_max_tensors=20)
    first, second = sorted(tmp_path.iterdir())
    expected = logits(served.load(file), prompts())
    for path in (first, second, tmp_path):
        assert torch.equal(logits(served.load(path), prompts()), expected)
        assert served.load_tokenizer(path)("this").input_ids == served.load_tokenizer(file)("this").input_ids
    with view(second) as made:
        assert made.name == "tiny"


def test_the_tokenizer(file):
    tokenizer = served.load_tokenizer(file)
    assert tokenizer.convert_ids_to_tokens(tokenizer("the th").input_ids) == ["th", "e", "Ġ", "th"]
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|im_start|>user\nhi<|im_end|>\n"
    )
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.name_or_path) == ("<|end|>", "<pad>", str(file))
    model = served.load(file)
    assert model.generation_config.eos_token_id == [0]
    assert (model.config.eos_token_id, model.config.pad_token_id) == (0, 1)


def drop(name: str):
    return lambda tensors: tensors.pop(name)


def put(name: str, shape: tuple[int, ...]):
    return lambda tensors: tensors.update({name: np.ones(shape, np.float32)})


#: What is changed -> the message. No weight has been read then.
REFUSED = {
    "missing norm": (drop("blk.1.attn_norm.weight"), {}, r"tensor for model\.layers\.1\.input_layernorm\.weight of Qwen3Moe"),
    "missing matrix": (drop("blk.1.attn_k.weight"), {}, r"tensor for model\.layers\.1\.self_attn\.k_proj\.weight"),
    "missing embedding": (drop("token_embd.weight"), {}, r"expected a tensor token_embd\.weight, found none"),
    "missing experts": (drop("blk.1.ffn_up_exps.weight"), {}, r"blk\.1\.ffn_up_exps\.weight: expected with the layer's others"),
    "another tensor": (put("blk.0.attn_other.weight", (64, 64)), {}, r"'blk\.0\.attn_other\.weight': expected none beside"),
    "3-D output": (put("output.weight", (2, 64, 64)), {}, r"lm_head\.weight of Qwen3Moe.*: expected \[128, 64\]"),
    "scale of nothing": (put("blk.0.attn_other.scale", (1,)), {}, r"attn_other\.scale': expected none beside"),
    "scale of a router": (put("blk.0.ffn_gate_inp.scale", (1,)), {}, r"ffn_gate_inp\.scale': expected none beside"),
    "scale without weights": (
        lambda tensors: (drop("output.weight")(tensors), put("output.scale", (1,))(tensors)),
        {},
        r"'output\.scale': expected none beside",
    ),
    "bias of the embedding": (put("token_embd.bias", (128,)), {}, r"'token_embd\.bias': expected none beside"),
    "bias without weights": (put("blk.0.attn_qkv.bias", (128,)), {}, r"attn_qkv\.bias': expected none beside"),
    "values without keys": (put("blk.0.attn_v_b.weight", (4, 16, 8)), {}, r"attn_v_b\.weight': expected none beside"),
    "q twice": (
        put("blk.0.attn_qkv.weight", (128, 64)),
        {},
        r"expected one tensor for model\.layers\.0\.self_attn\.[qkv]_proj",
    ),
    "qkv of three dimensions": (
        lambda tensors: (
            [drop(f"blk.0.attn_{part}.weight")(tensors) for part in "qkv"]
            and put("blk.0.attn_qkv.weight", (2, 64, 64))(tensors)
        ),
        {},
        r"blk\.0\.attn_qkv: expected 64 \+ 32 \+ 32 rows of q, k and v, found \[2, 64, 64\]",
    ),
    "norm twice": (put("blk.0.post_attention_norm.weight", (64,)), {}, r"expected one tensor for .*post_attention_layernorm"),
    "another bias": (
        put("blk.0.ffn_norm.bias", (64,)),
        {},
        r"found one for model\.layers\.0\.post_attention_layernorm\.bias",
    ),
    "rope factors": (put("rope_freqs.weight", (8,)), {}, r"'rope_freqs\.weight': expected none beside"),
    "bias alone": (put("blk.0.attn_q.bias", (64,)), {}, r"blk\.0\.attn_k: expected a bias, found none"),
    "shape of a matrix": (
        put("blk.0.attn_q.weight", (32, 64)),
        {},
        r"blk\.0\.attn_q: expected \[n, k\] = \[64, 64\], found \[32, 64\]",
    ),
    "shape of a norm": (
        put("blk.0.attn_norm.weight", (32,)),
        {},
        r"\.input_layernorm\.weight of Qwen3Moe.*: expected \[64\], found \[32\]",
    ),
    "rope": (None, {"rope.scaling.type": "longrope"}, r"qwen3moe\.rope\.scaling\.type: expected 'none', 'linear' or 'yarn'"),
    "attention to all": (None, {"attention.causal": False}, r"attention\.causal: expected none, or True, found False"),
    "temperature": (None, {"attention.temperature_scale": 0.1}, r"attention\.temperature_scale: expected none, or 0"),
    "attention factor": (None, {"rope.scaling.attn_factor": 1.5}, r"rope\.scaling\.attn_factor: expected none, or 1"),
    "base": (None, {"rope.freq_base": 0.0}, r"rope\.freq_base: expected a finite number above 1, found 0\.0"),
    "epsilon": (None, {"attention.layer_norm_rms_epsilon": -1.0}, r"layer_norm_rms_epsilon: expected a finite number above 0"),
    "yarn's context": (
        None,
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 0},
        r"rope\.scaling\.original_context_length: expected a number, 1 or more, found 0",
    ),
    "yarn's range": (
        None,
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": -1.0},
        r"yarn_beta_fast: expected a finite number above 0",
    ),
    "no key-value heads": (None, {"attention.head_count_kv": 0}, r"head_count_kv: expected a number from 1 to 4, found 0"),
    "key-value heads": (None, {"attention.head_count_kv": 3}, r"head_count_kv: expected a divisor of .*, 4, found 3"),
    "rotation": (None, {"rope.dimension_count": 7}, r"rope\.dimension_count: expected 16, as attention\.key_length, and even"),
    "experts of a token": (None, {"expert_used_count": 9}, r"expert_used_count: expected a number from 1 to 8, found 9"),
    "heads": (None, {"attention.head_count": "many"}, r"qwen3moe\.attention\.head_count: expected a number, 1 or more"),
    "values": (None, {"attention.value_length": 8}, r"attention\.value_length: expected 16, as attention\.key_length, found 8"),
    "weights scale": (None, {"expert_weights_scale": 2.5}, r"expert_weights_scale: expected none, or 0 or 1, found 2\.5"),
    "layers": (None, {"block_count": 2**31 - 1}, r"block_count: expected at most 3, as tensors are of 3 layers"),
    "prediction": (None, {"nextn_predict_layers": 3}, r"nextn_predict_layers: expected a number below block_count, 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path, name):
    change, keys, message = REFUSED[name]
    made = whole_gguf.write(make("qwen3_moe"), tmp_path / "model.gguf", change=change, keys=keys)
    with pytest.raises(KtmoeError, match=message):
        served.load(made)


#: Of DeepSeek's kind.
REFUSED_DEEPSEEK = {
    "norm of a softmax": (
        {"expert_gating_func": 1, "expert_weights_norm": True},
        r"expert_weights_norm: expected none, or False",
    ),
    "groups": ({"expert_group_count": 3}, r"expert_group_count: expected groups of equally many of 8 experts"),
    "groups of one": ({"expert_group_count": 8}, r"expert_group_count: expected groups of equally many of 8 experts"),
    "chosen groups": (
        {"expert_group_count": 2, "expert_group_used_count": 3},
        r"expert_group_used_count: expected a number from 0 to 2",
    ),
    "rotation": ({"rope.dimension_count": 200}, r"rope\.dimension_count: expected a number from 2 to 15, found 200"),
}


@pytest.mark.parametrize("name", REFUSED_DEEPSEEK)
def test_refused_of_deepseek(tmp_path, name):
    keys, message = REFUSED_DEEPSEEK[name]
    made = whole_gguf.write(make("deepseek_v3"), tmp_path / "model.gguf", keys=keys)
    with pytest.raises(KtmoeError, match=message):
        served.load(made)


def test_a_router_that_does_not_say_its_function(tmp_path):
    """Files of some models leave it out: tensors that correct the choice of experts tell a sigmoid."""
    model = make("deepseek_v3")
    made = whole_gguf.write(model, tmp_path / "model.gguf", without=("expert_gating_func",))
    expected = served.load(whole_gguf.write(model, tmp_path / "whole.gguf"))
    assert torch.equal(logits(served.load(made), prompts()), logits(expected, prompts()))


def test_prediction_layers_that_are_counted_and_left_out(tmp_path, file):
    keys = {"block_count": 4, "nextn_predict_layers": 1}
    made = whole_gguf.write(make("qwen3_moe"), tmp_path / "model.gguf", keys=keys)
    assert torch.equal(logits(served.load(made), prompts()), logits(served.load(file), prompts()))


@pytest.mark.parametrize(
    ("name", "changes", "fused"),
    [
        ("mixtral", {"num_key_value_heads": 1, "head_dim": 8}, False),
        ("mixtral", {"num_key_value_heads": 1, "head_dim": 8}, True),
        ("granitemoeshared", GRANITE | {"shared_intermediate_size": 6}, False),
        ("granitemoeshared", GRANITE | {"shared_intermediate_size": 10}, False),
    ],
)
def test_modules_of_few_rows(tmp_path, name, changes, fused):
    """torch computes those of fewer than 16 rows: what the converter did to rows is undone there, too."""
    model = engine_models.make(name, changes)
    found = served.load(whole_gguf.write(model, tmp_path / "model.gguf", fused=fused))
    expected = served.load(engine_models.save(model, tmp_path / "folder"))
    assert torch.equal(logits(found, prompts()), logits(expected, prompts()))


def test_one_tensor_an_expert(tmp_path):
    """As files of Mixtral from 2023 have them."""
    model = make("mixtral")

    def apart(tensors):
        for name in [name for name in tensors if "_exps" in name]:
            for number, values in enumerate(tensors.pop(name)):
                tensors[name.replace("_exps.weight", f".{number}.weight")] = values

    found = served.load(whole_gguf.write(model, tmp_path / "model.gguf", change=apart))
    expected = served.load(whole_gguf.write(model, tmp_path / "whole.gguf"))
    assert torch.equal(logits(found, prompts()), logits(expected, prompts()))


def test_an_architecture_without_a_row(tmp_path):
    made = whole_gguf.write(make("qwen3_moe"), tmp_path / "model.gguf", architecture="arctic")
    with pytest.raises(FormatError, match=r"general\.architecture: text needs one of deepseek2, .*; found 'arctic'"):
        served.load(made)


def test_more_tokens_than_rows(tmp_path):
    """An id of the tokenizer would be none of the model's."""

    def shorten(tensors):
        tensors["token_embd.weight"] = tensors["token_embd.weight"][:-1]

    made = whole_gguf.write(make("qwen3_moe tied"), tmp_path / "model.gguf", change=shorten)
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.ggml\.tokens: expected at most 127, as token_embd\.weight has rows, found 128"
    ):
        served.load(made)


def test_a_truncated_file(tmp_path, file):
    data = file.read_bytes()
    for length in (8, len(data) // 2, len(data) - 100):
        (tmp_path / "model.gguf").write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="truncated"):
            served.load(tmp_path / "model.gguf")


def test_nothing_is_left_behind(tmp_path, file, monkeypatch):
    """Neither after loading nor after an error."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    served.load(file)
    served.load_tokenizer(file)
    with pytest.raises(KtmoeError):
        served.load(file, backend="none")
    assert list(tmp_path.iterdir()) == []


def test_a_packed_cache(tmp_path, file):
    pack(file, tmp_path / "packed")
    found = served.load(file, cache=tmp_path / "packed")
    assert torch.equal(logits(found, prompts()), logits(served.load(file), prompts()))
