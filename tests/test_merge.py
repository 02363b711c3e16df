"""merge_adapter(): W + s B A of each expert, restated by numpy, and nothing else; interruptions, refusals, the command."""

from __future__ import annotations

import itertools
import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import checkpoints
import ml_dtypes
import numpy as np
import pytest
from checkpoints import EXPERTS, HIDDEN, INTERMEDIATE, PROJ, SCHEMES, numbers
from converting import experts_of, refused, tree, write

from ktmoe import MoELayer
from ktmoe.adapters import export_adapter, merge_adapter, sums
from ktmoe.cli import main
from ktmoe.conversion import convert
from ktmoe.errors import (
    CheckpointError,
    FormatError,
    InputError,
    MissingTensorError,
    OutOfMemoryError,
    OutputError,
    UnavailableError,
)
from ktmoe.experts import PROJECTIONS
from ktmoe.files.atomic import AtomicFile
from ktmoe.loaders import naming
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.quantization import Quantizer
from ktmoe.training.lora import Lora

BF16 = ml_dtypes.bfloat16
QWEN = {"model_type": "qwen3_moe"}


def adapter(projections=PROJECTIONS, rank=3, alpha=2.0, seed=0, size=0.25, **other) -> Lora:
    """other: dtype, experts, intermediate."""
    dtype, experts, intermediate = (
        other.get(*each) for each in (("dtype", np.float32), ("experts", EXPERTS), ("intermediate", INTERMEDIATE))
    )
    random = np.random.default_rng(seed)

    def pair(n, k):
        a, b = (random.standard_normal(shape) * size for shape in ((experts, rank, k), (experts, n, rank)))
        return a.astype(dtype), b.astype(dtype)

    shapes = {"gate": (intermediate, HIDDEN), "up": (intermediate, HIDDEN), "down": (HIDDEN, intermediate)}
    return Lora({projection: pair(*shapes[projection]) for projection in projections}, alpha)


def merged(weights: np.ndarray, lora: Lora, projection: str, expert: int) -> np.ndarray:
    """The merged weights by the definition: float32 sums in ascending rank, times s, plus W, and one rounding to bfloat16."""
    if projection not in lora.pairs:
        return weights
    a, b = (array.view(BF16) if array.dtype == np.uint16 else array for array in lora.pairs[projection])
    a, b = a[expert].astype(np.float32), b[expert].astype(np.float32)
    change = np.zeros(weights.shape, np.float32)
    for rank in range(lora.rank):
        change = change + np.outer(b[:, rank], a[rank])
    exact = weights.astype(np.float32) + np.float32(lora.alpha / lora.rank) * change
    return exact.astype(BF16).astype(np.float64)


