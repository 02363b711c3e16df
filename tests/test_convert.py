"""`ktmoe convert`: what becomes of every kind of source, in every format; what is refused before a byte is written."""

import json
import re

import numpy as np
import pytest
from checkpoints import EXPERTS, SCHEMES
from converting import REST, check_layer, check_rest, experts_of, names, tree, write

import ktmoe
from ktmoe import cli
from ktmoe.conversion import convert
from ktmoe.conversion.stated import MIXED
from ktmoe.conversion.storage import storage
from ktmoe.errors import FormatError, InputError, KtmoeError, MissingTensorError, UnavailableError
from ktmoe.loaders.base import explain
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.quantization import Quantizer

#: What it is converted to, and the loader that then reads it.
TARGETS = {
    "mxfp4": ({}, "mxfp4"),
    "nvfp4": ({"rule": "compressed-tensors"}, "nvfp4"),
    "nvfp4 ModelOpt": ({"rule": "modelopt"}, "nvfp4"),
    "mxfp8": ({}, "mxfp8"),
    "fp8": ({}, "fp8"),
    "fp8 smaller blocks": ({"group": (64, 32), "scales": "bf16"}, "fp8"),
    "fp8 per row": ({"group": "row"}, "fp8_per_row"),
    "fp8 per matrix": ({"group": "matrix"}, "fp8_per_row"),
    "int8": ({}, "compressed_tensors"),
    "int8 groups": ({"group": 32, "scales": "fp16"}, "compressed_tensors"),
    "int4": ({}, "compressed_tensors"),
    "int4 per row": ({"group": "row"}, "compressed_tensors"),
    "int4 asymmetric": ({"symmetric": False}, "compressed_tensors"),
}
#: Sources of 8 and 16 bits, whose names become others' in each way.
SOURCES = (
    "bf16 w1",
    "bf16 native",
    "fp8",
    "fp8 mistral",
    "int8 groups",
    "bf16 fused",
    "llama4",
    "aria",
    "granite",
    "step3",
    "fp8 transposed",
    "fp8 fused per matrix",
    "llama4 fp8",
)


