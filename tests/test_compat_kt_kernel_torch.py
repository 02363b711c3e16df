"""KTMoEWrapper on torch tensors, by real torch where it is installed, and on CUDA tensors where it has a device."""

import numpy as np
import pytest
from helpers import BF16, same_bits
from kt_wrappers import EXPERTS, HIDDEN, INTERMEDIATE, arguments, batch, wrapper, write

from ktmoe import load_experts
from ktmoe.compat.kt_kernel import KTMoEWrapper, generate_gpu_experts_masks
from ktmoe.errors import InputError

pytestmark = [pytest.mark.usefixtures("nothing_is_left"), pytest.mark.smoke]


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def cuda(torch):
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA device here")
    return torch.device("cuda")


def tensors(torch, case, device="cpu"):
    """Copies."""
    x, ids, scores = (torch.from_numpy(array.copy()).to(device) for array in (case[0].view(np.int16), *case[1:]))
    return x.view(torch.bfloat16), ids, scores


def as_array(torch, y):
    return y.cpu().view(torch.int16).numpy().view(BF16)


def test_forward(torch, folder):
    case = batch()
    x, ids, scores = tensors(torch, case)
    with wrapper(folder) as w:
        expected = w.forward(*case)
        y = w.forward(x, ids, scores, None)
        assert (y.dtype, y.device.type, tuple(y.shape)) == (torch.bfloat16, "cpu", expected.shape)
        assert same_bits(as_array(torch, y), expected)
        w.submit_forward(x, ids.int(), scores.double().requires_grad_(), cuda_stream=0)
        for tensor in (x, ids, scores):
            tensor.zero_()
        assert same_bits(as_array(torch, w.sync_forward(x, cuda_stream=0)), expected)
        x, ids, scores = tensors(torch, case)
        wide = w.forward(x.float().t().contiguous().t(), ids.t().contiguous().t(), scores)
        assert wide.dtype == torch.float32
        assert same_bits(wide.numpy(), expected.astype(np.float32))


def test_callers_in_a_device_context(torch, folder):
    """SGLang builds its models in torch.device("cuda"); here another device that is not the CPU."""
    case = batch()
    made = tensors(torch, case)
    with torch.device("meta"), wrapper(folder, num_gpu_experts=2) as w:
        assert w.gpu_experts_mask.device.type == "cpu"
        assert w.gpu_experts_mask.tolist() == [expert < 2 for expert in range(EXPERTS)]
        y = w.forward(*made)
        assert same_bits(as_array(torch, y), w.forward(case[0], case[1], case[2]))


def test_callers_in_inference_mode(torch, folder):
    """Buffers that were made there are filled again outside, and the other way round."""
    KTMoEWrapper.set_capture_batch_sizes([2])
    with wrapper(folder) as w:
        for tokens in (2, 3):
            case = batch(0, tokens)
            made, expected = tensors(torch, case), w.forward(*case).copy()
            for inside in (True, False, True):
                with torch.inference_mode(inside):
                    w.submit_forward(*made)
                    w.submit_forward(*made)  # one is given up, whose y is used again
                    assert same_bits(as_array(torch, w.sync_forward(made[0])), expected)


def test_captured_sizes(torch, folder):
    KTMoEWrapper.set_capture_batch_sizes([2])
    with wrapper(folder) as w:
        first = w.forward(*tensors(torch, batch(0, 2)))
        kept = first.clone()
        second = w.forward(*tensors(torch, batch(1, 2)))
        assert second.data_ptr() == first.data_ptr()
        assert not torch.equal(kept, second)
        free = w.forward(*tensors(torch, batch(0, 3)))
        kept = free.clone()
        w.forward(*tensors(torch, batch(1, 3)))
        assert torch.equal(free, kept)


def test_the_mask_is_a_tensor(torch, folder):
    """As the callers change it: copy_() from another one."""
    case = batch()
    mask = torch.zeros(EXPERTS, dtype=torch.bool)
    mask[1] = True
    for given in (mask, None):
        with wrapper(folder, gpu_experts_mask=given) as w:
            assert isinstance(w.gpu_experts_mask, torch.Tensor)
            assert w.gpu_experts_mask.dtype == torch.bool
            assert w.num_gpu_experts == (given is not None)
            w.gpu_experts_mask.copy_(torch.arange(EXPERTS) < 3)
            assert same_bits(w.forward(*case), w.forward(case[0], np.where(case[1] < 3, -1, case[1]), case[2]))
    assert mask.tolist() == [expert == 1 for expert in range(EXPERTS)]


