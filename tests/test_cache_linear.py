"""Dense matrices in packed caches: what is mapped has the bits of what was packed, and what does not belong is refused."""

import json
import os
import shutil
import weakref

import numpy as np
import pytest
from cached import arenas_of, edit
from checkpoints import BF16, SCHEMES, write, zeros
from helpers import same_bits
from linears import DENSE_FORMATS, random_matrix
from topology import THREE

from ktmoe import Linear, Matrix, MoELayer, MoEModel, backends, cli
from ktmoe._native import core
from ktmoe._native.isa import ISAS
from ktmoe.backends import native
from ktmoe.backends.base import Backend, Plan
from ktmoe.cache import manifest, packed_file
from ktmoe.cache import packing as packing_module
from ktmoe.cache.opened import Cache
from ktmoe.cache.packing import pack
from ktmoe.errors import CacheError, FormatError, InputError, MissingTensorError, OutOfMemoryError, UnavailableError
from ktmoe.linear_weights import LinearWeights
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.machine import memory

ATTENTION = "model.layers.0.self_attn"
Q, K, HEAD = f"{ATTENTION}.q_proj", f"{ATTENTION}.k_proj", "lm_head"
ODD = "../a b/ü"


def one(weight_format=DENSE_FORMATS["mxfp4"], n=128, k=256, **options) -> Matrix:
    return random_matrix(np.random.default_rng(1), n, k, weight_format, **options)


def unread(matrix: Matrix) -> LinearWeights:
    def read():
        raise AssertionError("the matrix was read")

    return LinearWeights.of_headers(matrix.name, matrix.format, matrix.shape, read)


def outputs(linear: Linear, tokens=3) -> np.ndarray:
    return linear.forward(np.random.default_rng(tokens).standard_normal((tokens, linear.shape[1])).astype(np.float32))


def assert_alike(mapped: Linear, packed: Linear):
    assert (mapped.mapped, packed.mapped) == (True, False)
    assert (mapped.nbytes, mapped.rounding) == (packed.nbytes, packed.rounding)
    for tokens in (1, 40):
        assert same_bits(outputs(mapped, tokens), outputs(packed, tokens))
    found, expected = mapped.export(), packed.export()
    assert all(same_bits(found.stored[label], expected.stored[label]) for label in expected.stored)
    assert (found.bias is None) == (expected.bias is None)
    assert found.bias is None or same_bits(found.bias, expected.bias)


