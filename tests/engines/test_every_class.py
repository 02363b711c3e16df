"""Every class of experts in the installed transformers: ktmoe computes what its own forward() does, or refuses it by name."""

import pytest
import torch
from experts_classes import CLASSES, DECORATED, alone, computed
from tiny_models import EXPERTS, HIDDEN, TOP_K

import ktmoe.transformers as served
from ktmoe.errors import UnavailableError

#: The classes with the decorator that are refused, and the reason.
REFUSED = {
    "DiffusionGemmaTextExperts": "found another, act_fn GELUTanh",
    "Gemma4TextExperts": "found another, act_fn GELUTanh",
    "Inkling2Experts": "found another",
    "MuseSparkExperts": "found a norm behind each",
    "NemotronHExperts": "found no gate",
}
#: The classes that transformers opens to no other implementation.
CLOSED = {
    "DbrxExperts",
    "JetMoeParallelExperts",
    "Llama4TextExperts",
    "LongcatFlashExperts",
    "NllbMoeExperts",
    "Step3p7Experts",
    "SwitchTransformersExperts",
}
#: The classes that are called so, but are not routed: their models have others besides.
SHARED = {"AriaSharedExpertsMLP", "InklingSharedExperts"}
#: The classes whose function is float32's whatever its inputs are.
IN_FLOAT32 = {"BeamExperts", "OpenAIPrivacyFilterExperts"}
TOKENS = 6


@pytest.mark.smoke
def test_the_lists_are_complete():
    assert {*CLASSES} - {*DECORATED} == CLOSED | SHARED
    assert len(DECORATED) >= 65


def routed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, bfloat16 numbers as float32, ids and router weights. gate and up go past the limits that some have."""
    generator = torch.Generator().manual_seed(5)
    x = (4 * torch.randn((TOKENS, HIDDEN), generator=generator)).bfloat16().float()
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)])
    return x, ids, torch.rand(ids.shape, generator=generator)


@pytest.mark.smoke
@pytest.mark.parametrize("name", [name for name in DECORATED if name not in REFUSED])
def test_served(name):
    model, arguments = alone(name), routed()
    x, ids, weights = arguments
    with torch.inference_mode():
        y, bound = computed(model.experts.double(), *arguments)
        own = model.experts(x.double(), ids, weights.double())
        # so that what was computed here is what the class computes
        relative = 1e-6 if name in IN_FLOAT32 else 1e-12
        torch.testing.assert_close(own, y, rtol=0, atol=relative * float(y.abs().max()))
        assert bound.max() < 0.02 * y.abs().max()
        model.bfloat16()
        served.pack(model, activations="bf16")
        found = model.experts(x, ids, weights)
    assert found.dtype == torch.float32
    worst = ((found.double() - y).abs() / bound).max()
    assert worst <= 1, f"{worst:.3g} of the bound"


@pytest.mark.smoke
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    model = alone(name)
    before = dict(model.named_parameters())
    with pytest.raises(UnavailableError, match=rf"layers\.0\.experts \({name}\): .*{REFUSED[name]}"):
        served.pack(model)
    assert dict(model.named_parameters()) == before


@pytest.mark.smoke
@pytest.mark.parametrize("name", sorted(CLOSED))
def test_closed(name):
    with pytest.raises(UnavailableError, match=f"Alone: ktmoe cannot serve it: transformers opens its {name} to no other"):
        served.pack(alone(name))