def check(source: Path, out: Path, loras: dict[int, Lora], layers: int) -> None:
    """Experts are W + s B A. Names, shapes and all other tensors are the same."""
    before, after = Checkpoint(source), Checkpoint(out)
    assert set(after.names()) == set(before.names())
    changed = {name for layer in loras for name in naming.tensors(before, layer) if not name.endswith("_bias")}
    for name in before.names():
        assert (after.info(name).dtype, after.info(name).shape) == (before.info(name).dtype, before.info(name).shape)
        if name not in changed:
            np.testing.assert_array_equal(after.read(name), before.read(name))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == set(after.names())
    assert json.loads((out / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    for layer in range(layers):
        was, now = experts_of(source, layer), experts_of(out, layer)
        for expert in range(EXPERTS):
            for projection in PROJECTIONS:
                expected = numbers(was.matrix(expert, projection))
                if layer in loras:
                    expected = merged(expected, loras[layer], projection, expert)
                np.testing.assert_array_equal(numbers(now.matrix(expert, projection)), expected)


@pytest.fixture
def source(tmp_path) -> Path:
    write(tmp_path / "source", config=QWEN)
    return tmp_path / "source"


@pytest.mark.parametrize(
    "scheme",
    [
        "bf16",
        "bf16 w1",
        "bf16 native",
        "deepseek_v4 bf16",
        "bf16 fused",
        "bf16 transposed",
        "llama4",
        "aria",
        "granite",
        "step3",
        "gpt_oss bf16",
    ],
)
def test_every_order_of_tensors(tmp_path, scheme):
    """The second layer has an adapter, the first one has none."""
    write(tmp_path / "source", scheme)
    loras = {1: adapter()}
    report = merge_adapter(tmp_path / "source", loras, tmp_path / "out")
    check(tmp_path / "source", tmp_path / "out", loras, 2)
    assert list(report.layers) == [1]


@pytest.mark.parametrize("scheme", ["bf16", "bf16 fused", "gpt_oss bf16"])
@pytest.mark.parametrize("projections", [("gate",), ("up",), ("down",), ("gate", "down")])
def test_some_projections(tmp_path, scheme, projections):
    """Those without an adapter keep their bits; of a tensor with gate and up, one half."""
    write(tmp_path / "source", scheme)
    loras = {0: adapter(projections, rank=1, alpha=-0.75, dtype=BF16), 1: adapter(projections, rank=5, seed=1)}
    merge_adapter(tmp_path / "source", loras, tmp_path / "out")
    check(tmp_path / "source", tmp_path / "out", loras, 2)


def test_blocks(source, tmp_path, monkeypatch):
    """The result does not depend on how many rows are computed at a time."""
    merge_adapter(source, {0: adapter()}, tmp_path / "whole")
    monkeypatch.setattr(sums, "BLOCK", 7 * HIDDEN)
    merge_adapter(source, {0: adapter()}, tmp_path / "blocks")
    first, second = tree(tmp_path / "whole"), tree(tmp_path / "blocks")
    report = "ktmoe_merge.json"  # whose sums are added up in another order
    assert first.pop(report)
    assert second.pop(report)
    assert first == second


def test_what_rounding_lost(source, tmp_path):
    """An adapter that is small beside the weights is lost in bfloat16, and the report says so."""
    large = merge_adapter(source, {0: adapter(size=2.0)}, tmp_path / "large").layers[0]
    small = merge_adapter(source, {0: adapter(size=0.005)}, tmp_path / "small").layers[0]
    assert 0 < large.relative < 0.01
    assert small.relative > 0.5
    was, now = experts_of(source, 0), experts_of(tmp_path / "small", 0)
    lost = change = 0.0
    for expert in range(EXPERTS):
        for projection in PROJECTIONS:
            lora = adapter(size=0.005)
            a, b = (array[expert].astype(np.float64) for array in lora.pairs[projection])
            exact = lora.scale * b @ a
            change += np.square(exact).sum()
            lost += np.square(numbers(now.matrix(expert, projection)) - numbers(was.matrix(expert, projection)) - exact).sum()
    assert small.relative == pytest.approx((lost / change) ** 0.5, rel=1e-3)
    kept = json.loads((tmp_path / "small" / "ktmoe_merge.json").read_text())
    assert kept["relative_rms_lost"] == {"0": small.relative}
    assert kept["adapter"] == {"0": {"rank": 3, "alpha": 2.0, "projections": ["gate", "up", "down"]}}


def test_nothing_to_add(source, tmp_path):
    """B is 0 where training begins: all bytes stay."""
    lora = Lora({p: (a, np.zeros_like(b)) for p, (a, b) in adapter().pairs.items()}, 2.0)
    report = merge_adapter(source, {0: lora, 1: lora}, tmp_path / "out")
    check(source, tmp_path / "out", {}, 2)
    assert [error.relative for error in report.layers.values()] == [0, 0]


def test_nothing_to_add_to_rounded_weights(tmp_path, capsys):
    """B is 0 in a layer that is dequantized: its weights are rounded, but nothing of the adapter is lost."""
    write(tmp_path / "source", "fp8", config=QWEN)
    lora = adapter(intermediate=SCHEMES["fp8"].intermediate)
    fresh = Lora({p: (a, np.zeros_like(b)) for p, (a, b) in lora.pairs.items()}, 2.0)
    export_adapter(tmp_path / "adapter", {0: fresh, 1: lora}, QWEN)
    arguments = ["merge", str(tmp_path / "source"), str(tmp_path / "adapter"), str(tmp_path / "out"), "--dequantize"]
    assert main(arguments) == 0
    assert "layer 0: nothing, since the adapter changes no weight\n  layer 1: " in capsys.readouterr().out
    kept = json.loads((tmp_path / "out" / "ktmoe_merge.json").read_text())["relative_rms_lost"]
    assert kept["0"] == 0 < kept["1"]
    report = merge_adapter(tmp_path / "source", {1: lora}, tmp_path / "same", dequantize=True)
    assert kept["1"] == report.layers[1].relative
    for layer, expert, projection in itertools.product(range(2), range(EXPERTS), PROJECTIONS):
        found, same = (experts_of(tmp_path / folder, layer).matrix(expert, projection) for folder in ("out", "same"))
        np.testing.assert_array_equal(numbers(found), numbers(same))


def test_files_of_an_adapter(source, tmp_path):
    """A folder of PEFT's format gives the same bytes as the adapter itself."""
    loras = {0: adapter(), 1: adapter(("down",), seed=1)}
    export_adapter(tmp_path / "adapter", loras, source)
    merge_adapter(source, tmp_path / "adapter", tmp_path / "out")
    merge_adapter(source, loras, tmp_path / "same")
    assert tree(tmp_path / "out") == tree(tmp_path / "same")


def test_it_goes_on(source, tmp_path):
    loras, options = {0: adapter(), 1: adapter(seed=1)}, {"shard_bytes": 30_000}
    merge_adapter(source, loras, tmp_path / "whole", **options)

    def fail(done, total):
        if done > total / 2:
            raise RuntimeError("no more")

    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="no more"):
        merge_adapter(source, loras, out, progress=fail, **options)
    assert "ktmoe merge has not finished" in refused(out)
    for other, label in (({"shard_bytes": 9}, "options"), (options, "adapter")):
        changed = {0: adapter(alpha=2.5), 1: adapter(seed=1)} if label == "adapter" else loras
        with pytest.raises(OutputError, match=f"holds an unfinished merge with another {label}"):
            merge_adapter(source, changed, out, **other)
    with pytest.raises(OutputError, match="found a model"):
        convert(source, out, "mxfp4")
    report = merge_adapter(source, loras, out, **options)
    assert len(report.kept) >= 2
    assert tree(out) == tree(tmp_path / "whole")


def test_it_goes_on_from_whichever_file_failed(tmp_path, monkeypatch):
    """Each of the weights, of the journal's states and of what is copied; the report, config.json and the index."""
    write(tmp_path / "source", "fp8")
    lora = adapter(intermediate=SCHEMES["fp8"].intermediate)
    fresh = Lora({p: (a, np.zeros_like(b)) for p, (a, b) in lora.pairs.items()}, 2.0)
    given = tmp_path / "source", {0: fresh, 1: lora}
    options = {"dequantize": True, "shard_bytes": 60_000}
    merge_adapter(*given, tmp_path / "whole", **options)
    commit, left, failed = AtomicFile.commit, 0, []

    def failing(file):
        nonlocal left
        left -= 1
        if left:
            commit(file)
            return
        file.abort()
        failed.append(str(file.path.relative_to(out)))
        raise RuntimeError("no more")

    monkeypatch.setattr(AtomicFile, "commit", failing)
    for step in itertools.count(1):
        left, out = step, tmp_path / f"out {step}"
        try:
            merge_adapter(*given, out, **options)
            break
        except RuntimeError:
            left = 0
        if out.exists():
            assert "ktmoe merge has not finished" in refused(out)
        merge_adapter(*given, out, **options)
        assert tree(out) == tree(tmp_path / "whole")
    assert set(failed) == set(tree(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("scheme", "loras", "error", "message"),
    [
        ("fp8", {0: adapter()}, FormatError, "expected bfloat16 experts, found E4M3"),
        ("gpt_oss", {0: adapter()}, FormatError, "expected bfloat16 experts, found E2M1"),
        ("bf16", {2: adapter()}, MissingTensorError, "layer 2"),
        ("bf16", {0: adapter(experts=2)}, InputError, "gate's a"),
        ("bf16", {0: adapter(dtype=np.float64)}, InputError, "lora must be of float32 or bfloat16, found float64"),
        ("bf16", {}, InputError, "expected a folder or"),
        ("bf16", {0: None}, InputError, "expected a folder or"),
        ("bf16", {0: adapter(size=1e18)}, None, ""),
        ("bf16", {0: adapter(size=1e19, alpha=1e10)}, FormatError, "expected finite weights with the adapter"),
    ],
)
def test_refusals(tmp_path, scheme, loras, error, message):
    write(tmp_path / "source", scheme)
    if error is None:  # large, and finite
        merge_adapter(tmp_path / "source", loras, tmp_path / "out")
        check(tmp_path / "source", tmp_path / "out", loras, 2)
        return
    with pytest.raises(error, match=message):
        merge_adapter(tmp_path / "source", loras, tmp_path / "out")
    assert not (tmp_path / "out").exists() or "ktmoe merge has not finished" in refused(tmp_path / "out")


@pytest.mark.parametrize("scheme", ["fp8", "fp8 transposed", "int4 zero points", "nvfp4", "gptq", "bf16"])
def test_dequantized(tmp_path, scheme):
    """Experts of another format become bfloat16 with the adapter added before the one rounding; also in layers without one."""
    stated = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}} if scheme == "fp8" else {}
    made = write(tmp_path / "source", scheme, config=stated)
    loras = {1: adapter(("gate", "down"), intermediate=SCHEMES[scheme].intermediate)}
    report = merge_adapter(tmp_path / "source", loras, tmp_path / "out", dequantize=True)
    assert list(report.layers) == [1]
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    before, after = Checkpoint(tmp_path / "source"), Checkpoint(tmp_path / "out")
    experts = {tensor for of_layer in made.values() for tensor in of_layer}
    for tensor in set(before.names()) - experts:
        np.testing.assert_array_equal(after.read(tensor), before.read(tensor))
    assert len(after) == len(set(before.names()) - experts) + 2 * len(PROJECTIONS) * EXPERTS
    for layer in range(2):
        was, now = experts_of(tmp_path / "source", layer), experts_of(tmp_path / "out", layer)
        for expert in range(EXPERTS):
            for projection in PROJECTIONS:
                found = now.matrix(expert, projection)
                assert found.format.element.name == "BF16"
                expected = numbers(was.matrix(expert, projection)).astype(np.float32)
                expected = merged(expected, loras[1], projection, expert) if layer else expected.astype(BF16)
                np.testing.assert_array_equal(numbers(found), expected.astype(BF16).astype(np.float64))


