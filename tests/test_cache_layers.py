"""Layers that are mapped from a packed cache compute, are changed and are exported as those that were packed."""

from dataclasses import replace

import numpy as np
import pytest
from cached import SIZES, arenas_of, batch, outputs, write_model
from helpers import DEEPSEEK, TURNED, WEIGHTS, in_child, random_experts, reading, same_bits, unsigned
from topology import THREE

from ktmoe import BF16, SILU, ExpertWeights, MoELayer, MoEModel, backends, int8, nvfp4, synthetic
from ktmoe._native import core
from ktmoe._native.isa import ISAS
from ktmoe.backends import native
from ktmoe.backends.base import Backend, Missing, Plan
from ktmoe.cache import manifest, opened
from ktmoe.cache.manifest import Item
from ktmoe.cache.opened import Cache
from ktmoe.cache.packing import pack
from ktmoe.errors import CacheError, ClosedError, FormatError, InputError, OutOfMemoryError, UnavailableError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.machine import memory

FORMATS = WEIGHTS | {name: {"formats": weight_format} for name, weight_format in TURNED.items()}


def unread(experts):
    """The same experts, none of whose matrices may be read."""

    def read(expert, projection):
        raise AssertionError(f"{projection} of expert {expert} was read")

    return reading(experts, read)


def assert_alike(mapped: MoELayer, packed: MoELayer):
    for tokens in (1, 40):
        assert same_bits(outputs(mapped, tokens), outputs(packed, tokens))
    assert core.folded(mapped.packed) == core.folded(packed.packed)
    for expert in (0, packed.num_experts - 1):
        assert_same(mapped.export_expert(expert), packed.export_expert(expert))


def assert_same(found, expected):
    for part, other in zip(found, expected, strict=True):
        for projection in PROJECTIONS:
            ours, theirs = part[projection], other[projection]
            assert ours.stored.keys() == theirs.stored.keys()
            assert all(same_bits(ours.stored[label], theirs.stored[label]) for label in ours.stored)
            assert (ours.bias is None) == (theirs.bias is None)
            assert ours.bias is None or same_bits(ours.bias, theirs.bias)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(tmp_path, name):
    experts = random_experts(np.random.default_rng(1), 3, 192, 160, **FORMATS[name], biases=len(name) % 2)
    with MoELayer(experts) as packed, MoELayer(unread(experts), arenas=arenas_of(tmp_path, experts)) as mapped:
        assert_alike(mapped, packed)
        assert (mapped.mapped, packed.mapped, mapped.nbytes) == (True, False, packed.nbytes)


@pytest.mark.parametrize("name", ["folded", "nvfp4", "fp8", "b16"])
def test_shards(tmp_path, fake_nodes, name):
    fake_nodes(THREE)
    nodes = {"numa_nodes": [2, 0]}
    experts = random_experts(np.random.default_rng(1), 3, 256, 384, **FORMATS[name], biases=True)
    arenas = arenas_of(tmp_path, experts, **nodes)
    with MoELayer(experts, **nodes) as packed, MoELayer(unread(experts), **nodes, arenas=arenas) as mapped:
        assert packed.placement.shards == 2
        assert_alike(mapped, packed)


def test_one_file_serves_every_way_to_compute(tmp_path):
    """Which kernels are chosen depends on what packing saw of the scales; AMX folds most. Nothing is computed here."""
    folded = 0
    for name in ("folded", "unfolded", "int4-64", "nvfp4", "fp8", "int8-64"):
        experts = random_experts(np.random.default_rng(1), 3, 128, 96, **FORMATS[name])
        if name == "int4-64":  # two of three experts' scales have signs, so that only one can be folded
            experts = unsigned(experts, {(0, projection) for projection in PROJECTIONS})
        arenas, ranges = arenas_of(tmp_path, experts), [(0, experts.intermediate)]
        for isa in ISAS:
            table = native.load_table(isa)
            for plan in (Plan(), Plan(rounding="folded"), Plan(tuned_for="prefill")):
                if not all(table.serves(weight_format, "bf16") for weight_format in experts.formats.values()):
                    continue
                packed = core.PackedLayer(table, experts, plan, ranges, 1)
                for expert in range(3):
                    packed.pack(expert, {projection: experts.matrix(expert, projection) for projection in PROJECTIONS})
                mapped = core.PackedLayer(table, experts, plan, ranges, 1, arenas.file)
                core.adopt(mapped, arenas.seen, arenas.biases, arenas.factors)
                assert core.folded(mapped) == core.folded(packed)
                assert mapped.rounding == packed.rounding
                folded += 0 < sum(map(bool, core.folded(packed).values())) < 9
    assert folded or "amx" not in ISAS  # some layers have both kinds of kernels


