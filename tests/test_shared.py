"""Shared experts: what every token has besides the experts that it chooses, in the same call."""

import numpy as np
import pytest
from helpers import BF16, FORMATS, GPT_OSS, MIXED, TURNED, bits, random_batch, random_experts, reading, same_bits

from ktmoe import BF16 as BF16_FORMAT
from ktmoe import MXFP4, MXFP8, ExpertWeights, MoELayer, load_experts, reference
from ktmoe._native import core
from ktmoe.errors import FormatError, InputError
from ktmoe.experts import PROJECTIONS, ROUTER_WEIGHTS
from ktmoe.matrix import Matrix
from ktmoe.synthetic import write_qwen3
from ktmoe.training import Lora, Training
from ktmoe.two_stage import gemm1, moe_sorting

EXPERTS, SHARED, HIDDEN, INTERMEDIATE, TOP_K = 5, 2, 96, 64, 3
#: Ids that no routed expert has, of which two are numbers of the shared ones.
NOBODYS = [-1, EXPERTS, EXPERTS + 1, EXPERTS + SHARED, 2**40]


def both(seed=0, formats=MXFP4, **options):
    """Routed and shared experts, which differ in having biases too."""
    rng = np.random.default_rng(seed)
    routed = random_experts(rng, EXPERTS, HIDDEN, INTERMEDIATE, formats=formats, **options)
    return routed, random_experts(rng, SHARED, HIDDEN, INTERMEDIATE, formats=formats, biases=True, **options)


@pytest.fixture(scope="module")
def layers():
    """A layer with shared experts, and one whose routed experts are all of these."""
    routed, shared = both()
    made = MoELayer(routed, activations="bf16", shared=shared), MoELayer(joined(routed, shared), activations="bf16")
    with made[0], made[1]:
        yield made


def joined(routed, shared):
    """Both as routed experts, put together apart from the code."""

    def read(expert, projection):
        return routed.matrix(expert, projection) if expert < EXPERTS else shared.matrix(expert - EXPERTS, projection)

    sizes = EXPERTS + SHARED, routed.hidden, routed.intermediate
    return ExpertWeights(*sizes, read, routed.formats, routed.activation)


def in_rows(experts, weight_format):
    """The same experts of a format in rows, whose transposed arrays are turned here."""

    def read(expert, projection):
        matrix = experts.matrix(expert, projection)
        turned = matrix.format.order.transposed
        arrays = {label: np.ascontiguousarray(array.T if turned else array) for label, array in matrix.stored.items()}
        return Matrix(matrix.name, weight_format, matrix.shape, bias=matrix.bias, **arrays)

    return ExpertWeights(experts.num_experts, experts.hidden, experts.intermediate, read, weight_format)


def batch_of(layer, tokens, top_k=TOP_K, dtype=BF16, seed=1):
    """x, ids, router weights and weights of the shared experts; some ids are nobody's, some repeat."""
    rng = np.random.default_rng(seed)
    x, ids, weights = random_batch(rng, layer, tokens, top_k, dtype)
    nobodys = rng.random(ids.shape) < 0.3
    ids[nobodys] = rng.choice(NOBODYS, nobodys.sum())
    return x, ids, weights, rng.random((tokens, SHARED)).astype(np.float32)


def extended(ids, weights, shared_weights=None):
    """What a token's ids and weights are where shared experts are routed ones that it chooses."""
    ids = np.where(ids < EXPERTS, ids, -1)
    shared_weights = np.ones((len(ids), SHARED), np.float32) if shared_weights is None else shared_weights
    every = np.tile(np.arange(EXPERTS, EXPERTS + SHARED), (len(ids), 1))
    return np.concatenate([ids, every], 1), np.concatenate([weights, shared_weights], 1)


def assert_shared(layer, plain, x, ids, weights, shared_weights=None):
    """The bits of a layer whose routed experts are all of these; returns y."""
    y = layer.forward(x, ids, weights, shared_weights=shared_weights)
    assert same_bits(y, plain.forward(x, *extended(ids, weights, shared_weights)))
    return y


# What is computed


