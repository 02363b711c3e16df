"""ktmoe.torch: matrices that share an input, and those with an input each, have the bits of their Linears."""

from __future__ import annotations

import copy
import threading
import weakref

import numpy as np
import pytest
from linears import random_matrix

from ktmoe import Linear, LinearGroup
from ktmoe.dequantization import dequantize
from ktmoe.errors import ClosedError, InputError

torch = pytest.importorskip("torch", reason="torch is not installed")

from ktmoe.torch import DenseGroupedLinear, DenseLinear, share_input  # noqa: E402
from ktmoe.torch import shared_input as of_shared  # noqa: E402

pytestmark = pytest.mark.smoke

K, SIZES = 64, (128, 32, 33)
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture
def linears():
    made = [Linear(random_matrix(np.random.default_rng(i), n, K, name=f"{i}", bias=i == 1)) for i, n in enumerate(SIZES)]
    yield made
    for linear in made:
        linear.close()


@pytest.fixture
def modules(linears):
    modules = [DenseLinear(linear) for linear in linears]
    share_input(modules)
    return modules


@pytest.fixture
def dispatches(monkeypatch):
    """Of how many matrices each call was that was computed."""
    counts, compute = [], of_shared.products.__globals__["compute"]

    def counted(linears, *others):
        counts.append(len(linears))
        return compute(linears, *others)

    monkeypatch.setitem(of_shared.products.__globals__, "compute", counted)
    return counts


def random(*shape, dtype=torch.bfloat16, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# One input


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=str)
def test_one_dispatch_of_the_same_bits(linears, modules, dispatches, dtype, order):
    for seed in (1, 2):
        x = random(2, 3, K, dtype=dtype, seed=seed)
        for i in order:
            assert torch.equal(modules[i](x), linears[i].forward(x.view(6, K)).view(2, 3, -1))
    assert dispatches == [3, 3]


def test_only_for_the_same_tensor_as_it_was(linears, modules, dispatches):
    """Neither for an equal one, nor for one that changed, by itself or by a view."""
    first, second, _ = modules
    x = random(4, K)
    view = x[:2]
    first(x)
    assert torch.equal(second(x.clone()), linears[1].forward(x))
    for change in (lambda: x.mul_(2), lambda: view.add_(1)):
        share_input(modules)  # anew: what is not taken twice is computed by itself
        first(x)
        change()
        assert torch.equal(second(x), linears[1].forward(x))
    assert dispatches == [3] * 6


def test_a_second_call_is_computed_by_itself(linears, modules, dispatches):
    x = random(4, K)
    y = modules[0](x)
    y.zero_()
    assert torch.equal(modules[0](x), linears[0].forward(x))
    modules[1](x)
    assert dispatches == [3, 1]


def test_outputs_are_not_kept(modules, monkeypatch):
    """Neither one that was taken, nor one that nobody took, after its input is gone."""
    made, products = [], of_shared.products

    def noted(*arguments):
        outs = products(*arguments)
        made.extend(map(weakref.ref, outs))
        return outs

    monkeypatch.setattr(of_shared, "products", noted)
    x = random(4, K)
    for count, module in enumerate(modules):
        module(x)
        assert [y() is None for y in made] == [i <= count for i in range(3)]
    other = random(4, K)
    modules[0](other)
    assert [y() is None for y in made[3:]] == [True, False, False]
    del other
    assert [y() is None for y in made[3:]] == [True] * 3


def test_without_versions_nothing_is_shared(linears, modules, dispatches):
    with torch.inference_mode():
        x = random(4, K)
        modules[0](x)
        x.mul_(2)
        assert torch.equal(modules[1](x), linears[1].forward(x))
    assert dispatches == [1, 1]


def test_gradients(linears, modules, dispatches):
    x = random(4, K, dtype=torch.float32).requires_grad_()
    modules[1](x.detach())
    with torch.no_grad():
        assert not modules[0](x).requires_grad
    y = [module(x) for module in modules]
    torch.autograd.grad(sum(each.sum() for each in y), x)
    assert all(each.requires_grad for each in y)
    assert dispatches == [3, 3]


def test_threads_do_not_mix(linears, modules):
    """Each with a tensor of its own, and all with the same one."""
    shared, wrong = random(4, K, seed=99), []

    def run(seed):
        for turn in range(50):
            x = shared if turn % 2 else random(4, K, seed=seed * 1000 + turn)
            for module, linear in zip(modules, linears, strict=True):
                if not torch.equal(module(x), linear.forward(x)):
                    wrong.append((seed, turn))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_replaced_and_closed_in_between(linears, modules):
    x = random(4, K)
    modules[0](x)
    matrix = random_matrix(np.random.default_rng(9), SIZES[1], K, name="1", bias=True)
    before = linears[1].forward(x)
    linears[1].replace(matrix)
    found = modules[1](x)
    assert torch.equal(found, linears[1].forward(x))
    assert not torch.equal(found, before)
    linears[2].close()
    with pytest.raises(ClosedError, match=r"2: forward after close\(\)"):
        modules[2](x)


