"""A skip is a promise: it must have one of these reasons, or it counts as a failure. CI therefore cannot skip unnoticed."""

from __future__ import annotations

import re

import pytest

#: Every reason for which a test may be skipped, as a regular expression that must match from the reason's start.
ALLOWED = (
    r"this CPU lacks (avx2|avx512\w*|fma)( |,|$)",  # not what is emulated, but what the emulator builds on
    r"there is no C compiler",
    r"the compiler has no -fsanitize=[\w,]+ that works here",
    r"this CPU has the instructions",  # so that nothing is emulated
    r"the system's assembler does not know (AVX512_BF16|AMX)",
    r"this system has no posix_fadvise",
    r"this file system reads by way of the page cache",  # such as tmpfs, which is one
    r"objdump is not installed",
    r"(torch|vLLM) is not installed",
    r"torch has no CUDA device here",
    r"there can be no (network|mount) namespaces here: ",
    r"matplotlib is not installed",
    r"needs two CPUs",
    r"this Python has a GIL",
    r"needs (several NUMA nodes|the guest (\w+ )?of make test-numa)",  # these guests have them
    r"IPv6 cannot be used here",
    r"(kt-kernel|SGLang|compressed-tensors|modelopt|autoawq|quark|gptqmodel|torchao|mypy) is not installed",
    r"(llama|llama-converter|engines) is not installed",
    r"this CPU lacks what kt-kernel's \w+ needs",
)


def allowed(reason: str) -> bool:
    """Whether a test may be skipped for this reason."""
    return any(re.match(pattern, reason) for pattern in ALLOWED)


def judge(report):
    """The report of a test or of a file; an unexpected skip becomes a failure."""
    if report.outcome == "skipped" and not hasattr(report, "wasxfail"):
        *_, text = report.longrepr if isinstance(report.longrepr, tuple) else (str(report.longrepr),)
        reason = text.removeprefix("Skipped: ")
        if not allowed(reason):
            report.outcome = "failed"
            report.longrepr = f"skipped for a reason that tests/skips.py does not allow: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return judge((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return judge((yield))
