"""torch CPU tensors, in and out, by real torch where it is installed; and that ktmoe does without it everywhere else."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import BF16, random_batch, random_experts, same_bits
from linears import random_matrix, random_x

import ktmoe
from ktmoe import Linear, LinearGroup, MoELayer
from ktmoe.errors import InputError

pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture(scope="module")
def case(backend):
    rng = np.random.default_rng(1)
    experts = random_experts(rng, 4, 64, 64)
    with MoELayer(experts, backend) as layer:
        arguments = random_batch(rng, experts, 6, 2)
        yield layer, arguments, layer.forward(*arguments)


def tensors(torch, arguments):
    x, ids, weights = arguments
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16), torch.from_numpy(ids), torch.from_numpy(weights)


def as_array(torch, y):
    return y.view(torch.int16).numpy().view(BF16) if y.dtype == torch.bfloat16 else y.numpy()


def test_bfloat16_tensors(torch, case):
    layer, arguments, expected = case
    x, ids, weights = tensors(torch, arguments)
    y = layer.forward(x, ids, weights)
    assert (type(y), y.dtype, tuple(y.shape)) == (torch.Tensor, torch.bfloat16, expected.shape)
    assert same_bits(as_array(torch, y), expected)
    assert same_bits(as_array(torch, layer.submit(x, ids, weights).result()), expected)


def test_float32_tensors(torch, case):
    layer, arguments, _ = case
    x, ids, weights = tensors(torch, arguments)
    y = layer.forward(x.float(), ids, weights)
    assert y.dtype == torch.float32
    assert same_bits(y.numpy(), layer.forward(arguments[0].astype(np.float32), *arguments[1:]))


def test_kinds_may_be_mixed(torch, case):
    """y follows x alone."""
    layer, arguments, expected = case
    x, ids, weights = tensors(torch, arguments)
    assert same_bits(layer.forward(arguments[0], ids, weights), expected)
    assert same_bits(as_array(torch, layer.forward(x, *arguments[1:])), expected)
    assert same_bits(as_array(torch, layer.forward(x, ids.int(), weights)), expected)


def test_out(torch, case):
    layer, arguments, expected = case
    x, ids, weights = tensors(torch, arguments)
    out = torch.full_like(x, float("nan"))
    assert layer.forward(x, ids, weights, out=out) is out
    assert same_bits(as_array(torch, out), expected)
    in_place = x.clone()
    assert layer.forward(in_place, ids, weights, out=in_place) is in_place
    assert same_bits(as_array(torch, in_place), expected)
    with pytest.raises(InputError, match="out must be of x's kind, a torch bfloat16 tensor, or float32; found a bfloat16"):
        layer.forward(x, ids, weights, out=np.empty_like(arguments[0]))
    with pytest.raises(InputError, match="out must be of x's kind, a bfloat16 array, or float32; found a torch bfloat16"):
        layer.forward(*arguments, out=out)


def test_tensors_of_any_layout_and_with_gradients(torch, case):
    layer, arguments, expected = case
    x, ids, weights = tensors(torch, arguments)
    strided = torch.stack([x, x], dim=2)[:, :, 1]
    assert not strided.is_contiguous()
    assert same_bits(as_array(torch, layer.forward(strided, ids.t().contiguous().t(), weights)), expected)
    y = layer.forward(x.clone().requires_grad_(), ids, weights.clone().requires_grad_())
    assert not y.requires_grad
    assert same_bits(as_array(torch, y), expected)


def test_bad_tensors(torch, case):
    layer, arguments, _ = case
    good = dict(zip(("x", "expert_ids", "expert_weights"), tensors(torch, arguments), strict=True))
    for argument, value, message in (
        ("x", good["x"].double(), r"x must be .*found a torch tensor of torch\.float64"),
        ("x", good["x"].half(), r"x must be .*found a torch tensor of torch\.float16"),
        ("x", good["x"].to("meta"), r"x must be on the CPU; found a torch tensor on meta"),
        ("x", good["x"].to_sparse(), r"x: numpy cannot view a torch tensor of torch\.bfloat16, torch\.sparse_coo"),
        ("x", good["x"][:, 1:], r"x must have shape \[any, 64\], found \[6, 63\]"),
        ("expert_ids", good["expert_ids"].float(), r"expert_ids must be integers, found float32"),
        ("expert_ids", good["expert_ids"].to("meta"), r"expert_ids must be on the CPU"),
        ("expert_weights", good["expert_weights"].double(), r"expert_weights must be float32, found float64"),
        ("expert_weights", good["expert_weights"].bfloat16(), r"expert_weights: .*bfloat16"),
        ("expert_weights", good["expert_weights"].to_sparse(), r"expert_weights"),
    ):
        with pytest.raises(InputError, match=message):
            layer.forward(**good | {argument: value})


def test_dense_matrices(torch, backend):
    """y is of x's library and dtype, or float32; out may be a float32 tensor, or an array for a tensor's x."""
    rng = np.random.default_rng(2)
    matrix, array = random_matrix(rng, 70, 64), random_x(rng, 3, 64)
    x = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    with Linear(matrix, backend) as linear:
        expected, full = linear.forward(array), linear.forward(array, dtype=np.float32)
        assert same_bits(as_array(torch, linear.forward(x)), expected)
        for dtype in (torch.float32, np.float32):
            y = linear.forward(x, dtype=dtype)
            assert y.dtype == torch.float32
            assert same_bits(y.numpy(), full)
        assert linear.forward(x.float()).dtype == torch.float32
        out = torch.empty(3, 70)
        assert linear.forward(x, out=out) is out
        assert same_bits(out.numpy(), full)
        first, _ = LinearGroup([linear, linear]).forward(x.requires_grad_())
        assert not first.requires_grad
        assert same_bits(as_array(torch, first), expected)
        own = LinearGroup([linear, linear], "own").forward(torch.stack([x, x], dim=1))
        assert same_bits(as_array(torch, own[:, 1].contiguous()), expected)
        with pytest.raises(InputError, match=r"dtype must be None or float32, found torch\.bfloat16"):
            linear.forward(x, dtype=torch.bfloat16)
        with pytest.raises(InputError, match="out must be of x's kind, a torch bfloat16 tensor, or float32; found a bfloat16"):
            linear.forward(x, out=np.empty_like(expected))


# Without torch


class Lookalike:
    """What has a tensor's methods, but is none, and no array."""

    dtype, shape, device = np.dtype(np.float32), (1, 64), "cpu"

    def numpy(self):
        return np.zeros(self.shape, np.float32)

    def detach(self):
        return self

    def __array__(self, *_, **__):
        return self.numpy()


