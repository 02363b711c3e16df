"""ktmoe.torch.DenseLinear: the bits of its Linear, numbers near PyTorch's own in float64, and what a module has to bear."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from helpers import FORMATS
from linears import random_matrix

from ktmoe import Linear
from ktmoe.dequantization import dequantize
from ktmoe.errors import ClosedError, InputError, NotCopyableError, UnavailableError

torch = pytest.importorskip("torch", reason="torch is not installed")
from torch.utils.checkpoint import checkpoint  # noqa: E402

from ktmoe.torch import DenseLinear  # noqa: E402

pytestmark = pytest.mark.smoke

N, K = 70, 64
DTYPES = [torch.bfloat16, torch.float32]
#: Half a unit in the last place, relative, as rounding to nearest has it. Of float32 with a bit more, for float64's own.
UNIT, UNIT_BF16 = 2.0**-24 * (1 + 2.0**-10), 2.0**-8


@pytest.fixture(scope="module")
def linear():
    with Linear(random_matrix(np.random.default_rng(1), N, K, name="q_proj", bias=True)) as linear:
        yield linear


@pytest.fixture
def own():
    """One that a test may close."""
    with Linear(random_matrix(np.random.default_rng(2), N, K, name="v_proj")) as linear:
        yield linear


def random(*shape, dtype=torch.bfloat16, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both(module, x, grad_y):
    """y and the gradient of x."""
    x = x.detach().requires_grad_()
    y = module(x)
    return y, torch.autograd.grad(y, x, grad_y)[0]


# Values and gradients


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (19,), (2, 3), (2, 1, 5), (0,), (2, 0)], ids=str)
def test_the_bits_of_the_linear(linear, shape, dtype):
    x, grad_y = random(*shape, K, dtype=dtype), random(*shape, N, dtype=dtype, seed=4)
    y, grad_x = both(DenseLinear(linear), x, grad_y)
    assert (y.shape, grad_x.shape) == ((*shape, N), (*shape, K))
    assert y.dtype == grad_x.dtype == dtype
    assert torch.equal(y.reshape(-1, N), linear.forward(x.reshape(-1, K)))
    assert torch.equal(grad_x.reshape(-1, K), linear.backward(grad_y.reshape(-1, N)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["b16", "mxfp4"])
def test_beside_pytorch(name, bias, dtype):
    """Weights and products of these formats are exact: what rounds is each addition in float32, and the result."""
    matrix = random_matrix(np.random.default_rng(5), N, K, FORMATS[name], bias=bias)
    theirs = torch.nn.Linear(K, N, bias, dtype=torch.float64)
    with torch.no_grad():
        theirs.weight.copy_(torch.from_numpy(dequantize(matrix)))
        if bias:
            theirs.bias.copy_(torch.from_numpy(matrix.bias))
    x, grad_y = random(3, 7, K), random(3, 7, N, seed=6)
    sizes = (
        torch.nn.functional.linear(x.double().abs(), theirs.weight.abs(), theirs.bias.abs() if bias else None),
        grad_y.double().abs() @ theirs.weight.abs(),
    )
    with Linear(matrix) as linear:
        found = both(DenseLinear(linear), x.to(dtype), grad_y.to(dtype))
    expected = both(theirs, x.double(), grad_y.double())
    for mine, exact, size, additions in zip(found, expected, sizes, (K + 1, N), strict=True):
        bound = additions * UNIT * size
        if dtype == torch.bfloat16:
            bound = bound + UNIT_BF16 * (exact.abs() + bound)
        assert ((mine.double() - exact).abs() <= bound).all()


def test_float32_is_rounded_to_bfloat16_once(linear):
    """Both ways, as Linear has it."""
    module = DenseLinear(linear)
    x, grad_y = random(5, K, dtype=torch.float32), random(5, N, dtype=torch.float32, seed=4)
    found = both(module, x, grad_y)
    assert not torch.equal(x, x.bfloat16().float())
    rounded = both(module, x.bfloat16().float(), grad_y.bfloat16().float())
    assert all(torch.equal(mine, other) for mine, other in zip(found, rounded, strict=True))


def test_inputs_of_any_layout(linear):
    module = DenseLinear(linear)
    x, grad_y = random(4, 3, K), random(4, 3, N, seed=4)
    expected = both(module, x, grad_y)
    strided = torch.stack([x] * 2, 3)[..., 1]
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    for given in (strided, turned):
        assert not given.is_contiguous()
        assert all(map(torch.equal, both(module, given, grad_y), expected))
    of_sum = both(module, x, torch.ones(()).bfloat16().expand(4, 3, N))[1]  # one number, as y.sum() has it
    assert torch.equal(of_sum, both(module, x, torch.ones(4, 3, N).bfloat16())[1])


def test_float16_goes_by_way_of_float32(linear):
    module, x, grad_y = DenseLinear(linear), random(5, K, dtype=torch.float16), random(5, N, dtype=torch.float16, seed=4)
    y, grad_x = both(module, x, grad_y)
    assert y.dtype == grad_x.dtype == torch.float16
    wide = both(module, x.float(), grad_y.float())
    assert all(torch.equal(mine, other.half()) for mine, other in zip((y, grad_x), wide, strict=True))
    assert torch.equal(module(x), y)


def test_shapes_on_the_meta_device(linear):
    y = DenseLinear(linear)(torch.empty(2, 3, K, device="meta", dtype=torch.float16))
    assert (y.shape, y.device.type, y.dtype) == ((2, 3, N), "meta", torch.float16)


# Graphs


def test_in_a_model(linear):
    """Layers before it learn by its gradient; twice in a graph, and accumulated."""
    first, module = torch.nn.Linear(8, K), DenseLinear(linear)
    x = random(5, 8, dtype=torch.float32)
    ones = torch.ones(5, N)
    for times in (1, 2):
        (module(first(x)).sum() + module(2 * first(x)).sum()).backward()
        of_hidden = 3 * linear.backward(ones)
        torch.testing.assert_close(first.weight.grad, times * of_hidden.t() @ x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(linear, reentrant):
    module, x, grad_y = DenseLinear(linear), random(5, K).requires_grad_(), random(5, N, seed=4)
    checkpoint(module, x, use_reentrant=reentrant).backward(grad_y)
    assert torch.equal(x.grad, linear.backward(grad_y))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_y_may_be_changed_in_place(linear, dtype):
    """As models add a residual: y is no view of what another tensor holds."""
    module, x, more = DenseLinear(linear), random(2, 3, K, dtype=dtype).requires_grad_(), random(2, 3, N, dtype=dtype)
    y = module(x)
    y += more
    y.mul_(2)
    assert torch.equal(y, 2 * (module(x) + more))
    ones = torch.ones_like(y)
    assert torch.equal(torch.autograd.grad(y, x, ones)[0], both(module, x, 2 * ones)[1])


def test_nothing_is_kept_or_copied(linear, monkeypatch):
    """Torch keeps no tensor until the backward pass; the Linear reads x's own memory and writes y's and the gradient's."""
    module, x, grad_y, seen = DenseLinear(linear), random(2, 3, K).requires_grad_(), random(2, 3, N, seed=4), []
    for call in (linear.forward, linear.backward):

        def noted(given, out=None, call=call):
            if len(given):  # not that of no rows, which finds out whether there is a gradient
                seen.append((given.data_ptr(), out.data_ptr()))
            return call(given, out)

        monkeypatch.setattr(linear, call.__name__, noted)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        y = module(x)
    (grad_x,) = torch.autograd.grad(y, x, grad_y)
    assert not kept
    assert seen == [(x.data_ptr(), y.data_ptr()), (grad_y.data_ptr(), grad_x.data_ptr())]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(linear, context):
    module, x = DenseLinear(linear), random(5, K).requires_grad_()
    with context():
        y = module(x)
    assert not y.requires_grad
    assert torch.equal(y, module(x))
    assert module(x).requires_grad
    assert not module(x.detach()).requires_grad


