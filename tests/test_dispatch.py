"""Which backend and kernels run where: fake CPUs, compile flags within the requirements, detection, KTMOE_BACKEND."""

import platform
import re
from pathlib import Path

import pytest
from cpus import ALL_FEATURES, BEST, CPUS, EVERYTHING, NEEDED_BY, OF_MODES, experts_of
from helpers import FORMATS, GROUPS

from ktmoe import MXFP4, Scale, WeightFormat, backends
from ktmoe._native import core, isa
from ktmoe.backends import native
from ktmoe.backends.base import Missing
from ktmoe.backends.choice import choose_backend
from ktmoe.errors import UnavailableError, UnknownNameError

NATIVE = Path(core.__file__).parent


def isas():
    """{backend: the instruction set of the kernels that it uses here} of all that are available, best first."""
    return {name: backends.get(name).lookup().table.name for name in backends.available()}


def test_every_row_and_feature_is_in_the_tables():
    assert set(BEST) == set(CPUS) >= set(isa.ISAS)
    assert set(NEEDED_BY) == set(ALL_FEATURES)


@pytest.mark.parametrize("name", CPUS)
def test_a_cpu_with_exactly_one_rows_features(cpu, name):
    cpu(*CPUS[name])
    assert list(isas().items()) == list(BEST[name].items())
    best = next(iter(BEST[name]))
    assert choose_backend("auto").name == best
    for weight_format in FORMATS.values():
        assert choose_backend("auto", experts_of(weight_format)).name == best
    for usable in BEST[name]:
        assert choose_backend(usable)[:2] == (usable, "asked for by name")
        row = "avx2" if usable == "avx2" else BEST[name][usable]  # AVX-VNNI serves modes of it and does not rank it
        assert backends.get(usable).rank == isa.rank(row, core.cpu_features())


@pytest.mark.parametrize(("row", "missing"), [(row, feature) for row in ("avx512_bf16", "amx") for feature in CPUS[row]])
def test_a_cpu_that_lacks_one_feature(cpu, row, missing):
    """By far the most telling message a user can get; and there is always a backend."""
    cpu(*(feature for feature in CPUS[row] if feature != missing))
    lost = NEEDED_BY[missing] & set(BEST[row])
    assert set(backends.available()) == set(BEST[row]) - lost
    assert isas()["fp32_lut"] == ("portable" if missing in ("avx2", "fma", "avx512f") else "avx512f")
    for name in lost:
        why = f"this CPU lacks {missing} (needed by {name})"
        assert backends.get(name).lookup() == Missing(why)
        with pytest.raises(UnavailableError, match=rf"'{name}' .*cannot be used: {re.escape(why)}\. Available: .*fp32_lut"):
            choose_backend(name)
    assert f"{row}: this CPU lacks {missing} (needed by {row})" in choose_backend("auto").why


@pytest.mark.parametrize("row", isa.ISAS)
def test_every_missing_feature_is_named(cpu, row):
    """In the order of the rows that ask for them."""
    cpu()
    required = isa.required_features(row)
    assert native.missing_features(row) == list(required)
    for name in backends.names():
        if backends.get(name).isas["bf16"] == (row,):
            assert backends.get(name).lookup() == Missing(f"this CPU lacks {' '.join(required)} (needed by {row})")


def test_a_cpu_with_nothing_and_one_with_everything(cpu):
    cpu()
    assert backends.available() == ["fp32_lut"]
    cpu(*ALL_FEATURES)
    assert set(backends.available()) == set(backends.names())
    assert backends.available() == backends.ranked()


def test_ranks(cpu):
    """A backend that cannot run ranks as the best of its instruction sets, so that it is passed over, and named, first."""
    ranks = {name: row.rank for name, row in isa.ISAS.items()}
    assert ranks["portable"] < ranks["avx2"] < ranks["avx512f"] < ranks["avx512_bf16"] < ranks["amx"]
    cpu()
    assert {name: backends.get(name).rank for name in backends.names()} == {
        "fp32_lut": ranks["portable"], **{name: ranks[name] for name in ("avx2", "avx512_bf16", "amx")}
    }  # fmt: skip
    assert backends.ranked() == ["amx", "avx512_bf16", "avx2", "fp32_lut"]
    cpu(*EVERYTHING)
    assert backends.get("fp32_lut").rank == ranks["avx512f"]