def test_one_file_serves_every_activation_mode(tmp_path):
    experts = random_experts(np.random.default_rng(1), 3, 128, 96)
    arenas = arenas_of(tmp_path, experts)
    for backend in backends.available():
        for mode in ("bf16", "int16", "int8", "mxfp8", "mxfp4", "mxfp8/mxfp4:even"):
            if isinstance(backends.get(backend).lookup(experts, mode), Missing):
                continue
            with MoELayer(experts, backend, mode) as layer, MoELayer(experts, backend, mode, arenas=arenas) as mapped:
                assert same_bits(outputs(mapped), outputs(layer))


@pytest.mark.parametrize("write", [synthetic.write_deepseek_v4, synthetic.write_gpt_oss, synthetic.write_awq])
def test_from_a_checkpoint(tmp_path, write):
    path, cache = write_model(tmp_path, write=write)
    with MoEModel.from_checkpoint(path) as packed, MoEModel.from_checkpoint(path, cache=cache) as mapped:
        for layer in packed:
            assert mapped[layer].mapped
            assert_alike(mapped[layer], packed[layer])
        assert mapped.loaded == packed.loaded
        with MoELayer.from_checkpoint(path, 1, cache=cache) as alone:
            assert_alike(alone, packed[1])


def test_a_replaced_expert_stays_in_this_process(tmp_path):
    """Twice the same one, so that it is packed into what was mapped; another layer of the file does not see it."""
    path, cache = write_model(tmp_path)
    with MoELayer.from_checkpoint(path, 0, cache=cache) as layer, MoELayer.from_checkpoint(path, 0, cache=cache) as other:
        before = outputs(other)
        with MoELayer.from_checkpoint(path, 1) as source:
            for expert in (1, 2, 1):
                layer.replace_expert(expert, source.export_expert(3)[0])
            assert_same(layer.export_expert(1), source.export_expert(3))
            assert_same(layer.export_expert(2), source.export_expert(3))
        assert not same_bits(outputs(layer), before)
        assert same_bits(outputs(other), before)
        assert_same(layer.export_expert(4), other.export_expert(4))


def test_memory_is_not_asked_for(tmp_path, monkeypatch):
    path, cache = write_model(tmp_path)
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    with pytest.raises(OutOfMemoryError, match="2 layers need"):
        MoEModel.from_checkpoint(path)
    with MoEModel.from_checkpoint(path, cache=cache) as model:
        assert np.isfinite(outputs(model[0])).all()


def test_nothing_is_left_after_close(tmp_path, nothing_left):
    path, cache = write_model(tmp_path)
    layer = MoELayer.from_checkpoint(path, 0, cache=cache)
    file = str(cache / "layer-0.safetensors")

    def mapped():
        with open("/proc/self/maps") as maps:
            return file in maps.read()

    assert mapped()
    layer.close()
    assert not mapped()
    with pytest.raises(ClosedError):
        outputs(layer)


def test_a_forked_child_computes(tmp_path):
    path, cache = write_model(tmp_path)
    with MoELayer.from_checkpoint(path, 0, cache=cache) as layer:
        assert same_bits(in_child(lambda: outputs(layer)), outputs(layer))


def test_arenas_begin_at_huge_pages(tmp_path):
    """In the file and in memory: else the page cache could not map its own."""
    experts = random_experts(np.random.default_rng(1), 3, 128, 96)
    with MoELayer(experts, arenas=arenas_of(tmp_path, experts)), open("/proc/self/maps") as maps:
        line = next(line for line in maps if str(tmp_path) in line)
    start, offset = int(line.split("-")[0], 16), int(line.split()[2], 16)
    assert offset == core.HUGE_PAGE_BYTES
    assert start % core.HUGE_PAGE_BYTES == 0


def test_another_number_of_nodes(tmp_path, fake_nodes):
    path, cache = write_model(tmp_path)
    fake_nodes(THREE)
    with pytest.raises(CacheError, match="layer 0: expected arenas for 2 NUMA nodes, found them for 1 NUMA node;"):
        MoELayer.from_checkpoint(path, 0, cache=cache, numa_nodes=[0, 1])
    with MoELayer.from_checkpoint(path, 0, cache=cache, numa_nodes=[2]) as layer, MoELayer.from_checkpoint(path, 0) as packed:
        assert layer.placement.shards == 1
        assert packed.placement.shards > 1


def test_other_experts_than_those_that_were_packed(tmp_path):
    """The checkpoint is the same: its loader gives others."""
    path, cache = write_model(tmp_path)
    with Checkpoint(path) as checkpoint, MoELayer.from_checkpoint(path, 0) as layer:
        found, placement = Cache(cache, checkpoint), layer.placement
    for other, what in (
        (random_experts(np.random.default_rng(1), 5, 128, 256, formats=BF16), "formats: expected .*BF16.*, found .*E2M1"),
        (random_experts(np.random.default_rng(1), 4, 128, 256), "experts: expected 4, found 5"),
        (random_experts(np.random.default_rng(1), 5, 64, 256), "hidden: expected 64, found 128"),
        (random_experts(np.random.default_rng(1), 5, 128, 160), "intermediate: expected 160, found 256"),
    ):
        with pytest.raises(CacheError, match=what):
            found.layer(0, other, placement)


