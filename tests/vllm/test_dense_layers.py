"""Dense layers: what vLLM makes and fills has the bits of ktmoe's own Linear of the same numbers."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from dense_schemes import CASES, NAME, K, cut, joined, matrices
from helpers import BF16, same_bits
from linears import assert_within, random_x
from quantized_layers import BLOCKS, INT4, compressed, said

from ktmoe import Linear, backends
from ktmoe.errors import UnknownNameError

#: Inputs of one of two processes that divide them.
HALF = 256


@pytest.fixture
def dense(layers, monkeypatch):
    """dense_layers_of_vllm, where ktmoe computes every dense layer that it can."""
    import dense_layers_of_vllm  # not before: vLLM warns

    from ktmoe.vllm import report

    monkeypatch.setattr(report, "SAID", set())
    monkeypatch.setenv("KTMOE_VLLM_DENSE", "all")
    return dense_layers_of_vllm


@pytest.mark.smoke
@pytest.mark.parametrize("scheme", CASES)
def test_every_scheme(dense, scheme):
    """In each class of vLLM's; outputs within their bound, too.

    Parameters are the checkpoint's: vLLM would wait for others when it loads again. They are loaded as those of vLLM's own
    methods, and no copy is left.
    """
    case = CASES[scheme]
    for name, kind in dense.KINDS.items():
        if name == "head" and not case.head:
            continue
        parts = matrices(case, kind.rows)
        layer = dense.loaded(case, kind, parts)
        assert dense.ours(layer), name
        parameters = dict(layer.named_parameters())
        assert parameters.keys() == case.tensors(parts[0]).keys(), name
        loader = "weight_loader" if name in ("replicated", "head") else "weight_loader_v2"
        assert {parameter.weight_loader.__name__ for parameter in parameters.values()} == {loader}, name
        assert not sum(parameter.numel() for parameter in parameters.values()), name
        x = random_x(np.random.default_rng(1), 5, K)
        with Linear(joined(parts)) as own:
            y = assert_within(own, joined(parts), x)
        assert same_bits(dense.product(layer, x), y), name


@pytest.mark.parametrize("scheme", ["bfloat16", "FP8 per matrix", "INT4"])
def test_biases(dense, scheme):
    """They are added once, before y is rounded; or not at all, where the layer gives them to its caller."""
    case = CASES[scheme]
    x = random_x(np.random.default_rng(1), 5, K)
    for kind in (dense.KINDS[name] for name in ("replicated", "column", "qkv", "row")):
        parts = matrices(case, kind.rows)
        bias = np.random.default_rng(2).standard_normal(sum(kind.rows)).astype(BF16)
        layer = dense.loaded(case, kind, parts, bias)
        with Linear(joined(parts, bias.astype(np.float32))) as own:
            assert same_bits(dense.product(layer, x), own.forward(x)), kind
        layer = dense.loaded(case, kind, parts, bias, skip_bias_add=True)
        with Linear(joined(parts)) as own:
            assert same_bits(dense.product(layer, x), own.forward(x)), kind


@pytest.mark.parametrize("scheme", CASES)
def test_parts_of_two_processes(dense, monkeypatch, scheme):
    """Column layers have half of each matrix's rows, row layers half of its columns, and only the first one's bias."""
    case = CASES[scheme]
    for kind in (dense.KINDS[name] for name in ("column", "merged", "qkv", "row", "head")):
        if kind is dense.KINDS["head"] and not case.head:
            continue
        parts, biased = matrices(case, kind.rows, 2 * HALF), kind.cuts == 1
        bias = np.random.default_rng(2).standard_normal(kind.rows[0]).astype(BF16) if biased else None
        for rank in range(2):
            dense.of_rank(monkeypatch, rank)
            layer = dense.loaded(case, dense.resized(kind, 2 * HALF), parts, bias)
            halves = [cut(part, kind.cuts, rank) for part in parts]
            x = random_x(np.random.default_rng(1), 5, halves[0].shape[1])
            with Linear(joined(halves, bias.astype(np.float32) if biased and rank == 0 else None)) as own:
                assert same_bits(dense.applied(layer, x), own.forward(x)), (kind, rank)


@pytest.mark.parametrize(
    ("scheme", "kind", "size", "processes", "message"),
    [
        ("FP8 of blocks", "row", {"input_size": 384}, 2, "expected a multiple of 128 inputs in each process, .* found 192"),
        ("MXFP4", "row", {"input_size": 96}, 2, "expected a multiple of 32 inputs in each process, .* found 48"),
        (
            "FP8 of blocks",
            "column",
            {"output_size": 384},
            2,
            "expected matrices of a multiple of 128 outputs each, .* found 192",
        ),
        ("FP8 of blocks", "merged", {"output_sizes": [192, 64]}, 1, "a multiple of 128 outputs each, .* found 192, 64$"),
        ("AWQ", "column", {"output_size": 24}, 2, "a multiple of 8 outputs each, .* found 12"),
        ("INT4, zero points", "merged", {"output_sizes": [12, 20]}, 1, "a multiple of 8 outputs each, .* found 12, 20"),
    ],
)
def test_cuts_through_a_scale(dense, monkeypatch, scheme, kind, size, processes, message):
    """vLLM's loaders would read past the end, or put scales where others belong."""
    dense.of_rank(monkeypatch, 0, processes)
    with pytest.raises(ValueError, match=rf"{NAME}: {message}" if message.startswith("expected") else message):
        dense.make(CASES[scheme], dense.KINDS[kind], **size)


