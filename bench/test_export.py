"""Exporting: how fast KTMoEWrapper writes experts into the host buffers of GPU ranks, as SGLang asks it before a prefill."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

import ktmoe
from bench import record
from bench.cases import EVERYWHERE
from bench.copying import Copying
from bench.models import models
from ktmoe import synthetic
from ktmoe.compat.kt_kernel import KTMoEWrapper

SHAPE = models()[EVERYWHERE]
EXPERTS = 8  # in turn, so that they come from memory
RANKS = 2
WRITERS = {"MXFP4": synthetic.write_deepseek_v4, "RAWINT4": synthetic.write_kimi_k2, "FP8": synthetic.write_fp8}


@pytest.fixture(scope="module", params=WRITERS)
def wrapper(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    sizes = {"num_experts": EXPERTS, "hidden": SHAPE.hidden, "intermediate": SHAPE.intermediate}
    try:
        WRITERS[request.param](path, **sizes)
        made = KTMoEWrapper(
            layer_idx=0,
            num_experts=EXPERTS,
            num_experts_per_tok=1,
            hidden_size=SHAPE.hidden,
            moe_intermediate_size=SHAPE.intermediate,
            threadpool_count=1,
            weight_path=path,
            method=request.param,
        )
        made.load_weights()
    finally:
        for file in path.iterdir():
            file.unlink()
    with made:
        yield made


def test_exporting(benchmark, wrapper):
    """A round is all experts, one after the other, into the ranks' buffers; beside copying the checkpoint's bytes of these."""
    experts = wrapper.moe.spec
    codes = [{p: matrix.codes for p, matrix in part.items()} for part in wrapper.moe.export_expert(EXPERTS - 1, RANKS)]
    w13, w2 = (sum(codes[0][p].nbytes for p in names) for names in (("gate", "up"), ("down",)))
    buffers = [np.ones((RANKS, nbytes), np.uint8) for nbytes in (w13, w13, w2, w2)]  # scales are less than codes
    pointers = [[rank.ctypes.data for rank in buffer] for buffer in buffers]

    def export():
        for expert in range(EXPERTS):
            wrapper.submit_write_weight_scale_to_buffer(RANKS, expert, *pointers)
        wrapper.sync_write_weight_scale_to_buffer()

    with Copying(np.ones(experts.nbytes, np.uint8)) as memcpy:
        benchmark.pedantic(export, setup=memcpy.copy, rounds=10, warmup_rounds=1)
    seconds = benchmark.stats.stats.data
    shares = memcpy.shares(seconds)
    rate, share = experts.nbytes / statistics.median(seconds) / 1e9, statistics.median(shares)
    benchmark.extra_info.update(
        record.shares(
            "load",
            shares,
            work=f"exporting experts for {RANKS} GPUs, {wrapper.method}",
            gb_s=rate,
            of_memcpy=share,
            figure=f"{rate:.2f} GB/s, {share:.0%} of memcpy with {ktmoe.get_num_threads()} threads",
            contract="-",
        )
    )
    for rank, part in enumerate(codes):
        assert np.array_equal(buffers[0][rank], np.concatenate([part[p].view(np.uint8).ravel() for p in ("gate", "up")]))
        assert np.array_equal(buffers[2][rank], part["down"].view(np.uint8).ravel())
