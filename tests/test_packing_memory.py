"""What a layer's making takes: memory, which is given back however it ends, and one reading of each matrix."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from helpers import B16, FORMATS, random_experts, reading

from ktmoe import MXFP4, ExpertWeights, Matrix, MoELayer, backends, int4
from ktmoe.errors import FormatError
from ktmoe.weights.elements import E2M1
from ktmoe.weights.formats import MXFP8, WeightFormat, fp8, nvfp4
from ktmoe.weights.scales import Scale

#: hidden, intermediate, format, bytes a weight of the checkpoint: codes and their share of a scale, a zero point, a factor.
MODELS = {
    "DeepSeek V4-Flash": (4096, 2048, MXFP4, 17 / 32),
    "DeepSeek V4-Pro": (7168, 3072, MXFP4, 17 / 32),
    "gpt-oss": (2880, 2880, MXFP4, 17 / 32),
    "Kimi-K2": (7168, 2048, int4(32), 18 / 32),
    "groups of 128": (5120, 1536, int4(128), 66 / 128),
    "DeepSeek V3": (7168, 2048, fp8(), 1 + 4 / 128**2),
    "MiniMax-M3": (3072, 1536, MXFP8, 33 / 32),
    "NVFP4": (4096, 2048, nvfp4(), (9 + 64 / 4096 / 2048) / 16),
    "GPTQ": (2048, 768, FORMATS["gptq-128"], (64 + 2 + 0.5) / 128),
    "AWQ": (2048, 768, FORMATS["awq-128"], (64 + 2 + 0.5) / 128),
    "Qwen3-30B": (2048, 768, B16, 2),
    "gpt-oss in b16": (2880, 2880, B16, 2),
}


@pytest.mark.cover("values")
@pytest.mark.parametrize(("hidden", "intermediate", "weight_format", "bytes_a_weight"), MODELS.values(), ids=MODELS)
def test_packed_weights_take_at_most_one_percent_more_than_the_checkpoints(
    backend, hidden, intermediate, weight_format, bytes_a_weight
):
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}

    def matrix(n, k):
        stored = {label: np.ones(shape, dtype) for label, (dtype, shape) in weight_format.arrays(n, k).items()}
        return Matrix("w", weight_format, (n, k), **stored)

    read = {shape: matrix(*shape) for shape in set(shapes.values())}
    experts = ExpertWeights(1, hidden, intermediate, lambda _, projection: read[shapes[projection]], weight_format)
    checkpoint = 3 * hidden * intermediate * bytes_a_weight
    assert experts.nbytes == pytest.approx(checkpoint, rel=1e-6)
    with MoELayer(experts, backend) as layer:
        assert layer.nbytes <= 1.01 * checkpoint


def memory_bytes():
    """(mapped, resident) bytes of this process."""
    pages = [int(field) for field in Path("/proc/self/statm").read_text().split()[:2]]
    return np.array(pages) * os.sysconf("SC_PAGE_SIZE")


def big_experts(fail_at=None, error=None):
    """16 experts of 3 MB each; reading expert fail_at raises error, or gives a NaN scale where error is None."""
    good = random_experts(np.random.default_rng(4), 1, 1024, 1024)
    scales = np.full((1024, 32), 255, np.uint8)

    def read(expert, projection):
        matrix = good.matrix(0, projection)
        if expert != fail_at:
            return matrix
        if error:
            raise error
        return Matrix("bad", MXFP4, matrix.shape, matrix.codes, scales)

    return ExpertWeights(16, 1024, 1024, read)


class Cancelled(Exception):
    pass


@pytest.mark.cover("values")
@pytest.mark.parametrize("how", ["read", "NaN scale", "progress", "close", "garbage"])
def test_memory_is_given_back(backend, how):
    """Whether a layer's making fails, or it is closed, or dropped: eight of them leave less behind than one holds."""

    def cancel(done, total):
        if done > total * 0.8:
            raise Cancelled

    def attempt():
        if how == "read":
            with pytest.raises(OSError, match="torn"):
                MoELayer(big_experts(14, OSError("torn")), backend)
        elif how == "NaN scale":
            with pytest.raises(FormatError, match="bad: scale"):
                MoELayer(big_experts(14), backend)
        elif how == "progress":
            with pytest.raises(Cancelled):
                MoELayer(big_experts(), backend, progress=cancel)
        elif how == "close":
            layer = MoELayer(big_experts(), backend)
            layer.close()
            attempt.kept.append(layer)  # closed, though not dropped
        else:
            MoELayer(big_experts(), backend)

    attempt.kept = []
    attempt()
    gc.collect()
    before = memory_bytes()
    for _ in range(8):
        attempt()
    gc.collect()
    layer_bytes = big_experts().nbytes
    mapped, resident = memory_bytes() - before
    assert resident < layer_bytes / 2
    assert mapped < 2 * layer_bytes  # an idle thread's heap maps more than it holds


def test_progress_counts_the_checkpoints_bytes(backend):
    experts = random_experts(np.random.default_rng(5), 3, 64, 64)
    calls = []
    with MoELayer(experts, backend, progress=lambda *done_and_total: calls.append(done_and_total)):
        pass
    assert calls == [(experts.nbytes * n // 3, experts.nbytes) for n in (1, 2, 3)]


def test_matrices_are_read_once_each():
    experts, asked = random_experts(np.random.default_rng(6), 4, 64, 64), []
    with MoELayer(reading(experts, lambda *key: (asked.append(key), experts.matrix(*key))[1]), "fp32_lut"):
        pass
    assert sorted(asked) == sorted((e, p) for e in range(4) for p in ("gate", "up", "down"))


def test_an_unknown_format_is_refused_before_anything_is_read():
    weight_format = WeightFormat(E2M1, Scale("ue8m0", (1, 16)))
    experts = ExpertWeights(1, 64, 64, lambda *_: pytest.fail("was read"), weight_format)
    assert "ue8m0 scales per 1x16" in backends.get("fp32_lut").lookup(experts).reason
