"""What a token reads of real models: their headers are written by hand, after their configurations and published names."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from gguf_files import F32, Q4_K, Q6_K, Q8_0, RECORDS

from ktmoe.errors import MissingTensorError
from ktmoe.loaders.tensor_file import TensorInfo
from ktmoe.measuring.token_bytes import MEDIA, PREDICTION, TABLES, passes, token_bytes

GB = 1e9
#: Bits of an element.
BITS = {"BF16": 16, "F32": 32, "I64": 64, "I8": 8, "U8": 8, "F8_E4M3": 8, "F8_E8M0": 8}


class Headers:
    """What is asked of a checkpoint, of headers without a file. absent: names of tensors whose file is not there."""

    path = folder = Path("model")

    def __init__(self, tensors: dict[str, tuple], config: dict, absent: tuple[str, ...] = ()):
        self._tensors, self.config, self._absent = tensors, config, absent
        self.failures = 0

    def names(self):
        return self._tensors.keys()

    def file_of(self, name: str) -> Path:
        return self.folder / ("absent.safetensors" if name in self._absent else "here.safetensors")

    def info(self, name: str) -> TensorInfo:
        if name in self._absent:
            self.failures += 1
            raise MissingTensorError(name)
        dtype, shape = self._tensors[name]
        if isinstance(dtype, int):
            weights, size = RECORDS[dtype]
            nbytes = math.prod(shape) // weights * size
        else:
            nbytes = math.prod(shape) * BITS[dtype] // 8
        return TensorInfo(name, str(dtype), shape, self.file_of(name), 0, nbytes)

    @property
    def nbytes(self) -> int:
        return sum(self.info(name).nbytes for name in self._tensors)


def matrices(of: dict[str, tuple], dtype="BF16") -> dict[str, tuple]:
    return {f"{name}.weight": (dtype, shape) for name, shape in of.items()}


def fp8(of: dict[str, tuple[int, int]]) -> dict[str, tuple]:
    """DeepSeek-V4's: a scale for 128 x 128 weights."""
    scales = {f"{name}.scale": ("F8_E8M0", (-(-n // 128), -(-k // 128))) for name, (n, k) in of.items()}
    return matrices(of, "F8_E4M3") | scales


def attention(layer: str, hidden: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, tuple]:
    q, kv = heads * head_dim, kv_heads * head_dim
    return {
        f"{layer}.self_attn.q_proj": (q, hidden),
        f"{layer}.self_attn.k_proj": (kv, hidden),
        f"{layer}.self_attn.v_proj": (kv, hidden),
        f"{layer}.self_attn.o_proj": (hidden, q),
        f"{layer}.input_layernorm": (hidden,),
        f"{layer}.post_attention_layernorm": (hidden,),
    }


def gpt_oss(layers=24, hidden=2880, experts=32, vocab=201088) -> dict[str, tuple]:
    dense = dict.fromkeys(("model.embed_tokens", "lm_head"), (vocab, hidden)) | {"model.norm": (hidden,)}
    tensors = {}
    for number in range(layers):
        layer = f"model.layers.{number}"
        dense |= attention(layer, hidden, 64, 8, 64) | {f"{layer}.mlp.router": (experts, hidden)}
        for stem, n in (("gate_up_proj", 2 * hidden), ("down_proj", hidden)):
            name = f"{layer}.mlp.experts.{stem}"
            tensors[f"{name}_blocks"] = "U8", (experts, n, hidden // 32, 16)
            tensors[f"{name}_scales"] = "U8", (experts, n, hidden // 32)
            tensors[f"{name}_bias"] = "BF16", (experts, n)
    return matrices(dense) | tensors


def qwen3(layers=48, hidden=2048, experts=128, intermediate=768, vocab=151936, root="model") -> dict[str, tuple]:
    dense = {f"{root}.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden), f"{root}.norm": (hidden,)}
    for number in range(layers):
        layer = f"{root}.layers.{number}"
        dense |= attention(layer, hidden, 32, 4, 128) | {f"{layer}.mlp.gate": (experts, hidden)}
        for expert in range(experts):
            name = f"{layer}.mlp.experts.{expert}"
            dense |= dict.fromkeys((f"{name}.gate_proj", f"{name}.up_proj"), (intermediate, hidden))
            dense[f"{name}.down_proj"] = hidden, intermediate
    return matrices(dense)


def v4_layer(layer: str, ratio: int, hidden=4096, experts=256, intermediate=2048) -> dict[str, tuple]:
    """ratio: of the layer's compressed attention, 0, 4 or 128."""
    dense = {"wq_a": (1024, hidden), "wq_b": (32768, 1024), "wkv": (512, hidden), "wo_a": (8192, 4096), "wo_b": (hidden, 8192)}
    dense = {f"{layer}.attn.{name}": shape for name, shape in dense.items()}
    shared = {"w1": (intermediate, hidden), "w2": (hidden, intermediate), "w3": (intermediate, hidden)}
    dense |= {f"{layer}.ffn.shared_experts.{name}": shape for name, shape in shared.items()}
    if ratio == 4:
        dense[f"{layer}.attn.indexer.wq_b"] = 8192, 1024
    tensors = fp8(dense)
    tensors |= matrices({f"{layer}.attn_norm": (hidden,), f"{layer}.ffn_norm": (hidden,)})
    tensors |= matrices({f"{layer}.ffn.gate": (experts, hidden)})
    tensors |= {f"{layer}.hc_{part}_fn": ("F32", (24, 4 * hidden)) for part in ("attn", "ffn")}
    if ratio:
        width = 1024 if ratio == 4 else 512
        tensors |= matrices(dict.fromkeys((f"{layer}.attn.compressor.wkv", f"{layer}.attn.compressor.wgate"), (width, hidden)))
    if ratio == 4:
        indexer = f"{layer}.attn.indexer"
        tensors |= matrices(dict.fromkeys((f"{indexer}.compressor.wkv", f"{indexer}.compressor.wgate"), (256, hidden)))
        tensors |= matrices({f"{indexer}.weights_proj": (64, hidden)})
    for expert in range(experts):
        for name, (n, k) in shared.items():
            tensors[f"{layer}.ffn.experts.{expert}.{name}.weight"] = "I8", (n, k // 2)
            tensors[f"{layer}.ffn.experts.{expert}.{name}.scale"] = "F8_E8M0", (n, k // 32)
    return tensors


def v4(vocab=129280, hidden=4096) -> dict[str, tuple]:
    tensors = matrices({"embed": (vocab, hidden), "head": (vocab, hidden), "norm": (hidden,)})
    for layer in range(43):
        tensors |= v4_layer(f"layers.{layer}", 0 if layer < 2 else 128 if layer % 2 else 4)
    for layer in range(3):
        tensors[f"layers.{layer}.ffn.gate.tid2eid"] = "I64", (vocab, 6)
    return tensors | v4_layer("mtp.0", 0) | fp8({"mtp.0.e_proj": (hidden, hidden), "mtp.0.h_proj": (hidden, hidden)})


def qwen3_gguf(layers=48, output=True) -> dict[str, tuple]:
    tensors = {"token_embd.weight": (Q4_K, (151936, 2048)), "output_norm.weight": (F32, (2048,))}
    if output:
        tensors["output.weight"] = Q6_K, (151936, 2048)
    for number in range(layers):
        layer = f"blk.{number}"
        for name, shape in (("q", (4096, 2048)), ("k", (512, 2048)), ("v", (512, 2048)), ("output", (2048, 4096))):
            tensors[f"{layer}.attn_{name}.weight"] = Q8_0, shape
        tensors[f"{layer}.ffn_gate_inp.weight"] = F32, (128, 2048)
        for name, kind, shape in (("gate", Q4_K, (768, 2048)), ("up", Q4_K, (768, 2048)), ("down", Q6_K, (2048, 768))):
            tensors[f"{layer}.ffn_{name}_exps.weight"] = kind, (128, *shape)
    return tensors


def near(gigabytes: float):
    return pytest.approx(gigabytes * GB, rel=0.03)


def test_gpt_oss_20b():
    found = token_bytes(Headers(gpt_oss(), {}), 24)
    assert found.of_experts(4) == near(1.27)
    assert found.dense == near(2.43)
    assert found.output == 201088 * 2880 * 2
    assert found.left_out == {TABLES: 201088 * 2880 * 2}
    assert found.complete


def test_gpt_oss_120b():
    found = token_bytes(Headers(gpt_oss(layers=36, experts=128), {}), 36)
    assert found.of_experts(4) == near(1.90)
    assert found.dense == near(3.07)


def test_deepseek_v4_flash():
    checkpoint = Headers(v4(), {})
    assert checkpoint.nbytes == pytest.approx(159.6 * GB, rel=0.001)  # what its published index says
    found = token_bytes(checkpoint, 43)
    assert found.of_experts(6) == near(3.45)
    assert found.dense == near(6.5 + 1.06)
    assert found.output == 129280 * 4096 * 2
    assert found.left_out.keys() == {TABLES, PREDICTION}
    assert found.left_out[TABLES] == 129280 * (4096 * 2 + 3 * 6 * 8)
    assert found.left_out[PREDICTION] == near(3.42 + 0.19)
    assert list(found.routed) == list(range(43))
    assert found.complete


def test_qwen3_30b_a3b():
    found = token_bytes(Headers(qwen3(), {}), 48)
    assert found.of_experts(8) == pytest.approx(48 * 8 * 3 * 768 * 2048 * 2)  # twice the 1.81 GB of FP8
    assert found.dense == near(2.43)
    assert found.routed[0].num_experts == 128
    assert found.complete


def test_gguf():
    """4.5 bits a weight of Q4_K, 6.5625 of Q6_K, 8.5 of Q8_0."""
    found = token_bytes(Headers(qwen3_gguf(), {"general.architecture": "qwen3moe"}), 48)
    expert = 768 * 2048 * (2 * 4.5 + 6.5625) / 8
    assert found.of_experts(8) == pytest.approx(48 * 8 * expert)
    assert found.output == 151936 * 2048 * 6.5625 / 8
    layer = 2048 * (2 * 4096 + 2 * 512) * 8.5 / 8 + 128 * 2048 * 4
    assert found.dense == found.output + 48 * layer + 2048 * 4
    assert found.left_out == {TABLES: 151936 * 2048 * 4.5 / 8}


def test_gguf_experts_that_have_tensors_of_their_own():
    tensors = qwen3_gguf(layers=0)
    for expert in range(8):
        for name in ("gate", "up", "down"):
            tensors[f"blk.0.ffn_{name}.{expert}.weight"] = Q8_0, (256, 256)
    found = token_bytes(Headers(tensors, {}), 1)
    assert found.routed[0].num_experts == 8
    assert found.of_experts(2) == 2 * 3 * 256 * 256 * 34 / 32


@pytest.mark.parametrize("tie", [None, True])
def test_an_output_layer_that_is_the_embedding_counts_once(tie):
    config = {} if tie is None else {"text_config": {"tie_word_embeddings": tie}}
    apart = token_bytes(Headers(qwen3_gguf(), {}), 48)
    tied = token_bytes(Headers(qwen3_gguf(output=False), config), 48)
    assert tied.output == apart.left_out[TABLES]
    assert tied.dense - tied.output == apart.dense - apart.output
    assert tied.left_out == {}
    assert tied.complete


def test_an_output_layer_is_missed_where_the_configuration_has_one():
    tensors = {name: of for name, of in qwen3(layers=1).items() if name != "lm_head.weight"}
    found = token_bytes(Headers(tensors, {"tie_word_embeddings": False}), 1)
    assert not found.output
    assert not found.complete
    assert found.left_out == {TABLES: 151936 * 2048 * 2}


SMALL = {"layers": 2, "hidden": 64, "experts": 4, "intermediate": 32, "vocab": 1000}


@pytest.mark.parametrize(
    "name",
    [
        "visual.blocks.0.attn.qkv.weight",
        "model.visual.merger.linear_fc1.weight",
        "vision_tower.encoder.layers.0.mlp.fc1.weight",
        "model.vision_model.head.weight",
        "multi_modal_projector.linear_1.weight",
        "thinker.audio_tower.layers.1.fc1.weight",
        "talker.model.layers.0.mlp.experts.0.gate_proj.weight",
        "aligner.w1.weight",
        "model.sam_model.neck.0.weight",
        "v.blk.0.attn_q.weight",
        "mm.0.weight",
    ],
)
def test_towers_are_left_out(name):
    plain = token_bytes(Headers(qwen3(**SMALL), {}), 2)
    found = token_bytes(Headers(qwen3(**SMALL) | {name: ("BF16", (10, 10))}, {}), 2)
    assert (found.dense, found.of_experts(2)) == (plain.dense, plain.of_experts(2))
    assert found.left_out[MEDIA] == 200


@pytest.mark.parametrize("root", ["language_model.model", "model.language_model", "thinker.model"])
def test_beside_a_nested_language_model_all_else_is_left_out(root):
    plain = token_bytes(Headers(qwen3(**SMALL), {}), 2)
    found = token_bytes(Headers(qwen3(**SMALL, root=root) | matrices({"mlp1.0": (10, 10)}), {}), 2)
    assert (found.dense, found.output) == (plain.dense, plain.output)
    assert found.left_out[MEDIA] == 200


@pytest.mark.parametrize(
    "name",
    [
        "mtp.fc.weight",
        "model.mtp_layers.0.proj.weight",
        "mtp.layers.0.mlp.experts.0.gate_proj.weight",
        "model.layers.2.embed_tokens.weight",
        "model.layers.2.mlp.experts.0.gate_proj.weight",
        "blk.2.nextn.eh_proj.weight",
    ],
)
def test_multi_token_prediction_is_left_out(name):
    plain = token_bytes(Headers(qwen3(**SMALL), {}), 2)
    found = token_bytes(Headers(qwen3(**SMALL) | {name: ("BF16", (10, 10))}, {}), 2)
    assert (found.dense, found.routed) == (plain.dense, plain.routed)
    assert found.left_out[PREDICTION] == 200


@pytest.mark.parametrize(
    "name", ["layers.1.engram.embed.weight", "blk.1.engram_embd.weight", "per_layer_token_embd.weight", "wpe.weight"]
)
def test_tables_are_left_out(name):
    plain = token_bytes(Headers(qwen3(**SMALL), {}), 2)
    found = token_bytes(Headers(qwen3(**SMALL) | {name: ("BF16", (10, 10))}, {}), 2)
    assert found.dense == plain.dense
    assert found.left_out[TABLES] == plain.left_out[TABLES] + 200


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.shared_experts.gate_proj.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.1.self_attn.output.weight",
        "hc_head_fn",
        "token_embd_norm.weight",
        "output_norm.weight",
    ],
)
def test_what_is_of_the_dense_part(name):
    plain = token_bytes(Headers(qwen3(**SMALL), {}), 2)
    found = token_bytes(Headers(qwen3(**SMALL) | {name: ("F32", (10, 10))}, {}), 2)
    assert (found.dense - plain.dense, found.output) == (400, plain.output)


def test_a_quantized_output_layer_counts_with_its_scales():
    tensors = qwen3(**SMALL) | {"lm_head.weight_scale": ("F32", (1000, 1))}
    assert token_bytes(Headers(tensors, {}), 2).output == 1000 * (64 * 2 + 4)


def test_what_is_not_here_is_named():
    absent = "model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.0.self_attn.q_proj.weight", "mtp.fc.weight"
    tensors = qwen3(**SMALL) | matrices({"mtp.fc": (10, 10)})
    whole, found = token_bytes(Headers(tensors, {}), 2), token_bytes(Headers(tensors, {}, absent), 2)
    assert (found.unread, found.files, found.incomplete) == (2, ["absent.safetensors"], [1])
    assert list(found.routed) == [0]
    assert whole.dense - found.dense == 4096 * 64 * 2
    assert whole.complete
    assert not found.complete


def test_a_file_that_cannot_be_read_is_tried_once():
    """Each try would read its header again, which may be large."""
    tensors = qwen3(**SMALL)
    checkpoint = Headers(tensors, {}, tuple(tensors))
    assert token_bytes(checkpoint, 2).unread == len(tensors) - 1  # the input embedding's would not be read
    assert checkpoint.failures == 1


def test_layers_without_a_tensor_are_named():
    assert token_bytes(Headers(qwen3(**SMALL), {}), 5).absent == [2, 3, 4]
    assert len(token_bytes(Headers(qwen3(**SMALL), {}), 10**9).absent) < 10**4
    tower = matrices({"vision_tower.layers.3.fc1": (10, 10)})
    assert token_bytes(Headers(qwen3(**SMALL) | tower, {}), 5).absent == [2, 3, 4]


def test_a_token_has_at_most_all_experts():
    found = token_bytes(Headers(qwen3(**SMALL), {}), 2)
    assert found.of_experts(100) == found.of_experts(4) == 2 * 4 * 3 * 64 * 32 * 2


def test_a_dense_model():
    tensors = matrices({"model.embed_tokens": (10, 10), "lm_head": (10, 10), "model.layers.0.mlp.up_proj": (20, 10)})
    found = token_bytes(Headers(tensors, {}), 1)
    assert (found.dense, found.output, found.left_out) == (600, 200, {TABLES: 200})
    assert found.dense_alone
    assert not token_bytes(Headers(qwen3(**SMALL), {}), 2).dense_alone


def test_of_experts_without_a_known_name_nothing_is_said():
    assert token_bytes(Headers(matrices({"model.layers.0.strange": (10, 10)}), {"num_experts": 4}), 1) is None


def test_layers_that_a_token_passes():
    assert passes(3, 4)
    assert passes(99, None)
    assert not passes(4, 4)
    assert not passes("mtp.0", None)
