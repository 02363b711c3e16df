"""Rounding weights: bytes of bfloat16 a second, beside copying them, by as many threads as ktmoe has."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import ktmoe
from bench import record
from bench.cases import EVERYWHERE
from bench.copying import Copying
from bench.models import models
from ktmoe import BF16, Matrix, reference
from ktmoe.quantization import Quantizer

SHAPE = models()[EVERYWHERE]
MATRICES = 8  # in turn, so that they come from memory
QUANTIZERS = {to: Quantizer(to) for to in ("mxfp4", "nvfp4", "mxfp8", "fp8", "int8", "int4")} | {
    "AMXINT4": Quantizer("int4", rule="amxint4"),
    "AMXINT8": Quantizer("int8", rule="amxint8"),
}


@pytest.fixture(scope="module")
def matrices():
    rng = np.random.default_rng(0)
    shape = SHAPE.intermediate, SHAPE.hidden
    weights = (rng.standard_normal((MATRICES, *shape), np.float32) * np.float32(0.02)).astype(ml_dtypes.bfloat16)
    return [Matrix(f"matrix {number}", BF16, shape, codes) for number, codes in enumerate(weights)]


@pytest.mark.parametrize("name", QUANTIZERS)
def test_rounding(benchmark, matrices, name):
    """A round is all matrices, each by one thread, as when a layer is made of them."""
    nbytes, threads, quantizer = sum(m.codes.nbytes for m in matrices), ktmoe.get_num_threads(), QUANTIZERS[name]
    experts = ktmoe.ExpertWeights(MATRICES, SHAPE.hidden, SHAPE.intermediate, lambda expert, _: matrices[expert], BF16)
    rounded = quantizer.experts(experts)
    with ThreadPoolExecutor(threads) as pool, Copying(np.ones(nbytes, np.uint8)) as memcpy:
        made = []
        benchmark.pedantic(
            lambda: made.append(list(pool.map(rounded.matrix, range(MATRICES), ["gate"] * MATRICES))),
            setup=memcpy.copy,
            rounds=10,
            warmup_rounds=1,
        )
    seconds = benchmark.stats.stats.data
    shares = memcpy.shares(seconds)
    rate, share = nbytes / statistics.median(seconds) / 1e9, statistics.median(shares)
    benchmark.extra_info.update(
        record.shares(
            "load",
            shares,
            work=f"rounding bfloat16 to {name}",
            gb_s=rate,
            of_memcpy=share,
            figure=f"{rate:.2f} GB/s of bfloat16, {share:.0%} of memcpy with {threads} threads",
            contract="-",
        )
    )
    found, (_, error) = made[-1][0], quantizer.matrix(matrices[0])
    rows = slice(0, 128)
    off = reference.dequantize(found, rows) - matrices[0].codes[rows].astype(np.float64)
    assert np.sqrt((off**2).mean()) <= 1.2 * error.relative * 0.02
    assert error.relative < 0.2
