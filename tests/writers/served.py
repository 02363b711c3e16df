"""What the tests of others' writers share: one loader claims a folder, and what its experts compute, by the definitions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from checkpoints import numbers, scores
from writing import routed

import ktmoe
from ktmoe import reference
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.loaders.base import Loader, find_loader
from ktmoe.loaders.checkpoint import Checkpoint

#: Unit roundoff of float64.
UNIT = 2.0**-53


def claimed(folder: Path, loader: str) -> tuple[Loader, Checkpoint]:
    """The loader of that name and the folder's checkpoint, which no other loader claims."""
    checkpoint = Checkpoint(folder)
    assert {name for name, score in scores(checkpoint).items() if score} == {loader}
    return find_loader(checkpoint), checkpoint


def plain(experts: ExpertWeights, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """y [tokens, hidden] in float64 without any rounding between, and a bound on how far two such computations are apart.

    A sum of n products is off by at most n UNIT times the sum of their sizes, in any order (Higham 2002, eq. 4.4). Errors of
    gate and up pass to h: its function changes by at most 1.1 times its input, and its exponential is off by |alpha g| UNIT.
    """
    act = experts.activation
    y, size = np.zeros_like(x), np.zeros_like(x)
    largest = 0.0
    for token, slot in np.ndindex(ids.shape):
        matrices = {p: experts.matrix(int(ids[token, slot]), p) for p in PROJECTIONS}
        w = {p: numbers(matrix) for p, matrix in matrices.items()}
        bias = {p: 0.0 if matrix.bias is None else matrix.bias.astype(np.float64) for p, matrix in matrices.items()}
        r, a = weights[token, slot], x[token]
        if experts.router_weight == "expert_input":
            r, a = 1.0, r * a
        gate, up = (w[p] @ a + bias[p] for p in ("gate", "up"))
        sizes = {p: np.abs(w[p]) @ np.abs(a) + np.abs(bias[p]) for p in ("gate", "up")}
        gate, up = np.minimum(gate, act.limit), np.clip(up, -act.limit, act.limit)
        h = gate / (1 + np.exp(-act.alpha * gate)) * (up + act.up_offset)
        y[token] += r * (w["down"] @ h + bias["down"])
        of_h = sizes["gate"] * (sizes["up"] + act.up_offset)
        size[token] += abs(r) * (np.abs(w["down"]) @ of_h + np.abs(bias["down"]))
        largest = max(largest, np.abs(act.alpha * gate).max())
    roundings = 2 * experts.hidden + experts.intermediate + ids.shape[1] + largest + 16
    return y, 2 * 2.2 * roundings * UNIT * size


def check_layer(folder: Path, layer: int | str, num_experts: int, hidden: int) -> None:
    """A MoELayer from that folder stays within the bound of the reference."""
    x, ids, weights = routed(hidden, num_experts)
    experts = ktmoe.load_experts(folder, layer)
    expected = reference.forward(experts, x, ids, weights, out_dtype="float32", router_weight=experts.router_weight)
    with ktmoe.MoELayer.from_checkpoint(folder, layer=layer) as made:
        assert expected.worst(made.forward(x.astype(np.float32), ids, weights.astype(np.float32))) <= 1