def test_ranks_that_a_feature_changes(cpu):
    """One that the row does not ask for: it says how fast others are there."""
    changed = {row: isa.ISAS[row].rank_with for row in isa.ISAS if isa.ISAS[row].rank_with}
    assert set(changed) == {"avx512_bf16"}
    (rank,) = {rank for _, rank in changed["avx512_bf16"]}
    assert isa.ISAS["avx2"].rank < rank < isa.ISAS["avx512f"].rank
    features = [feature for feature, _ in changed["avx512_bf16"]]
    assert features == ["amx_tile", "avx512_fp16"]
    for feature in features:
        assert feature not in isa.required_features("avx512_bf16")
        for row in isa.ISAS:
            assert isa.rank(row, {}) == isa.rank(row, {feature: False}) == isa.ISAS[row].rank
            assert isa.rank(row, {feature: True}) == (rank if row in changed else isa.ISAS[row].rank)
    for name in ("avx512_bf16 with AMX", "avx512_bf16 with FP16", "amx"):
        cpu(*CPUS[name])
        assert backends.get("avx512_bf16").rank == rank
    cpu(*CPUS["avx512_bf16"])
    assert backends.get("avx512_bf16").rank == isa.ISAS["avx512_bf16"].rank


def test_the_choice_says_who_was_passed_over(cpu):
    cpu(*isa.required_features("avx512f"))
    name, why, _ = choose_backend("auto")
    assert name == "fp32_lut"
    reasons = (
        "amx: this CPU lacks avx512bw avx512vl avx512_bf16 avx512vbmi gfni amx_tile amx_bf16 (needed by amx); "
        "avx512_bf16: this CPU lacks avx512bw avx512vl avx512_bf16 (needed by avx512_bf16)"
    )
    assert why == f"the best available; {reasons}"


def test_a_row_asks_for_what_it_implies():
    for name, row in isa.ISAS.items():
        for other in row.implies:
            assert set(isa.required_features(other)) <= set(isa.required_features(name))
            assert set(isa.compile_flags(other)) <= set(isa.compile_flags(name))
            assert isa.ISAS[other].rank < row.rank
        assert set(isa.required_features(name)) <= set(ALL_FEATURES)


@pytest.mark.parametrize("row", isa.ISAS)
def test_what_a_row_does_not_compile_it_has_of_one_that_it_implies(row):
    """It runs wherever the row does. Kernels of one form name one object of rows, so that x is encoded once."""
    described = isa.ISAS[row]
    assert set(described.shared) <= {*described.kernels, *isa.COMMON}
    assert set(described.operands) <= set(described.kernels) - set(described.shared)
    for source in described.kernels + isa.COMMON:
        for owner in {isa.compiled_for(row, source), isa.loops_of(row, source)} - {row}:
            assert source in isa.sources(owner)
            assert set(isa.required_features(owner)) <= set(isa.required_features(row))
        assert source not in isa.ISAS[isa.loops_of(row, source)].operands
    rows = [flag for source in described.kernels if source.endswith("_f32") for flag in isa.definitions(row, source)]
    assert len({flag for flag in rows if flag.startswith("-DKT_ROWS=")}) <= 1


@pytest.mark.parametrize("row", isa.ISAS)
def test_compile_flags_are_within_the_requirement(row):
    """What the compiler may use, the CPU was asked for."""
    for flag in isa.compile_flags(row):
        feature = flag.removeprefix("-m").replace("-", "_")
        assert flag.startswith("-m")
        assert {feature, feature.replace("avx512", "avx512_"), feature.replace("avxvnni", "avx_vnni")} & set(
            isa.required_features(row)
        ), flag


def test_flags_of_all_c_files_name_no_instruction_set():
    assert not [flag for flag in isa.C_FLAGS if flag.startswith(("-march", "-mtune", "-m"))]
    assert not [flag for flag in isa.C_FLAGS if "fast-math" in flag or flag in ("-Ofast", "-funsafe-math-optimizations")]
    assert "-ffp-contract=off" in isa.C_FLAGS


def test_every_row_has_kernels_and_every_kernel_file_a_row():
    rows = set(isa.ISAS)
    files = {file.stem for file in (Path(isa.__file__).parent / "kernels").glob("*.c")}
    assert files == {"isas", *(source for row in rows for source in isa.sources(row))}
    used = {(row, mode) for name in backends.names() for mode, isas in backends.get(name).isas.items() for row in isas}
    exact = {row for row, mode in used if mode == "bf16"}
    assert {(row, mode) for row, mode in used if row not in exact} == {
        (row, mode) for row, modes in OF_MODES.items() for mode in modes
    }
    assert rows == exact | set(OF_MODES)
    for row in rows:
        assert native.load_table(row).name == row