def test_gradients_of_gradients_are_refused(linear):
    x = random(5, K, dtype=torch.float32).requires_grad_()
    (found,) = torch.autograd.grad(DenseLinear(linear)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.sum().backward()


# Modules


def test_state(linear):
    module = DenseLinear(linear)
    assert module.linear is linear
    assert (module.in_features, module.out_features) == (K, N)
    assert not [*module.parameters(), *module.buffers(), *module.state_dict()]
    module.load_state_dict({})
    assert repr(module) == f"DenseLinear(in_features=64, out_features=70, {linear.format.description})"


def test_libraries_take_it_for_a_linear_layer_without_a_weight(linear):
    module = DenseLinear(linear)
    assert isinstance(module, torch.nn.Linear)
    assert module.bias is None
    assert (module.weight.shape, module.weight.dtype, module.weight.device.type) == ((N, K), torch.bfloat16, "cpu")
    why = r"q_proj: its weight is packed and is no tensor; ktmoe\.Linear\.export\(\) gives the matrix: "
    with pytest.raises(AttributeError, match=rf"{why}expected no use of its 'data'"):
        module.weight.data += 1  # as peft merges
    with pytest.raises(AttributeError, match=rf"{why}expected no use of its 'size'"):
        module.weight.size()  # as transformers begins to resize
    with pytest.raises(AttributeError, match=rf"{why}expected nothing to set its 'data'"):
        module.weight.data = torch.zeros(N, K)
    with pytest.raises(TypeError, match=rf"{why}torch's linear cannot take it"):
        torch.nn.functional.linear(random(K), module.weight)
    for value in (torch.nn.Parameter(torch.zeros(N, K)), torch.zeros(N, K)):
        with pytest.raises(UnavailableError, match="q_proj: it cannot be given a weight: the matrix is packed"):
            module.weight = value
    module.reset_parameters()
    assert torch.equal(module.half()(random(K)), linear.forward(random(1, K))[0])


def test_a_deep_copy_shares_the_linear(linear):
    """In a model, with what else a module has: here a hook, and that it is not training."""
    model = torch.nn.Sequential(torch.nn.Linear(8, K), DenseLinear(linear))
    model[1].register_forward_hook(lambda module, arguments, y: 2 * y)
    other = copy.deepcopy(model.eval())
    assert other[1] is not model[1]
    assert other[1].linear is linear
    assert not other[1].training
    assert other[0].weight.data_ptr() != model[0].weight.data_ptr()
    x = random(5, 8, dtype=torch.float32)
    assert torch.equal(other(x), model(x))
    assert torch.equal(other(x), 2 * linear.forward(other[0](x)))
    with pytest.raises(NotCopyableError, match="q_proj: a Linear cannot be copied or pickled"):
        pickle.dumps(DenseLinear(linear))


# Refusals


def test_a_mode_without_gradients():
    """It computes; where x requires grad, the forward pass says already why there is none."""
    with Linear(random_matrix(np.random.default_rng(7), N, K, name="head"), activations="int8") as rounding:
        module, x = DenseLinear(rounding), random(5, K)
        y = module(x)
        assert torch.equal(y, rounding.forward(x))
        x.requires_grad_()
        with torch.no_grad():
            assert torch.equal(module(x), y)
        with pytest.raises(UnavailableError, match='head: it cannot be trained: only activations="bf16"'):
            module(x)


def test_a_closed_linear(own):
    module, x = DenseLinear(own), random(5, K).requires_grad_()
    y = module(x)
    own.close()
    with pytest.raises(ClosedError, match=r"v_proj: backward after close\(\)"):
        y.sum().backward()
    with pytest.raises(ClosedError, match=r"v_proj: forward after close\(\)"):
        module(x.detach())


@pytest.mark.parametrize("grad", [False, True])
def test_what_is_refused(linear, grad):
    module, kinds = DenseLinear(linear), "x must be a torch tensor of bfloat16, float32 or float16; found one of"
    for x, message in (
        (random(2, 5, K, dtype=torch.float64), rf"{kinds} torch\.float64"),
        (torch.ones(5, K, dtype=torch.int32), rf"{kinds} torch\.int32"),
        (random(2, 3, K).float().to_sparse(), r"x: numpy cannot view a torch tensor of torch\.float32, torch\.sparse_coo"),
        (random(5, K - 1), r"x must have shape \[\.\.\., 64\], found \[5, 63\]"),
        (random(K, 2), r"x must have shape \[\.\.\., 64\], found \[64, 2\]"),
        (random(), r"x must have shape \[\.\.\., 64\], found \[\]"),
    ):
        with pytest.raises(InputError, match=message):
            module(x.requires_grad_(grad and x.is_floating_point()))


def test_what_is_no_tensor_and_no_linear(linear):
    with pytest.raises(InputError, match="x must be a torch tensor, found ndarray"):
        DenseLinear(linear)(np.zeros((5, K), np.float32))
    with pytest.raises(InputError, match=r"linear must be a ktmoe\.Linear, found torch\.nn\.modules\.linear\.Linear"):
        DenseLinear(torch.nn.Linear(1, 1))
