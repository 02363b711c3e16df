"""The function that a module of experts has between gate/up and down, found out by evaluating it."""

from __future__ import annotations

import math

import numpy as np
import torch

from ktmoe.errors import UnavailableError
from ktmoe.weights.activation import GatedActivation

#: Attributes in which transformers' modules keep the numbers of their function.
_LIMITS, _ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")
#: float32 functions of sound implementations differ by less.
_TOLERANCE = 1e-5


def recognise(module: torch.nn.Module, name: str) -> GatedActivation:
    """The GatedActivation that a module's _apply_gate() computes, on a grid that goes past its limits on both sides.

    name: what messages call the module. Raises UnavailableError if it is none.
    """
    candidates = [
        GatedActivation(alpha, limit, offset)
        for limit in (math.inf, *_numbers(module, _LIMITS))
        for alpha in (1.0, *_numbers(module, _ALPHAS))
        for offset in (0.0, 1.0)
    ]
    gate, up = _grid([each.limit for each in candidates if math.isfinite(each.limit)])
    try:
        found = _evaluate(module, gate, up)
    except Exception as error:  # whatever the model's own code raises
        raise UnavailableError(f"{name}: its activation cannot be evaluated: {type(error).__name__}: {error}") from error
    for candidate in candidates:
        expected = _definition(candidate, gate, up)
        if found.shape == expected.shape and np.allclose(found, expected, rtol=_TOLERANCE, atol=1e-30):
            return candidate
    function = getattr(module, "act_fn", None)
    described = f", act_fn {type(function).__name__}" if function is not None else ""
    raise UnavailableError(
        f"{name}: expected SwiGLU, with or without limits, alpha and an offset of up; found another{described}"
    )


def _numbers(module: torch.nn.Module, names: tuple[str, ...]) -> list[float]:
    """The module's attributes of these names that are numbers above 0."""
    found = [getattr(module, name, None) for name in names]
    return [float(value) for value in found if isinstance(value, int | float) and 0 < value < math.inf]


def _grid(limits: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Every pair of gate and up, float32 [pairs] each: numbers around the limits and up to 60 on both sides."""
    sizes = [0.0, 0.01, 0.3, 1.0, 1.7, 3.0, 8.0, 20.0, 60.0]
    sizes += [limit * share for limit in limits for share in (0.5, 0.99, 1.01, 2.0)]
    points = np.unique(np.array([sign * size for size in sizes for sign in (-1, 1)], np.float32))
    gate, up = np.meshgrid(points, points)
    return gate.ravel(), up.ravel()


def _evaluate(module: torch.nn.Module, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """What the module makes of one token whose gate and up are these, float64."""
    row = np.concatenate([gate, up]) if module.is_concatenated else np.stack([gate, up], axis=1).ravel()
    # transformers builds models under another default device
    with torch.no_grad(), torch.device("cpu"):
        return module._apply_gate(torch.from_numpy(row)[None])[0].double().numpy()


def _definition(activation: GatedActivation, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """GatedActivation's formula in float64."""
    gate = np.minimum(gate.astype(np.float64), activation.limit)
    up = np.clip(up.astype(np.float64), -activation.limit, activation.limit)
    with np.errstate(over="ignore"):
        return (up + activation.up_offset) * gate / (1 + np.exp(-activation.alpha * gate))
