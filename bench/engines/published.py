"""What a results file keeps of make bench-engines besides whole models, which bench/engines/page.py has."""

from __future__ import annotations

import datetime

from bench.engines import report
from bench.engines.ways import OF_EXPERTS
from bench.results_file import digits
from bench.saved_run import streams_of


def section(saved: dict) -> dict | None:
    """A results file's `engines`, of what make bench-engines saved besides whole models; None if that is nothing.

    Ways that failed are left out.
    """
    kept = [comparison for comparison in saved["comparisons"] if comparison["comparison"] in OF_EXPERTS]
    if not kept:
        return None
    streams = streams_of([row for comparison in kept for row in comparison["rounds"]])
    commit = {"commit": saved["commit"]} if saved["commit"] else {}
    comparisons = [
        {
            **{name: comparison[name] for name in ("model", "layers", "of_layers", "vocabulary")},
            "way": [
                _way(name, about, found)
                for name, about in comparison["ways"].items()
                if not about["failure"] and (found := report.figures(comparison, name))
            ],
        }
        for comparison in kept
    ]
    date = datetime.date.fromisoformat(saved["date"])
    return {
        "date": date,
        **commit,
        "source": "make bench-engines",
        **({"read_streams": streams} if streams else {}),
        "comparison": comparisons,
    }


def _way(name: str, about: dict, found: dict) -> dict:
    """load_s: of a checkpoint that was read. bfloat16 weights were made."""

    def line(number: str, count: int, fields: dict) -> dict:
        lead = {"lead": digits(fields["lead"])} if fields["lead"] else {}
        read = {"read_gb_s": digits(fields["read"] / 1e9), "of_read": digits(fields["of_read"])} if "read" in fields else {}
        return {number: count, "tokens_s": digits(fields["rate"]), **lead, "experts": digits(fields["share"]), **read}

    return {
        "name": name,
        "weights": about["weights"],
        **({"environment": about["environment"]} if about["environment"] else {}),
        **({"error": digits(about["error"])} if about["error"] is not None else {}),
        "peak_gb": digits(found["peak"] / 1e9),
        **({"load_s": digits(found["load"]["seconds"])} if about["weights"] == "MXFP4" else {}),
        "prefill": [line("tokens", *entry) for entry in found["prefill"].items()],
        "decode": [line("texts", *entry) for entry in found["decode"].items()],
    }