def config(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("target", TARGETS)
def test_a_format(tmp_path, target):
    to, (options, loader) = target.partition(" ")[0], TARGETS[target]
    of_layers = write(tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "out", to, **options)
    quantizer = Quantizer(to, **options)
    check_rest(tmp_path / "source", tmp_path / "out", {name for of in of_layers.values() for name in of})
    for layer in of_layers:
        relative = check_layer(tmp_path / "source", tmp_path / "out", layer, quantizer)
        assert report.layers[layer].relative == pytest.approx(relative, rel=1e-6)
    findings = explain(Checkpoint(tmp_path / "out"))
    assert [finding.loader for finding in findings if finding.score > 0] == [loader]
    assert report.format == quantizer.format.description


@pytest.mark.parametrize("scheme", SOURCES)
def test_a_source(tmp_path, scheme):
    of_layers = write(tmp_path / "source", scheme)
    convert(tmp_path / "source", tmp_path / "out", "mxfp4", shard_bytes=20_000)
    check_rest(tmp_path / "source", tmp_path / "out", {name for of in of_layers.values() for name in of})
    for layer in of_layers:
        check_layer(tmp_path / "source", tmp_path / "out", layer, Quantizer("mxfp4"))


def test_gpt_oss(tmp_path):
    """It keeps its own names, and its biases; rows of gate and up alternate."""
    of_layers = write(tmp_path / "source", "gpt_oss bf16", config={"model_type": "gpt_oss"})
    convert(tmp_path / "source", tmp_path / "out", "mxfp4")
    rounded = {name for of in of_layers.values() for name in of if not name.endswith("_bias")}
    check_rest(tmp_path / "source", tmp_path / "out", rounded)
    for layer in of_layers:
        check_layer(tmp_path / "source", tmp_path / "out", layer, Quantizer("mxfp4"))
    assert config(tmp_path / "out")["quantization_config"]["quant_method"] == "mxfp4"
    shape = Checkpoint(tmp_path / "out").info("model.layers.0.mlp.experts.gate_up_proj_blocks").shape
    assert shape == (EXPERTS, 2 * 64, 96 // 32, 16)


def test_gpt_oss_has_no_other_format(tmp_path):
    write(tmp_path / "source", "gpt_oss bf16", config={"model_type": "gpt_oss"})
    with pytest.raises(FormatError, match="experts with biases, as gpt-oss has them: expected mxfp4, found int4"):
        convert(tmp_path / "source", tmp_path / "out", "int4")
    assert names(tmp_path) == ["source"]


def test_deepseek_v4_keeps_its_names(tmp_path):
    """Its other weights are FP8, as quantization_config goes on to say."""
    stated = {"model_type": "deepseek_v4", "swiglu_limit": 10.0, "quantization_config": {"quant_method": "fp8"}}
    of_layers = write(tmp_path / "source", "deepseek_v4 bf16", config=stated)
    add(tmp_path / "source", "layers.0.attn.wkv.weight", "F8_E4M3")
    report = convert(tmp_path / "source", tmp_path / "out", "mxfp4")
    for layer in of_layers:
        check_layer(tmp_path / "source", tmp_path / "out", layer, Quantizer("mxfp4"))
    info = Checkpoint(tmp_path / "out").info("model.layers.0.ffn.experts.0.w1.scale")
    assert (info.dtype, info.shape) == ("F8_E8M0", (64, 3))
    assert config(tmp_path / "out")["quantization_config"] == {"quant_method": "fp8"}
    assert config(tmp_path / "out")["expert_dtype"] == "fp4"
    assert report.note == ""


def add(folder, name, dtype):
    """A file with one tensor more."""
    length = len(header := json.dumps({name: {"dtype": dtype, "shape": [8], "data_offsets": [0, 8]}}).encode())
    (folder / "more.safetensors").write_bytes(length.to_bytes(8, "little") + header + bytes(8))


def test_what_config_says(tmp_path):
    """Experts are targets, by a pattern; other modules with a matrix are not."""
    write(tmp_path / "source", config={"torch_dtype": "bfloat16"})
    convert(tmp_path / "source", tmp_path / "out", "mxfp4")
    found = config(tmp_path / "out")
    stated = found.pop("quantization_config")
    assert found == config(tmp_path / "source")
    (group,) = stated["config_groups"].values()
    (target,) = group["targets"]
    pattern = re.compile(target.removeprefix("re:"))
    assert pattern.match("model.layers.0.mlp.experts.12.gate_proj")
    assert pattern.match("layers.0.block_sparse_moe.experts.0.w2")
    for other in ("model.layers.0.mlp.shared_experts.gate_proj", "model.layers.0.mlp.experts.0.gate_proj.x", "lm_head"):
        assert not pattern.match(other)
    assert stated["ignore"] == ["lm_head", "model.embed_tokens", "model.layers.0.self_attn.q_proj"]
    assert (stated["format"], group["weights"]["group_size"]) == ("mxfp4-pack-quantized", 32)


def test_fp8_says_what_is_not(tmp_path):
    write(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", "fp8")
    stated = config(tmp_path / "out")["quantization_config"]
    assert (stated["quant_method"], stated["weight_block_size"]) == ("fp8", [128, 128])
    assert stated["modules_to_not_convert"] == ["lm_head", "model.embed_tokens", "model.layers.0.self_attn.q_proj"]


def test_some_layers(tmp_path):
    of_layers = write(tmp_path / "source", layers=3)
    report = convert(tmp_path / "source", tmp_path / "out", "mxfp4", layers=[2, "0"])
    assert list(report.layers) == [2, 0]
    check_rest(tmp_path / "source", tmp_path / "out", {*of_layers[0], *of_layers[2]})
    for layer in (0, 2):
        check_layer(tmp_path / "source", tmp_path / "out", layer, Quantizer("mxfp4"))
    stated = config(tmp_path / "out")["quantization_config"]
    pattern = re.compile(stated["config_groups"]["group_0"]["targets"][0].removeprefix("re:"))
    matched = [layer for layer in (0, 1, 2, 20) if pattern.match(f"model.layers.{layer}.mlp.experts.0.up_proj")]
    assert matched == [0, 2]
    assert "model.layers.1.mlp.experts" in stated["ignore"]


def test_a_rest_that_is_quantized(tmp_path):
    """By another method: config.json cannot say both, and the report says so."""
    stated = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    write(tmp_path / "source", "fp8", config=stated)
    add(tmp_path / "source", "model.layers.0.self_attn.kv.weight", "F8_E4M3")
    (tmp_path / "source" / "hf_quant_config.json").write_text("{}")
    report = convert(tmp_path / "source", tmp_path / "out", "mxfp4")
    assert report.note == MIXED
    assert (tmp_path / "out" / "hf_quant_config.json").read_text() == "{}"
    assert config(tmp_path / "out") == config(tmp_path / "source")
    check_layer(tmp_path / "source", tmp_path / "out", 1, Quantizer("mxfp4"))


@pytest.mark.parametrize(
    ("target", "options", "expected"),
    [
        ("int8", {}, {"num_bits": 8, "strategy": "channel"}),
        ("int4", {}, {"num_bits": 4, "strategy": "group", "group_size": 32}),
        ("fp8", {"group": "row"}, {"num_bits": 8, "strategy": "channel"}),
        ("fp8", {"group": "matrix"}, {"num_bits": 8, "strategy": "tensor"}),
    ],
)
def test_what_compressed_tensors_is_told_of_weights(target, options, expected):
    """ktmoe tells it from the tensors; others do not."""
    weights = storage(Quantizer(target, **options).format).weights
    assert {name: weights[name] for name in ("num_bits", "strategy", "group_size") if name in weights} == expected


def test_a_rest_of_compressed_tensors(tmp_path):
    """Its config takes one group more."""
    before = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    ignore = ["lm_head", "re:.*experts.*", "model.layers.1.mlp.experts.0.up_proj", "re:.*self_attn.*"]
    stated = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ignore}
    write(tmp_path / "source", config={"quantization_config": stated | {"config_groups": {"a": before}}})
    add(tmp_path / "source", "model.layers.0.self_attn.kv.weight", "F8_E4M3")
    convert(tmp_path / "source", tmp_path / "out", "int4")
    found = config(tmp_path / "out")["quantization_config"]
    mine, other = found["config_groups"].values()
    assert found["format"] == "mixed-precision"
    assert (mine["format"], other) == ("pack-quantized", {"format": "float-quantized", **before})
    assert found["ignore"] == ["lm_head", "re:.*self_attn.*"]
    check_layer(tmp_path / "source", tmp_path / "out", 1, Quantizer("int4"))


def test_four_bits_again(tmp_path):
    of_layers = write(tmp_path / "source", "int4", config={"quantization_config": {"quant_method": "compressed-tensors"}})
    with pytest.raises(FormatError, match=r"INT4 .* adds to the error of the first time; ask for that with --requantize"):
        convert(tmp_path / "source", tmp_path / "out", "mxfp4")
    assert names(tmp_path) == ["source"]
    convert(tmp_path / "source", tmp_path / "out", "mxfp4", requantize=True)
    check_rest(tmp_path / "source", tmp_path / "out", {name for of in of_layers.values() for name in of})
    check_layer(tmp_path / "source", tmp_path / "out", 0, Quantizer("mxfp4"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layers": [7]}, MissingTensorError, "7"),
        ({"layers": []}, InputError, "expected at least one layer"),
        ({"to": "int4", "scales": "fp32"}, InputError, "no checkpoint has names for these"),
        ({"to": "int8", "group": (128, 128)}, InputError, "no checkpoint has names for these"),
        ({"to": "fp8", "scales": "fp16"}, InputError, "expected fp32 or bf16 scales"),
        ({"rule": "best"}, InputError, "rule must be one of"),
        ({"rule": ""}, InputError, "rule must be one of"),
        ({"shard_bytes": 0}, InputError, "shard_bytes: expected at least 1"),
    ],
)
def test_what_is_refused(tmp_path, options, error, message):
    write(tmp_path / "source")
    with pytest.raises(error, match=message):
        convert(tmp_path / "source", tmp_path / "out", **{"to": "mxfp4", **options})
    assert names(tmp_path) == ["source"]


#: Groups as --group has them.
GROUPS = {
    "x".join(map(str, group)) if isinstance(group, tuple) else str(group): group
    for group in ("row", "matrix", 8, 16, 32, 48, 64, 96, 128, 256, (16, 16), (32, 64), (64, 32), (64, 48), (128, 128))
}


@pytest.mark.parametrize(("to", "symmetric"), [("fp8", None), ("int8", None), ("int4", True), ("int4", False)])
def test_what_is_written_is_computed(tmp_path, to, symmetric):
    """Of every group: a layer computes it, or nothing is written. What has names, and no kernel, is refused by the groups that
    work."""
    write(tmp_path / "source", layers=1)
    experts, written, said = experts_of(tmp_path / "source", 0), set(), set()
    for name, group in GROUPS.items():
        options = {"to": to, "group": group, "symmetric": symmetric}
        try:
            convert(tmp_path / "source", tmp_path / name, **options)
        except InputError as error:
            assert not (tmp_path / name).exists()
            message = re.search(r"expected a format that a backend computes, found .*; groups that work: (.*)", str(error))
            if message:
                said.add(message[1])
                with pytest.raises(UnavailableError, match="no backend can be used"):
                    ktmoe.MoELayer(ktmoe.quantize(experts, **options))
        else:
            ktmoe.MoELayer.from_checkpoint(tmp_path / name, layer=0).close()
            written.add(name)
    (working,) = said
    assert written == set(working.split(", ")) & GROUPS.keys()


def test_what_is_in_that_format_already(tmp_path):
    write(tmp_path / "source", "mxfp4 quark")
    with pytest.raises(FormatError, match="gate is E2M1 with ue8m0 scales per 1x32 already"):
        convert(tmp_path / "source", tmp_path / "out", "mxfp4", requantize=True)


def test_columns_that_do_not_fit(tmp_path):
    """16 columns are no 32."""
    random = np.random.default_rng(1)
    tensors = SCHEMES["bf16"].tensors("model.layers.0.mlp.experts", random, 48, 32)
    from checkpoints import write as plain

    (tmp_path / "source").mkdir()
    plain(tmp_path / "source", tensors, {})
    with pytest.raises(InputError, match=r"gate: expected a multiple of 32 columns for this format, found \[32, 48\]"):
        convert(tmp_path / "source", tmp_path / "out", "mxfp4")
    assert names(tmp_path) == ["source"]


def test_one_file(tmp_path):
    """A source that is a .safetensors file: what lies beside it is not copied, but config.json counts."""
    source = tmp_path / "source" / "model.safetensors"
    write(tmp_path / "source")
    convert(source, tmp_path / "out", "mxfp4")
    check_layer(tmp_path / "source", tmp_path / "out", 1, Quantizer("mxfp4"))
    assert "tokenizer.json" not in names(tmp_path / "out")
    assert config(tmp_path / "out")["num_experts"] == EXPERTS


def test_params_of_mistral(tmp_path):
    """They take config.json's place, and keep it."""
    source, out = tmp_path / "source", tmp_path / "out"
    write(source, "bf16 native")
    (source / "config.json").unlink()
    stated = {"dim": 96, "moe": {"num_experts": EXPERTS}, "quantization": {"qformat_weight": "fp8_e4m3"}}
    (source / "params.json").write_text(json.dumps(stated))
    convert(source, out, "int4")
    found = json.loads((out / "params.json").read_text())
    assert (found["dim"], found["quantization_config"]["format"]) == (96, "pack-quantized")
    assert "quantization" not in found
    assert "config.json" not in names(out)
    check_layer(source, out, 1, Quantizer("int4"))


def test_a_name_that_the_result_has_already(tmp_path):
    """Granite's experts get names in which there is something else."""
    write(tmp_path / "source", "granite")
    add(tmp_path / "source", "model.layers.0.block_sparse_moe.experts.0.gate_proj.weight_packed", "I8")
    with pytest.raises(KtmoeError, match="expected none of that name beside the experts, found one"):
        convert(tmp_path / "source", tmp_path / "out", "mxfp4")
    assert names(tmp_path) == ["source"]


def test_a_weight_that_is_no_number(tmp_path):
    of_layers = write(tmp_path / "source")
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    info = Checkpoint(tmp_path / "source").info(name)
    with (tmp_path / "source" / "model.safetensors").open("r+b") as file:
        file.seek(info.offset + 2 * 70)
        file.write(b"\xc0\x7f")  # NaN
    assert name in of_layers[1]
    with pytest.raises(FormatError, match=r"layers\.1\.mlp\.experts\.2\.down_proj"):
        convert(tmp_path / "source", tmp_path / "out", "int4")
    assert "model-00001-of-00001.safetensors" not in names(tmp_path / "out")


def test_files_of_any_size_hold_the_same(tmp_path):
    write(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "one", "mxfp4")
    report = convert(tmp_path / "source", tmp_path / "many", "mxfp4", shard_bytes=1)
    one, many = Checkpoint(tmp_path / "one"), Checkpoint(tmp_path / "many")
    assert set(one.names()) == set(many.names())
    for name in one.names():
        np.testing.assert_array_equal(one.read(name), many.read(name))
    assert len(list((tmp_path / "many").glob("*.safetensors"))) == len(REST) + 2 * EXPERTS
    assert report.nbytes == sum(one.info(name).nbytes for name in one.names())


def test_threads_do_not_change_a_byte(tmp_path):
    write(tmp_path / "source")
    for threads in (1, 3):
        ktmoe.set_num_threads(threads)
        convert(tmp_path / "source", tmp_path / str(threads), "int4", shard_bytes=30_000)
    assert tree(tmp_path / "1") == tree(tmp_path / "3")


def test_progress(tmp_path):
    write(tmp_path / "source")
    seen = []
    report = convert(tmp_path / "source", tmp_path / "out", "mxfp4", progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, report.source_nbytes)
    assert seen[-1] == (report.source_nbytes, report.source_nbytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_the_command(tmp_path, capsys):
    write(tmp_path / "source")
    source, out = str(tmp_path / "source"), str(tmp_path / "out")
    assert cli.main(["convert", source, out, "--to", "int8", "--group", "32", "--layers", "0-1", "--shard-gb", "1e-5"]) == 0
    text = capsys.readouterr().out
    assert f"{out}: layers 0-1 as INT8 with bf16 scales per 1x32, rule symmetric\n" in text
    relative = check_layer(tmp_path / "source", tmp_path / "out", 1, Quantizer("int8", group=32))
    assert f"  layer 1: {100 * relative:.3f} %\n" in text
    kept = json.loads((tmp_path / "out" / "ktmoe_convert.json").read_text())
    assert kept["relative_rms_error"]["1"] == pytest.approx(relative, rel=1e-6)
    assert cli.main(["convert", source, out, "--to", "int8"]) == 1
    assert capsys.readouterr().err == f"ktmoe: {out}: expected a new or an empty folder, found a model\n"


def test_a_size_that_is_no_number(tmp_path, capsys):
    write(tmp_path / "source")
    assert cli.main(["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--to", "int8", "--shard-gb", "nan"]) == 2
    assert "'--shard-gb': expected a number, found nan" in capsys.readouterr().err
    assert names(tmp_path) == ["source"]


def test_nvfp4_by_modelopt_says_who_loads_it(tmp_path, capsys):
    write(tmp_path / "source")
    arguments = ["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--to", "nvfp4", "--rule", "modelopt"]
    assert cli.main(arguments) == 0
    assert "transformers does not know the quant_method modelopt: by itself it does not load" in capsys.readouterr().out


def test_nvfp4_that_is_asked_to_be_symmetric(tmp_path):
    """It always is: its rule stays that which vLLM reads."""
    write(tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "out", "nvfp4", symmetric=True)
    assert report.rule == "compressed-tensors"


def test_the_command_in_json(tmp_path, capsys):
    write(tmp_path / "source")
    out = str(tmp_path / "out")
    assert cli.main(["convert", str(tmp_path / "source"), out, "--to", "fp8", "--group", "64x32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], found["to"], [each["layer"] for each in found["layers"]]) == (out, "fp8", [0, 1])
    assert config(tmp_path / "out")["quantization_config"]["weight_block_size"] == [64, 32]


def test_a_group_that_is_none(tmp_path, capsys):
    assert cli.main(["convert", "a", "b", "--to", "fp8", "--group", "12y"]) == 2
    assert "expected a number of columns, ROWSxCOLUMNS, row or matrix, found '12y'" in capsys.readouterr().err


def test_a_source_that_is_none(tmp_path):
    with pytest.raises(KtmoeError, match="found nothing of that name"):
        convert(tmp_path / "none", tmp_path / "out", "mxfp4")
    assert names(tmp_path) == []
