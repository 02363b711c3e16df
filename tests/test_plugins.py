"""The plugins in examples/, built and installed as third parties would, and the documents that quote them."""

import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from environments import NEEDS_COMPILER, ROOT, Environment
from helpers import DEEPSEEK, FORMATS, GPT_OSS, assert_right, random_arrays, random_batch, random_experts, same_bits

import ktmoe
from ktmoe import MoELayer, backends, loaders, reference
from ktmoe._native import core
from ktmoe.backends.choice import choose_backend

EXAMPLES = ROOT / "examples"
DOCUMENTS = [ROOT / "docs" / f"add-a-{kind}.md" for kind in ("loader", "backend", "kernel")]
PYTHON = ("loader_plugin", "format_plugin", "python_backend")
DISTRIBUTIONS = {
    "loader_plugin": "ktmoe-blocks",
    "format_plugin": "ktmoe-iq4-nl",
    "python_backend": "ktmoe-float64",
    "native_backend": "ktmoe-plain",
}


# The documents


def quotations(document):
    """[(file, text)] of the code that a document quotes: a paragraph that begins with a link to an example stands before it."""
    found = re.finditer(
        r"^\[[^\]]+\]\((?P<link>\.\./examples/[^)]+)\)(?:.+\n)*.*:\n\n(?:<!-- .*\n)?```(?!sh)\w+\n(?P<text>(?:.*\n)*?)```$",
        document.read_text(),
        re.MULTILINE,
    )
    return [((document.parent / quoted["link"]).resolve(), quoted["text"]) for quoted in found]


#: The files that the documents quote as a whole.
QUOTED = {
    "add-a-loader.md": ["loader_plugin/ktmoe_blocks.py", "loader_plugin/pyproject.toml", "format_plugin/ktmoe_iq4_nl.py"],
    "add-a-backend.md": [
        "python_backend/ktmoe_float64.py",
        "python_backend/pyproject.toml",
        "native_backend/src/ktmoe_plain/__init__.py",
    ],
    "add-a-kernel.md": ["native_backend/kernels/plain/q4.c"],
}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_quotes_is_what_the_file_says(document):
    files = {EXAMPLES / name for name in QUOTED[document.name]}
    quoted = quotations(document)
    assert {file for file, _ in quoted} == files
    for file, text in quoted:
        assert text == file.read_text(), f"{document.name} must quote the whole of {file}"


def test_every_file_of_the_examples_is_named():
    """A reader of the documents finds all there is: a document links to each file."""
    linked = {
        (document.parent / link).resolve()
        for document in DOCUMENTS
        for link in re.findall(r"\]\((\.\./examples/[^)#]+)", document.read_text())
    }
    files = {
        file
        for file in EXAMPLES.rglob("*")
        if file.is_file() and not {"build", "__pycache__"} & {*file.parts} and ".egg-info" not in str(file)
    }
    assert files <= linked


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
        assert (document.parent / link).exists(), link


# Environments; what they share is built once


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    """An environment to build in, and a function that gives an example's copy: a build leaves files beside its sources."""
    folder = tmp_path_factory.mktemp("builder")

    def copy(example, name=""):
        ignored = shutil.ignore_patterns("build", "*.egg-info")
        return shutil.copytree(EXAMPLES / example, folder / (name or example), ignore=ignored)

    return Environment(folder / "environment"), copy


@pytest.fixture(scope="module")
def python_wheels(builder, tmp_path_factory):
    environment, copy = builder
    folder = tmp_path_factory.mktemp("wheels")
    first, *others = map(copy, PYTHON)
    environment.wheel(first, folder, *others)
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def native_wheel(builder, tmp_path_factory):
    environment, copy = builder
    folder = tmp_path_factory.mktemp("wheels")
    environment.wheel(copy("native_backend"), folder)
    return next(folder.iterdir())


@pytest.fixture(scope="module")
def python_plugins(python_wheels, tmp_path_factory):
    """An environment with the loaders and the Python backend."""
    environment = Environment(tmp_path_factory.mktemp("python"))
    environment.install(*python_wheels)
    return environment


