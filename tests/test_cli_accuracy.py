"""`ktmoe accuracy` as far as it needs no torch: its options, what is refused before anything is loaded, and --against."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

import ktmoe
from ktmoe import cli, conversion, reference, synthetic
from ktmoe.measuring import rounding_cost


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """A function of the text's bytes and of options -> (exit status, the one line on stderr)."""
    monkeypatch.setitem(sys.modules, "torch", None)

    def call(data: bytes, *options: str) -> tuple[int, str]:
        file = tmp_path / "text"
        file.write_bytes(data)
        status = cli.main(["accuracy", str(tmp_path), "--text", str(file), *options])
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("ktmoe: ")
        assert captured.err.count("\n") == 1
        return status, captured.err

    return call


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected a text, found an empty file"),
        (b" \n\n", "expected a text, found white space alone"),
        (b"abc\xffdef", "expected text in UTF-8, found byte 0xff at 3"),
    ],
)
def test_what_is_no_text(run, data, message):
    status, err = run(data)
    assert status == 1
    assert message in err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--backend none", "unknown backend 'none'"),
        ("--activations int8,int4", "'int4'"),
        ("--activations int8,", "''"),
        ("--backend fp32_lut --activations int16", "it has no activation mode 'int16', only bf16, int8"),
    ],
)
def test_modes_that_no_backend_has(run, options, named):
    status, err = run(b"a text", *options.split())
    assert status == 1
    assert named in err


@pytest.mark.parametrize("options", ["--context 1", "--tokens 1", "--rounding up", "--layers 3"])
def test_wrong_usage(run, options):
    assert run(b"a text", *options.split())[0] == 2


def test_the_text_has_to_be_given(capsys):
    assert cli.main(["accuracy", "folder"]) == 2
    assert "--text" in capsys.readouterr().err


def test_no_such_file(capsys, tmp_path):
    for file, found in ((tmp_path / "absent", "No such file or directory"), (tmp_path, "Is a directory")):
        assert cli.main(["accuracy", str(tmp_path), "--text", str(file)]) == 1
        assert capsys.readouterr().err == f"ktmoe: {file}: expected a file with a text, found {found}\n"


def test_without_torch(run):
    status, err = run(b"a text")
    assert status == 1
    assert "ktmoe.transformers needs " in err
    assert "install" in err


# --against, without a text

SIZES = {"num_experts": 6, "hidden": 128, "intermediate": 64, "layers": 2, "top_k": 2}


@pytest.fixture
def original(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    synthetic.write_qwen3(tmp_path / "original", **SIZES)
    return tmp_path / "original"


@pytest.fixture
def compare(capsys):
    """A function of the rounded one, the original and options -> (exit status, stdout, stderr)."""

    def call(rounded, against, *options: str) -> tuple[int, str, str]:
        status = cli.main(["accuracy", str(rounded), "--against", str(against), *options])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_rounded_layers(compare, original, tmp_path, monkeypatch):
    """Outputs beside those of two float64 references, and weights beside what the conversion itself reports of all experts."""
    monkeypatch.setattr(rounding_cost, "EXPERTS", SIZES["num_experts"])
    rounded = tmp_path / "rounded"
    report = conversion.convert(original, rounded, "mxfp4")
    status, out, err = compare(rounded, original, "--json")
    assert (status, err) == (0, "")
    data = json.loads(out)
    assert (data["path"], data["against"], data["text"]) == (str(rounded), str(original), None)
    assert [layer["layer"] for layer in data["layers"]] == [0, 1]
    batch = next(ktmoe.measuring.random_batches(data["sampled_tokens"], 2, SIZES["num_experts"], SIZES["hidden"]))
    x = batch.x.astype(np.float32)
    for layer in data["layers"]:
        assert layer["weights_relative_error"] == pytest.approx(report.layers[layer["layer"]].relative, rel=1e-6)
        found = [
            reference.forward(ktmoe.load_experts(path, layer["layer"]), x, batch.ids, batch.weights, out_dtype="float32")
            for path in (rounded, original)
        ]
        ours, exact = (each.y for each in found)
        sizes = np.linalg.norm(exact, axis=1)
        of_tokens = np.linalg.norm(ours - exact, axis=1) / sizes
        expected = np.linalg.norm(ours - exact) / np.linalg.norm(exact)
        bound = sum(np.linalg.norm(each.bound) for each in found) / np.linalg.norm(exact)
        assert abs(layer["relative_error"] - expected) <= 2 * bound
        assert bound < 0.1 * expected  # or it would be no test
        largest = max(np.linalg.norm(each.bound, axis=1).max() for each in found) / sizes.min()
        assert abs(layer["largest_relative_error"] - of_tokens.max()) <= 4 * largest
        assert layer["original_formats"] == "BF16"
        assert layer["formats"].startswith("E2M1")


def test_more_bits_cost_less(compare, original, tmp_path):
    errors = []
    for to in ("int8", "fp8", "int4"):
        conversion.convert(original, tmp_path / to, to, **({"group": "row"} if to == "fp8" else {}))
        errors.append(
            [layer["relative_error"] for layer in json.loads(compare(tmp_path / to, original, "--json")[1])["layers"]]
        )
    assert errors == sorted(errors)
    assert min(errors[0]) > 0


def test_the_original_beside_itself(compare, original):
    status, out, _ = compare(original, original)
    assert status == 0
    assert [line.split() for line in out.splitlines() if line.startswith(("  0 ", "  1 "))] == [
        [number, "0.0e+00", "0.0e+00", "0.0e+00"] for number in "01"
    ]
    assert "layers 0-1: BF16, rounded: BF16" in out


def test_experts_from_elsewhere(compare, original, tmp_path):
    """--experts says where the rounded ones are."""
    conversion.convert(original, tmp_path / "rounded", "int8")
    expected = json.loads(compare(tmp_path / "rounded", original, "--json")[1])["layers"]
    assert json.loads(compare(original, original, "--experts", str(tmp_path / "rounded"), "--json")[1])["layers"] == expected


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"hidden": 64}, "hidden_size is 128, expected 64, as in {other}: both must be the same model"),
        ({"intermediate": 32}, "moe_intermediate_size is 64, expected 32, as in {other}"),
        ({"num_experts": 4}, "num_experts is 6, expected 4, as in {other}"),
        ({"layers": 3}, "expected the layers of {other}, found no experts of layers 2"),
        ({"top_k": 3}, "num_experts_per_tok is 2, expected 3, as in {other}: both must be the same model"),
    ],
)
def test_another_shape(compare, original, tmp_path, other, message):
    synthetic.write_qwen3(tmp_path / "other", **SIZES | other)
    status, out, err = compare(original, tmp_path / "other")
    assert (status, out) == (1, "")
    assert message.format(other=tmp_path / "other") in err
    assert err.startswith(f"ktmoe: {original}: ")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"hidden": 64}, "layer 0: hidden is 128, expected 64, as in "),
        ({"intermediate": 32}, "layer 0: intermediate is 64, expected 32, as in "),
        ({"num_experts": 4}, "layer 0: num_experts is 6, expected 4, as in "),
    ],
)
def test_another_shape_that_no_configuration_says(compare, original, tmp_path, other, message):
    synthetic.write_qwen3(tmp_path / "other", **SIZES | other)
    (tmp_path / "other" / "config.json").write_text('{"num_experts_per_tok": 2}')
    status, out, err = compare(original, tmp_path / "other")
    assert (status, out) == (1, "")
    assert f"{original}: {message}{tmp_path}/other" in err


