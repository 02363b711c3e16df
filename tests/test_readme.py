"""README's table of weights: each row runs, by each of its loaders on each backend, and whatever loaders read has a row."""

from dataclasses import replace

import numpy as np
import pytest
from checkpoints import SCHEMES, per_expert, write
from helpers import assert_right, random_batch
from integer_checkpoints import gptq, gptq_meaning

import ktmoe
from bench import readme
from ktmoe.experts import ExpertWeights
from ktmoe.synthetic import write_gguf
from ktmoe.weights.ggml import GGML
from ktmoe.weights.records import RecordOrder

#: Zero points need a config.json that says so.
ASYMMETRIC = {"quantization_config": {"sym": False}}
ALL = SCHEMES | {"gptq with zero points": per_expert("gptq", gptq, gptq_meaning)}
#: The types of GGUF, which is no safetensors' scheme, that have records.
TYPES = [name for name, weight_format in GGML.items() if isinstance(weight_format.order, RecordOrder)]
ROWS = {row.name: row for row in readme.weights()}


def schemes_of(row, folder):
    """{name: experts} of the small checkpoints whose weights are the row's."""
    found = {}
    for name, scheme in ALL.items():
        if scheme.loader in row.loaders:
            path = folder / name.replace(" ", "-")
            path.mkdir(parents=True)
            write(path, scheme.layer("model.layers.0"), None if name in SCHEMES else ASYMMETRIC)
            experts = ktmoe.load_experts(path, 0)
            if all(row.covers(scheme.loader, weight_format) for weight_format in experts.formats.values()):
                found[name] = experts
    for name in TYPES if "gguf" in row.loaders else ():
        path = folder / name
        write_gguf(path, types=name, num_experts=2, hidden=256, intermediate=256)
        experts = ktmoe.load_experts(path, 0)
        if row.covers("gguf", experts.formats["gate"]):
            found[name] = experts
    return found


@pytest.mark.cover("values")
@pytest.mark.parametrize("name", ROWS)
def test_a_row_runs(backend, tmp_path, name):
    row, rng = ROWS[name], np.random.default_rng(1)
    found = schemes_of(row, tmp_path)
    assert {"gguf" if scheme in TYPES else ALL[scheme].loader for scheme in found} == set(row.loaders)
    for experts in found.values():
        tame = of_size_one(experts)
        with ktmoe.MoELayer(tame, backend) as layer:
            assert_right(layer, tame, *random_batch(rng, experts, 3, 2))


def of_size_one(experts):
    """The same with UE8M0 scales from 2**-8 to 2**7, so that sums are finite: the small checkpoints have all of them."""

    def read(expert, projection):
        matrix = experts.matrix(expert, projection)
        scale = matrix.format.scale
        if isinstance(matrix.format.order, RecordOrder):
            return matrix
        return replace(matrix, scales=matrix.scales % 16 + 119) if scale and scale.kind == "ue8m0" else matrix

    sizes = experts.num_experts, experts.hidden, experts.intermediate
    return ExpertWeights(*sizes, read, experts.formats, experts.activation, experts.name)


def test_every_scheme_has_one_row(tmp_path):
    covered = [name for row in ROWS.values() for name in schemes_of(row, tmp_path / row.name.replace(" ", "-"))]
    assert sorted(covered) == sorted([*ALL, *TYPES])


def test_every_loader_has_a_row():
    assert {loader for row in ROWS.values() for loader in row.loaders} == set(ktmoe.loaders.names())
