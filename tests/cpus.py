"""Made-up CPUs: their features, the backends that each can use, and the fixtures that make this machine one of them."""

import pytest

from ktmoe import ExpertWeights
from ktmoe._native import core, isa
from ktmoe.backends import native
from ktmoe.errors import UnavailableError

ALL_FEATURES = sorted(core.cpu_features())
#: CPUs that have exactly the features of a row; and cores with AMX, hidden or not, where VDPBF16PS is slower than two FMAs.
CPUS = {row: isa.required_features(row) for row in isa.ISAS}
CPUS["avx512_bf16 with AMX"] = (*CPUS["avx512_bf16"], "amx_tile")
CPUS["avx512_bf16 with FP16"] = (*CPUS["avx512_bf16"], "avx512_fp16")
EVERYTHING = CPUS["amx"]
#: What each can use, best first: {backend: the row of its kernels}. The first is what "auto" takes.
BEST = {
    "portable": {"fp32_lut": "portable"},
    "avx2": {"avx2": "avx2", "fp32_lut": "portable"},
    "avx_vnni": {"avx2": "avx_vnni", "fp32_lut": "portable"},
    "avx512f": {"fp32_lut": "avx512f", "avx2": "avx2"},
    "avx512_vnni": {"fp32_lut": "avx512f", "avx2": "avx2"},
    "avx512_bf16": {"avx512_bf16": "avx512_bf16", "fp32_lut": "avx512f", "avx2": "avx2"},
    "avx512_bf16 with AMX": {"fp32_lut": "avx512f", "avx512_bf16": "avx512_bf16", "avx2": "avx2"},
    "avx512_bf16 with FP16": {"fp32_lut": "avx512f", "avx512_bf16": "avx512_bf16", "avx2": "avx2"},
    "amx": {"amx": "amx", "fp32_lut": "avx512f", "avx512_bf16": "avx512_bf16", "avx2": "avx2"},
}
#: CPU feature -> the backends that need it.
NEEDED_BY = {
    "avx2": {"avx2", "avx512_bf16", "amx"},
    "fma": {"avx2", "avx512_bf16", "amx"},
    "avx512f": {"avx512_bf16", "amx"},
    "avx512bw": {"avx512_bf16", "amx"},
    "avx512vl": {"avx512_bf16", "amx"},
    "avx512_bf16": {"avx512_bf16", "amx"},
    "avx512vbmi": {"amx"},
    "gfni": {"amx"},
    "amx_tile": {"amx"},
    "amx_bf16": {"amx"},
    "avx_vnni": set(),  # only modes of avx2, which has other kernels for them
    "avx512_vnni": set(),
    "avx512_fp16": set(),  # only a mark of Intel's cores with AMX
}
#: Rows that serve nothing but activation modes of other rows' backends.
OF_MODES = {"avx_vnni": ["int16", "int8"], "avx512_vnni": ["int8"]}


@pytest.fixture
def cpu(monkeypatch):
    """A function that makes this a CPU with just these features, under an operating system that refuses none."""
    monkeypatch.setattr(native, "refusal", lambda isa: None)
    monkeypatch.setattr(native, "_refused", {})

    def pretend(*features):
        assert set(features) <= set(ALL_FEATURES)
        monkeypatch.setattr(core, "cpu_features", lambda: {name: name in features for name in ALL_FEATURES})

    return pretend


@pytest.fixture
def uncompiled(monkeypatch):
    """A function that makes this a build without these instruction sets."""
    compiled = core.kernel_table

    def pretend(*rows):
        def kernel_table(isa):
            if isa in rows:
                raise UnavailableError(f"{isa} was not compiled into this build")
            return compiled(isa)

        monkeypatch.setattr(core, "kernel_table", kernel_table)

    return pretend


def experts_of(formats):
    """Experts of these formats, of which nothing is read."""
    return ExpertWeights(1, 64, 64, lambda *_: pytest.fail("was read"), formats)
