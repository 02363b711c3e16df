"""KTMoEWrapper's mode "sft" on torch tensors: results, devices, and gradients that an optimizer finds in its Parameters."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from helpers import BF16, same_bits
from kt_wrappers import batch
from sft_wrappers import checkpoint, dirty, matrices, wrapper

from ktmoe.errors import InputError, NotCopyableError, UnavailableError
from ktmoe.training import Training

pytestmark = pytest.mark.smoke


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint("MXFP4_SFT", tmp_path_factory.mktemp("mxfp4"))


def tensor(torch, array):
    """A copy."""
    array = array.copy()
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if array.dtype == BF16 else torch.from_numpy(array)


def as_array(torch, made):
    return made.view(torch.int16).numpy().view(BF16)


@pytest.fixture
def tuned(torch, folder):
    """A wrapper whose adapter is six Parameters, its call, and the gradient of its output."""
    given = matrices()
    parameters = [torch.nn.Parameter(tensor(torch, array)) for array in given.values()]
    buffers = [tensor(torch, array) for array in dirty(given).values()]
    with wrapper(folder) as w:
        w.init_lora_weights(*parameters, *buffers)
        call = [tensor(torch, array) for array in batch()]
        grad = tensor(torch, np.random.default_rng(3).standard_normal((5, 128)).astype(BF16))
        yield w, parameters, buffers, call, grad


def test_results(torch, folder, tuned):
    """The bits of numpy arrays; leaves of a graph are no trouble."""
    w, _, buffers, call, grad = tuned
    with wrapper(folder, tensors=matrices(), gradients=(expected := dirty(matrices()))) as same:
        y = same.forward(*batch())
        of_x, of_weights = same.backward(as_array(torch, grad))
    call[0].requires_grad_()
    found = w.forward(*call)
    assert (found.dtype, found.device.type, found.requires_grad) == (torch.bfloat16, "cpu", False)
    assert same_bits(as_array(torch, found), y)
    assert same_bits(as_array(torch, w.forward(call[0].float(), call[1].int(), call[2].double(), output_device="cpu")), y)
    found = w.backward(grad, output_device=torch.device("cpu"))
    assert [array.dtype for array in found] == [torch.bfloat16, torch.float32]
    assert same_bits(as_array(torch, found[0]), of_x)
    assert same_bits(found[1].numpy(), of_weights)
    for buffer, wanted in zip(buffers, expected.values(), strict=True):
        assert same_bits(as_array(torch, buffer), wanted)
    w.submit_forward_inference(*call, 0)
    assert same_bits(as_array(torch, w.sync_forward_inference(0)), y)


def test_an_optimizers_window(torch, tuned):
    """A first backward writes, further ones add until the gradients are released; then the buffers are written anew."""
    w, parameters, buffers, call, grad = tuned
    assert w.validate_authoritative_optimizer_grad_state() == "closed"
    assert all(parameter.grad is None for parameter in parameters)
    w.forward(*call)
    w.backward(grad)
    assert w.validate_authoritative_optimizer_grad_state() == "open"
    assert all(parameter.grad is buffer for parameter, buffer in zip(parameters, buffers, strict=True))
    once = [buffer.clone() for buffer in buffers]
    w.forward(*call)
    w.backward(grad, optimizer_grad_scale=0.5)
    for buffer, first in zip(buffers, once, strict=True):
        half = first.float() / 2
        torch.testing.assert_close(buffer.float(), first.float() + half, rtol=2**-7, atol=1e-6)
    w.release_authoritative_optimizer_grads()
    assert all(parameter.grad is None for parameter in parameters)
    w.forward(*call)
    w.backward(grad)
    for buffer, first in zip(buffers, once, strict=True):
        assert torch.equal(buffer, first)


def test_a_training_step(torch, tuned):
    """SGD's step is seen by the next forward."""
    w, parameters, _, call, grad = tuned
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    before = w.forward(*call)
    w.backward(grad)
    optimizer.step()
    assert not torch.equal(w.forward(*call), before)


def test_windows_that_somebody_touched(torch, tuned):
    w, parameters, buffers, call, grad = tuned
    w.forward(*call)
    w.backward(grad)
    parameters[0].grad = None
    w.forward(*call)
    with pytest.raises(UnavailableError, match="expected all grads to be None or none of them, found some"):
        w.backward(grad)
    parameters[0].grad = torch.zeros_like(parameters[0])
    with pytest.raises(UnavailableError, match=r"lora.gate_lora_a: expected grad to be None or the registered tensor"):
        w.backward(grad)
    parameters[0].grad = buffers[0]
    w.backward(grad)
    buffers[1].data = buffers[1].clone()
    with pytest.raises(UnavailableError, match=r"lora.gate_lora_b: the memory or the shape of its gradient was changed"):
        w.release_authoritative_optimizer_grads()