def write_dense(folder) -> None:
    """A layer of three experts, and beside it: q in blocks of FP8 with a bias, k and the head in bfloat16, and no matrices."""
    rng = np.random.default_rng(5)
    folder.mkdir()
    tensors = SCHEMES["bf16"].layer("model.layers.0")
    tensors[f"{Q}.weight"] = ["F8_E4M3", rng.integers(0, 120, (256, 128), np.uint8)]
    tensors[f"{Q}.weight_scale_inv"] = ["F32", rng.random((2, 1), np.float32)]
    tensors[f"{Q}.bias"] = ["BF16", rng.standard_normal(256).astype(BF16)]
    for name in (K, HEAD, "model.layers.10.self_attn.k_proj", ODD):
        tensors[f"{name}.weight"] = ["BF16", rng.standard_normal((192, 64)).astype(BF16)]
    tensors[f"{ATTENTION}.q_norm.weight"] = zeros("BF16", 64)
    tensors[f"{ATTENTION}.conv1d.weight"] = zeros("BF16", 8, 1, 4)
    write(folder, tensors)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint, and a cache with two of its matrices, which no test changes."""
    folder = tmp_path_factory.mktemp("made")
    write_dense(folder / "model")
    pack(folder / "model", folder / "cache", (), matrices=[Q, HEAD])
    return folder / "model", folder / "cache"


@pytest.fixture
def copied(made, tmp_path):
    """A copy of both, with their times."""
    for folder in made:
        shutil.copytree(folder, tmp_path / folder.name)
    return tmp_path / "model", tmp_path / "cache"


# What is mapped


#: With a factor and without, scales of two levels, minima, records' order, and numbers.
KINDS = ("mxfp4", "gptq-128", "nvfp4 divided", "super-32 minima", "fp8", "int8-row", "b16", "gguf Q6_K")


@pytest.mark.parametrize("name", KINDS)
def test_formats(tmp_path, name):
    matrix = one(DENSE_FORMATS[name], bias=len(name) % 2 == 0)
    with Linear(matrix) as packed, Linear(unread(matrix), arenas=arenas_of(tmp_path, LinearWeights(matrix))) as mapped:
        assert_alike(mapped, packed)


def test_shards(tmp_path, fake_nodes):
    fake_nodes(THREE)
    matrix = one(DENSE_FORMATS["fp8"], 384, 128, bias=True)
    nodes = {"numa_nodes": [2, 0]}
    arenas = arenas_of(tmp_path, LinearWeights(matrix), **nodes)
    with Linear(matrix, **nodes) as packed, Linear(unread(matrix), **nodes, arenas=arenas) as mapped:
        assert mapped.placement.shards == 2
        assert_alike(mapped, packed)


def test_scales_choose_kernels(tmp_path):
    """Which are folded depends on what packing saw: here whether a scale is too small for that. Nothing is computed."""
    found = {}
    for fold in (True, False):
        weights = LinearWeights(one(fold=fold))
        arenas = arenas_of(tmp_path, weights)
        for isa in ISAS:
            table = native.load_table(isa)
            arguments = table, weights, Plan(), [(0, 128)], 1
            if not table.serves(weights.formats["weight"], "bf16"):
                continue
            packed, mapped = core.PackedLinear(*arguments), core.PackedLinear(*arguments, arenas.file)
            packed.pack(0, {"weight": weights.matrix(0, "weight")})
            core.adopt(mapped, arenas.seen, arenas.biases, arenas.factors)
            assert core.folded(mapped) == core.folded(packed)
            found[isa, fold] = core.folded(packed)
    assert ("amx" not in ISAS) or (found["amx", True], found["amx", False]) == ({(0, "weight"): 1}, {(0, "weight"): 0})


@pytest.mark.parametrize("name", [Q, HEAD])
def test_from_a_checkpoint(made, monkeypatch, name):
    path, cache = made
    done = []
    with Linear.from_checkpoint(path, name) as packed:
        monkeypatch.setattr(Checkpoint, "read", None)
        with pytest.raises(TypeError):
            Linear.from_checkpoint(path, name)
        with Linear.from_checkpoint(path, name, cache=cache, progress=lambda *counts: done.append(counts)) as mapped:
            assert_alike(mapped, packed)
            assert (mapped.name, mapped.shape, mapped.format) == (packed.name, packed.shape, packed.format)
            assert len(done) == 1
            assert done[0][0] == done[0][1] == mapped.format.nbytes(*mapped.shape)


def test_beside_layers(made, tmp_path):
    """Each is packed once, whenever it is asked for; matrices do not depend on which layers there are."""
    path, cache = made[0], tmp_path / "cache"
    pack(path, cache, (), matrices=[Q])
    with pytest.raises(CacheError, match="layers: expected to be packed, found none; `ktmoe pack` adds them"):
        MoEModel.from_checkpoint(path, cache=cache)
    done = pack(path, cache, matrices=[Q, K], verify=True)
    assert (done.written, done.kept, done.verified) == ([0], [], [0])
    assert (done.matrices_written, done.matrices_kept, done.matrices_verified) == ([K], [Q], [Q, K])
    assert done.nbytes == sum(file.stat().st_size for file in cache.glob("*.safetensors"))
    with MoELayer.from_checkpoint(path, 0, cache=cache) as layer, Linear.from_checkpoint(path, K, cache=cache) as linear:
        assert layer.mapped
        assert linear.mapped
    assert pack(path, cache).matrices_kept == []


def test_a_dense_model(tmp_path):
    """It has no layer of experts, and needs none."""
    write(tmp_path, {"lm_head.weight": zeros("BF16", 64, 64)})
    assert pack(tmp_path, tmp_path / "cache", matrices=["lm_head"]).matrices_written == ["lm_head"]
    with pytest.raises(UnavailableError, match="no loader recognises this checkpoint"):
        pack(tmp_path, tmp_path / "other")


# Names


def test_patterns(made, tmp_path):
    """A * takes matrices alone, no expert's; in the order of layers, each once."""
    done = pack(made[0], tmp_path / "cache", (), matrices=[K, "model.*"])
    assert done.matrices_written == [K, Q, "model.layers.10.self_attn.k_proj"]
    with pytest.raises(MissingTensorError, match=r"matrices: expected names that fit '\*norm', found none"):
        pack(made[0], tmp_path / "cache", (), matrices=["*norm"])
    with pytest.raises(MissingTensorError, match=r"matrix 'model.q'"):
        pack(made[0], tmp_path / "cache", (), matrices=["model.q"])


