"""ktmoe.torch.MoEExperts: gradients beside numerical ones and PyTorch's own, and what a module has to bear."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from helpers import BF16, DEEPSEEK, GPT_OSS, random_experts

from ktmoe import MXFP4, SILU, MoELayer
from ktmoe.errors import InputError, NotCopyableError
from ktmoe.experts import PROJECTIONS, ROUTER_WEIGHTS
from ktmoe.reference.gradients import ReferenceTraining
from ktmoe.training import Lora, Training, saved_nbytes

torch = pytest.importorskip("torch", reason="torch is not installed")
from eager_experts import EagerExperts  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from ktmoe.torch import MoEExperts  # noqa: E402

pytestmark = pytest.mark.smoke

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K, RANK = 6, 96, 64, 11, 3, 4
#: The largest difference of gradients and outputs from float64 that rounds where ktmoe does: fp32 sums of less than 2^8 terms
#: of like size, and here and there another bfloat16 neighbour of an h, which is one of 64 inputs of a sum.
NEAR = 2.0**-9


def adapter(spec, seed=1, projections=PROJECTIONS, dtype=np.float32, rank=RANK):
    """An adapter whose B is not zero; Lora.initial() makes it zero."""
    rng = np.random.default_rng(seed)
    lora = Lora.initial(spec, rank, 2 * rank, projections, seed, dtype)
    return Lora({p: (a, (rng.standard_normal(b.shape) / 4).astype(dtype)) for p, (a, b) in _viewed(lora, dtype)}, 2 * rank)


def _viewed(lora, dtype):
    for projection, pair in lora.pairs.items():
        yield projection, tuple(array.view(dtype) for array in pair)


def batch(dtype=None, tokens=TOKENS, seed=2):
    """x and router weights that require grad, and ids, some of which no expert has."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    ids = torch.randint(-1, EXPERTS + 1, (tokens, TOP_K), generator=generator)
    weights = torch.rand(tokens, TOP_K, generator=generator, dtype=torch.float64)
    x, weights = x.to(dtype or torch.bfloat16), weights.float() if dtype != torch.float64 else weights
    return x.requires_grad_(), ids, weights.requires_grad_()


def gradients(module, x, ids, weights, seed=3):
    """y and all gradients of one loss, by name."""
    tensors = {"x": x, "weights": weights, **dict(module.named_parameters())}
    y = module(x, ids, weights)
    of_y = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.dtype)
    found = torch.autograd.grad(y, list(tensors.values()), of_y)
    return {"y": y.detach()} | dict(zip(tensors, found, strict=True))


def assert_near(found, expected, most=NEAR):
    """Check each tensor's error, relative to its norm."""
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        one, own = one.double(), found[name].double()
        assert torch.linalg.norm(own - one) <= most * torch.linalg.norm(one), name


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def weights():
    return random_experts(np.random.default_rng(4), EXPERTS, HIDDEN, INTERMEDIATE)


@pytest.fixture(scope="module")
def layer(weights):
    with MoELayer(weights, activations="bf16") as layer:
        yield layer


# Gradients


@pytest.mark.parametrize("activation", [SILU, DEEPSEEK, GPT_OSS], ids=["silu", "deepseek", "gpt_oss"])
@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
def test_gradcheck(activation, router_weight):
    """Numerical differentiation in float64 of all inputs and parameters at once."""
    weights = random_experts(np.random.default_rng(5), 3, 32, 32, biases=True, activation=activation)
    passes = ReferenceTraining(weights, router_weight=router_weight)
    module = MoEExperts(passes, adapter(weights.spec, rank=2)).double()
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(4, weights.hidden, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 1], [2, 2], [-1, 0], [1, 3]])
    router = torch.rand(ids.shape, generator=generator, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*module.named_parameters(), strict=True)

    def function(x, router, *values):
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x, ids, router))

    assert torch.autograd.gradcheck(function, (x, router, *parameters), fast_mode=True)


@pytest.mark.parametrize("projections", [PROJECTIONS, ("gate",), ("up", "down"), ()], ids=lambda p: "-".join(p) or "none")
@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_beside_pytorch(projections, router_weight, dtype):
    """Through the kernels, beside autograd on dequantised weights that rounds where ktmoe does."""
    weights = random_experts(
        np.random.default_rng(7), EXPERTS, HIDDEN, INTERMEDIATE, formats=MXFP4, biases=True, activation=GPT_OSS
    )
    lora = adapter(weights.spec, projections=projections) if projections else None
    with MoELayer(weights, activations="bf16", router_weight=router_weight) as layer:
        found = gradients(MoEExperts(layer, lora), *batch(dtype))
    assert found["x"].dtype == found["y"].dtype == dtype
    eager = EagerExperts(weights, lora, router_weight=router_weight)
    assert_near(found, gradients(eager, *batch(dtype)), 2.0**-7 if dtype == torch.bfloat16 else NEAR)