def test_a_backend_with_instruction_sets_of_its_own_needs_no_rank():
    def load(isa):
        raise UnavailableError(f"this CPU lacks fingers (needed by {isa})")

    foreign = native.NativeBackend({"bf16": ("abacus",)}, load)
    assert foreign.rank == 0
    assert foreign.lookup() == Missing("this CPU lacks fingers (needed by abacus)")
    assert native.NativeBackend({"bf16": ("abacus",)}, load, rank=7).rank == 7


def test_a_plugin_names_what_the_cpu_lacks(cpu):
    cpu("fma")
    assert native.require("abacus", "fma") is None
    with pytest.raises(UnavailableError, match=r"^this CPU lacks avx2 fingers \(needed by abacus\)$"):
        native.require("abacus", "avx2", "fma", "fingers")


# KTMOE_BACKEND


@pytest.mark.parametrize("name", CPUS)
def test_the_override_is_strict(cpu, monkeypatch, name):
    """It names a backend that can be used, or nothing is chosen in its stead."""
    cpu(*CPUS[name])
    for asked in backends.names():
        monkeypatch.setenv("KTMOE_BACKEND", asked)
        if asked in BEST[name]:
            assert choose_backend("auto")[:2] == (asked, "KTMOE_BACKEND")
            continue
        lacking = " ".join(native.missing_features(asked))
        message = rf"'{asked}' \(KTMOE_BACKEND\) cannot be used: this CPU lacks {lacking} .*Available: {', '.join(BEST[name])}$"
        with pytest.raises(UnavailableError, match=message):
            choose_backend("auto")
    for unknown in ("avx512f", "AVX2", "avx2 ", "portable", "auto,avx2"):
        monkeypatch.setenv("KTMOE_BACKEND", unknown)
        with pytest.raises(UnknownNameError, match=rf"unknown backend '{unknown}'; known are .*avx2.*\(KTMOE_BACKEND\)"):
            choose_backend("auto")
        assert choose_backend("fp32_lut")[:2] == ("fp32_lut", "asked for by name")


def test_the_override_does_not_fall_back_for_weights(cpu, monkeypatch):
    cpu(*ALL_FEATURES)
    monkeypatch.setenv("KTMOE_BACKEND", "avx2")
    experts = experts_of(WeightFormat(MXFP4.element, Scale("bf16", (1, 2 * GROUPS[-1]))))
    with pytest.raises(UnavailableError, match=r"'avx2' \(KTMOE_BACKEND\) cannot be used: it has no kernels for"):
        choose_backend("auto", experts)


# Detection


def test_features_agree_with_the_systems():
    """/proc/cpuinfo lists what the kernel enabled; ours must be neither more nor less."""
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split()
    assert platform.machine() == "x86_64"
    assert core.cpu_features() == {name: name in flags for name in ALL_FEATURES}


@pytest.mark.parametrize(
    ("rows", "left"),
    [
        (["amx"], {"fp32_lut": "avx512f", "avx512_bf16": "avx512_bf16", "avx2": "avx2"}),
        (["avx512_bf16"], {"amx": "amx", "fp32_lut": "avx512f", "avx2": "avx2"}),
        (["avx512f"], {"amx": "amx", "avx512_bf16": "avx512_bf16", "avx2": "avx2", "fp32_lut": "portable"}),
        (["avx2"], {"amx": "amx", "fp32_lut": "avx512f", "avx512_bf16": "avx512_bf16"}),
        (["portable"], BEST["amx"]),
        (["amx", "avx512_bf16", "avx512f", "avx2"], {"fp32_lut": "portable"}),
        (["avx512f", "portable"], {"amx": "amx", "avx512_bf16": "avx512_bf16", "avx2": "avx2"}),
    ],
    ids=" ".join,
)
def test_an_instruction_set_that_was_not_compiled(cpu, uncompiled, rows, left):
    """A backend that has another one uses that, and ranks as that; one that has none says so."""
    cpu(*EVERYTHING)
    uncompiled(*rows)
    assert list(isas().items()) == list(left.items())
    assert choose_backend("auto").name == next(iter(left))
    for name in set(backends.names()) - set(left):
        reason = rf"{backends.get(name).isas['bf16'][0]} was not compiled into this build"
        assert reason in backends.get(name).lookup().reason
        with pytest.raises(UnavailableError, match=rf"{reason}.*Available: {', '.join(left)}$"):
            choose_backend(name)


def test_nothing_can_be_used(cpu, uncompiled):
    cpu()
    uncompiled("portable")
    reasons = (
        r"amx: this CPU .*; avx512_bf16: this CPU .*; fp32_lut: this CPU .*\(needed by avx512f\); portable was not compiled.*; "
        r"avx2: this CPU "
    )
    with pytest.raises(UnavailableError, match=f"no backend can be used: {reasons}"):
        choose_backend("auto")