@pytest.mark.parametrize("gated", [False, True])
def test_sum_of_both(gated):
    """Beside float64: the routed experts' y, to which each shared one adds its own with one rounding of the sum."""
    routed, shared = both(2, MIXED["int4 and mxfp4"]["formats"], activation=GPT_OSS)
    with MoELayer(routed, activations="bf16", shared=shared) as layer:
        x, ids, weights, gates = batch_of(layer, 9, dtype=np.float32)
        y = layer.forward(x, ids, weights, shared_weights=gates if gated else None)
        settings = {"router_weight": layer.router_weight, "out_dtype": "float32", "rounding": layer.rounding}
    gates = gates if gated else np.ones_like(gates)
    expected = reference.forward(routed, x, ids, weights, **settings)
    total, bound = expected.y, expected.bound
    for i in range(SHARED):
        one = reference.forward(shared.take([i]), x, np.zeros((len(x), 1), int), gates[:, i : i + 1], **settings)
        bound = bound + one.bound
        total = total + one.y
        bound = bound + 2.0**-24 * (np.abs(total) + bound)
    assert np.isfinite(bound).all()
    assert (np.abs(y - total) <= bound).all()
    assert (np.abs(total - expected.y) > bound).any(axis=1).all(), "a token without its shared experts would pass"


@pytest.mark.parametrize("tokens", [0, 1, 7, 40])
@pytest.mark.parametrize("top_k", [0, TOP_K])
@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=["bfloat16", "float32"])
def test_last_experts_of_every_token(layers, tokens, top_k, dtype):
    x, ids, weights, gates = batch_of(layers[0], tokens, top_k, dtype)
    assert_shared(*layers, x, ids, weights)
    y = assert_shared(*layers, x, ids, weights, gates)
    for token in range(tokens):
        one = slice(token, token + 1)
        alone = layers[0].forward(x[one], ids[one], weights[one], shared_weights=gates[one])
        assert same_bits(alone, y[one]), "bits depend on the batch"


@pytest.mark.parametrize("name", ["b16", "mxfp8"])
def test_another_source_order(name):
    """Shared matrices in rows beside transposed routed ones, and the other way round."""
    for formats in ((FORMATS[name], TURNED[f"{name} transposed"]), (TURNED[f"{name} transposed"], FORMATS[name])):
        rng = np.random.default_rng(9)
        routed, shared = (
            random_experts(rng, n, HIDDEN, 64, formats=f) for n, f in zip((EXPERTS, SHARED), formats, strict=True)
        )
        expected = joined(*(in_rows(experts, FORMATS[name]) for experts in (routed, shared)))
        with MoELayer(routed, shared=shared) as layer, MoELayer(expected) as plain:
            assert_shared(layer, plain, *batch_of(layer, 4)[:3])
            (exported,) = layer.export_expert(EXPERTS)
        assert exported["up"].format == formats[0]


@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
def test_places_of_router_weights_and_shards(router_weight, three_nodes):
    routed, shared = both(3)
    options = {"router_weight": router_weight, "numa_nodes": [1, 0]}
    with MoELayer(routed, shared=shared, **options) as layer, MoELayer(joined(routed, shared), **options) as plain:
        x, ids, weights, gates = batch_of(layer, 6)
        assert_shared(layer, plain, x, ids, weights)
        assert_shared(layer, plain, x, ids, weights, gates)


def test_mask_is_of_the_routed_experts(layers):
    layer, plain = layers
    assert layer.expert_mask.shape == (layer.num_experts,) == (EXPERTS,)
    assert (layer.num_shared, layer.spec.num_experts, plain.num_shared) == (SHARED, EXPERTS, 0)
    x, ids, weights, _ = batch_of(layer, 8)
    layer.expert_mask[:] = False
    try:
        assert same_bits(layer.forward(x, ids, weights), layer.forward(x, np.full_like(ids, -1), weights))
        layer.expert_mask[:] = plain.expert_mask[:EXPERTS] = [True, False, True, True, False]
        assert_shared(layer, plain, x, ids, weights)
    finally:
        layer.expert_mask[:] = plain.expert_mask[:] = True


