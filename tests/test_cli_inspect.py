"""`ktmoe inspect`: its numbers are those of layers that are loaded; and it says what does not fit and what is not served."""

from __future__ import annotations

import json
import math

import gguf_files
import numpy as np
import pytest
from checkpoint_files import write_file, write_index

from ktmoe import MoELayer, MoEModel, backends, cli, loaders, synthetic
from ktmoe.backends.base import Backend
from ktmoe.errors import OutOfMemoryError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.base import Loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.machine import memory
from ktmoe.measuring import LimitMeter, inspection, limits
from ktmoe.measuring.limits import Limits
from ktmoe.measuring.speed import Speed
from ktmoe.weights.formats import FORMATS

EXPERTS, HIDDEN, INTERMEDIATE = 4, 128, 256
SIZES = {"num_experts": EXPERTS, "hidden": HIDDEN, "intermediate": INTERMEDIATE}
#: What writes a checkpoint, and the loader that reads it.
MODELS = {
    "deepseek_v4": lambda folder: synthetic.write_deepseek_v4(folder, **SIZES, layers=3, mtp_layers=1, top_k=2),
    "gpt_oss": lambda folder: synthetic.write_gpt_oss(folder, **SIZES, layers=2, top_k=2),
    "nvfp4": lambda folder: synthetic.write_nvfp4(folder, **SIZES, layers=2, top_k=2),
    "gptq": lambda folder: synthetic.write_gptq(folder, **SIZES, layers=2, top_k=2),
}


@pytest.fixture
def inspect(capsys):
    """A function that gives (exit status, what the JSON says)."""

    def call(path, *arguments: str) -> tuple[int, dict]:
        status = cli.main(["inspect", str(path), "--json", *arguments])
        captured = capsys.readouterr()
        assert captured.err == ""
        return status, json.loads(captured.out)

    return call


@pytest.fixture
def quick(monkeypatch):
    """Limits are measured on little memory, in little time."""
    for name, value in {"STAND_IN_BYTES": 1 << 16, "ROUNDS": 1, "READ_SECONDS": 1e-4, "PEAK_SECONDS": 1e-4}.items():
        monkeypatch.setattr(limits, name, value)
    monkeypatch.setattr(limits, "settled", LimitMeter)


@pytest.fixture
def model(tmp_path):
    MODELS["deepseek_v4"](tmp_path)
    return tmp_path


@pytest.mark.parametrize("loader", MODELS)
def test_bytes_are_those_of_loaded_layers(tmp_path, inspect, loader):
    MODELS[loader](tmp_path)
    status, data = inspect(tmp_path, "--no-measure")
    (group,) = data["groups"]
    assert (status, data["loader"], data["not_served"]) == (0, loader, [])
    assert (group["experts"], group["hidden"], group["intermediate"]) == (EXPERTS, HIDDEN, INTERMEDIATE)
    assert data["top_k"] == 2
    with MoEModel.from_checkpoint(tmp_path) as loaded:
        assert group["layers"] == list(loaded)
        assert {layer.nbytes for layer in map(loaded.__getitem__, loaded)} == {group["packed_layer_bytes"]}
        assert (group["backend"], group["activations"]) == (loaded[0].backend, loaded[0].activations)
        assert group["base"] == loaded[0].name
    with Checkpoint(tmp_path) as checkpoint:
        arrays = [name for name in checkpoint.names() if group["base"] in name]
        left = (".bias", "_bias", ".input_scale", ".g_idx")
        stored = sum(checkpoint.info(name).nbytes for name in arrays if not name.endswith(left))
    assert (group["layer_bytes"], group["expert_bytes"]) == (stored, stored // EXPERTS)


def test_the_memory_is_what_loading_asks_for(model, inspect, monkeypatch):
    needed = inspect(model, "--no-measure")[1]["memory"]["needed_bytes"]
    for available, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(memory, "available_bytes", lambda available=available: available)
        status, data = inspect(model, "--no-measure")
        assert status == 0
        assert (data["memory"]["available_bytes"], data["memory"]["fits"]) == (available, fits)
        if fits:
            MoEModel.from_checkpoint(model).close()
        else:
            with pytest.raises(OutOfMemoryError):
                MoEModel.from_checkpoint(model)


@pytest.mark.parametrize(
    ("available", "words"), [(1000, "0.00000100 GB is available: it does not fit"), (None, "does not say")]
)
def test_a_model_that_does_not_fit(model, quick, capsys, monkeypatch, available, words):
    """Nor does a layer to measure with, where there is no memory."""
    monkeypatch.setattr(memory, "available_bytes", lambda: available)
    assert cli.main(["inspect", str(model)]) == 0
    out = capsys.readouterr().out
    assert words in out
    assert ("tokens/s: not known: stand-in" in out) == (available is not None)


def test_no_weight_is_read(model, quick, inspect, monkeypatch):
    def read(*arguments, **options):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Checkpoint, "read", read)
    status, data = inspect(model)
    assert status == 0
    assert data["at_most"]["decode"]["tokens_s"] > 0