def test_a_group_that_is_wider_than_a_row(tmp_path, monkeypatch):
    """config.json may name any group: each row has one scale then. Memory is for the tensors."""
    of_rows = {"tensors": checkpoints.int4(PROJ, HIDDEN), "meaning": checkpoints.int4_meaning(PROJ, HIDDEN)}
    monkeypatch.setitem(SCHEMES, "wide", replace(SCHEMES["int4"], **of_rows))
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 2**31 - 1}
    stated = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    tensors = write(tmp_path / "source", "wide", config={"quantization_config": stated})[0]
    lora = adapter(intermediate=SCHEMES["wide"].intermediate)
    tracemalloc.start()
    merge_adapter(tmp_path / "source", {0: lora}, tmp_path / "merged", dequantize=True)
    convert(tmp_path / "source", tmp_path / "converted", "mxfp4", requantize=True)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()
    weights, _ = SCHEMES["wide"].meaning(tensors, "model.layers.0.mlp.experts", 1, "up")
    found = numbers(experts_of(tmp_path / "merged", 0).matrix(1, "up"))
    np.testing.assert_array_equal(found, merged(weights.astype(np.float32), lora, "up", 1))
    with pytest.raises(UnavailableError, match="no kernel has scale groups of 2147483647"):
        MoELayer.from_checkpoint(tmp_path / "source", 0)


