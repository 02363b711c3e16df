"""What experts of GGUF files compute, by their architecture: the table beside what llama.cpp's source says."""

import struct

import pytest
from gguf_files import F32, array, layer, metadata, write

from ktmoe import SILU, GatedActivation
from ktmoe.errors import CheckpointError, FormatError, MissingTensorError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.architectures import ARCHITECTURES
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.gguf_model import ARCHITECTURE

#: Architectures with routed experts of the llama.cpp in llama-cpp-python 0.3.36, by the function that their graph gives to
#: build_moe_ffn(). A script found them: it went from src/llama-model.cpp to each one's tensors, graph and calls.
THEIRS = {
    "SILU": """afmoe arctic bailingmoe bailingmoe2 bailingmoe3 cohere2moe dbrx deepseek deepseek2 deepseek2-ocr deepseek32
        deepseek4 dflash dots1 dots3note ernie4_5-moe exaone-moe glm-dsa glm4moe glm5-next granite granite_swa granitehybrid
        granitemoe grovemoe hunyuan-moe hy_v3 hy_v4 jamba kimi-linear laguna lfm2 lfm2moe llada-moe llama llama-embed llama4
        maple mellum mimo2 minicpm minimax-01 minimax-m2 mistral3 mistral4 olmoe phimoe qwen2moe qwen35moe qwen3moe qwen3next
        qwen3vlmoe qwen4exp rnd1 step35""",
    "SWIGLU_OAI_MOE": "gpt-oss minimax-m3",
    "GELU": "gemma4 grok nomic-bert-moe",
    "RELU": "smallthinker",
    "RELU_SQR": "nemotron_h nemotron_h_moe",
    "SITU": "kimi-k3",
}
#: The architectures without experts: they load no tensor of experts, or their graph uses none (refact).
DENSE = """apertus arcee arwkv7 baichuan bert bitnet bloom chameleon chatglm clip codeshell cogvlm cohere2 command-r deci dream
    eagle3 ernie4_5 eurobert exaone exaone4 falcon falcon-h1 gemma gemma-embedding gemma2 gemma3 gemma3n gemma4-assistant glm4
    gpt2 gptj gptneox graniteswitch hrm_text hunyuan-dense hunyuan_vl internlm2 jais jais2 jina-bert-v2 jina-bert-v3 llada
    maincoder mamba mamba2 minicpm3 modern-bert mpt muse-glimmer nanbeige nemotron neo-bert nomic-bert olmo olmo2 openelm orion
    paddleocr pangu-embedded phi2 phi3 plamo plamo2 plamo3 plm pockettts qwen qwen2 qwen2vl qwen3 qwen35 qwen3tts qwen3vl
    refact rwkv6 rwkv6qwen2 rwkv7 seed_oss smollm3 spark2_5 stablelm starcoder starcoder2 t5 t5encoder talkie wavtokenizer-dec
    xverse"""
#: The architectures that read swiglu_clamp_exp; those that must have it; and those in whose graph ggml_swiglu_clamp() clamps
#: before SiLU.
CLAMPED = {"bailingmoe3", "deepseek4", "dflash", "glm5-next", "hy_v4", "maple", "step35"}
LIMITED = {"deepseek4", "dflash", "maple"}
BEFORE = {"deepseek4", "dflash", "glm5-next", "hy_v4", "maple"}

SILU_ARCHITECTURES = THEIRS["SILU"].split()
KINDS = dict.fromkeys(PROJECTIONS, F32)
SIZES = {"experts": 2, "hidden": 8, "intermediate": 4}
ROWS = {"gate": 4, "up": 4, "down": 8}


def biases(number=0):
    return {f"blk.{number}.ffn_{p}_exps.bias": (F32, (2, n), bytes(8 * n)) for p, n in ROWS.items()}


@pytest.fixture
def of(tmp_path):
    """A function: a checkpoint of one layer, or as many, whose metadata are then said to be another architecture's."""

    def make(architecture, *values, layers=1, more=()):
        tensors = {name: tensor for number in range(layers) for name, tensor in layer(number, KINDS, **SIZES).items()}
        checkpoint = Checkpoint(write(tmp_path / f"{architecture}.gguf", metadata(architecture), tensors | dict(more)))
        if values:
            checkpoint.config[f"{architecture}.swiglu_clamp_exp"] = list(values)
        return checkpoint

    return make


def load(checkpoint, number=0):
    return find_loader(checkpoint).load(checkpoint, number)


