"""ktmoe.torch.DenseEmbedding: the bits of PyTorch's own on the same weights, and what a module has to bear."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from helpers import FORMATS
from linears import random_matrix

from ktmoe import Linear
from ktmoe.dequantization import dequantize
from ktmoe.errors import ClosedError, InputError

torch = pytest.importorskip("torch", reason="torch is not installed")

from ktmoe.torch import DenseEmbedding, DenseLinear  # noqa: E402

pytestmark = pytest.mark.smoke

N, K = 150, 64


def matrix(name="b16"):
    return random_matrix(np.random.default_rng(1), N, K, FORMATS[name], name="lm_head")


@pytest.fixture
def linear():
    with Linear(matrix()) as linear:
        yield linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["b16", "mxfp4"])
def test_beside_pytorch(name, dtype):
    """Ids of any shape, layout and integer dtype. Weights of these formats are bfloat16 numbers."""
    given = matrix(name)
    exact = torch.from_numpy(dequantize(given))
    theirs = torch.nn.Embedding.from_pretrained(exact.to(dtype))
    ids = torch.randint(N, (2, 3, 5), generator=torch.Generator().manual_seed(2))
    with Linear(given) as linear:
        module = DenseEmbedding(linear, dtype)
        for these in (ids, ids.int(), ids.transpose(0, 2), ids[0, 0], ids[0, 0, 0], ids[:0], ids[:, :0]):
            found = module(these)
            assert found.dtype == dtype
            assert torch.equal(found, theirs(these))
            assert not found.requires_grad


def test_one_matrix_at_both_ends_of_a_model(linear):
    """What it gives is no view of the weights, and may be changed in place."""
    ids = torch.tensor([[0, N - 1, 64]])
    embedding, head = DenseEmbedding(linear), DenseLinear(linear)
    model = torch.nn.Sequential(embedding, head)
    weights = torch.from_numpy(dequantize(linear.export()))
    x = weights[ids]
    assert ((model(ids).double() - x @ weights.T).abs() <= 2.0**-7 * (x.abs() @ weights.abs().T)).all()
    first = embedding(ids)
    first.mul_(2)
    assert torch.equal(embedding(ids).double(), x)
    assert torch.equal(linear.rows(ids[0]).double(), x[0])
    other = copy.deepcopy(model)
    assert other[0] is not embedding
    assert other[0].linear is other[1].linear is linear


def test_state(linear):
    module = DenseEmbedding(linear, torch.float32)
    assert (module.num_embeddings, module.embedding_dim, module.dtype) == (N, K, torch.float32)
    assert not [*module.parameters(), *module.buffers(), *module.state_dict()]
    assert repr(module) == f"DenseEmbedding(150, 64, {linear.format.description})"
    with pytest.raises(AttributeError, match=r"has no weight: lm_head is packed; linear\.rows"):
        _ = module.weight
    with pytest.raises(AttributeError, match="no attribute 'bias'"):
        _ = module.bias
    assert not hasattr(module, "weight")


def test_what_is_refused(linear):
    module = DenseEmbedding(linear)
    for ids, message in (
        (torch.tensor([[1, N]]), r"ids must be in \[0, 150\), found 150 at \[1\]"),
        (torch.tensor([-1]), r"ids must be in \[0, 150\), found -1 at \[0\]"),
        (torch.tensor([0.0]), "ids must be integers, found float32"),
        (torch.tensor([True]), "ids must be integers, found bool"),
        (torch.empty(2, dtype=torch.int64, device="meta"), "ids must be on the CPU; found a torch tensor on meta"),
        (np.zeros(1, int), "ids must be a torch tensor, found ndarray"),
    ):
        with pytest.raises(InputError, match=message):
            module(ids)
    ids, array = torch.tensor([1]), np.empty((1, K), np.float32)
    with pytest.raises(InputError, match="out must be a torch tensor, as ids are; found a float32 array"):
        linear.rows(ids, out=array)
    with pytest.raises(InputError, match="out must be a numpy array, as ids are; found a torch float32 tensor"):
        linear.rows(ids.numpy(), out=torch.from_numpy(array))
    with pytest.raises(InputError, match=r"linear must be a ktmoe\.Linear, found torch\.nn\.modules\.sparse\.Embedding"):
        DenseEmbedding(torch.nn.Embedding(1, 1))
    with pytest.raises(InputError, match=r"dtype must be torch\.bfloat16 or torch\.float32, found torch\.float16"):
        DenseEmbedding(linear, torch.float16)
    linear.close()
    with pytest.raises(ClosedError, match=r"lm_head: rows after close\(\)"):
        module(torch.tensor([1]))
