"""What every loader owes: the right numbers, read lazily and by several threads, and refusals that name what is wrong."""

import gc
import itertools
import os
import random
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from checkpoints import EXPERTS, HIDDEN, SCHEMES, check_matrix, scores, write, write_index, zeros

from ktmoe import loaders
from ktmoe.errors import CheckpointError, ClosedError, InputError, MissingTensorError, UnavailableError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.messages import show

#: Schemes that differ from another one in a name, or in the kind of a scale. What every scheme must do is asked of them in
#: test_layers() alone, unless all cases run.
VARIANTS = {
    "aria",
    "bf16 w1",
    "deepseek_v4 bf16",
    "fp8 bf16",
    "fp8 per matrix, inverse",
    "fp8 per row, flat",
    "fp8 transposed",
    "fp8 w1",
    "fp8 weight_scale",
    "gptq w1",
    "granite",
    "int4 w1",
    "int8 groups",
    "int8 packed per row",
    "int8 per matrix",
    "llama4",
    "mxfp8 weight_scale",
}
CHOSEN = [pytest.param(name, marks=pytest.mark.exhaustive) if name in VARIANTS else name for name in SCHEMES]
PER_EXPERT = [name for name in CHOSEN if not SCHEMES[name if isinstance(name, str) else name.values[0]].stacked]


@pytest.fixture(params=CHOSEN)
def scheme(request):
    return SCHEMES[request.param]


def test_the_variants_are_schemes():
    assert SCHEMES.keys() > VARIANTS


@pytest.mark.cover("values")
@pytest.mark.parametrize("scheme", SCHEMES, indirect=True)
@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model.", "thinker.model."])
def test_layers(tmp_path, scheme, prefix):
    """Numbers, order and names of layers behind any prefix, and no loader but one that wants them."""
    names = {layer: f"{prefix}layers.{layer}" for layer in (1, 2, 10)} | {"mtp.0": f"{prefix}mtp.layers.0"}
    tensors = {}
    for seed, name in enumerate(reversed(names.values())):
        tensors |= scheme.layer(name, seed)
    tensors[f"{prefix}layers.0.mlp.gate_proj.weight"] = zeros("BF16", 8, 8)  # a dense layer
    tensors[f"{prefix}layers.3.mlp.shared_experts.gate_proj.weight"] = zeros("BF16", 8, 8)
    tensors[f"{prefix}embed.weight"] = zeros("BF16", 8, 8)
    checkpoint = write(tmp_path, tensors)
    found = scores(checkpoint)
    assert found.pop(scheme.loader) > 0.5
    assert not any(found.values())
    loader = find_loader(checkpoint)
    assert loader is loaders.get(scheme.loader)
    assert loader.layers(checkpoint) == [1, 2, 10, "mtp.0"]
    for layer, name in names.items():
        scheme.check(loader.load(checkpoint, layer), tensors, name)
    for same in ("10", np.int64(10)):
        scheme.check(loader.load(checkpoint, same), tensors, names[10])
    before = f"{tmp_path}: layer 3: expected a layer that has routed experts, found layers 1-2, 10, mtp.0"
    for absent in (3, -1, "mtp.1", "4", "x", "-1", "", "\u0660", "mtp.0 ", "9" * 5000):
        with pytest.raises(MissingTensorError) as caught:
            loader.load(checkpoint, absent)
        assert str(caught.value) == before.replace("layer 3", f"layer {show(absent)}")


def test_no_layer_at_all(tmp_path, scheme):
    checkpoint = write(tmp_path, {"a": zeros("I8", 2, 2)})
    loader = loaders.get(scheme.loader)
    assert loader.detect(checkpoint) == 0
    assert loader.layers(checkpoint) == []
    with pytest.raises(MissingTensorError, match=r"layer 0: expected .*, found no layer with tensors of .* names"):
        loader.load(checkpoint, 0)
    with pytest.raises(UnavailableError, match=rf"no loader recognises this checkpoint; tried .*{scheme.loader}"):
        find_loader(checkpoint)


def test_shards_and_threads(tmp_path, scheme):
    """Every tensor in another file than its neighbour; matrices asked for in any order, some alone, by four threads."""
    tensors = scheme.layer("model.layers.0")
    names, weight_map = list(tensors), {}
    for shard in range(5):
        chosen = names[shard::5]
        weight_map |= dict.fromkeys(chosen, f"{shard}.safetensors")
        write(tmp_path, {name: tensors[name] for name in chosen}, file=f"{shard}.safetensors")
    write_index(tmp_path, weight_map)
    checkpoint = Checkpoint(tmp_path)
    weights = find_loader(checkpoint).load(checkpoint, 0)
    jobs = [(expert, projection) for expert in range(EXPERTS) for projection in PROJECTIONS] * 5
    random.Random(0).shuffle(jobs)
    with ThreadPoolExecutor(4) as pool:
        for job, matrix in zip(jobs, pool.map(lambda job: weights.matrix(*job), jobs), strict=True):
            check_matrix(matrix, *scheme.meaning(tensors, weights.name, *job))