def test_memory_that_is_refused(source, tmp_path, monkeypatch, capsys):
    """The library's error, one line of the command; the same command goes on later."""
    export_adapter(tmp_path / "adapter", {0: adapter()}, source)
    arguments = ["merge", str(source), str(tmp_path / "adapter"), str(tmp_path / "out")]
    with monkeypatch.context() as changed:
        changed.setattr(naming, "read_slice", refuse)
        changed.setattr(Quantizer, "matrix", refuse)
        assert main(arguments) == 1
        assert capsys.readouterr().err == f"ktmoe: {source}: merging: the system refused memory: Unable to allocate 9 GiB\n"
        with pytest.raises(OutOfMemoryError, match="converting: the system refused memory: Unable"):
            convert(source, tmp_path / "converted", "mxfp4")
    assert main(arguments) == 0


def refuse(*_arguments, **_options):
    raise MemoryError("Unable to allocate 9 GiB")


def test_what_is_not_dequantized(tmp_path):
    """Experts with biases; numbers beyond bfloat16's; and where another weight stays quantized."""
    write(tmp_path / "biases", "gpt_oss")
    with pytest.raises(FormatError, match="expected experts without biases"):
        merge_adapter(tmp_path / "biases", {0: adapter()}, tmp_path / "out", dequantize=True)
    write(tmp_path / "large", "mxfp4 packed")
    with pytest.raises(FormatError, match="expected finite weights with the adapter"):
        merge_adapter(tmp_path / "large", {0: adapter()}, tmp_path / "of large", dequantize=True)
    write(tmp_path / "mixed", "fp8")
    tensor = {"model.layers.0.self_attn.o_proj.weight": ["F8_E4M3", np.zeros((4, 4), np.uint8)]}
    checkpoints.write(tmp_path / "mixed", tensor, file="other.safetensors")
    with pytest.raises(FormatError, match=r"expected all but the experts unquantized.*in model\.layers\.0\.self_attn\.o_proj"):
        merge_adapter(tmp_path / "mixed", {0: adapter()}, tmp_path / "out", dequantize=True)
    assert not (tmp_path / "out").exists()