def test_a_layer_less(compare, original, tmp_path):
    """Whoever lacks it is named."""
    synthetic.write_qwen3(tmp_path / "other", **SIZES | {"layers": 1})
    assert compare(original, tmp_path / "other") == (
        1,
        "",
        f"ktmoe: {tmp_path}/other: expected the layers of {original}, found no experts of layers 1\n",
    )


def test_a_gguf_file(compare, tmp_path):
    """Its architecture has another name than config.json's model_type. Other random weights are as far off as can be."""
    sizes = {"num_experts": 4, "hidden": 256, "intermediate": 256, "top_k": 2}
    synthetic.write_gguf(tmp_path / "a.gguf", **sizes)
    synthetic.write_qwen3(tmp_path / "original", **sizes)
    status, out, err = compare(tmp_path / "a.gguf", tmp_path / "original", "--json")
    assert (status, err) == (0, "")
    (layer,) = json.loads(out)["layers"]
    assert min(layer["relative_error"], layer["weights_relative_error"]) > 0.9
    synthetic.write_qwen3(tmp_path / "other", **sizes | {"top_k": 3})
    assert "num_experts_per_tok is 2, expected 3" in compare(tmp_path / "a.gguf", tmp_path / "other")[2]


def test_progress(original):
    seen = []
    found = rounding_cost.rounding_cost(original, original, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(1, 2), (2, 2)]
    assert [layer.layer for layer in found] == [0, 1]


def test_another_architecture(compare, original, tmp_path):
    synthetic.write_deepseek_v4(tmp_path / "other", **SIZES)
    status, _, err = compare(original, tmp_path / "other")
    assert status == 1
    assert "model_type is 'qwen3_moe', expected 'deepseek_v4'" in err


def test_a_configuration_that_differs_in_a_size_of_no_expert(compare, original, tmp_path):
    synthetic.write_qwen3(tmp_path / "other", **SIZES)
    for folder, heads in ((original, 2), (tmp_path / "other", 4)):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": heads}))
    assert "num_attention_heads is 2, expected 4" in compare(original, tmp_path / "other")[2]


def test_a_folder_without_a_model(compare, original, tmp_path):
    (tmp_path / "empty").mkdir()
    for pair in ((tmp_path / "empty", original), (original, tmp_path / "empty"), (original, tmp_path / "absent")):
        status, out, err = compare(*pair)
        assert (status, out) == (1, "")
        assert err.startswith(f"ktmoe: {tmp_path}/")


@pytest.mark.parametrize(
    "option",
    [
        "--activations int8",
        "--tokens 5",
        "--context 8",
        "--no-layers",
        "--dense torch",
        "--rounding exact",
        "--rounding folded",
    ],
)
def test_what_needs_a_text(compare, original, option):
    status, out, err = compare(original, original, *option.split())
    assert (status, out) == (2, "")
    name = option.split()[0].removeprefix("--no-").removeprefix("--")
    assert f"--{name}" in err


def test_rounding_twice(run, original):
    status, err = run(b"a text", "--against", str(original), "--rounding", "folded")
    assert status == 2
    assert "--against excludes --rounding folded" in err