def test_text(model, capsys):
    assert cli.main(["inspect", str(model), "--no-measure"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{model}: 96 tensors, 0.000836 GB of routed experts\nloader: deepseek_v4, score 0.9 of 1 ")
    assert "\n  not awq, " in out
    sizes = f"{EXPERTS} experts, hidden {HIDDEN}, intermediate {INTERMEDIATE}"
    assert f"\nlayers 0-2, mtp.0 (layers.0.ffn.experts), loader deepseek_v4: {sizes}\n" in out
    assert f"\n  down: [{HIDDEN}, {INTERMEDIATE}], E2M1 with ue8m0 scales per 1x32\n" in out
    assert "\n  activation: silu(gate) * up, gate at most 10, up within 10; router weights multiply an expert's output\n" in out
    assert "\nmemory: loading needs " in out
    assert "tokens/s" not in out


def estimated(tokens: int, layers: int, layer_bytes: int, read: float, peak: float, top_k: int = 2) -> float:
    """Seconds, where each token's experts are any top_k of EXPERTS: by the number of sets that leave an expert out."""
    missed = math.comb(EXPERTS - 1, top_k) / math.comb(EXPERTS, top_k)
    reading = layer_bytes * (1 - missed**tokens) / read
    multiplying = tokens * top_k * 2 * 3 * HIDDEN * INTERMEDIATE / peak
    return layers * max(reading, multiplying)


@pytest.mark.parametrize(("peak", "bound"), [(1e15, "read"), (1e3, "multiply")])
def test_estimates_follow_from_the_limits(model, inspect, monkeypatch, peak, bound):
    monkeypatch.setattr(inspection, "measured", lambda experts, backend, table: Limits(table.name, 2e9, peak))
    _, data = inspect(model)
    (group,) = data["groups"]
    assert data["limits"] == [{"isa": group["isa"], "read_gb_s": 2.0, "multiply_gflop_s": peak / 1e9}]
    for name, tokens in (("decode", 1), ("prefill", 4096)):
        seconds = estimated(tokens, 3, group["packed_layer_bytes"], 2e9, peak)  # mtp.0 does not count
        call = data["at_most"][name]
        assert (call["tokens"], call["bounded_by"]) == (tokens, bound)
        assert call["ms"] == pytest.approx(1e3 * seconds)
        assert call["tokens_s"] == pytest.approx(tokens / seconds)


def test_layers_past_the_models_own_do_not_count(model, inspect, monkeypatch):
    """DeepSeek-V3's layer 61 is for multi-token prediction."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    monkeypatch.setattr(inspection, "measured", lambda experts, backend, table: Limits(table.name, 2e9, 1e15))
    _, data = inspect(model)
    seconds = estimated(1, 2, data["groups"][0]["packed_layer_bytes"], 2e9, 1e15)
    assert data["at_most"]["decode"]["ms"] == pytest.approx(1e3 * seconds)


@pytest.mark.parametrize("name", FORMATS)
def test_a_stand_in_packs_as_the_experts_do(name, monkeypatch):
    monkeypatch.setattr(limits, "STAND_IN_BYTES", 1 << 20)
    read = None  # what stands in for a checkpoint must not read it
    experts = limits.ExpertWeights(1000, 256, 128, read, FORMATS[name])
    made = limits.stand_in(experts)
    expert_bytes = experts.nbytes // 1000
    assert made.num_experts == (1 << 20) // expert_bytes
    with MoELayer(made) as layer:
        chosen = backends.get(layer.backend)
        assert layer.nbytes * 1000 == chosen.packed_nbytes(experts, layer.placement) * made.num_experts
        y = layer.forward(np.ones((1, 256), np.float32), np.array([[0]]), np.ones((1, 1), np.float32))
        assert not np.isnan(y).any()


def test_limits_are_measured(quick):
    experts = synthetic.deepseek_v4_experts(num_experts=4, hidden=64, intermediate=32)
    found = limits.measured(experts, "fp32_lut", backends.get("fp32_lut").lookup(experts).table)
    assert 1e6 < found.read < 1e13
    assert 1e6 < found.peak < 1e14
    assert found.isa == backends.get("fp32_lut").lookup().table.name


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "expected num_experts_per_tok of config.json, which says how many experts a token has, found none"),
        ({"num_experts_per_tok": "two"}, "expected a whole number from 1 to 4, found 'two'"),
        ({"num_experts_per_tok": True}, "found True"),
        ({"num_experts_per_tok": 10**100}, "found 1000"),
    ],
)
def test_no_speed_without_the_experts_of_a_token(model, inspect, monkeypatch, config, words):
    (model / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(inspection, "measured", lambda experts, backend, table: Limits(table.name, 2e9, 1e9))
    status, data = inspect(model)
    assert (status, data["at_most"]) == (0, {})
    assert words in data["why_not_at_most"]
    assert inspect(model, "--top-k", "3")[1]["at_most"]["decode"]["tokens_s"] > 0


class Elsewhere(Backend):
    """A backend without a kernel table."""

    def pack(self, experts, plan, progress=None):
        raise AssertionError


def test_no_speed_without_a_kernel_table(model, inspect, monkeypatch):
    backends.register("elsewhere", Elsewhere())
    try:
        _, data = inspect(model, "--backend", "elsewhere")
    finally:
        backends.unregister("elsewhere")
    assert data["groups"][0]["packed_layer_bytes"] == data["groups"][0]["layer_bytes"]
    assert data["why_not_at_most"] == "backend elsewhere has no kernel table to measure limits with"


# What a token reads


def dense(vocab=100, layers=3) -> dict:
    """The dense part of MODELS["deepseek_v4"] in bfloat16, small, and an input embedding."""
    shapes = {"embed": [vocab, HIDDEN], "head": [vocab, HIDDEN], "norm": [HIDDEN], "mtp.0.e_proj": [HIDDEN, HIDDEN]}
    shapes |= {f"layers.{layer}.attn.wq_a": [HIDDEN, HIDDEN] for layer in range(layers)}
    return {f"{name}.weight": ("BF16", shape, bytes(2 * math.prod(shape))) for name, shape in shapes.items()}


DENSE_BYTES = 2 * (100 * HIDDEN + HIDDEN + 3 * HIDDEN**2)


@pytest.fixture
def whole_model(model):
    write_file(model / "more.safetensors", dense())
    return model


def test_bytes_of_a_token(whole_model, inspect, monkeypatch):
    monkeypatch.setattr(inspection, "measured", lambda experts, backend, table: Limits(table.name, 2e9, 1e15))
    _, data = inspect(whole_model)
    token, (group,) = data["token"], data["groups"]
    routed = 3 * 2 * group["expert_bytes"]  # three layers, two experts each: mtp.0 does not count
    assert token["routed_bytes"] == routed
    assert token["routed_layers"] == [{"layer": n, "experts": 4, "expert_bytes": group["expert_bytes"]} for n in range(3)]
    assert (token["dense_bytes"], token["output_layer_bytes"]) == (DENSE_BYTES, 2 * 100 * HIDDEN)
    assert token["total_bytes"] == routed + DENSE_BYTES
    assert token["at_most_tokens_s"] == pytest.approx(2e9 / (routed + DENSE_BYTES))
    assert token["complete"]
    assert {left["what"]: left["bytes"] for left in token["not_read"]} == {
        "tables of which a token reads some rows": 2 * 100 * HIDDEN,
        "multi-token prediction": group["layer_bytes"] + 2 * HIDDEN**2,
    }


def test_the_fastest_kernels_set_the_limit():
    """Layers may have kernels of different instruction sets."""
    found = Speed({isa: Limits(isa, read, 1.0) for isa, read in (("a", 1e9), ("b", 3e9), ("c", 2e9))}, {})
    assert found.read == 3e9
    assert Speed({}, {}).read is None


def test_text_of_a_token(whole_model, capsys, monkeypatch):
    monkeypatch.setattr(inspection, "measured", lambda experts, backend, table: Limits(table.name, 2e9, 1e15))
    assert cli.main(["inspect", str(whole_model)]) == 0
    out = capsys.readouterr().out
    assert "\nbytes that a token reads (decode, one text): 0.000438 GB\n" in out
    assert "\n  routed experts of layers 0-2: 0.000313 GB, 2 of 4 a layer\n" in out
    assert "\n  dense part, all else that is read once a token: 0.000124 GB, 0.0000256 GB of it the output layer\n" in out
    assert "\n  not read: 0.0000256 GB of tables of which a token reads some rows, 0.000242 GB of multi-token" in out
    assert (
        "\nmemory allows at most 4571 tokens/s of the whole model (decode, one text): 0.000438 GB a token at 2.00 GB/s\n" in out
    )
    assert "not counted" not in out


def test_without_a_measurement_there_are_bytes_alone(whole_model, capsys):
    assert cli.main(["inspect", str(whole_model), "--no-measure"]) == 0
    out = capsys.readouterr().out
    assert "bytes that a token reads (decode, one text): 0.000438 GB" in out
    assert "at most" not in out.partition("bytes that a token reads")[2]


def test_experts_of_a_token_that_are_not_known(whole_model, inspect, capsys):
    (whole_model / "config.json").write_text("{}")
    _, data = inspect(whole_model, "--no-measure")
    assert (data["token"]["total_bytes"], data["token"]["routed_bytes"]) == (None, None)
    assert "which says how many experts a token has" in data["token"]["why_no_total"]
    assert data["token"]["dense_bytes"] == DENSE_BYTES
    assert cli.main(["inspect", str(whole_model)]) == 0
    out = capsys.readouterr().out
    assert f"(decode, one text): not known: {whole_model}: expected num_experts_per_tok of config.json" in out
    assert "\n  routed experts of layers 0-2: 0.0000522 GB an expert\n" in out
    assert "memory allows" not in out
    total = inspect(whole_model, "--no-measure", "--top-k", "3")[1]["token"]["total_bytes"]
    assert total == DENSE_BYTES + 3 * 3 * data["groups"][0]["expert_bytes"]


@pytest.mark.parametrize("found", ["nothing", "half of a file"])
def test_a_partial_download(whole_model, inspect, capsys, found):
    """The index also names a fourth layer, in a file that is not there; the file of the dense part is not there or cut."""
    weight_map = {}
    for file in whole_model.glob("*.safetensors"):
        with Checkpoint(file) as checkpoint:
            weight_map |= dict.fromkeys(checkpoint.names(), file.name)
    last = [name.replace("layers.2.ffn", "layers.3.ffn") for name in weight_map if name.startswith("layers.2.ffn")]
    write_index(whole_model, weight_map | dict.fromkeys(last, "last.safetensors"))
    config = json.loads((whole_model / "config.json").read_text())
    (whole_model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    more = whole_model / "more.safetensors"
    if found == "nothing":
        more.unlink()
    else:
        more.write_bytes(more.read_bytes()[: more.stat().st_size // 2])
    _, data = inspect(whole_model, "--no-measure")
    token = data["token"]
    assert (token["dense_bytes"], token["output_layer_bytes"], token["complete"]) == (0, None, False)
    assert [layer["layer"] for layer in token["routed_layers"]] == [0, 1, 2]
    missed = {"tensors": 24 + 5, "files": ["last.safetensors", "more.safetensors"], "layers_of_experts": [3], "layers": []}
    assert token["not_counted"] == missed
    assert cli.main(["inspect", str(whole_model), "--no-measure"]) == 0
    out = capsys.readouterr().out
    assert "(decode, one text): at least 0.000313 GB\n" in out
    assert "read once a token: 0 GB, no output layer is here\n" in out
    files = "last.safetensors, more.safetensors"
    assert f"\n  not counted: 29 tensors of files that are absent or broken ({files}), experts of layers 3 among them\n" in out


def test_layers_that_are_not_here(whole_model, inspect, capsys):
    """Without an index, config.json alone says that there are more."""
    config = json.loads((whole_model / "config.json").read_text())
    (whole_model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    assert inspect(whole_model, "--no-measure")[1]["token"]["not_counted"]["layers"] == [3, 4]
    assert cli.main(["inspect", str(whole_model), "--no-measure"]) == 0
    assert "\n  not counted: layers 3-4, of which there is no tensor\n" in capsys.readouterr().out


def test_a_token_of_gguf(tmp_path, inspect):
    """The output layer is the embedding; the experts, of a type that ktmoe does not compute, count all the same."""
    kinds = dict.fromkeys(PROJECTIONS, gguf_files.Q1_0)
    tensors = gguf_files.layer(0, kinds, experts=8)
    for name, kind, shape in (
        ("token_embd", gguf_files.Q4_K, (100, 256)),
        ("blk.0.attn_q", gguf_files.Q8_0, (256, 256)),
        ("blk.0.ffn_gate_inp", gguf_files.F32, (8, 256)),
    ):
        tensors[f"{name}.weight"] = kind, shape, gguf_files.records(0, kind, shape)
    keys = gguf_files.metadata(block_count=1, expert_count=8, expert_used_count=2)
    status, data = inspect(gguf_files.write(tmp_path / "model.gguf", keys, tensors), "--no-measure")
    assert (status, data["groups"], data["top_k"]) == (1, [], 2)
    assert data["token"]["routed_bytes"] == 2 * 3 * 256 * 512 * 18 / 128
    assert data["token"]["output_layer_bytes"] == 100 * 144
    assert data["token"]["dense_bytes"] == 100 * 144 + 256 * 8 * 34 + 8 * 256 * 4
    assert data["token"]["not_read"] == []


class OwnNames(Loader):
    """Has experts under names of its own."""

    def detect(self, checkpoint):
        return 1.0

    def layers(self, checkpoint):
        return [7]

    def load(self, checkpoint, layer):
        return synthetic.deepseek_v4_experts(**SIZES)


def test_names_that_only_a_plugin_knows(whole_model, inspect):
    """Its experts would pass for the dense part, so nothing is said."""
    loaders.register("own", OwnNames())
    try:
        status, data = inspect(whole_model, "--no-measure", "--loader", "own")
    finally:
        loaders.unregister("own")
    assert (status, data["groups"][0]["layers"], data["top_k"], data["token"]) == (0, [7], 2, None)


# What is not served


def bf16(base: str, experts: int, hidden: int, intermediate: int) -> dict:
    shapes = {"gate": [intermediate, hidden], "up": [intermediate, hidden], "down": [hidden, intermediate]}
    return {
        f"{base}.{expert}.{projection}_proj.weight": ("BF16", shapes[projection], bytes(2 * hidden * intermediate))
        for expert in range(experts)
        for projection in PROJECTIONS
    }


def test_layers_of_another_format(tmp_path, inspect, capsys):
    """NVFP4 experts, and a layer for multi-token prediction in bfloat16."""
    MODELS["nvfp4"](tmp_path)
    write_file(tmp_path / "more.safetensors", bf16("mtp.0.mlp.experts", EXPERTS, HIDDEN, INTERMEDIATE))
    status, data = inspect(tmp_path, "--no-measure")
    assert (status, data["loader"], data["not_served"]) == (0, "nvfp4", [])
    assert [(group["layers"], group["loader"]) for group in data["groups"]] == [([0, 1], "nvfp4"), (["mtp.0"], "bf16")]
    with MoEModel.from_checkpoint(tmp_path) as loaded:
        assert sum(len(group["layers"]) * group["packed_layer_bytes"] for group in data["groups"]) == loaded.nbytes
    status, data = inspect(tmp_path, "--no-measure", "--loader", "bf16")
    assert [group["layers"] for group in data["groups"]] == [["mtp.0"]]
    assert [refused["layers"] for refused in data["not_served"]] == [[0, 1]]


def test_alike_layers_are_grouped(tmp_path, inspect):
    tensors = {}
    for layer, intermediate in enumerate((64, 32, 64)):
        tensors |= bf16(f"model.layers.{layer}.mlp.experts", 2, 64, intermediate)
    write_file(tmp_path / "model.safetensors", tensors)
    _, data = inspect(tmp_path, "--no-measure")
    assert [(group["layers"], group["intermediate"]) for group in data["groups"]] == [([0, 2], 64), ([1], 32)]
    assert data["memory"]["needed_bytes"] - data["memory"]["staged_bytes"] == sum(
        len(group["layers"]) * group["packed_layer_bytes"] for group in data["groups"]
    )


def test_layers_that_are_incomplete(tmp_path, inspect):
    """The others are served; alike ones are told in one line."""
    tensors = {}
    for layer in range(4):
        tensors |= bf16(f"model.layers.{layer}.mlp.experts", 2, 64, 32)
    for layer in (1, 2):
        del tensors[f"model.layers.{layer}.mlp.experts.1.up_proj.weight"]
    write_file(tmp_path / "model.safetensors", tensors)
    status, data = inspect(tmp_path, "--no-measure")
    assert (status, data["groups"][0]["layers"]) == (0, [0, 3])
    (refused,) = data["not_served"]
    assert refused["layers"] == [1, 2]
    assert "layers.1.mlp.experts.1.up_proj.weight: expected with experts 0-1" in refused["reason"]


def test_a_dense_model(tmp_path, inspect, capsys):
    write_file(tmp_path / "model.safetensors", {"model.layers.0.mlp.up_proj.weight": ("BF16", [2, 2], bytes(8))})
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith(f"{tmp_path}: 1 tensor\nloader: none\n")
    status, data = inspect(tmp_path)
    assert (status, data["loader"], data["groups"], data["not_served"]) == (1, None, [], [])
    assert "dense" in data["why_no_loader"]
    assert {found["score"] for found in data["loaders"]} == {0}


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]"])
def test_hostile_files(tmp_path, capsys, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert cli.main(["inspect", str(tmp_path), "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"ktmoe: {tmp_path}/model.safetensors")
    assert captured.err.count("\n") == 1