def test_arguments_of_other_layouts(layers):
    """Ids of other integers, strided weights, x as its own out, and a job."""
    layer, plain = layers
    x, ids, weights, gates = batch_of(layer, 6)
    expected = assert_shared(layer, plain, x, ids, weights, gates)
    unsigned = np.where(ids < 0, 2**64 - 1, ids.astype(np.uint64))
    wide = np.repeat(gates, 2, axis=1)[:, ::2]
    assert same_bits(layer.submit(x, unsigned, np.asfortranarray(weights), None, wide).result(), expected)
    out = x.copy()
    assert layer.forward(out, ids, weights, out, gates) is out
    assert same_bits(out, expected)


def test_memory_and_progress_count_all():
    routed, shared = both(4)
    done = []
    with MoELayer(routed, "fp32_lut", shared=shared, progress=lambda *bytes: done.append(bytes)) as layer:
        assert layer.nbytes == (EXPERTS + SHARED) * core.expert_nbytes(routed, [(0, routed.intermediate)])
        assert f"{EXPERTS} experts" in repr(layer)
        assert f"{SHARED} shared experts" in repr(layer)
    assert done[-1] == (routed.nbytes + shared.nbytes,) * 2


# One expert's weights


def test_replaced_and_exported_by_number():
    """Number num_experts + i is shared expert i."""
    routed, shared = both(5)
    other = random_experts(np.random.default_rng(6), 1, HIDDEN, INTERMEDIATE, biases=True)
    new = {p: other.matrix(0, p) for p in PROJECTIONS}
    changed = reading(shared, lambda expert, p: new[p] if expert == 1 else shared.matrix(expert, p))
    with MoELayer(routed, shared=shared) as layer, MoELayer(joined(routed, changed)) as plain:
        layer.replace_expert(EXPERTS + 1, new)
        x, ids, weights, _ = batch_of(layer, 5)
        assert_shared(layer, plain, x, ids, weights)
        for number, expected in ((0, shared.matrix(0, "down")), (1, new["down"])):
            (found,) = layer.export_expert(EXPERTS + number)
            assert np.array_equal(found["down"].codes, expected.codes)
            assert np.array_equal(found["down"].bias, expected.bias)
        for call in (lambda n: layer.replace_expert(n, new), layer.export_expert):
            with pytest.raises(InputError, match=r"expert must be in \[0, 7\), found 7"):
                call(EXPERTS + SHARED)


# Training


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients(layers, recompute):
    """Those of a layer whose routed experts are all of these, of x and of both kinds of weights."""
    layer, plain = layers
    x, ids, weights, gates = batch_of(layer, 6)
    grad_y = batch_of(layer, 6, seed=7)[0]
    own, other = Training(layer, recompute), Training(plain, recompute)
    for given in (gates, None):
        y, saved = own.forward(x, ids, weights, shared_weights=given)
        assert same_bits(y, layer.forward(x, ids, weights, shared_weights=given))
        found = own.backward(saved, grad_y)
        expected = other.backward(other.forward(x, *extended(ids, weights, given))[1], grad_y)
        assert same_bits(found.x, expected.x)
        assert np.array_equal(found.weights, expected.weights[:, :TOP_K])
        assert np.array_equal(found.shared_weights, expected.weights[:, TOP_K:])
        assert found.shared_weights.all()
    only_x = own.backward(saved, grad_y, wanted=["x"])
    assert only_x.weights is only_x.shared_weights is None
    y, saved = own.forward(x, ids[:, :0], weights[:, :0])
    assert bits(own.backward(saved, grad_y).x).any(), "a token without routed experts has its shared ones"


def test_gradients_in_torch(layers):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from ktmoe.torch import MoEExperts

    layer, plain = layers
    x, ids, weights, gates = batch_of(layer, 6, dtype=np.float32)

    def gradients(module, ids, *differentiated):
        tensors = [torch.from_numpy(array).requires_grad_() for array in differentiated]
        y = module(tensors[0], torch.from_numpy(ids), *tensors[1:])
        of_x, *of_weights = torch.autograd.grad(y.square().sum(), tensors)
        return y, of_x, torch.cat(of_weights, 1)

    own = gradients(MoEExperts(layer), ids, x, weights, gates)
    other_ids, other_weights = extended(ids, weights, gates)
    other = gradients(MoEExperts(plain), other_ids, x, other_weights)
    assert all(torch.equal(*pair) for pair in zip(own, other, strict=True))
    shared_weights = torch.from_numpy(gates).requires_grad_()  # which alone does now
    y = MoEExperts(layer)(*map(torch.from_numpy, (x.copy(), ids, weights.copy())), shared_weights)
    y.square().sum().backward()
    assert torch.equal(shared_weights.grad, own[2][:, TOP_K:])