def test_hooks_and_copies(linears, modules, dispatches):
    seen = []
    modules[1].register_forward_hook(lambda module, arguments, y: seen.append(arguments[0]) or 2 * y)
    model = copy.deepcopy(torch.nn.ModuleList(modules))
    x = random(4, K)
    for module, linear, factor in zip(model, linears, (1, 2, 1), strict=True):
        assert torch.equal(module(x), factor * linear.forward(x))
    assert len(seen) == 1
    assert seen[0] is x
    assert dispatches == [3]


def test_what_cannot_share(linears):
    with pytest.raises(InputError, match="modules must be DenseLinears, found Linear"):
        share_input([DenseLinear(linears[0]), torch.nn.Linear(K, 8)])
    other = Linear(random_matrix(np.random.default_rng(5), 64, 2 * K, name="o_proj"))
    with other, pytest.raises(InputError, match="o_proj: expected as many inputs as 0, 64"):
        share_input([DenseLinear(linears[0]), DenseLinear(other)])


# Inputs of their own


GROUPS, N = 4, 32


@pytest.fixture
def stored():
    return random_matrix(np.random.default_rng(7), GROUPS * N, K, name="o_a_proj")


@pytest.fixture
def grouped(stored):
    with LinearGroup.of_rows(stored, GROUPS) as group:
        yield DenseGroupedLinear(group)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("ahead", [(), (5,), (2, 3), (0,)], ids=str)
def test_groups_have_the_bits_of_their_linears(grouped, ahead, dtype):
    x, grad_y = random(*ahead, GROUPS, K, dtype=dtype), random(*ahead, GROUPS, N, dtype=dtype, seed=4)
    x.requires_grad_()
    y = grouped(x)
    (grad_x,) = torch.autograd.grad(y, x, grad_y)
    assert (y.shape, y.dtype, grad_x.shape, grad_x.dtype) == ((*ahead, GROUPS, N), dtype, x.shape, dtype)
    with torch.no_grad():
        assert torch.equal(grouped(x), y)
    for i, linear in enumerate(grouped.group.linears):
        alone = DenseLinear(linear)
        part = x[..., i, :].detach().requires_grad_()
        assert torch.equal(alone(part), y[..., i, :])
        assert torch.equal(torch.autograd.grad(alone(part), part, grad_y[..., i, :])[0], grad_x[..., i, :])


def test_groups_beside_pytorch(stored, grouped):
    """Of float64: sums of K + 1 exact products, and one rounding to bfloat16."""
    x, w = random(2, 3, GROUPS, K), torch.from_numpy(dequantize(stored)).double().view(GROUPS, N, K)
    exact = torch.einsum("...gk,gnk->...gn", x.double(), w)
    bound = (K + 1) * 2.0**-23 * torch.einsum("...gk,gnk->...gn", x.double().abs(), w.abs())
    assert ((grouped(x).double() - exact).abs() <= bound + 2.0**-8 * (exact.abs() + bound)).all()


def test_state_of_groups(grouped):
    assert isinstance(grouped, torch.nn.Linear)
    assert not [*grouped.parameters(), *grouped.state_dict()]
    assert (grouped.n_groups, grouped.in_features, grouped.out_features) == (GROUPS, K, GROUPS * N)
    assert grouped.weight.shape == (GROUPS * N, K)
    assert repr(grouped).startswith("DenseGroupedLinear(in_features=64, out_features=128, n_groups=4, ")
    assert copy.deepcopy(grouped).group is grouped.group


def test_what_groups_refuse(linears, grouped):
    with pytest.raises(InputError, match=r"x must have shape \[\.\.\., 4, 64\], found \[4, 2, 64\]"):
        grouped(random(4, 2, K))
    for other in (LinearGroup(linears), linears[0]):
        with pytest.raises(InputError, match=r'group must be a ktmoe\.LinearGroup of inputs="own", found'):
            DenseGroupedLinear(other)


def test_modules_that_get_different_tensors(modules, linears, dispatches):
    """They are soon computed one by one, and all outputs are right meanwhile."""
    x = random(5, K)
    for _ in range(3):
        for module, linear in zip(modules, linears, strict=True):
            assert torch.equal(module(x.clone()), linear.forward(x))
    assert [count for count in dispatches if count > 1] == [3, 3, 3]
    assert dispatches[-1] == 1