def test_a_window_while_a_backward_is_pending(tuned):
    w, parameters, _, call, grad = tuned
    w.forward(*call)
    w.submit_backward_async(grad)
    with pytest.raises(UnavailableError, match="gradients cannot be released while a backward is pending"):
        w.release_authoritative_optimizer_grads()
    w.sync_backward()
    w.forward(*call)
    w.submit_backward_async(grad)
    for parameter in parameters:
        parameter.grad = None
    with pytest.raises(UnavailableError, match="gradients were closed after a backward that began while they were open"):
        w.sync_backward()
    w.forward(*call)
    w.backward(grad)


def test_registering(torch, tuned):
    w, parameters, buffers, _, _ = tuned
    register = w.register_authoritative_optimizer_grad
    other, grad = torch.nn.Parameter(torch.zeros(3)), torch.zeros(3)
    with pytest.raises(InputError, match="other must be a torch Parameter and a tensor"):
        register("other", grad, grad)
    with pytest.raises(InputError, match="other: its gradient must be like it"):
        register("other", other, torch.zeros(4))
    for pair in ((parameters[0], torch.zeros_like(parameters[0])), (torch.nn.Parameter(buffers[2].clone()), buffers[2])):
        with pytest.raises(UnavailableError, match=r"it or its gradient is registered already as lora\."):
            register("again", *pair)
    register("other", other, grad)
    assert [entry.name for entry in w.authoritative_optimizer_grads][-2:] == ["lora.down_lora_b", "other"]


def test_parameters_with_plain_tensors(torch, folder):
    given = {name: tensor(torch, array) for name, array in matrices().items()}
    given["up_lora_a"] = torch.nn.Parameter(given["up_lora_a"])
    with wrapper(folder) as w, pytest.raises(InputError, match="either all matrices of an adapter or none must be"):
        w.init_lora_weights(*given.values(), *(torch.zeros_like(matrix) for matrix in given.values()))


def test_a_backward_that_fails_closes_the_windows(torch, tuned, monkeypatch):
    """And the next one writes anew."""
    w, parameters, buffers, call, grad = tuned
    w.forward(*call)
    w.backward(grad)
    expected = [buffer.clone() for buffer in buffers]
    w.forward(*call)
    with monkeypatch.context() as patch:
        patch.setattr(Training, "backward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            w.backward(grad)
    assert all(parameter.grad is None for parameter in parameters)
    w.forward(*call)
    w.backward(grad)
    assert all(torch.equal(buffer, before) for buffer, before in zip(buffers, expected, strict=True))


def test_another_adapter(torch, tuned):
    """It takes the windows of the first one. One that is refused leaves them as they are."""
    w, parameters, buffers, call, grad = tuned
    registered = w.authoritative_optimizer_grads
    others = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    theirs = [torch.zeros_like(buffer) for buffer in buffers]
    with pytest.raises(UnavailableError, match=r"registered already as lora\.gate_lora_a"):
        w.init_lora_weights(*others, *theirs[:2], theirs[0], *theirs[3:])
    assert w.authoritative_optimizer_grads == registered
    w.forward(*call)
    w.submit_backward_async(grad)
    with pytest.raises(UnavailableError, match="an adapter cannot be replaced while a backward is pending"):
        w.init_lora_weights(*others, *theirs)
    w.sync_backward()
    w.init_lora_weights(*others, *theirs)
    for _ in range(2):  # the first one's windows stay open
        w.forward(*call)
        w.backward(grad)
        assert all(torch.equal(one, other) for one, other in zip(theirs, buffers, strict=True))
        assert all(other.grad is own for other, own in zip(others, theirs, strict=True))
        for other in others:
            other.grad = None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_wrappers_are_not_copied(tuned, copied):
    """A copy's adapter would be other memory than its tensors."""
    with pytest.raises(NotCopyableError, match="layer 0: an SFTWrapper cannot be copied or pickled"):
        copied(tuned[0])


def test_a_method_without_windows(torch, tmp_path):
    """Its gradients are written anew, and grad stays the caller's."""
    parameters = [torch.nn.Parameter(tensor(torch, array)) for array in matrices().values()]
    buffers = [tensor(torch, array) for array in dirty(matrices()).values()]
    call, grad = [tensor(torch, array) for array in batch()], torch.ones(5, 128)
    with wrapper(checkpoint("AMXINT4_SFT", tmp_path), "AMXINT4_SFT") as w:
        w.init_lora_weights(*parameters, *buffers)
        written = []
        for _ in range(2):
            w.forward(*call)
            w.backward(grad)
            written.append([buffer.clone() for buffer in buffers])
        assert all(parameter.grad is None for parameter in parameters)
        assert all(torch.equal(one, other) for one, other in zip(*written, strict=True))
        w.release_authoritative_optimizer_grads()


def test_kept_outputs(torch, tuned):
    w, *_ = tuned
    y = torch.ones(5, 128)
    w.cache_checkpoint_output(y, 5)
    assert torch.equal(w.get_checkpoint_output(5, torch.device("cpu")), y)
    w.clear_checkpoint_output()
    with pytest.raises(InputError, match="output_cpu must be on the CPU, found meta"):
        w.cache_checkpoint_output(y.to("meta"), 5)