def test_every_architecture_with_silu(of):
    """And what its router weights multiply. "glm5next" is Unsloth's name for "glm5-next"."""
    for architecture in [*SILU_ARCHITECTURES, "glm5next"]:
        values = [0.0] if architecture in LIMITED else []
        experts = load(of(architecture, *values))
        assert experts.activation == SILU
        assert (experts.router_weight == "expert_input") == (architecture == "llama4")
        assert experts.router_weight in ("expert_input", "down_output")


def test_limits(of):
    """A clamp before SiLU is computed; one behind it is refused by the layer that has one."""
    for architecture in sorted(CLAMPED | {"glm5next"}):
        checkpoint = of(architecture, 0.0, 7.0, 1e-7, layers=3)
        assert load(checkpoint, 0).activation == load(checkpoint, 2).activation == SILU
        if architecture in BEFORE or architecture == "glm5next":
            assert load(checkpoint, 1).activation == GatedActivation(limit=7.0)
        else:
            words = rf"layer 1 of '{architecture}' clamps silu\(gate\) to 7, which is not supported"
            with pytest.raises(FormatError, match=words):
                load(checkpoint, 1)


def test_a_limit_of_all_layers(tmp_path):
    """Where a file has a number and no list."""
    keys = metadata("hy_v4") | {"hy_v4.swiglu_clamp_exp": struct.pack("<If", 6, 10)}
    experts = load(Checkpoint(write(tmp_path / "m.gguf", keys, layer(1, KINDS, **SIZES))), 1)
    assert experts.activation == GatedActivation(limit=10.0)


def of_floats(*values):
    return array(6, [struct.pack("<f", value) for value in values])


@pytest.mark.parametrize("value", [of_floats(1), of_floats(1, float("nan")), of_floats(1, -1), struct.pack("<II", 4, 7), None])
@pytest.mark.parametrize("architecture", sorted(LIMITED))
def test_limits_that_are_none(tmp_path, architecture, value):
    keys = {} if value is None else {f"{architecture}.swiglu_clamp_exp": value}
    checkpoint = Checkpoint(write(tmp_path / "m.gguf", metadata(architecture) | keys, layer(1, KINDS, **SIZES)))
    with pytest.raises(CheckpointError, match=rf"{architecture}.swiglu_clamp_exp: expected a number, 0 or more, for layer 1"):
        find_loader(checkpoint)


def test_every_other_function_is_refused_by_its_name(of):
    """So is every architecture that has no experts, should a file have some."""
    words = {"GELU": "GELU", "RELU": "ReLU", "RELU_SQR": "squared ReLU", "SITU": "SiTU"}
    for function, word in words.items():
        for architecture in THEIRS[function].split():
            message = f"expected experts with SiLU, found '{architecture}', whose function is {word}"
            with pytest.raises(FormatError, match=message):
                find_loader(of(architecture))
    for architecture in [*DENSE.split(), "not-known"]:
        with pytest.raises(FormatError, match=f"one whose experts' function is known, found '{architecture}'"):
            find_loader(of(architecture))


def test_no_architecture(tmp_path):
    checkpoint = Checkpoint(write(tmp_path / "m.gguf", {}, layer(0, KINDS, **SIZES)))
    with pytest.raises(CheckpointError, match=r"general\.architecture: expected a name, found None"):
        find_loader(checkpoint)


def test_biases_belong_to_an_architecture(of):
    """Without one of them gpt-oss would compute something else; llama.cpp does not load such a file, nor one with others."""
    whole = load(of("gpt-oss", more=biases()))
    assert whole.activation == GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0)
    for name in biases():
        rest = {other: tensor for other, tensor in biases().items() if other != name}
        with pytest.raises(MissingTensorError, match=f"{name}: expected with the layer's others, found no such tensor"):
            find_loader(of("gpt-oss", more=rest))
    with pytest.raises(MissingTensorError, match=r"blk\.0\.ffn_down_exps\.bias: expected"):
        find_loader(of("gpt-oss"))
    for architecture in [*SILU_ARCHITECTURES, "minimax-m3"]:
        values = [0.0] if architecture in LIMITED else []
        name = "blk.0.ffn_up_exps.bias"
        words = f"{name}: expected none beside .*, as {ARCHITECTURE} is '{architecture}', found one"
        with pytest.raises(FormatError, match=words):
            find_loader(of(architecture, *values, more={name: biases()[name]}))
    assert load(of("minimax-m3")).activation == whole.activation


def test_the_table_has_no_other():
    assert sorted(ARCHITECTURES.keys() - {"glm5next"}) == sorted(" ".join(THEIRS.values()).split())
