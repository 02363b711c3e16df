"""What a results file holds: the fields of each section."""

from __future__ import annotations

import datetime

#: The fields of one call or kernel. Shares are of the limits that the same rounds measured.
CALL = {"ms?": float, "gb_s?": float, "of_read?": float, "gflop_s?": float, "of_peak?": float}
#: The fields of generate(). experts: their share of the time.
RATE = {"tokens_s": float, "lead?": float, "experts": float}
LOADING = (
    "seconds",
    "gb_s",
    "of_memcpy",
    "of_reading",
    "of_reading_into_new_memory",
    "parsing_seconds",
    "peak_rss_of_packed",
    "packed_of_checkpoint",
)
#: Text of whole models. file: the types of a GGUF file.
TEXTS = {
    "date": datetime.date,
    "commit?": str,
    "source": str,
    "comparison": [
        {
            "model": str,
            "file?": str,
            "layers": int,
            "of_layers": int,
            "vocabulary": int,
            "by_turns": bool,
            "way": [
                {
                    "name": str,
                    "error?": float,
                    "resident_gb": float,
                    "mapped_gb": float,
                    "packed_gb": float,
                    "load_s": float,
                    "prefill": [{"tokens": int, "tokens_s": float, "ratio?": float}],
                    "decode": [{"texts": int, "after": int, "tokens_s": float, "ratio?": float, "of_limit?": float}],
                }
            ],
        }
    ],
}
#: A dict has these fields, and those with a question mark if they are known. [kind] is a list, {str: kind} has any names.
SCHEMA = {
    "date": datetime.date,
    "commit": str,
    "source": str,
    "ktmoe?": str,
    "compiler?": str,
    "cpu": {
        "name": str,
        "family": int,
        "model": int,
        "stepping?": int,
        "features?": [str],
        "threads": int,
        "l2_bytes?": int,
        "llc_bytes?": int,
    },
    "limits?": {"read_gb_s?": float, "read_streams?": int, "handoff_us?": float, "multiply_gflop_s?": {str: float}},
    "layer?": [
        {
            "model": str,
            "weights": str,
            "backend": str,
            "isa": str,
            "activations": str,
            "rounding": str,
            "tuned_for?": str,
            "experts": int,
            "copies": int,
            "bound?": float,
            "decode?": [{"tokens": int, **CALL}],
            "prefill?": [{"tokens": int, **CALL}],
            "per_expert?": [{"rows": int, "experts": int, **CALL}],
        }
    ],
    "kernel?": [
        {
            "weights": str,
            "isa": str,
            "activations": str,
            "scales": str,
            "memory?": [{"rows": int, **CALL}],
            "l2?": [{"rows": int, **CALL}],
        }
    ],
    "pool?": [{"work": str, "us": float, "low_us?": float, "high_us?": float, "of_call?": float}],
    "load?": [{"work": str, **{f"{name}?": float for name in LOADING}}],
    "modes?": {
        "date": datetime.date,
        "commit": str,
        "source": str,
        "model": str,
        "experts": int,
        "mode": [
            {
                "backend": str,
                "isa": str,
                "form": str,
                "activations": str,
                "beside": str,
                "call": [{"work": str, "tokens": int, "ms": float, "ratio": float}],
            }
        ],
    },
    "linear?": {
        "date": datetime.date,
        "commit": str,
        "source": str,
        "call": [
            {
                "model": str,
                "call": str,
                "weights": str,
                "backend": str,
                "isa": str,
                "activations": str,
                "shapes": [[int]],
                "dispatches": int,
                "copies": int,
                "cached": bool,
                "nbytes": int,
                "bound": float,
                "point": [{"rows": int, **CALL}],
            }
        ],
    },
    "linear_peers?": {
        "date": datetime.date,
        "commit?": str,
        "source": str,
        "call": [
            {
                "model": str,
                "call": str,
                "weights": str,
                "shapes": [[int]],
                "dispatches": int,
                "copies": int,
                "library": [
                    {
                        "name": str,
                        "version": str,
                        "weights": str,
                        "activations": str,
                        "bytes": int,
                        "most_error": float,
                        "point": [{"rows": int, "ms": float, "lead?": float, "of_read": float, "of_peak": float}],
                    }
                ],
            }
        ],
    },
    "peers?": [
        {
            "weights": str,
            "date": datetime.date,
            "commit?": str,
            "source": str,
            "experts": int,
            "auto?": str,
            "int8?": str,
            "library": [
                {
                    "name": str,
                    "version?": str,
                    "activations": str,
                    "least_error?": float,
                    "most_error?": float,
                    "calls": [{"tokens": int, "ms": float, "lead?": float, "int8_lead?": float}],
                }
            ],
        }
    ],
    "training?": {
        "date": datetime.date,
        "commit?": str,
        "source": str,
        "model": str,
        "rank": int,
        "run": [
            {
                "experts": int,
                "tokens": int,
                "rows": int,
                "participant": [
                    {
                        "name": str,
                        "forward_gflop_s": float,
                        "forward_of_peak": float,
                        "backward_gflop_s": float,
                        "backward_of_peak": float,
                        "step_s": float,
                        "ratio": float,
                        "loaded_gb?": float,
                        "step_gb?": float,
                        "error?": float,
                    }
                ],
            }
        ],
    },
    "engines?": {
        "date": datetime.date,
        "commit?": str,
        "source": str,
        "read_streams?": int,
        "comparison": [
            {
                "model": str,
                "layers": int,
                "of_layers": int,
                "vocabulary": int,
                "way": [
                    {
                        "name": str,
                        "weights": str,
                        "environment?": {str: str},
                        "error?": float,
                        "peak_gb": float,
                        "load_s?": float,
                        "prefill": [{"tokens": int, **RATE}],
                        "decode": [{"texts": int, **RATE, "read_gb_s": float, "of_read": float}],
                    }
                ],
            }
        ],
    },
    "whole?": TEXTS,
    "gguf?": TEXTS,
    "cold?": {
        "date": datetime.date,
        "commit?": str,
        "source": str,
        "comparison": [
            {
                "model": str,
                "file": str,
                "layers": int,
                "of_layers": int,
                "vocabulary": int,
                "file_gb": float,
                "disk_gb_s": float,
                "way": [
                    {
                        "name": str,
                        "read": str,
                        "before_s": float,
                        "load_s": float,
                        "token_s": float,
                        "of_disk?": float,
                        "total_s": float,
                        "ratio?": float,
                        "ratio_after?": float,
                    }
                ],
            }
        ],
    },
    "vllm?": {
        "date": datetime.date,
        "commit?": str,
        "source": str,
        "version": str,
        "model": str,
        "layers": int,
        "of_layers": int,
        "way": [
            {
                "name": str,
                "weights": str,
                "environment?": {str: str},
                "memory_gb": float,
                "load_s": float,
                "prefill": [{"tokens": int, "tokens_s": float, "lead?": float}],
                "decode": [{"texts": int, "tokens_s": float, "lead?": float}],
            }
        ],
    },
    "vllm_servers?": {
        "date": datetime.date,
        "commit?": str,
        "source": str,
        "version": str,
        "model": str,
        "layers": int,
        "of_layers": int,
        "prompt": int,
        "new": int,
        "read_gb_s": float,
        "read_streams": int,
        "server": [
            {
                "name": str,
                "weights": str,
                "of": str,
                "options": str,
                "environment?": {str: str},
                "users": [
                    {
                        "users": int,
                        "texts": int,
                        "first_s": float,
                        "decode_tokens_s": float,
                        "decode_lead?": float,
                        "tokens_s": float,
                        "lead?": float,
                    }
                ],
            }
        ],
    },
    "vllm_dense?": {
        "date": datetime.date,
        "commit?": str,
        "source": str,
        "layer": [
            {"name": str, "n": int, "k": int, "gb_s": float, "tokens": [{"tokens": int, "lead": float}]},
        ],
    },
    "distributed?": {
        "date": datetime.date,
        "commit?": str,
        "source": str,
        "model": str,
        "weights": str,
        "experts": int,
        "top_k": int,
        "hidden": int,
        "intermediate": int,
        "shards": int,
        "absent": {str: str},
        "group": [
            {
                "network": str,
                "communicator": str,
                "ranks": int,
                "cpus": int,
                "shared": bool,
                "latency_us?": float,
                "gb_s?": float,
                "packed_gb": float,
                "exchange": [{"bytes": int, "us": float}],
                "call": [
                    {
                        "tokens": str,
                        "count": int,
                        "ms": float,
                        "messages_ms": float,
                        "compute_ms": float,
                        "host_ms": float,
                        "model_ms": float,
                        "alone_ms": float,
                        "ratio": float,
                        "rounds": int,
                        "bytes": int,
                    }
                ],
            }
        ],
    },
    "soak?": {
        "date": datetime.date,
        "commit": str,
        "source": str,
        "row": [{"what": str, "done": int, "of": int, "seconds": float, "most": {str: float}}],
    },
    "cost?": [{"isa": str, "activations": str, "decode_ns": float, "efficiency": float, "overlap": float}],
}
