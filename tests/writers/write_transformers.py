"""write_transformers.py FOLDER: save_pretrained() of every model in tiny_models.py, and what its experts compute in float64."""

import inspect
from functools import partial
from pathlib import Path

import numpy as np
import tiny_models
import torch
import transformers
import writing
from tiny_models import EXPERTS, HIDDEN


def write(folder: Path, model_type: str, changes: dict) -> dict[str, np.ndarray]:
    """y.{layer}: the output of each layer's own module of experts."""
    model = tiny_models.make(model_type, changes)
    model.save_pretrained(folder)
    if model_type in tiny_models.REFUSED:
        return {}
    return {f"y.{layer}": output(module.double()) for layer, module in tiny_models.modules(model)}


def output(module: torch.nn.Module) -> np.ndarray:
    """float64 [tokens, hidden]."""
    x, ids, weights = map(torch.from_numpy, writing.routed(HIDDEN, EXPERTS))
    with torch.no_grad():
        if len(inspect.signature(module.forward).parameters) > 1:
            return module(x, ids, weights).numpy()
        # Llama-4's takes x once for each expert, multiplied by the router weight, which is 0 where an expert is not chosen
        scores = torch.zeros(EXPERTS, len(x), dtype=torch.float64)
        scores[ids, torch.arange(len(x))[:, None]] = weights
        return module((scores[:, :, None] * x).reshape(-1, HIDDEN)).reshape(EXPERTS, len(x), HIDDEN).sum(0).numpy()


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    models = {name: model[1] for name, model in tiny_models.MODELS.items()}
    models |= {name: model[0] for name, model in tiny_models.REFUSED.items()}
    writing.main({name: partial(write, model_type=name, changes=changes) for name, changes in models.items()})