def test_patterns_of_deepseeks_names(tmp_path):
    """Parameters that are no matrix's are none; routers whose other tensors only choose experts are left out, and said."""
    tensors = {
        f"{name}.weight": zeros("BF16", 64, 64)
        for name in ("embed", "head", "layers.0.attn.wq_a", "layers.0.attn.compressor.wkv")
    }
    tensors |= {f"layers.{layer}.ffn.gate.weight": zeros("BF16", 4, 64) for layer in (0, 1)}
    tensors |= {"layers.0.hc_attn_fn": zeros("F32", 24, 256), "layers.0.attn.compressor.ape": zeros("F32", 4, 64)}
    tensors |= {"layers.0.ffn.gate.tid2eid": zeros("I64", 64, 6), "layers.1.ffn.gate.bias": zeros("F32", 4)}
    tensors |= {"model.layers.2.mlp.gate.weight": zeros("BF16", 4, 64)}
    tensors |= {"model.layers.2.mlp.gate.e_score_correction_bias": zeros("F32", 4), "layers.0.norm.weight": zeros("BF16", 64)}
    write(tmp_path, tensors)
    done = pack(tmp_path, tmp_path / "cache", (), matrices=["*"])
    assert done.matrices_written == ["head", "layers.0.attn.compressor.wkv", "layers.0.attn.wq_a"]
    assert {name: why.split(":")[0] for name, why in done.skipped.items()} == {
        "embed": "a token reads some rows of an embedding; if it is the output layer, too, ask for it by its name",
        "layers.0.ffn.gate": "layers.0.ffn.gate.tid2eid",
        "layers.1.ffn.gate": "layers.1.ffn.gate.bias",
        "model.layers.2.mlp.gate": "model.layers.2.mlp.gate.e_score_correction_bias",
    }
    assert pack(tmp_path, tmp_path / "cache", (), matrices=["*", "embed"]).matrices_written == ["embed"]
    with pytest.raises(MissingTensorError, match=r"fit '\*\.mlp\.gate', found none that is read: model.layers.2.mlp.gate: "):
        pack(tmp_path, tmp_path / "other", (), matrices=["*.mlp.gate"])


def test_a_name_leads_nowhere(made, tmp_path):
    path, cache = made[0], tmp_path / "deep" / "cache"
    cache.parent.mkdir()
    pack(path, cache, (), matrices=[ODD])
    assert os.listdir(cache.parent) == ["cache"]
    assert sorted(os.listdir(cache)) == [manifest.NAME, "matrix-..%2Fa%20b%2F%C3%BC.safetensors"]
    with Linear.from_checkpoint(path, ODD) as packed, Linear.from_checkpoint(path, ODD, cache=cache) as mapped:
        assert_alike(mapped, packed)


def test_matrices_that_are_none(made, tmp_path):
    with pytest.raises(InputError, match="matrices must be a sequence of names, found 'lm_head'"):
        pack(made[0], tmp_path / "cache", matrices="lm_head")
    with pytest.raises(FormatError, match="q_norm"):
        pack(made[0], tmp_path / "cache", matrices=[f"{ATTENTION}.q_norm"])
    assert not (tmp_path / "cache").exists()


# What does not belong