def test_weights_from_tensors_and_maps(torch, tmp_path):
    experts = load_experts(write("BF16", tmp_path), 0)
    case, physical = batch(), np.arange(EXPERTS)[::-1].copy()
    given = [np.stack([experts.matrix(e, p).codes for e in range(EXPERTS)]) for p in ("gate", "up", "down")]
    made = [torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) for array in given]
    with KTMoEWrapper(**arguments(method="BF16")) as w, wrapper(tmp_path, physical=physical, method="BF16") as same:
        w.load_weights_from_tensors(*made, torch.from_numpy(physical))
        assert same_bits(w.forward(*case), same.forward(*case))
        same.load_weights(torch.arange(EXPERTS, dtype=torch.int64))
        w.load_weights_from_tensors(*made)
        assert same_bits(w.forward(*case), same.forward(*case))
        with pytest.raises(InputError, match="gate_proj must be bfloat16, found a torch float32 tensor"):
            w.load_weights_from_tensors(made[0].float(), *made[1:])


def test_write_to_pinnable_buffers(torch, folder):
    """Pointers as data_ptr() gives them."""
    experts = load_experts(folder, 0)
    sizes = (
        INTERMEDIATE * HIDDEN,
        4 * INTERMEDIATE * HIDDEN // 32,
        HIDDEN * INTERMEDIATE // 2,
        2 * HIDDEN * INTERMEDIATE // 32,
    )
    host = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    with wrapper(folder) as w:
        w.submit_write_weight_scale_to_buffer(1, 5, *([tensor.data_ptr()] for tensor in host))
        w.sync_write_weight_scale_to_buffer()
    assert np.array_equal(host[2].numpy(), experts.matrix(5, "down").codes.ravel())
    scales = host[3].view(torch.bfloat16).double().numpy()
    assert np.array_equal(scales, np.ldexp(1.0, experts.matrix(5, "down").scales.ravel().astype(int) - 127))


def test_generate_masks(torch):
    frequency = torch.tensor([[0.1, 0.5, 0.3, 0.8], [0.2, 0.4, 0.9, 0.1]])
    for given in (frequency, frequency.bfloat16(), (frequency * 10).long()):
        masks = generate_gpu_experts_masks(given, 3)
        assert masks.dtype == torch.bool
        assert masks.tolist() == [[False, True, False, True], [False, False, True, False]]


def test_wrong_tensors(torch, folder):
    x, ids, scores = tensors(torch, batch())
    with wrapper(folder) as w:
        for call, message in (
            ((x.to("meta"), ids, scores), "hidden_states must be on the CPU or a CUDA device, found a torch tensor on meta"),
            ((x.int(), ids, scores), r"hidden_states must be a torch tensor of floats, found torch\.int32"),
            ((x, ids.float(), scores), r"topk_ids must be a torch tensor of integers, found torch\.float32"),
            ((x, ids, ids), r"topk_weights must be a torch tensor of floats, found torch\.int64"),
            ((x, ids.numpy(), scores), "topk_ids must be a torch tensor of integers, found ndarray"),
        ):
            with pytest.raises(InputError, match=message):
                w.forward(*call)


# With a CUDA device


@pytest.mark.parametrize("handle", ["stream", "number", "none"])
def test_cuda_forward(torch, cuda, folder, handle):
    case = batch()
    with wrapper(folder) as w, wrapper(folder, 1) as other:
        expected = [each.forward(*case) for each in (w, other)]
        side = torch.cuda.Stream()
        given = {"stream": side, "number": side.cuda_stream, "none": None}[handle]
        with torch.cuda.stream(side):
            for _ in range(20):
                made = tensors(torch, case, cuda)
                for each, y in zip((w, other), expected, strict=True):
                    each.submit_forward(*made, given)
                    found = each.sync_forward(made[0], given)
                    assert found.device.type == "cuda"
                    assert same_bits(as_array(torch, found), y)
        x, ids, scores = tensors(torch, case, cuda)
        torch.cuda.synchronize()
        y = w.forward(x, ids.int(), scores, 0)  # the default stream
        assert same_bits(as_array(torch, y), expected[0])