def test_parameters_in_bfloat16(layer, weights):
    lora = adapter(weights.spec, dtype=BF16)
    module = MoEExperts(layer, lora)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    found = gradients(module, *batch(torch.float32))
    assert {found[name].dtype for name, _ in module.named_parameters()} == {torch.bfloat16}
    widened = MoEExperts(
        layer, Lora({p: tuple(a.astype(np.float32) for a in pair) for p, pair in _viewed(lora, BF16)}, lora.alpha)
    )
    expected = gradients(widened, *batch(torch.float32))
    assert torch.equal(found["y"], expected["y"])  # the numbers are the same
    assert_same(found, {name: expected[name].to(found[name].dtype) for name in found})


def test_without_an_adapter_it_is_the_layer(layer):
    module = MoEExperts(layer)
    x, ids, router = batch()
    assert list(module.parameters()) == []
    assert torch.equal(module(x, ids, router), layer.forward(x, ids, router))


def test_other_dtypes_of_inputs(layer, weights):
    """float16 by way of float32; router weights of bfloat16 get gradients of that."""
    module = MoEExperts(layer, adapter(weights.spec))
    x, ids, router = batch(torch.float32)
    x, router = x.detach().half().requires_grad_(), router.detach().bfloat16().requires_grad_()
    found = gradients(module, x, ids, router)
    assert (found["y"].dtype, found["x"].dtype, found["weights"].dtype) == (torch.float16, torch.float16, torch.bfloat16)
    expected = gradients(module, x.detach().float().requires_grad_(), ids, router.detach().float().requires_grad_())
    assert torch.equal(found["y"], expected["y"].half())
    assert_near(found, expected, 2.0**-6)


# Graphs


def test_twice_in_one_graph(layer, weights):
    """Each use has its own saved numbers, and parameters get the sum of both gradients."""
    module, eager = MoEExperts(layer, adapter(weights.spec)), EagerExperts(weights, adapter(weights.spec))
    x, ids, router = batch(torch.float32)

    def twice(own):
        def called(x, ids, router):
            first = own(x, ids, router)
            return own(first / first.norm() * 8, ids.flip(0), router) + first

        called.named_parameters = own.named_parameters
        return called

    assert_near(gradients(twice(module), x, ids, router), gradients(twice(eager), x, ids, router))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_checkpointing(layer, weights, reentrant, recompute):
    lora, arguments = adapter(weights.spec), batch()
    expected = gradients(MoEExperts(layer, lora), *arguments)
    module = MoEExperts(layer, lora, recompute=recompute)
    y = checkpoint(module, *arguments, use_reentrant=reentrant)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype))
    x, _, router = arguments
    found = {"y": y.detach(), "x": x.grad, "weights": router.grad} | {n: p.grad for n, p in module.named_parameters()}
    assert_same(found, expected)


def test_checkpointing_keeps_nothing(layer, weights):
    """Until the backward pass, but for what it is called with."""
    module = MoEExperts(layer, adapter(weights.spec))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        checkpoint(module, *batch(), use_reentrant=False)
    assert {tensor.shape for tensor in kept} <= {(TOKENS, HIDDEN), (TOKENS, TOP_K)}


def test_accumulation(layer, weights):
    module = MoEExperts(layer, adapter(weights.spec))
    first, second = gradients(module, *batch(seed=8)), gradients(module, *batch(seed=9), seed=10)
    for seed, of_y in ((8, 3), (9, 10)):
        y = module(*batch(seed=seed))
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(of_y)).to(y.dtype))
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, first[name] + second[name])


def test_a_second_backward_pass(layer, weights):
    """With retain_graph the same gradients again; without, torch's error."""
    module = MoEExperts(layer, adapter(weights.spec))
    x, ids, router = batch()
    y = module(x, ids, router).float().sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(y, x)[0])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, x)


