"""What may be chosen for the experts, by each way that takes options, and what messages say of wrong values."""

import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
import ways
from engine_models import EXPERTS, LAYERS, experts, logits, prompts
from loading_models import own_threads, wait_for_threads
from serving import CHOOSING, assert_served, eager
from transformers import PreTrainedModel

import ktmoe
import ktmoe.transformers as served
from ktmoe.cache.packing import pack
from ktmoe.errors import CacheError, InputError, KtmoeError, UnavailableError, UnknownNameError


@pytest.fixture(params=CHOOSING)
def make(request, checkpoint):
    """options -> the same model by one of the ways."""
    return lambda **options: CHOOSING[request.param](checkpoint("qwen3_moe"), **options)


def layers(model) -> list[ktmoe.MoELayer]:
    return [module.ktmoe_layer for _, module in experts(model)]


@pytest.mark.smoke
def test_backend(make):
    model = make(backend="fp32_lut")
    assert_served(model)
    assert {layer.backend for layer in layers(model)} == {"fp32_lut"}
    assert torch.isfinite(logits(model, prompts())).all()


@pytest.mark.smoke
@pytest.mark.parametrize("activations", ["bf16", "int8"])
def test_activations(checkpoint, activations):
    """An option of formats that have integer codes; here the smallest: INT4."""
    folder, ids = checkpoint("Kimi INT4"), prompts()
    model = served.load(folder, activations=activations)
    assert {layer.activations for layer in layers(model)} == {activations}
    exact = logits(served.load(folder, activations="bf16"), ids)
    assert torch.equal(logits(model, ids), exact) == (activations == "bf16")


@pytest.mark.parametrize("rounding", ["exact", "folded"])
def test_rounding(checkpoint, emulator_folder, rounding):
    """amx may fold INT4's scales into its weights."""
    with ways.prepared("amx", emulator_folder):
        model = served.load(checkpoint("Kimi INT4"), backend="amx", rounding=rounding)
        assert_served(model)
        assert {layer.rounding for layer in layers(model)} == {rounding}


@pytest.mark.parametrize("tuned_for", ["decode", "prefill"])
def test_tuned_for(checkpoint, emulator_folder, tuned_for):
    with ways.prepared("amx", emulator_folder):
        model = served.load(checkpoint("Kimi INT4"), backend="amx", tuned_for=tuned_for)
        assert_served(model)
        assert {layer.tuned_for for layer in layers(model)} == {tuned_for}


def test_threads(make):
    """Of ktmoe in this process; bits do not depend on them."""
    found = []
    for threads in (1, 2):
        model = make(threads=threads)
        assert ktmoe.get_num_threads() == threads
        found.append(logits(model, prompts()))
    assert torch.equal(*found)


def test_nodes(make):
    model = make(numa_nodes=[0])
    assert {tuple(layer.placement.nodes) for layer in layers(model)} == {(0,)}
    assert torch.equal(logits(model, prompts()), logits(make(), prompts()))


def test_progress(make):
    """All bytes of the model's experts, in order, up to the end."""
    calls = []
    make(progress=lambda done, total: calls.append((done, total)))
    assert len({total for _, total in calls}) == 1
    done = [done for done, _ in calls]
    assert done == sorted(done)
    assert calls[-1][0] == calls[-1][1] > 0


@pytest.mark.parametrize("source", ["checkpoint", "parameters"])
@pytest.mark.parametrize("error", [ValueError("from progress"), KeyboardInterrupt()])
def test_an_error_from_progress(checkpoint, source, error):
    def fail(done, total):
        raise error

    with pytest.raises(type(error)) as raised:
        served.load(checkpoint("qwen3_moe"), source=source, progress=fail)
    assert error in (raised.value, raised.value.__cause__)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_while_transformers_loads_ends_loading_in_the_background(checkpoint, monkeypatch, error):
    """Even while the error's traceback holds everything."""
    started, failed, calls = threading.Event(), threading.Event(), []

    def progress(done, total):
        calls.append(failed.is_set())
        started.set()
        assert failed.wait(60)

    def fail(*args, **kwargs):
        assert started.wait(60)
        raise error("elsewhere")

    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", fail)
    with pytest.raises(error, match="elsewhere") as raised:
        served.load(checkpoint("qwen3_moe"), source="checkpoint", progress=progress)
    failed.set()
    wait_for_threads()
    assert not own_threads()
    assert raised.tb  # still there
    assert calls == [False]