# What is refused


def test_adapters_and_sorted_rows_are_of_routed_experts(layers):
    layer, _ = layers
    x, ids, weights, _ = batch_of(layer, 4)
    with pytest.raises(InputError, match=r"lora must be None for a layer with shared experts, found Lora\(rank=2"):
        Training(layer).forward(x, ids, weights, Lora.initial(layer.spec, 2, 4))
    sorting = moe_sorting(np.zeros((4, 1), np.int32), np.ones((4, 1), np.float32), EXPERTS)
    with pytest.raises(InputError, match=r"layer must have no shared experts, .* found 2"):
        gemm1(layer, x, sorting)


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        ([1, 2, 3], InputError, "shared must be ExpertWeights, found"),
        ({"hidden": 128}, InputError, "need the routed ones' hidden, 96, found 128; a MoELayer of the shared experts alone"),
        ({"intermediate": 128}, InputError, "need the routed ones' intermediate, 64, found 128; a MoELayer of"),
        ({"activation": GPT_OSS}, InputError, r"need the routed ones' activation, .*alpha=1.0.*, found .*alpha=1.702.*; a"),
        (
            {"formats": {"gate": MXFP4, "up": MXFP4, "down": MXFP8}},
            FormatError,
            "need the routed ones' format of down, E2M1 with .*, found E4M3 with .*; a MoELayer of the shared",
        ),
    ],
    ids=["no experts", "hidden", "intermediate", "activation", "format"],
)
def test_other_experts(other, error, message):
    routed, _ = both()
    if isinstance(other, dict):
        options = {"hidden": HIDDEN, "intermediate": INTERMEDIATE} | other
        other = random_experts(np.random.default_rng(0), 1, options.pop("hidden"), options.pop("intermediate"), **options)
    with pytest.raises(error, match=message):
        MoELayer(routed, shared=other)


def test_bad_weights_of_shared_experts(layers):
    layer, plain = layers
    x, ids, weights, gates = batch_of(layer, 4, dtype=np.float32)
    for given, message in (
        (gates.tolist(), "shared_weights must be a numpy array or a torch CPU tensor; found list"),
        (gates.astype(np.float64), "shared_weights must be float32, found float64"),
        (gates[:, :1], r"shared_weights must have shape \[4, 2\], found \[4, 1\]"),
        (gates[:3], r"shared_weights must have shape \[4, 2\], found \[3, 2\]"),
    ):
        for call in (layer.forward, Training(layer).forward):
            with pytest.raises(InputError, match=message):
                call(x, ids, weights, shared_weights=given)
    with pytest.raises(InputError, match="shared_weights must be None for a layer without shared experts, found"):
        plain.forward(x, ids, weights, shared_weights=gates)
    out = np.zeros_like(x)
    with pytest.raises(InputError, match="out must not overlap shared_weights"):
        layer.forward(x, ids, weights, out, out.reshape(-1)[: gates.size].reshape(gates.shape))


def test_from_a_checkpoint(tmp_path):
    """Shared experts join those that are loaded, under a map of experts; a packed cache has none."""
    write_qwen3(tmp_path / "model", num_experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, top_k=TOP_K)
    routed = load_experts(tmp_path / "model", 0)
    shared = random_experts(np.random.default_rng(8), SHARED, HIDDEN, INTERMEDIATE, formats=BF16_FORMAT)
    order = [4, 3, 2, 1, 0]
    layer = MoELayer.from_checkpoint(tmp_path / "model", 0, shared=shared, physical_to_logical=order)
    with layer, MoELayer(joined(routed.take(order), shared)) as plain:
        assert_shared(layer, plain, *batch_of(layer, 4)[:3])
    with pytest.raises(InputError, match="cache must be None where shared experts are given: a packed cache has the routed"):
        MoELayer.from_checkpoint(tmp_path / "model", 0, shared=shared, cache=tmp_path / "cache")
