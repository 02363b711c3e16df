"""KTMoEWrapper's mode "sft": weights in the tensors of their formats, and from checkpoints."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from helpers import BF16, same_bits
from kt_wrappers import batch
from sft_wrappers import EXPERTS, arguments, checkpoint, dirty, matrices, wrapper

from ktmoe import load_experts
from ktmoe.compat.kt_kernel import KTMoEWrapper, sft
from ktmoe.errors import FormatError, InputError, UnavailableError
from ktmoe.experts import PROJECTIONS

pytestmark = pytest.mark.usefixtures("nothing_is_leased")


def stacked(experts, kind) -> dict[str, np.ndarray]:
    return {p: np.stack([getattr(experts.matrix(e, p), kind) for e in range(EXPERTS)]) for p in PROJECTIONS}


def check_same(made, expected, call):
    with made as w:
        w.init_lora_weights(*matrices().values(), *dirty(matrices()).values())
        assert same_bits(w.forward(*call), expected.forward(*call))


@pytest.mark.parametrize("physical", [None, np.arange(EXPERTS)[::-1]], ids=["each its own", "reversed"])
def test_tensors_of_a_format(tmp_path, physical):
    """kt-kernel's containers, and bfloat16 tensors for methods that round: as from the checkpoint."""
    call = batch(3)
    for method in ("MXFP4_SFT", "RAWINT4_SFT", "AMXFP8_SFT", "AMXBF16_SFT", "AMXINT8_SFT"):
        folder = checkpoint(method, tmp_path / method)
        experts = load_experts(folder, 0)
        with wrapper(folder, method, matrices()) as expected:
            if physical is not None:
                expected.close()
                expected = KTMoEWrapper(**arguments(weight_path=str(folder), method=method))
                expected.load_weights(physical)
                expected.init_lora_weights(*matrices().values(), *dirty(matrices()).values())
            made = KTMoEWrapper(**arguments(method=method, swiglu_limit=experts.activation.limit or 0.0))
            codes = stacked(experts, "codes")
            if method in ("AMXBF16_SFT", "AMXINT8_SFT"):
                made.load_weights_from_tensors(*codes.values(), physical)
            else:
                scales = stacked(experts, "scales")
                if method == "MXFP4_SFT":
                    scales = {p: (array.astype(np.uint16) << 7).view(BF16) for p, array in scales.items()}
                    given = codes | {f"{p}_scale": array for p, array in scales.items()}
                    made.load_mxfp4_weights(given, physical)
                else:
                    named = {f"{p}_proj": array for p, array in codes.items()} | {f"{p}_scale": scales[p] for p in PROJECTIONS}
                    if method == "RAWINT4_SFT":
                        made.load_rawint4_weights(SimpleNamespace(**named, group_size=32), physical)
                    else:
                        made.load_block_fp8_weights(SimpleNamespace(**named, block_size=(128, 128)), physical)
            check_same(made, expected, call)
            expected.close()


def test_files_of_a_layer(tmp_path):
    """As sglang-kt asks for them to serve an adapter: the same bits as by load_weights()."""
    call, served = batch(3), {"RAWINT4_SFT": sft.get_rawint4_runtime, "AMXFP8_SFT": sft.get_fp8_runtime}
    for method, runtime in served.items():
        assert runtime() == method
        folder = checkpoint(method, tmp_path / method)
        files = sorted(str(path) for path in folder.glob("*.safetensors"))
        with wrapper(folder, method, matrices()) as expected, KTMoEWrapper(**arguments(method=method)) as made:
            if method == "RAWINT4_SFT":
                given = sft.load_rawint4_experts_from_checkpoint_files(checkpoint_files=files, layer_idx=0, group_size=32)
                made.load_rawint4_weights(given, np.arange(EXPERTS))
            else:
                given = sft.load_block_fp8_experts_from_checkpoint_files(checkpoint_files=files, layer_idx=0, hidden_size=1)
                made.load_block_fp8_weights(given, np.arange(EXPERTS))
            check_same(made, expected, call)
    for load in (sft.load_rawint4_experts_from_checkpoint_files, sft.load_block_fp8_experts_from_checkpoint_files):
        with pytest.raises(InputError, match=r"^layer 3: checkpoint_files must name files, found none$"):
            load(checkpoint_files=[], layer_idx=3)