def _entry(key, value):
    return lambda data: data["matrices"][HEAD].__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_entry("file", "../matrix-lm_head.safetensors"), "matrix 'lm_head': file: found '../matrix-lm_head.safetensors'"),
        (_entry("file", "layer-0.safetensors"), "matrix 'lm_head': file: expected matrix-lm_head.safetensors"),
        (_entry("nbytes", -1), "matrix 'lm_head': nbytes: found -1"),
        (_entry("label", 1), "matrix 'lm_head': label: found 1"),
        (_entry("label", "other"), "matrix-lm_head.safetensors: is packed from something else: packed_from"),
        (_entry("formats", {"gate": "BF16"}), "matrix 'lm_head': formats: expected {'weight': 'BF16'}, found {'gate'"),
        (_entry("intermediate", 64), "matrix 'lm_head': intermediate: expected 192, found 64"),
        (_entry("shards", [[0, 64], [64, 192]]), "matrix 'lm_head': expected arenas for 1 NUMA node, found them for 2"),
        (
            lambda data: data.__setitem__("matrices", []),
            "objects of layers and of matrices, found",
        ),
        (lambda data: data.pop("matrices"), "objects of layers and of matrices, found"),
        (lambda data: data["matrices"].pop(HEAD), f"matrix 'lm_head': expected to be packed, found '{Q}'; `ktmoe pack` adds"),
        (lambda data: data["matrices"].__setitem__(HEAD, data["matrices"][Q]), "matrix 'lm_head': file: expected matrix-lm_h"),
    ],
)
def test_another_manifest(copied, change, match):
    edit(copied[1], change)
    with pytest.raises(CacheError, match=match):
        Linear.from_checkpoint(copied[0], HEAD, cache=copied[1])


def test_a_file_of_another_matrix_or_a_layer(made, tmp_path):
    """Of the same shape and format, so that only what the header states tells them apart."""
    path, cache = made[0], tmp_path / "cache"
    pack(path, cache, (), matrices=[HEAD, K])
    os.replace(cache / f"matrix-{K}.safetensors", cache / "matrix-lm_head.safetensors")
    with pytest.raises(CacheError, match=r"is packed from something else: matrix: expected 'lm_head', found 'model.layers.0"):
        Linear.from_checkpoint(path, HEAD, cache=cache)
    assert pack(path, cache, (), matrices=[HEAD], verify=True).matrices_written == [HEAD]


def test_another_checkpoint(copied):
    os.utime(copied[0] / "model.safetensors")
    with pytest.raises(CacheError, match=r"is of another checkpoint: .*model.safetensors: last change"):
        Linear.from_checkpoint(copied[0], HEAD, cache=copied[1])


def test_another_number_of_nodes(made, fake_nodes):
    fake_nodes(THREE)
    with pytest.raises(CacheError, match="matrix 'lm_head': expected arenas for 2 NUMA nodes, found them for 1 NUMA node;"):
        Linear.from_checkpoint(made[0], HEAD, cache=made[1], numa_nodes=[0, 1])
    with Linear.from_checkpoint(made[0], HEAD, cache=made[1], numa_nodes=[2]) as linear:
        assert linear.placement.nodes == (2,)


def test_a_mapped_file_was_changed(copied):
    path, cache = copied
    with Linear.from_checkpoint(path, HEAD, cache=cache) as linear:
        linear.replace(linear.export())
        assert np.isfinite(outputs(linear)).all()
        os.utime(cache / "matrix-lm_head.safetensors", ns=(0, 1))
        for call in (lambda: outputs(linear), linear.export):
            with pytest.raises(CacheError, match=r"matrix-lm_head.safetensors: expected the file as it was when it was mapped"):
                call()


@pytest.mark.parametrize(("at", "what"), [(1, "weight"), (-10, "scales, biases or factors"), (-1, "scales, biases or factors")])
def test_verify_finds_a_changed_byte(copied, at, what):
    """Of the packed matrix, of the bias, of what was seen of the scales."""
    path, cache = copied
    file = cache / f"matrix-{Q}.safetensors"
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    arena = start + json.loads(data[8:start])["shard.0"]["data_offsets"][0]
    data[arena + 100 if at > 0 else at] ^= 1
    file.write_bytes(data)
    with pytest.raises(CacheError, match=f"matrix-{Q}.safetensors: the matrix: {what}: expected the bytes that packing gives"):
        pack(path, cache, (), matrices=[Q], verify=True)


def test_a_backend_with_a_layout_of_its_own(made):
    class Own(Backend):
        linear = True

        def pack(self, experts, plan, progress=None):
            raise AssertionError

    backends.register("own", Own())
    try:
        with pytest.raises(UnavailableError, match=r"^lm_head: backend 'own' cannot start a dense matrix from a packed cache"):
            Linear.from_checkpoint(made[0], HEAD, "own", cache=made[1])
    finally:
        backends.unregister("own")