@pytest.fixture(scope="module")
def native_plugin(native_wheel, tmp_path_factory):
    """An environment with the native backend."""
    environment = Environment(tmp_path_factory.mktemp("native"))
    environment.install(native_wheel)
    return environment


# The loader


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """A checkpoint of two layers in the example's naming scheme, and what layer 7 is."""
    folder = tmp_path_factory.mktemp("blocks")
    experts = random_experts(np.random.default_rng(7), 3, 64, 96)
    tensors = {}
    for layer in (7, 12):
        for projection in ("gate", "up", "down"):
            matrices = [experts.matrix(expert, projection) for expert in range(3)]
            name = f"blocks.{layer}.moe.{projection}"
            tensors[f"{name}.codes"] = np.stack([matrix.codes for matrix in matrices])
            tensors[f"{name}.scales"] = np.stack([matrix.scales for matrix in matrices])
    save(folder, tensors)
    return folder, tensors


def save(folder, tensors):
    from safetensors.numpy import save_file

    save_file(tensors, folder / "model.safetensors")


def use_loader(path):
    from ktmoe.cli import main
    from ktmoe.loaders.checkpoint import Checkpoint

    loader = loaders.get("blocks")
    with Checkpoint(path) as checkpoint:
        assert loader.detect(checkpoint) > 0
        assert loader.layers(checkpoint) == [7, 12]
        same = [loader.load(checkpoint, layer).matrix(2, "down") for layer in (7, "7")]
        assert np.array_equal(same[0].codes, same[1].codes)
    ours = random_experts(np.random.default_rng(7), 3, 64, 96)
    experts = ktmoe.load_experts(path, 7)  # the loader is found by the tensors
    for expert in range(3):
        for projection in ("gate", "up", "down"):
            theirs, wanted = experts.matrix(expert, projection), ours.matrix(expert, projection)
            assert np.array_equal(theirs.codes, wanted.codes)
            assert np.array_equal(theirs.scales, wanted.scales)
    with MoELayer.from_checkpoint(path, 7, "fp32_lut") as layer:
        assert_right(layer, ours, *random_batch(np.random.default_rng(1), ours, 5, 2))
    return main(["inspect", "--no-measure", path])


def test_the_loader(python_plugins, blocks):
    assert python_plugins.call(use_loader, str(blocks[0])) == 0


#: What is wrong -> tensors that are other ones or gone, the kind of the error, and what its message says.
REFUSED = {
    "tensor": ({"blocks.7.moe.up.codes": None}, "MissingTensorError", r"'blocks\.7\.moe\.up\.codes'"),
    "layer": ({"blocks.7.moe.gate.codes": None}, "MissingTensorError", r"layer 7: expected one of \[12\]"),
    "shape": (
        {"blocks.7.moe.down.scales": np.zeros((3, 64, 2), np.uint8)},
        "FormatError",
        r"7\.moe\.down\.scales: expected U8 or F8_E8M0 \[3, 64, 3\], found U8 \[3, 64, 2\]",
    ),
    "dtype": (
        {"blocks.7.moe.gate.codes": np.zeros((3, 96, 32), np.float32)},
        "FormatError",
        r"gate\.codes: expected U8 .* found F32",
    ),
    "dimensions": ({"blocks.7.moe.gate.codes": np.zeros((3, 96), np.uint8)}, "FormatError", "expected three dimensions"),
}


def refusals_of(path):
    """{folder: (kind, message)}"""
    found = {}
    for folder in Path(path).iterdir():
        with pytest.raises(ktmoe.errors.KtmoeError) as caught:
            ktmoe.load_experts(folder, 7, loader="blocks")
        found[folder.name] = caught.type.__name__, str(caught.value)
    return found


def test_the_loader_refuses(python_plugins, blocks, tmp_path):
    """All in one process."""
    for label, (change, *_) in REFUSED.items():
        tensors = {name: change.get(name, tensor) for name, tensor in blocks[1].items()}
        (tmp_path / label).mkdir()
        save(tmp_path / label, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    found = python_plugins.call(refusals_of, str(tmp_path))
    assert found.keys() == REFUSED.keys()
    for label, (_, kind, message) in REFUSED.items():
        assert found[label][0] == kind, label
        assert re.search(message, found[label][1]), found[label]


# The loader with a format of its own

IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])


