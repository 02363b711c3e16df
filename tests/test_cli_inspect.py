"""`ktmoe inspect`: its numbers are those of layers that are loaded; and it says what does not fit and what is not served."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from checkpoint_files import write_file

from ktmoe import MoELayer, MoEModel, backends, cli, synthetic
from ktmoe.backends.base import Backend
from ktmoe.errors import OutOfMemoryError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.machine import memory
from ktmoe.measuring import LimitMeter, inspection, limits
from ktmoe.measuring.limits import Limits
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