@pytest.mark.parametrize("scheme", ["bfloat16", "FP8 of blocks", "FP8 per matrix", "INT4", "INT4, zero points", "GPTQ", "AWQ"])
def test_matrices_that_a_checkpoint_has_merged(dense, scheme):
    """They have one factor. vLLM's loaders cut them apart, and ask the parameters where."""
    case, x = CASES[scheme], random_x(np.random.default_rng(1), 5, K)
    for kind in (dense.KINDS[name] for name in ("merged", "qkv")):
        parts = matrices(case, [sum(kind.rows)])
        layer = dense.loaded(case, replace(kind, shards=(None,)), parts)
        with Linear(parts[0]) as own:
            assert same_bits(dense.product(layer, x), own.forward(x)), kind


@pytest.mark.parametrize("scheme", ["bfloat16", "FP8 per row", "MXFP4", "NVFP4 by compressed-tensors", "INT4", "INT8 per row"])
def test_rows_that_vllm_adds(dense, scheme):
    """A vocabulary of 250 becomes 256 rows, the last six of which vLLM fills with zeros."""
    case, kind = CASES[scheme], dense.KINDS["head"]
    parts, x = matrices(case, [250]), random_x(np.random.default_rng(1), 5, K)
    layer = dense.loaded(case, replace(kind, arguments={**kind.arguments, "num_embeddings": 250}), parts)
    y = dense.product(layer, x)
    with Linear(parts[0]) as own:
        assert same_bits(y[:, :250].copy(), own.forward(x))
    assert np.isfinite(y[:, 250:].astype(np.float32)).all()


def test_rows_that_fill_no_item(dense):
    """Zero points are eight an item: the last one of 20 rows has four."""
    case, kind = CASES["INT4, zero points"], dense.KINDS["column"]
    kind = replace(kind, rows=(20,), arguments={**kind.arguments, "output_size": 20})
    parts, x = matrices(case, kind.rows), random_x(np.random.default_rng(1), 2, K)
    with Linear(parts[0]) as own:
        assert same_bits(dense.product(dense.loaded(case, kind, parts), x), own.forward(x))