def test_options_that_there_are_not(source, tmp_path):
    with pytest.raises(InputError, match="shard_bytes: expected at least 1, found 0"):
        merge_adapter(source, {0: adapter()}, tmp_path / "out", shard_bytes=0)
    with pytest.raises(OutputError, match="expected a new or an empty folder"):
        merge_adapter(source, {0: adapter()}, source)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        merge_adapter(source, tmp_path / "none", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(source, tmp_path, capsys):
    loras = {0: adapter(), 1: adapter(seed=1)}
    export_adapter(tmp_path / "adapter", loras, source)
    arguments = ["merge", str(source), str(tmp_path / "adapter")]
    assert main([*arguments, str(tmp_path / "out")]) == 0
    check(source, tmp_path / "out", loras, 2)
    said = capsys.readouterr().out
    assert "layers 0-1" in said
    assert "layer 1:" in said
    assert main([*arguments, str(tmp_path / "again"), "--json", "--shard-gb", "0.00003", "--threads", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["layer"] for each in found["layers"]] == [0, 1]
    assert 0 < found["layers"][0]["relative_rms_lost"] < 1
    assert len([name for name in os.listdir(tmp_path / "again") if name.endswith(".safetensors")]) > 2
    check(source, tmp_path / "again", loras, 2)
    assert main([*arguments, str(tmp_path / "out")]) == 1
    assert "expected a new or an empty folder" in capsys.readouterr().err