def test_a_changed_adapter_is_noticed(layer, weights):
    module = MoEExperts(layer, adapter(weights.spec))
    y = module(*batch()).float().sum()
    with torch.no_grad():
        module.lora_up_b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_gradients_of_gradients_are_refused(layer):
    x, ids, router = batch(torch.float32)
    (found,) = torch.autograd.grad(MoEExperts(layer)(x, ids, router).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.sum().backward()


class Spied(Training):
    """Notes what is asked of it."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.saves, self.wanted = [], []

    def forward(self, *arguments, save=True, **options):
        self.saves.append(save)
        return super().forward(*arguments, save=save, **options)

    def backward(self, *arguments, wanted, **options):
        self.wanted.append(wanted)
        return super().backward(*arguments, wanted=wanted, **options)


def test_nothing_is_saved_where_nothing_needs_it(layer, weights):
    passes = Spied(layer)
    module = MoEExperts(passes, adapter(weights.spec))
    x, ids, router = batch()
    with torch.no_grad():
        y = module(x, ids, router)
    assert not y.requires_grad
    with torch.inference_mode():
        module(x, ids, router)
    module.requires_grad_(False)
    assert not module(x.detach(), ids, router.detach()).requires_grad
    assert passes.saves == [False] * 3
    assert torch.equal(module(x, ids, router), y)
    assert passes.saves[3:] == [True]


def test_only_what_is_needed_is_computed(layer, weights):
    passes = Spied(layer)
    module = MoEExperts(passes, adapter(weights.spec))
    x, ids, router = batch()
    all_of_them = gradients(module, x, ids, router)
    module.requires_grad_(False)
    module.lora_gate_b.requires_grad_()
    y = module(x.detach(), ids, router)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype))
    assert passes.wanted == [["x", "weights", "lora"], ["weights", "lora"]]
    assert torch.equal(module.lora_gate_b.grad, all_of_them["lora_gate_b"])
    assert torch.equal(router.grad, all_of_them["weights"])
    assert [name for name, p in module.named_parameters() if p.grad is not None] == ["lora_gate_b"]


@pytest.mark.parametrize("recompute", [False, True])
def test_memory_between_the_passes(layer, weights, recompute):
    """saved_nbytes(), held by torch alone, and freed by the backward pass although the graph's end lives on."""
    module = MoEExperts(layer, adapter(weights.spec), recompute=recompute)
    kept, freed = {}, []

    class Held:
        def __init__(self, tensor):
            self.tensor = tensor
            kept[tensor.data_ptr()] = tensor.nbytes

        def __del__(self):
            freed.append(self.tensor.data_ptr())

    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        y = module(*batch())
    own = sum(nbytes for pointer, nbytes in kept.items() if pointer not in {p.data_ptr() for p in module.parameters()})
    sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "intermediate": INTERMEDIATE, "rank": RANK, "recompute": recompute}
    assert own == saved_nbytes(TOKENS, TOP_K, **sizes)
    loss = y.float().sum()
    loss.backward()
    assert set(freed) == set(kept)


