"""What is recorded of a measured point. compare.py compares `shares`, publish.py takes medians, summary.py prints them."""

from __future__ import annotations

from bench import machine
from bench.cases import Way
from ktmoe import measuring


def shares(suite: str, rounds: list[float] | tuple[float, ...], **fields) -> dict:
    """rounds: each round's own share of a limit that was measured in it."""
    return {"suite": suite, **machine.description(), "shares": [float(f"{share:.5g}") for share in rounds], **fields}


def forward(
    suite: str, way: Way, result: measuring.Result, batch: measuring.MeasuredBatch, check: measuring.Check, **fields
) -> dict:
    """Calls of a layer."""
    return shares(
        suite,
        result.limit_shares,
        backend=way.backend,
        isa=way.isa,
        activations=way.activations,
        **way.choices,
        tokens=result.tokens,
        experts=len(batch.experts),
        tokens_per_expert=batch.slots / len(batch.experts),
        ms=result.seconds * 1e3,
        read_gb_s=result.bytes_rate / 1e9,
        gflop_s=result.flops_rate / 1e9,
        limit_read_gb_s=result.read_limit / 1e9,
        read_streams=result.streams,
        limit_gflop_s=result.peak_limit / 1e9,
        share_of_read_bandwidth=result.read_share,
        share_of_multiply_peak=result.peak_share,
        worst_error_of_bound=check.error,
        bound_of_output=check.bound,
        **fields,
    )
