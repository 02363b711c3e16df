"""Small models of transformers, each as its save_pretrained() names its tensors: ktmoe's loaders read what its modules hold."""

import pytest
import tiny_models
import torch
from engine_models import experts, save
from serving import assert_served
from tiny_models import EXPERTS, HIDDEN, MODELS

import ktmoe.transformers as served

#: The models whose experts transformers opens to no other implementation, so that ktmoe cannot serve them.
CLOSED = {"llama4_text", "longcat_flash"}


@pytest.mark.smoke
@pytest.mark.parametrize("name", [name for name in MODELS if name not in CLOSED])
def test_a_model(name, tmp_path):
    """Each module's output has the same bits whether its parameters were packed, or read from the checkpoint by either way."""
    model = tiny_models.make(name, MODELS[name][1])
    save(model, tmp_path)
    served.pack(model)
    generator = torch.Generator().manual_seed(11)
    x = torch.randn((5, HIDDEN), generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(5)])
    weights = torch.rand(ids.shape, generator=generator)
    for source in ("checkpoint", "parameters"):
        loaded = served.load(tmp_path, source=source)
        assert type(loaded) is type(model)
        assert_served(loaded)
        for (where, module), (other, packed) in zip(experts(loaded), experts(model), strict=True):
            assert where == other
            assert torch.equal(module(x, ids, weights), packed(x, ids, weights)), where