# Memory


def test_one_matrix_is_in_memory_at_a_time(made, tmp_path, monkeypatch):
    """Before it is written, the bytes that were read are gone; it is written and compared in pieces."""
    there, made_one = [], Matrix.__post_init__

    def note(matrix):
        made_one(matrix)
        there.append(weakref.ref(matrix))
        assert sum(each() is not None for each in there) == 1

    def alone(*arguments):
        assert all(each() is None for each in there)
        for piece in pieces(*arguments):
            assert len(piece) == 1
            copied.append(piece)
            yield piece

    copied, pieces = [], packed_file.pieces
    monkeypatch.setattr(Matrix, "__post_init__", note)
    monkeypatch.setattr(packed_file, "PANELS_AT_ONCE", 1)
    for module in (packed_file, packing_module):
        monkeypatch.setattr(module, "pieces", alone)
    pack(made[0], tmp_path / "cache", (), matrices=[HEAD, Q, K], verify=True)
    panels = sum(-(-n // 64) for n in (192, 256, 192))
    assert (len(there), len(copied)) == (6, 3 * panels)  # of what is written, and of both that are compared
    monkeypatch.undo()
    with Linear.from_checkpoint(made[0], Q) as packed, Linear.from_checkpoint(made[0], Q, cache=tmp_path / "cache") as mapped:
        assert_alike(mapped, packed)


def test_messages_of_memory(made, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    with pytest.raises(OutOfMemoryError, match=r"^lm_head: packing BF16 \[192, 64\] needs 0\.00 GiB of memory, 0\.00 GiB is"):
        Linear.from_checkpoint(made[0], HEAD)
    with Linear.from_checkpoint(made[0], HEAD, cache=made[1]) as linear:
        assert np.isfinite(outputs(linear)).all()
    matrix = one(DENSE_FORMATS["b16"])  # what is read is in memory beside what is packed, unless its caller has it
    monkeypatch.setattr(memory, "available_bytes", lambda: 3 * matrix.codes.nbytes // 2)
    with Linear(matrix) as linear:
        assert np.isfinite(outputs(linear)).all()
    with pytest.raises(OutOfMemoryError, match="needs"):
        Linear(unread(matrix))
    monkeypatch.undo()

    def read():
        raise MemoryError("refused")

    weights = LinearWeights.of_headers("head", DENSE_FORMATS["b16"], (64, 64), read)
    with pytest.raises(OutOfMemoryError, match=r"^head: reading the matrix: the system refused memory: refused"):
        Linear(weights)


# The command


def test_the_command(made, tmp_path, capsys):
    path, out = str(made[0]), str(tmp_path / "out")
    assert cli.main(["pack", path, out, "--no-layers", "--matrix", "lm_head"]) == 0
    assert capsys.readouterr().out.endswith("\nwritten: lm_head\n")
    assert cli.main(["pack", path, out, "--no-matrices"]) == 0
    assert capsys.readouterr().out.endswith("\nwritten: layers 0\n")
    assert cli.main(["pack", path, out]) == 0
    assert capsys.readouterr().out.endswith(
        f"\nwritten: {ODD} ... model.layers.10.self_attn.k_proj (4 matrices)\nkept: layers 0, lm_head\n"
    )
    assert cli.main(["pack", path, out, "--no-layers", "--matrix", "lm_head", "--json", "--verify"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["layers_kept"], found["matrices_written"]) == ([], [])
    assert found["matrices_kept"] == found["matrices_verified"] == ["lm_head"]
    assert found["cache_bytes"] == (tmp_path / "out" / "matrix-lm_head.safetensors").stat().st_size
    for wrong in (["--no-layers", "--layers", "0"], ["--no-matrices", "--no-layers"], ["--no-matrices", "--matrix", "lm_head"]):
        assert cli.main(["pack", path, out, *wrong]) == 2
        assert f"{wrong[0]} excludes" in capsys.readouterr().err
    with Checkpoint(path) as checkpoint:
        assert sorted(Cache(out, checkpoint).matrices)[:2] == [ODD, "lm_head"]