def test_experts_in_other_places(tmp_path):
    path, cache = write_model(tmp_path)
    for load in (
        lambda **options: MoELayer.from_checkpoint(path, 0, **options),
        lambda **o: MoEModel.from_checkpoint(path, **o),
    ):
        with pytest.raises(InputError, match="cache: expected no physical_to_logical"):
            load(cache=cache, physical_to_logical=[0, 0])


def test_a_backend_with_a_layout_of_its_own(tmp_path, monkeypatch):
    class Own(Backend):
        def pack(self, experts, plan, progress=None):
            raise AssertionError

    path, cache = write_model(tmp_path)
    backends.register("own", Own())
    try:
        with pytest.raises(UnavailableError, match=r"^layers\.0\.ffn\.experts: backend 'own' cannot start from a packed cache"):
            MoELayer.from_checkpoint(path, 0, "own", cache=cache)
        monkeypatch.setenv("KTMOE_BACKEND", "own")
        with pytest.raises(UnavailableError, match="backend 'own' has no packed layout that a cache can hold"):
            pack(path, tmp_path / "another")
    finally:
        backends.unregister("own")


def some_biases(experts: ExpertWeights) -> ExpertWeights:
    def read(expert, projection):
        matrix = experts.matrix(expert, projection)
        return matrix if expert == 1 else type(matrix)(matrix.name, matrix.format, matrix.shape, **matrix.stored)

    return reading(experts, read)


def test_biases_of_some_experts(tmp_path):
    experts = some_biases(random_experts(np.random.default_rng(1), 2, 64, 64, biases=True))
    with pytest.raises(FormatError, match="biases of all experts or of none, found gate, up, down after none"):
        arenas_of(tmp_path, experts)


@pytest.mark.parametrize("weight_format", [nvfp4(divides=True), int8()], ids=str)
def test_factors_that_are_no_numbers(tmp_path, weight_format):
    experts = random_experts(np.random.default_rng(1), 2, 64, 64, formats=weight_format, biases=True)
    arenas = arenas_of(tmp_path, experts)
    for numbers, wrong in ((arenas.factors, np.inf), (arenas.biases, np.nan)):
        was = numbers["up"][1, 0]
        numbers["up"][1, 0] = wrong
        with pytest.raises(FormatError, match="expert 1: a bias or a factor is not finite"):
            MoELayer(experts, arenas=arenas)
        numbers["up"][1, 0] = was
    with MoELayer(experts, arenas=arenas) as layer:
        assert np.isfinite(layer.forward(*batch(layer.hidden, 2))).all()


def test_a_layer_that_was_not_packed(tmp_path):
    synthetic.write_deepseek_v4(tmp_path / "model", layers=3, **SIZES)
    pack(tmp_path / "model", tmp_path / "cache", [0, 2])
    with pytest.raises(CacheError, match="layer 1: expected to be packed, found layers 0, 2; `ktmoe pack` adds it"):
        MoEModel.from_checkpoint(tmp_path / "model", cache=tmp_path / "cache")
    with MoEModel.from_checkpoint(tmp_path / "model", [2], cache=tmp_path / "cache") as model:
        assert len(model) == 1


def test_headers_of_one_layer_of_a_kind_are_parsed(tmp_path, monkeypatch):
    """Of layers 0 and 2; layer 1 was packed from experts of another kind. All can still be read."""
    asked, expected = [], manifest.expected

    def find(checkpoint, name, layer):
        asked.append(layer)
        return find_loader(checkpoint, name, layer)

    def expect(item, *arguments):
        made = expected(item, *arguments)
        return replace(made, kind="other") if item.name == 1 else made

    monkeypatch.setattr(opened, "find_loader", find)
    path, cache = write_model(tmp_path / "one kind", layers=3)
    with MoEModel.from_checkpoint(path, cache=cache):
        assert asked == [0]
    monkeypatch.setattr(manifest, "expected", expect)
    path, cache = write_model(tmp_path / "two kinds", layers=3)
    asked.clear()
    with MoEModel.from_checkpoint(path, cache=cache):
        assert asked == [0, 1]
    with Checkpoint(path) as checkpoint:
        found = Cache(cache, checkpoint).experts(checkpoint, [0, 1, 2], "auto")
        for layer, experts in found.items():
            same = find_loader(checkpoint, "auto", layer).load(checkpoint, layer)
            assert experts.name == same.name
            assert same_bits(experts.matrix(1, "up").codes, same.matrix(1, "up").codes)


def test_kinds():
    """Activations and formats make them."""
    experts = random_experts(np.random.default_rng(1), 2, 64, 64)
    others = [experts.with_activation(DEEPSEEK), random_experts(np.random.default_rng(1), 2, 64, 64, formats=BF16)]
    assert experts.activation == SILU
    assert len({manifest.expected(Item("layer", 0), each, [(0, 64)]).kind for each in (experts, *others)}) == 3