def test_autocast(layer, weights):
    """Inputs are what a layer before it gives in bfloat16; the adapter stays in float32."""
    module = MoEExperts(layer, adapter(weights.spec))
    linear = torch.nn.Linear(HIDDEN, HIDDEN)
    x, ids, router = batch(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(linear(x), ids, router)
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
    assert {p.grad.dtype for p in module.parameters()} == {torch.float32}
    assert linear.weight.grad.abs().sum() > 0
    plain = module(linear.bfloat16()(x.bfloat16()), ids, router)
    assert torch.equal(y, plain)


def test_inputs_of_any_layout(layer, weights):
    module = MoEExperts(layer, adapter(weights.spec))
    x, ids, router = batch()
    expected = gradients(module, x, ids, router)
    strided = torch.stack([x.detach()] * 2, 2)[:, :, 1].requires_grad_()
    assert_same(gradients(module, strided, ids.t().contiguous().t(), router), expected)
    y = module(x, ids, router)
    (found,) = torch.autograd.grad(y.sum(), x)  # a gradient of y that is one number, expanded
    assert torch.equal(found, torch.autograd.grad(module(x, ids, router), x, torch.ones_like(y))[0])


def test_no_tokens(layer, weights):
    found = gradients(MoEExperts(layer, adapter(weights.spec)), *batch(tokens=0))
    assert found["x"].shape == (0, HIDDEN)
    assert not any(found[name].any() for name in found)


# Modules


def test_state(layer, weights):
    """The adapter alone, under names that other tools know LoRA by."""
    module, other = MoEExperts(layer, adapter(weights.spec)), MoEExperts(layer, Lora.initial(weights.spec, RANK, 8))
    state = module.state_dict()
    assert list(state) == [f"lora_{p}_{name}" for p in PROJECTIONS for name in "ab"]
    assert not torch.equal(module(*batch()), other(*batch()))
    other.load_state_dict(state)
    assert torch.equal(module(*batch()), other(*batch()))
    assert repr(module) == "MoEExperts(6 experts, hidden=96, intermediate=64, rank=4, alpha=8)"
    assert repr(MoEExperts(layer)) == "MoEExperts(6 experts, hidden=96, intermediate=64)"


def test_the_adapter_that_it_began_with_is_not_changed(layer, weights):
    lora = adapter(weights.spec)
    module = MoEExperts(layer, lora)
    before = {p: tuple(array.copy() for array in pair) for p, pair in lora.pairs.items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    for projection, pair in lora.pairs.items():
        assert all(np.array_equal(a, b) for a, b in zip(pair, before[projection], strict=True))
        own = module.lora.pairs[projection]
        assert all(np.array_equal(a + 1, b) for a, b in zip(pair, own, strict=True))
    assert (module.lora.alpha, module.lora.rank) == (lora.alpha, lora.rank)
    with torch.no_grad():
        module.lora_down_a[1, 2, 3] = float("nan")
    with pytest.raises(InputError, match=r"down's a \[1, 2, 3\] must be finite, found nan"):
        module.lora  # noqa: B018


def test_numbers_that_are_not_finite_come_out(layer, weights):
    module = MoEExperts(layer, adapter(weights.spec))
    with torch.no_grad():
        module.lora_down_b[0, 5] = float("nan")
    x, ids, router = batch()
    with torch.no_grad():
        y = module(x, ids, router)
    hit = (ids == 0).any(1)
    assert hit.any()
    assert y[hit][:, 5].isnan().all()
    assert y[~hit].isfinite().all()


def test_a_deep_copy_shares_the_layer(layer, weights):
    module = MoEExperts(layer, adapter(weights.spec))
    other = copy.deepcopy(module)
    assert other.passes.layer is layer
    assert other.lora_gate_a.data_ptr() != module.lora_gate_a.data_ptr()
    assert torch.equal(module(*batch()), other(*batch()))
    with pytest.raises(NotCopyableError, match="MoELayer cannot be copied or pickled"):
        pickle.dumps(module)


def test_a_mask_counts_from_the_forward_pass(layer, weights):
    module, arguments = MoEExperts(layer, adapter(weights.spec)), batch()
    try:
        layer.expert_mask[2] = False
        y = module(*arguments)
    finally:
        layer.expert_mask[2] = True
    found = torch.autograd.grad(y.float().sum(), list(module.parameters()))
    assert not any(one[2].any() for one in found)
    ids = torch.where(arguments[1] == 2, -1, arguments[1])
    assert torch.equal(y, module(arguments[0], ids, arguments[2]))


def test_what_is_refused(layer, weights):
    other = random_experts(np.random.default_rng(4), EXPERTS, HIDDEN, INTERMEDIATE + 32)
    with pytest.raises(InputError, match=r"gate's b must have shape \[6, 64, 4\], found \[6, 96, 4\]"):
        MoEExperts(layer, adapter(other.spec))
    with pytest.raises(InputError, match=r"lora must be a ktmoe\.training\.Lora or None, found dict"):
        MoEExperts(layer, {})
    with pytest.raises(InputError, match=r"layer must be a MoELayer, or a ktmoe\.training\.Training alone, found Linear"):
        MoEExperts(torch.nn.Linear(1, 1))
    with pytest.raises(InputError, match="found recompute, which is the Training's own"):
        MoEExperts(Training(layer), recompute=True)
    with (
        MoELayer(weights, activations="mxfp8") as rounding,
        pytest.raises(InputError, match="found 'mxfp8', which rounds more"),
    ):
        MoEExperts(rounding)
    module = MoEExperts(layer, adapter(weights.spec))
    x, ids, router = batch()
    with pytest.raises(InputError, match=r"x must have shape \[any, 96\], found \[11, 95\]"):
        module(x[:, 1:], ids, router)
    with pytest.raises(InputError, match="expert_ids must be integers"):
        module(x, ids.float(), router)
    module.lora_up_a.data = module.lora_up_a.data.double()
    with pytest.raises(InputError, match="lora must be of float32 or bfloat16, found float64"):
        module(x, ids, router)