def test_files_of_another_format(tmp_path):
    """Nothing of the checkpoint stays open."""
    folder = checkpoint("AMXBF16_SFT", tmp_path)
    given = sft.load_block_fp8_experts_from_checkpoint_files(
        checkpoint_files=[str(path) for path in folder.glob("*.safetensors")], layer_idx=0
    )
    with (
        KTMoEWrapper(**arguments(method="AMXFP8_SFT")) as made,
        pytest.raises(FormatError, match="method 'AMXFP8_SFT' expects"),
    ):
        made.load_block_fp8_weights(given)


def test_scales_of_mxfp4(tmp_path):
    """A power of two is UE8M0's byte, 2**-127 among them; all else is refused, by its place."""
    experts = load_experts(checkpoint("MXFP4_SFT", tmp_path), 0)
    codes, scales = stacked(experts, "codes"), stacked(experts, "scales")
    given = codes | {f"{p}_scale": (array.astype(np.uint16) << 7) for p, array in scales.items()}
    given["up_scale"][0, 0, 0] = 0x0040
    with KTMoEWrapper(**arguments()) as w:
        w.load_mxfp4_weights(given)
        assert w.moe.export_expert(0)[0]["up"].scales[0, 0] == 0
    for bits in (0, 0x0041, 0x3F81, 0x7F80, 0xBF80):
        given["up_scale"][1, 2, 3] = bits
        w = KTMoEWrapper(**arguments())
        with pytest.raises(InputError, match=r"layer 0.1.up scales \[2, 3\] must be a power of two, found"):
            w.load_mxfp4_weights(given)
    del given["up_scale"]
    with pytest.raises(InputError, match="experts_data must have gate, gate_scale, up, up_scale, down, down_scale, found"):
        w.load_mxfp4_weights(given)


def test_wrong_tensors(tmp_path):
    experts = load_experts(checkpoint("RAWINT4_SFT", tmp_path), 0)
    codes, scales = stacked(experts, "codes"), stacked(experts, "scales")
    named = {f"{p}_proj": array for p, array in codes.items()} | {f"{p}_scale": scales[p] for p in PROJECTIONS}
    w = KTMoEWrapper(**arguments(method="RAWINT4_SFT"))
    for changed, message in (
        ({"up_scale": scales["up"][:5]}, r"weights and scales must be of as many experts each, found \[5, 8\]"),
        ({"gate_scale": scales["gate"].astype(np.float32)}, "layer 0.0.gate scales must be bfloat16, found float32"),
        ({"down_proj": codes["down"].astype(np.int32)}, "layer 0.0.down codes must be bytes of two dimensions, found int32"),
        ({"group_size": 0}, "group_size must be a whole number, 1 or more, found 0"),
    ):
        given = SimpleNamespace(**({"group_size": 32} | named | changed))
        with pytest.raises(InputError, match=message):
            w.load_rawint4_weights(given)
    assert w.moe is None
    w = KTMoEWrapper(**arguments(method="AMXFP8_SFT"))
    with pytest.raises(FormatError, match="method 'AMXFP8_SFT' expects E4M3 with a scale per 128 x 128, found"):
        w.load_rawint4_weights(SimpleNamespace(**named, group_size=32))


def test_weights_are_loaded_once(tmp_path):
    with wrapper(checkpoint("MXFP4_SFT", tmp_path)) as w:
        layer = w.moe
        w.load_weights()
        assert w.moe is layer
        tensors = [np.zeros((EXPERTS, n, k), BF16) for n, k in ((128, 128),) * 3]
        with pytest.raises(UnavailableError, match="its weights are frozen"):
            w.load_weights_from_tensors(*tensors)