def test_partial_download(tmp_path, scheme):
    bases = [f"model.layers.{layer}" for layer in range(3)]
    tensors = {base: scheme.layer(base, seed) for seed, base in enumerate(bases)}
    write(tmp_path, tensors[bases[1]], file="1.safetensors")
    write_index(tmp_path, {name: f"{base[-1]}.safetensors" for base in bases for name in tensors[base]})
    checkpoint = Checkpoint(tmp_path)
    scheme.check(find_loader(checkpoint).load(checkpoint, 1), tensors[bases[1]], bases[1])
    with pytest.raises(MissingTensorError, match=r"2.safetensors: expected .* 'model.layers.2.*', found no such file"):
        find_loader(checkpoint).load(checkpoint, 2)
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(MissingTensorError, match=r"0.safetensors: expected .* 'model.layers.0.*', found no such file"):
        find_loader(Checkpoint(tmp_path))


def test_an_absent_file_of_another_scheme_does_not_matter(tmp_path):
    """A quantized model with an extra layer in BF16, whose file has not been downloaded."""
    tensors, extra = SCHEMES["int4"].layer("model.layers.0"), SCHEMES["bf16"].layer("model.layers.1")
    write(tmp_path, tensors, file="0.safetensors")
    write_index(tmp_path, dict.fromkeys(tensors, "0.safetensors") | dict.fromkeys(extra, "1.safetensors"))
    assert find_loader(Checkpoint(tmp_path)) is loaders.get("compressed_tensors")
    write(tmp_path, extra, file="1.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert find_loader(checkpoint) is loaders.get("compressed_tensors")
    SCHEMES["bf16"].check(loaders.get("bf16").load(checkpoint, 1), extra, "model.layers.1")


def test_reads_lazily_and_no_more_than_the_expert(tmp_path, scheme, monkeypatch):
    tensors = scheme.layer("model.layers.0")
    checkpoint = write(tmp_path, tensors)
    reads = []
    read = Checkpoint.read

    def record(self, name, out=None, *, byte_range=None, release=False):
        reads.append((name, byte_range, release))
        return read(self, name, out, byte_range=byte_range, release=release)

    monkeypatch.setattr(Checkpoint, "read", record)
    weights = find_loader(checkpoint).load(checkpoint, 0)
    assert reads == []
    for projection in PROJECTIONS:
        weights.matrix(1, projection)
    assert len(reads) == len({read[:2] for read in reads})
    mine = [name for name in tensors if scheme.stacked or ".experts.1." in name]
    assert {name for name, _, _ in reads} == set(mine)
    expected = sum(tensors[name][1].nbytes for name in mine) // (EXPERTS if scheme.stacked else 1)
    assert sum(own[1] - own[0] if own else checkpoint.info(name).nbytes for name, own, _ in reads) == expected
    assert all(release or name.endswith("weight_shape") for name, _, release in reads)


def test_weights_keep_the_checkpoint_open_and_let_it_go(tmp_path, scheme):
    checkpoint = write(tmp_path, scheme.layer("layers.0"))
    gone = weakref.ref(checkpoint)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights = find_loader(checkpoint).load(checkpoint, 0)
        del checkpoint
        gc.collect()
        assert weights.matrix(0, "gate").shape == (scheme.intermediate, HIDDEN)
        del weights
        gc.collect()
    assert gone() is None
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_after_close(tmp_path, scheme):
    checkpoint = write(tmp_path, scheme.layer("layers.0"))
    weights = find_loader(checkpoint).load(checkpoint, 0)
    checkpoint.close()
    with pytest.raises(ClosedError, match=rf"'{weights.name}\..*' was asked for after close"):
        weights.matrix(2, "down")


def test_wrong_expert_or_projection(tmp_path, scheme):
    checkpoint = write(tmp_path, scheme.layer("layers.0"))
    weights = find_loader(checkpoint).load(checkpoint, 0)
    with pytest.raises(InputError, match=rf"{weights.name}: expert must be in \[0, 3\), found 3"):
        weights.matrix(3, "gate")
    with pytest.raises(InputError, match=r"projection must be one of .*, found 'w1'"):
        weights.matrix(0, "w1")


def test_truncated_while_loaded(tmp_path, scheme):
    """Every matrix fails, and every time, also those whose bytes are there: the file is not the one whose header was read."""
    checkpoint = write(tmp_path, scheme.layer("layers.0"))
    weights = find_loader(checkpoint).load(checkpoint, 0)
    last = max(map(checkpoint.info, checkpoint.names()), key=lambda info: info.offset)
    os.truncate(last.file, last.offset + last.nbytes - 5)
    for expert, projection in list(itertools.product(range(EXPERTS), PROJECTIONS)) * 2:
        with pytest.raises(CheckpointError, match=r"truncated: tensor|changed while it was read: size: expected") as caught:
            weights.matrix(expert, projection)
        assert str(caught.value).startswith(f"{last.file}: ")


@pytest.mark.cover("values")
@pytest.mark.parametrize("stated", [EXPERTS - 1, EXPERTS + 1, str(EXPERTS), float(EXPERTS), True])
@pytest.mark.parametrize("nested", [False, True])
def test_config_disagrees_on_the_number_of_experts(tmp_path, scheme, stated, nested):
    config = {scheme.count: stated}
    checkpoint = write(tmp_path, scheme.layer("layers.0"), {"text_config": config} if nested else config)
    with pytest.raises(CheckpointError) as caught:
        find_loader(checkpoint).load(checkpoint, 0)
    words = (f"layers.0.{scheme.module}", f"expected {stated!r} by {scheme.count} of config.json", f"found {EXPERTS} experts")
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_config_agrees_on_the_number_of_experts(tmp_path, scheme):
    tensors = scheme.layer("layers.0")
    checkpoint = write(tmp_path, tensors, {"num_experts": None, "text_config": {scheme.count: EXPERTS}})
    scheme.check(find_loader(checkpoint).load(checkpoint, 0), tensors, "layers.0")


def test_missing_tensor(tmp_path, scheme):
    """Any one of a layer's tensors."""
    tensors = scheme.layer("layers.0")
    for number, name in enumerate(tensors):
        folder = tmp_path / str(number)
        folder.mkdir()
        checkpoint = write(folder, {other: tensor for other, tensor in tensors.items() if other != name})
        with pytest.raises(MissingTensorError) as caught:
            loaders.get(scheme.loader).load(checkpoint, 0)
        expected = "the others of this layer" if scheme.stacked else "experts 0-2"
        assert str(caught.value) == f"{folder}: {name}: expected with {expected}, found no such tensor"


@pytest.mark.parametrize("scheme", PER_EXPERT, indirect=True)
def test_missing_expert(tmp_path, scheme):
    tensors = scheme.layer("layers.0")
    for name in [name for name in tensors if ".experts.1." in name]:
        tensors[name.replace(".experts.1.", ".experts.4.")] = tensors.pop(name)
    checkpoint = write(tmp_path, tensors)
    with pytest.raises(MissingTensorError, match=r"layers.0.*experts.1.*: expected with experts 0-4"):
        find_loader(checkpoint).load(checkpoint, 0)


def test_two_names_for_one_layer(tmp_path, scheme):
    checkpoint = write(tmp_path, scheme.layer("layers.0") | scheme.layer("model.layers.0"))
    names = rf"layers.0.{scheme.module} \(\w+\) and model.layers.0.{scheme.module} \(\w+\)"
    with pytest.raises(CheckpointError, match=rf"layer 0: expected one name, found {names}$"):
        find_loader(checkpoint).load(checkpoint, 0)


@pytest.mark.parametrize("scheme", PER_EXPERT, indirect=True)
def test_an_expert_unlike_the_first(tmp_path, scheme):
    """In any one of its tensors, by its shape."""
    tensors = scheme.layer("layers.0")
    for number, name in enumerate(name for name in tensors if ".experts.2." in name):
        folder = tmp_path / str(number)
        folder.mkdir()
        dtype, array = tensors[name]
        checkpoint = write(folder, tensors | {name: [dtype, np.stack([array, array])]})
        like = loaders.get(scheme.loader)
        with pytest.raises(CheckpointError) as caught:
            like.load(checkpoint, 0)
        shape = list(checkpoint.info(name.replace(".experts.2.", ".experts.0.")).shape)
        assert str(caught.value) == f"{name}: expected {dtype} {shape} as in expert 0, found {dtype} {[2, *shape]}"


@pytest.mark.cover("values")
@pytest.mark.parametrize(
    "alias", ["layers.09", "layers.9x", "xlayers.9", "layers.1000000", "layers.\u0669", "foo.layers.9", "mtp.0."]
)
def test_names_that_only_look_alike_are_left_alone(tmp_path, scheme, alias):
    tensors = scheme.layer("layers.0")
    more = {f"{name}{end}": tensor for end in ("_else", "\n") for name, tensor in scheme.layer("layers.9").items()}
    checkpoint = write(tmp_path, tensors | scheme.layer(alias) | more)
    assert find_loader(checkpoint).layers(checkpoint) == [0]
    scheme.check(find_loader(checkpoint).load(checkpoint, 0), tensors, "layers.0")


def test_a_tensor_of_unknown_meaning_is_refused(tmp_path, scheme):
    """Beside the others, it might change what they mean."""
    tensors = scheme.layer("layers.0")
    name = f"{next(iter(tensors))}_twist"
    checkpoint = write(tmp_path, tensors | {name: zeros("U8", 2, 2)})
    with pytest.raises(ValueError, match=rf"^{name}: expected none beside .*, found one: its meaning is not known$"):
        find_loader(checkpoint).load(checkpoint, 0)