def test_what_looks_like_a_tensor_is_refused_by_its_type(case):
    layer, (x, ids, weights), _ = case
    for arguments in ((Lookalike(), ids, weights), (x, Lookalike(), weights), (x, ids, Lookalike())):
        with pytest.raises(InputError, match="found Lookalike"):
            layer.forward(*arguments)


NO_TORCH = """
import sys
sys.modules["torch"] = None  # importing it raises
import numpy, ktmoe
from ktmoe import ExpertWeights, MoELayer
arrays = [(numpy.zeros((1, 32, 16), numpy.uint8), numpy.full((1, 32, 1), 127, numpy.uint8))] * 3
with MoELayer(ExpertWeights.from_arrays(*arrays), "fp32_lut") as layer:
    x = numpy.ones((1, 32), numpy.float32)
    assert not layer.forward(x, numpy.zeros((1, 1), int), numpy.ones((1, 1), numpy.float32)).any()
    try:
        layer.forward([0], x, x)
    except ktmoe.errors.InputError:
        print("works")
"""


def test_torch_is_never_imported():
    result = subprocess.run([sys.executable, "-c", NO_TORCH], capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("works\n", "")


#: Torch, where it is to be found, is an empty module.
WITHOUT = """
import sys, types
sys.modules |= {"torch": types.ModuleType("torch"), sys.argv[1]: None}
import ktmoe
try:
    __import__(sys.argv[2])
except ktmoe.errors.UnavailableError as error:
    print(error)
"""


@pytest.mark.parametrize("module", ["ktmoe.transformers", "ktmoe.torch"])
def test_what_needs_torch_says_how_to_install_it(module):
    """One line, with the build for CPUs."""
    result = subprocess.run([sys.executable, "-c", WITHOUT, "torch", module], capture_output=True, text=True, check=False)
    assert re.fullmatch(rf"{re.escape(module)} needs torch, which is not installed: .*cpu.*\n", result.stdout), result
    assert result.stderr == ""


def test_what_needs_transformers_says_how_to_install_it():
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT, "transformers", "ktmoe.transformers"], capture_output=True, text=True, check=False
    )
    install = "pip install 'ktmoe[transformers]', or '.[transformers]' in a clone of ktmoe"
    expected = f"ktmoe.transformers needs transformers, which is not installed: {install}\n"
    assert (result.stdout, result.stderr) == (expected, "")


def test_no_module_imports_torch():
    """But for ktmoe.torch, ktmoe.transformers, ktmoe.vllm and ktmoe.distributed.gloo, which no other imports at its top."""
    needs = ("torch", "transformers", "vllm", "distributed/gloo.py")
    names = [name.removesuffix(".py").replace("/", r"\.") for name in needs]
    package = Path(ktmoe.__file__).parent
    sources = [source for source in package.rglob("*.p*") if source.suffix in (".py", ".pyx", ".pxd")]
    assert len(sources) > 20
    for source in sources:
        if not {package / name for name in needs} & {source, *source.parents}:
            text = source.read_text()
            assert not re.search(r"^\s*(import torch|from torch)\b", text, re.MULTILINE), source
            assert not re.search(rf"^(import|from) ktmoe\.({'|'.join(names)})\b", text, re.MULTILINE), source