@pytest.mark.parametrize("source", ["checkpoint", "parameters"])
def test_a_loaded_models_config_can_be_pickled(checkpoint, source):
    config = served.load(checkpoint("qwen3_moe"), source=source, threads=1, progress=lambda done, total: None).config
    assert pickle.loads(pickle.dumps(config)).quantization_config.to_dict() == config.quantization_config.to_dict()
    assert config.quantization_config.options.threads == 1


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"backend": "cuda"}, UnknownNameError, "cuda"),
        ({"activations": "fp8"}, KtmoeError, "fp8"),
        ({"activations": "int8"}, UnavailableError, "int8"),  # there are no codes of 4 or 8 bits
        ({"rounding": "down"}, InputError, "rounding must be one of .*'down'"),
        ({"tuned_for": "chat"}, InputError, "tuned_for must be one of .*'chat'"),
        ({"threads": 0}, InputError, "threads"),
        ({"threads": "two"}, InputError, "two"),
        ({"numa_nodes": [99]}, KtmoeError, "99"),
        ({"numa_nodes": []}, InputError, "numa_nodes"),
        ({"gpu_experts": [True]}, InputError, rf"bool \[{EXPERTS} experts\] .* found bool \[1\]"),
        ({"gpu_experts": [1] * EXPERTS}, InputError, rf"gpu_experts: .* found int64 \[{EXPERTS}\]"),
        ({"gpu_experts": np.zeros((LAYERS + 1, EXPERTS), bool)}, InputError, rf"found bool \[{LAYERS + 1}, {EXPERTS}\]"),
        ({"gpu_experts": [[True] * EXPERTS, [True]]}, InputError, "gpu_experts: expected rows of one length"),
        ({"gpu_experts": torch.ones(EXPERTS, dtype=torch.bool, device="meta")}, InputError, "gpu_experts must be on the CPU"),
        ({"gpu_experts": torch.ones(EXPERTS).bfloat16()}, InputError, "gpu_experts: numpy cannot view"),
        (
            {"gpu_experts": EXPERTS + 1},
            InputError,
            rf"gpu_experts: expected 0 to {EXPERTS} experts of each layer, found {EXPERTS + 1}",
        ),
        ({"gpu_experts": -1}, InputError, rf"gpu_experts: expected 0 to {EXPERTS} experts of each layer, found -1"),
        ({"gpu_experts": True}, InputError, r"gpu_experts: expected a number, or .* found bool \[\]"),
        ({"gpu_experts": 1.5}, InputError, r"gpu_experts: expected a number, or .* found float64 \[\]"),
    ],
)
def test_wrong_values(make, option, error, message):
    with pytest.raises(error, match=message):
        make(**option)


def test_a_wrong_value_leaves_a_loaded_model_as_it_was(checkpoint):
    model = eager(checkpoint("qwen3_moe"))
    expected = logits(model, prompts())
    for option in ({"backend": "cuda"}, {"activations": "int8"}, {"threads": 0}, {"numa_nodes": [99]}, {"rounding": "down"}):
        with pytest.raises(KtmoeError):
            served.pack(model, **option)
        assert torch.equal(logits(model, prompts()), expected)


def test_a_wrong_source(checkpoint):
    with pytest.raises(InputError, match=r"source must be one of .* 'file'"):
        served.load(checkpoint("qwen3_moe"), source="file")


def test_a_packed_cache(checkpoint, tmp_path):
    """It serves the folder that it was packed from, and no other one."""
    folder, cache = checkpoint("qwen3_moe"), tmp_path / "cache"
    pack(folder, cache)
    mapped = served.load(folder, cache=cache)
    assert torch.equal(logits(mapped, prompts()), logits(served.load(folder, source="checkpoint"), prompts()))
    with pytest.raises(CacheError, match="is of another checkpoint"):
        served.load(checkpoint("mixtral"), cache=cache)


@pytest.mark.parametrize("dtype", ["float32", torch.float16])
def test_a_dtype_that_transformers_does_not_give(checkpoint, dtype):
    """It leaves the rest of an FP8 checkpoint in bfloat16, whatever is asked for."""
    expected = str(dtype).removeprefix("torch.")
    folder = checkpoint("DeepSeek-V3 FP8")
    with pytest.warns(RuntimeWarning, match=rf"expected parameters of {expected}, found \d+ of \d+ in bfloat16, such as model"):
        served.load(folder, dtype=dtype, dense="torch")


@pytest.mark.parametrize("name", ["DeepSeek-V3 FP8", "gpt-oss MXFP4", "DeepSeek-V4 FP4", "Kimi INT4", "qwen3_moe"])
def test_a_dtype_that_it_gives(checkpoint, name):
    """Without a warning; and how all of a quantized model becomes float32."""
    dtypes = ("auto", torch.bfloat16, torch.float32) if name in ("qwen3_moe", "Kimi INT4") else ("auto", torch.bfloat16)
    with warnings.catch_warnings(record=True, action="always") as found:
        for dtype in dtypes:
            model = served.load(checkpoint(name), dtype=dtype)
            assert dtype in ("auto", model.dtype)
    assert not [each for each in found if "expected parameters of" in str(each.message)]
    torch.nn.Module.float(model)
    assert logits(model, prompts()).dtype == torch.float32