@pytest.fixture(scope="module")
def iq4_nl(tmp_path_factory):
    """A checkpoint whose codes are packed here, high nibble first; expected.npz has the weights that went in."""
    folder, rng, tensors, expected = tmp_path_factory.mktemp("iq4_nl"), np.random.default_rng(5), {}, {}
    for expert in range(3):
        for projection, (n, k) in {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}.items():
            q = rng.integers(0, 16, (n, k), np.uint8)
            scales = rng.uniform(0.0005, 0.002, (n, k // 32)).astype(np.float16)
            name = f"model.layers.4.mlp.experts.{expert}.{projection}_proj"
            tensors[f"{name}.codes"] = np.array([row[0::2] * 16 + row[1::2] for row in q])
            tensors[f"{name}.scales"] = scales
            expected[f"{expert}.{projection}"] = IQ4_NL[q] * scales.astype(np.float64).repeat(32, 1)
    save(folder, tensors)
    np.savez(folder / "expected.npz", **expected)
    return folder


def use_format(path):
    """What was read is what went in: by the arrays, and by the reference; then forward() by the reference."""
    expected = np.load(Path(path) / "expected.npz")
    experts = ktmoe.load_experts(path, 4)
    assert not any(0.0 in experts.formats[projection].element.values for projection in experts.formats)
    for name in expected:
        expert, projection = name.split(".")
        matrix = experts.matrix(int(expert), projection)
        q = np.stack([matrix.codes >> 4, matrix.codes & 15], axis=-1).reshape(matrix.shape)
        assert np.array_equal(IQ4_NL[q] * matrix.scales.astype(np.float64).repeat(32, 1), expected[name])
        assert np.array_equal(reference.dequantize(matrix), expected[name])
    rng = np.random.default_rng(1)
    for backend in ("fp32_lut", "auto"):
        with MoELayer.from_checkpoint(path, 4, backend) as layer:
            assert_right(layer, experts, *random_batch(rng, experts, 5, 2))
            for projection in ("gate", "up", "down"):
                (part,) = layer.export_expert(1)
                assert np.array_equal(part[projection].codes, experts.matrix(1, projection).codes)
    return loaders.names()


def test_a_format_of_a_plugin_needs_no_c(python_plugins, iq4_nl):
    assert "iq4_nl" in python_plugins.call(use_format, str(iq4_nl))
    assert not list((EXAMPLES / "format_plugin").rglob("*.c"))


# The backends


def use_backend(name):
    """A backend against the reference: formats, activations, router weights, dtypes, masks, ids; and the same bits by token."""
    assert name in backends.available()
    rng = np.random.default_rng(1)
    cases = [
        random_experts(rng, 4, 96, 160, activation=DEEPSEEK),
        random_experts(rng, 4, 64, 64, fold=False, biases=True, activation=GPT_OSS),
        random_experts(rng, 4, 64, 320, scales=(138, 142), down_scales=(0, 2)),  # large h, so that byte 0 counts
    ]
    for experts in cases:
        x, ids, weights = random_batch(rng, experts, 9, 3)
        ids[2, 1], ids[3] = -1, 4  # no expert has these ids
        for router_weight in reference.ROUTER_WEIGHTS:
            with MoELayer(experts, name, router_weight=router_weight) as layer:
                for given in (x, x.astype(np.float32)):
                    y = assert_right(layer, experts, given, ids, weights)
                    assert not y[3].any()
                    for i in range(len(x)):
                        assert same_bits(layer.forward(given[i : i + 1], ids[i : i + 1], weights[i : i + 1]), y[i : i + 1])
                layer.expert_mask[1:3] = False
                assert_right(layer, experts, x, ids, weights)
                y, in_place = layer.forward(x, ids, weights), x.copy()
                assert same_bits(layer.forward(in_place, ids, weights, out=in_place), y)
        poisoned = x.copy()
        poisoned[0] = np.nan
        with MoELayer(experts, name) as layer:
            clean, y = layer.forward(x, ids, weights), layer.forward(poisoned, ids, weights)
            assert np.isnan(y[0]).all()
            assert same_bits(y[1:], clean[1:])
    experts.matrix(0, "up").scales[5, 1] = 255
    with pytest.raises(ktmoe.errors.FormatError, match=r"experts\.0\.up: scale \[5, 1\] is byte 255"):
        MoELayer(experts, name)


def chosen_backend():
    with MoELayer(random_experts(np.random.default_rng(1), 2, 64, 64)) as layer:
        return layer.backend


def everything():
    """What ktmoe knows here, and what "auto" is."""
    return {"backends": backends.names(), "loaders": loaders.names(), "auto": choose_backend("auto")}


def use_formats(name):
    """Weights other than MXFP4."""
    rng = np.random.default_rng(1)

    def arrays(weight_format, n, k):
        return tuple(random_arrays(rng, weight_format, 3, n, k).values())

    for weight_format in FORMATS.values():
        gate, up, down = (arrays(weight_format, *shape) for shape in ((96, 160), (96, 160), (160, 96)))
        experts = ktmoe.ExpertWeights.from_arrays(gate, up, down, format=weight_format)
        with MoELayer(experts, name) as layer:
            assert_right(layer, experts, *random_batch(rng, experts, 5, 2))


def test_the_python_backend(python_plugins):
    python_plugins.call(use_backend, "float64")


def test_the_python_backend_reads_every_format(python_plugins):
    python_plugins.call(use_formats, "float64")


def test_the_python_backend_by_its_variable(python_plugins):
    assert python_plugins.call(chosen_backend, KTMOE_BACKEND="float64") == "float64"


@NEEDS_COMPILER
def test_the_native_backend(native_plugin):
    native_plugin.call(use_backend, "plain")


@NEEDS_COMPILER
def test_the_native_backend_by_its_variable(native_plugin):
    assert native_plugin.call(chosen_backend, KTMOE_BACKEND="plain") == "plain"


def refused_training():
    from ktmoe.errors import UnavailableError
    from ktmoe.training import Training

    with MoELayer(random_experts(np.random.default_rng(1), 2, 64, 64), "plain") as layer:
        try:
            Training(layer)
        except UnavailableError as error:
            return str(error)


@NEEDS_COMPILER
def test_a_native_backend_without_functions_for_training(native_plugin):
    assert native_plugin.call(refused_training).endswith("it cannot be trained: plain has no functions for training")


def native_limits():
    """The rest of a kernel table: exp, and what measures the machine."""
    from ktmoe import measuring

    experts = random_experts(np.random.default_rng(1), 2, 64, 64)
    table = backends.get("plain").lookup(experts).table
    x = np.linspace(-87, 87, 100_001, dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(core.exp(table, x) - exact) <= reference.EXP_RELATIVE_ERROR * exact).all()
    extreme = core.exp(table, np.array([-np.inf, -1e4, 1e4, np.inf, np.nan], np.float32))
    assert np.array_equal(extreme, [0, 0, np.inf, np.inf, np.nan], equal_nan=True)
    with MoELayer(experts, "plain") as layer:
        limits = measuring.LimitMeter(layer, table)
        assert 1e6 < limits.peak(1e-3) < 1e14
        assert 1e3 < limits.read(1e-3) < 1e14
        unknown = backends.get("plain").lookup(ktmoe.ExpertWeights(1, 64, 64, None, ktmoe.BF16))
    return table.name, core.kernels(table), unknown.reason


@NEEDS_COMPILER
def test_the_native_table(native_plugin):
    assert native_plugin.call(native_limits) == [
        "plain",
        [["q4", "ue8m0", 32, "bf16", False, "none"]],
        "it has no kernels for BF16: weights of family b16; "
        "instruction sets that have them are portable, avx2, avx512f, avx512_bf16, amx",
    ]


def refused():
    """Why "plain" cannot be used, by itself and when it is asked for; and what "auto" is."""
    with pytest.raises(ktmoe.errors.UnavailableError) as caught:
        MoELayer(random_experts(np.random.default_rng(1), 1, 64, 64), "plain")
    return backends.get("plain").lookup().reason, str(caught.value), backends.available(), choose_backend("auto").name


@NEEDS_COMPILER
def test_a_native_backend_of_another_version_is_refused(builder, tmp_path):
    """Built against a header that is this one but for its version."""
    environment, copy = builder
    header = (Path(ktmoe.get_include()) / "ktmoe.h").read_text()
    version = int(re.search(r"^#define KT_ABI_VERSION (\d+)$", header, re.MULTILINE)[1])
    folder = tmp_path / "headers"
    folder.mkdir()
    (folder / "ktmoe.h").write_text(header.replace(f"KT_ABI_VERSION {version}", "KT_ABI_VERSION 99"))
    project = copy("native_backend", "old")
    setup = project / "setup.py"
    setup.write_text(setup.read_text().replace('"-O3"', '"-O0"'))  # nothing of it is called
    environment.wheel(project, tmp_path, CFLAGS=f"-I{folder}")
    there = Environment(tmp_path / "environment")
    there.install(*tmp_path.glob("*.whl"))
    why, message, available, auto = there.call(refused)
    assert why == f"kernel table 'plain' was built for version 99 of ktmoe.h, this is {version}"
    assert message.startswith(f"backend 'plain' (asked for by name) cannot be used: {why}. Available: ")
    assert "plain" not in available
    assert auto == choose_backend("auto").name


# Presence


def available():
    return [*backends.available(), *loaders.names()]


def runs_in_its_own_folder(environment, example, name, folder):
    """Where Python looks for modules first. What is not installed must not stand in the way of what is."""
    project = shutil.copytree(EXAMPLES / example, folder / example, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    assert name in environment.call(available, cwd=project)


@NEEDS_COMPILER
def test_the_native_backend_runs_in_its_own_folder(native_plugin, tmp_path):
    runs_in_its_own_folder(native_plugin, "native_backend", "plain", tmp_path)


@pytest.mark.parametrize(
    ("example", "name"), [("loader_plugin", "blocks"), ("format_plugin", "iq4_nl"), ("python_backend", "float64")]
)
def test_the_others_run_in_their_own_folders(python_plugins, tmp_path, example, name):
    runs_in_its_own_folder(python_plugins, example, name, tmp_path)


@NEEDS_COMPILER
def test_a_native_backend_changes_nothing_else(native_plugin):
    here, there = everything(), native_plugin.call(everything)
    assert set(there["backends"]) == {*here["backends"], "plain"}
    assert there["loaders"] == here["loaders"]
    assert there["auto"][0] == here["auto"][0]


def test_plugins_change_nothing_else_and_go_when_uninstalled(python_plugins, python_wheels, tmp_path):
    here = everything()
    there = python_plugins.call(everything)
    assert set(there["backends"]) == {*here["backends"], "float64"}
    assert set(there["loaders"]) == {*here["loaders"], "blocks", "iq4_nl"}
    assert there["auto"] == list(here["auto"])

    environment = Environment(tmp_path)
    environment.install(*python_wheels)
    assert environment.call(everything) == there
    environment.uninstall(*(DISTRIBUTIONS[example] for example in PYTHON))
    assert environment.call(everything) == here | {"auto": list(here["auto"])}


def names_and_warnings():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = [*backends.names(), *loaders.names()]
    return names, [str(warning.message) for warning in caught]


def test_a_plugin_that_cannot_be_imported_warns_and_is_left_out(python_plugins, tmp_path):
    """One of two: the other one works."""
    (tmp_path / "ktmoe_float64.py").write_text("import a_module_that_is_not_there\n")
    tests = str(Path(__file__).parent)
    names, messages = python_plugins.call(names_and_warnings, PYTHONPATH=f"{tmp_path}:{tests}")
    assert "float64" not in names
    assert {"blocks", "fp32_lut", "deepseek_v4"} <= set(names)
    assert messages == [
        "backend 'float64' (ktmoe_float64:backend) was left out: "
        "ModuleNotFoundError: No module named 'a_module_that_is_not_there'"
    ]