@pytest.mark.smoke
def test_every_x(dense):
    """Any shape, no tokens, other dtypes, and a bias that is not the layer's."""
    case, kind = CASES["INT4"], dense.KINDS["column"]
    parts = matrices(case, kind.rows)
    layer = dense.loaded(case, kind, parts, np.ones(256, BF16))
    own = Linear(joined(parts, np.ones(256, np.float32)))
    x = torch.randn(3, 4, K, generator=torch.Generator().manual_seed(0))
    whole = torch.from_numpy(own.forward(x.reshape(12, -1).numpy())).reshape(3, 4, -1)
    bias = torch.arange(256, dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        given = x.to(dtype)
        y = torch.from_numpy(own.forward(given.float().reshape(12, -1).numpy())).reshape(3, 4, -1).to(dtype)
        assert torch.equal(layer.quant_method.apply(layer, given), y)
        assert torch.equal(layer.quant_method.apply(layer, given.transpose(0, 1)), y.transpose(0, 1))
        assert torch.equal(layer.quant_method.apply(layer, given, bias), (y + bias).to(dtype))
        empty = layer.quant_method.apply(layer, given[:, :0])
        assert (empty.shape, empty.dtype) == ((3, 0, 256), dtype)
    assert torch.equal(layer(x)[0], whole)
    own.close()


#: Those whose parameters vLLM counts otherwise: shapes are loaded once for each matrix, zero points of GPTQ are not read, and
#: some checkpoints lack scales of inputs, which vLLM waits for.
LOADED_AGAIN = [
    *("bfloat16", "FP8 of blocks", "FP8 per row", "MXFP4", "NVFP4", "INT4", "INT4, zero points", "GPTQ", "AWQ"),
    *("FP8 per matrix", "FP8 per matrix, no input scales", "FP8 by ModelOpt, no input scales"),
]


@pytest.mark.smoke("one")
@pytest.mark.parametrize("scheme", LOADED_AGAIN)
def test_weights_that_are_loaded_again(dense, scheme):
    """By vLLM's reload_weights(), as often as it is called; a compiled graph holds the tensor that finds the layer."""
    from vllm.model_executor.model_loader.reload import layerwise  # not before: vLLM warns

    name, _, lacking = scheme.partition(", no ")
    case = replace(CASES[name], more=lambda n, k: {}) if lacking else CASES[name]
    kind = dense.KINDS["qkv"]
    x, bias = random_x(np.random.default_rng(1), 5, K), np.random.default_rng(2).standard_normal((2, 1024)).astype(BF16)
    versions = [matrices(case, kind.rows, seed=seed) for seed in range(2)]
    layer = dense.make(case, kind, bias=True)
    dense.fill(case, kind, layer, versions[0], bias[0])
    layerwise.record_metadata_for_reloading(layer)
    dense.process(layer)
    held = layer.ktmoe
    for number in (1, 0, 1):
        layerwise.initialize_layerwise_reload(layer)
        dense.fill(case, kind, layer, versions[number], bias[number])
        layerwise.finalize_layerwise_reload(layer, None)
        assert layer.ktmoe is held
        with Linear(joined(versions[number], bias[number].astype(np.float32))) as own:
            assert same_bits(dense.product(layer, x), own.forward(x)), number
    assert sum(parameter.numel() for parameter in layer.parameters()) == 1024  # the bias's


@pytest.mark.parametrize("scheme", ["FP8 of blocks", "FP8 per matrix", "MXFP4", "NVFP4 by compressed-tensors", "INT4", "AWQ"])
def test_random_weights(dense, monkeypatch, scheme):
    """--load-format dummy. vLLM leaves what is no float as it was made."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load_config = get_current_vllm_config().load_config
    monkeypatch.setattr(load_config, "load_format", "dummy")
    layer = dense.make(CASES[scheme], dense.KINDS["merged"])
    DummyModelLoader(load_config).load_weights(layer, None)
    dense.process(layer)
    assert np.isfinite(dense.product(layer, random_x(np.random.default_rng(1), 2, K)).astype(np.float32)).all()


@pytest.mark.parametrize("by_assignment", [False, True])
def test_an_output_layer_that_is_the_embedding(dense, by_assignment):
    """The embedding keeps its rows, which it looks up. Some models assign the parameter."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    case, kind = CASES["bfloat16"], dense.KINDS["head"]
    parts, x = matrices(case, kind.rows), random_x(np.random.default_rng(1), 5, K)
    embedding = VocabParallelEmbedding(256, K, torch.bfloat16)
    dense.fill(case, kind, embedding, parts)
    layer = dense.make(case, kind)
    if by_assignment:
        layer.weight = embedding.weight
    else:
        layer = layer.tie_weights(embedding)
    dense.process(layer)
    with Linear(parts[0]) as own:
        assert same_bits(dense.product(layer, x), own.forward(x))
    assert torch.equal(embedding(torch.tensor([3]))[0], embedding.weight[3])


@pytest.mark.parametrize(("name", "value"), [("speculative_config", object()), ("model_config", None)])
def test_output_layers_that_vllm_reads(dense, monkeypatch, name, value):
    """With a model that drafts, or logits in float32, the weight stays where vLLM looks for it."""
    from types import SimpleNamespace

    from vllm.config import get_current_vllm_config

    config, kind = get_current_vllm_config(), dense.KINDS["head"]
    assert dense.ours(dense.make(CASES["bfloat16"], kind))
    given = value or SimpleNamespace(**vars(config.model_config), head_dtype=torch.float32)
    monkeypatch.setattr(config, name, given)
    assert not dense.ours(dense.make(CASES["bfloat16"], kind))


def test_layers_whose_parameters_a_model_reads(dense):
    """MLA's kv_b_proj, which may be called, too, and wo_a of DeepSeek-V4: they stay as vLLM's method would leave them."""
    kind = dense.KINDS["column"]

    def processed(scheme, attribute):
        layer = dense.make(CASES[scheme], kind)
        setattr(layer, attribute, True)
        dense.fill(CASES[scheme], kind, layer, matrices(CASES[scheme], kind.rows))
        dense.process(layer)
        return layer

    for attribute in ("_cpu_skip_gemm_dispatch", "is_bmm"):
        [part] = matrices(CASES["FP8 of blocks"], kind.rows)
        layer = processed("FP8 of blocks", attribute)
        np.testing.assert_array_equal(layer.weight.view(torch.uint8), part.codes)
        np.testing.assert_array_equal(layer.weight_scale_inv, part.scales)
        if attribute != "is_bmm":
            x = random_x(np.random.default_rng(1), 5, K)
            with Linear(part) as own:
                assert same_bits(dense.product(layer, x), own.forward(x))
    layer = processed("bfloat16", "_cpu_skip_gemm_dispatch")
    assert not dense.ours(layer)
    assert layer.weight.numel()


#: KTMOE_VLLM_DENSE -> whose are a small layer and a larger one in bfloat16, and a quantized one.
MODES = {
    None: (False, True, True),
    "auto": (False, True, True),
    "all": (True, True, True),
    "quantized": (False, False, True),
    "none": (False, False, False),
}


@pytest.mark.parametrize("mode", MODES)
def test_what_the_user_says(dense, monkeypatch, mode):
    from vllm.model_executor.custom_op import op_registry_oot

    from ktmoe.vllm import dense_choice, methods
    from ktmoe.vllm.dense_layers import CLASSES

    monkeypatch.setattr(dense_choice, "SMALLEST", dict.fromkeys(backends.available(), 1 << 20))
    for base in CLASSES:  # monkeypatch puts those back that it takes away
        monkeypatch.delitem(op_registry_oot, base.__name__)
    if mode is None:
        monkeypatch.delenv("KTMOE_VLLM_DENSE")
    else:
        monkeypatch.setenv("KTMOE_VLLM_DENSE", mode)
    methods.register()
    kind = dense.KINDS["column"]
    made = (
        dense.make(CASES["bfloat16"], kind),
        dense.make(CASES["bfloat16"], kind, input_size=2048),
        dense.make(CASES["INT4"], kind),
    )
    assert tuple(dense.ours(layer) for layer in made) == MODES[mode]


def test_a_wrong_value(dense, monkeypatch):
    monkeypatch.setenv("KTMOE_VLLM_DENSE", "some")
    with pytest.raises(UnknownNameError, match="KTMOE_VLLM_DENSE must be one of auto, all, quantized, none, found 'some'"):
        dense.make(CASES["INT4"], dense.KINDS["column"])


def test_weights_of_another_shape(dense):
    """Models with Mamba's layers make a weight of 3 dimensions from a column layer's."""
    layer = dense.make(CASES["bfloat16"], dense.KINDS["column"], input_size=4)
    layer.weight.data = layer.weight.data.unsqueeze(1)
    dense.process(layer)
    assert not dense.ours(layer)
    assert layer.weight.numel()


@pytest.mark.parametrize("scheme", ["bfloat16", "INT4"])
def test_lora(dense, monkeypatch, caplog, scheme):
    """Adapters change a layer's weights: vLLM computes it. One line, however many layers there are."""
    from vllm.config import get_current_vllm_config

    monkeypatch.setattr(get_current_vllm_config(), "lora_config", object())
    for _ in range(2):
        assert not dense.ours(dense.make(CASES[scheme], dense.KINDS["column"]))
    [line] = said(caplog)
    assert "LoRA adapters are enabled" in line


#: What ktmoe does not read -> (vLLM's name of it, config.json's, what the log says).
LEFT = {
    "transforms": (
        "compressed-tensors",
        {**compressed("pack-quantized", **INT4), "transform_config": {"config_groups": {}}},
        "expected weights without transforms",
    ),
    "AWQ without zero points": (
        "awq",
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": False, "version": "gemm"},
        "expected AWQ of 4 bits in groups with zero points, found 4 in groups of 32 without",
    ),
    "GPTQ of 8 bits": (
        "gptq",
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": False, "sym": True},
        "expected GPTQ of 4 bits, found 8",
    ),
    "no kernels": ("fp8", BLOCKS | {"weight_block_size": [32, 32]}, "32x32"),
}


@pytest.mark.parametrize("label", LEFT)
def test_what_is_left_to_vllm(dense, caplog, label):
    """One line, however many layers there are."""
    name, stated, reason = LEFT[label]
    for _ in range(2):
        layer = None
        with suppress(ValueError, NotImplementedError):  # vLLM has no kernel for this CPU
            layer = dense.make(replace(CASES["INT4"], quantization=name, stated=stated), dense.KINDS["column"])
        assert layer is None or not dense.ours(layer)
    [line] = said(caplog)
    assert re.search(reason, line)
    assert NAME in line
