"""A fault of each kind, planted in a copy of one native source, is reported where it is."""

import os
import re

import pytest
import ways
from sanitizers import Fault, build, run_cases, works

PORTABLE, WIDE, TILES = "fp32_lut-portable", "avx2", "amx"
FAULTS = {
    "an adapter is read one element too far": Fault(
        "kernels/dense.c",
        "w[v] = first ? load_first(b, first)",
        "w[v] = first ? load_first(b + 1, first)",
        "portable/kernels/dense.o",
        ("heap-buffer-overflow|use-after-poison", "READ of size", r"in load_first .*kernels/dense\.c"),
    ),
    "a load with a mask": Fault(
        "kernels/dense.c",
        "w[v] = first ? load_first(b, first)",
        "w[v] = first ? load_first(b + 1, first)",
        "avx2/kernels/dense.o",
        ("heap-buffer-overflow|use-after-poison", "READ of size", r"in load_first .*kernels/dense\.c"),
        WIDE,
    ),
    "a store with a mask": Fault(
        "kernels/dense.c",
        "store_first(to, sum[r][v], first);",
        "store_first(to + 1, sum[r][v], first);",
        "avx2/kernels/dense.o",
        ("heap-buffer-overflow|use-after-poison", "WRITE of size", r"in store_first .*kernels/dense\.c"),
        WIDE,
    ),
    "beyond a row of y": Fault(
        "forward/phase_b.c",
        "kt_store(y, left < KT_PANEL ? left : KT_PANEL, j->batch.y",
        "kt_store(y, left < KT_PANEL ? left + 1 : KT_PANEL, j->batch.y",
        "driver/forward/phase_b.o",
        ("heap-buffer-overflow", "WRITE of size", r"in store .*forward/phase_b\.c"),
    ),
    "behind a packed matrix": Fault(
        "kernels/common/b16_layout.h",
        " + v * LANES * 4;",
        " + (v + 1) * LANES * 4;",
        "portable/kernels/b16_f32.o",
        ("use-after-poison", "READ of size 16", r"in decode ktmoe/_native/kernels/b16_f32\.c"),
    ),
    "behind a packed matrix, few rows": Fault(
        "kernels/loops/panel.h",
        "        w[0] += bytes, w[1] += bytes;",
        "        w[0] += bytes + 64, w[1] += bytes + 64;",
        "avx2/kernels/b16_f32.o",
        ("use-after-poison", "READ of size 32", r"in pass ktmoe/_native/kernels/loops/panel\.h"),
        WIDE,
    ),
    "a tile of weights": Fault(
        "kernels/b16_amx.c",
        "step_of(&w->at, step) + n * 64;",
        "step_of(&w->at, step) + n * 64 + 64;",
        "amx/kernels/b16_amx.o",
        ("use-after-poison", "READ of size", r"in tile_touch ktmoe/_native/kernels/common/tile\.h"),
        TILES,
    ),
    "a tile that is stored": Fault(
        "kernels/loops/tiles.h",
        "TILE_STORE(t, sums + (t) * TILE_BYTES / 4, 16 * sizeof(float)); \\",
        "TILE_STORE(t, sums + (t) * TILE_BYTES / 4 + 3 * TILE_BYTES / 4 + 16, 16 * sizeof(float)); \\",
        "amx/kernels/f8_amx.o",
        ("overflow|use-after-poison", "WRITE of size", r"in tile_touch ktmoe/_native/kernels/common/tile\.h"),
        TILES,
    ),
    "packing writes past the caches behind a matrix": Fault(
        "pack/words.h",
        "    kt_stream(block + column_at(column),",
        "    kt_stream(block + 64 + column_at(column),",
        "driver/pack/b16.o",
        ("use-after-poison", "WRITE of size", r"in kt_stream .*base/stream\.h"),
    ),
    "scratch memory beyond an array": Fault(
        "forward/scratch.c",
        ".g = kt_carve(&c, KT_ROWS_MAX, sizeof(kt_panel_row)),\n            .u",
        ".g = kt_carve(&c, 1, sizeof(kt_panel_row)),\n            .u",
        "driver/forward/scratch.o",
        ("use-after-poison",),
    ),
    "a bias that was freed": Fault(
        "layer/experts.c",
        "        free_numbers(&fresh[i]); /* replaced, or not taken */",
        "        free_numbers(fresh[i].bias ? kt_matrix_of(e, 0, expert, i % KT_MATRICES) : &fresh[i]);",
        "driver/layer/experts.o",
        ("heap-use-after-free", "READ of size", "freed by"),
    ),
    "an expert that was replaced": Fault(
        "layer/experts.c",
        "        *now = fresh[i];\n        fresh[i] = was;",
        "        *now = fresh[i];\n        now->data = was.data ? was.data : now->data;\n        fresh[i] = was;",
        "driver/layer/experts.o",
        ("use-after-poison", "READ of size"),
    ),
    "a sum that overflows": Fault(
        "forward/route.c",
        "r->slot_token[slot] = (uint32_t)t;",
        "r->slot_token[slot] = (uint32_t)t + (uint32_t)((id + INT64_MAX) >> 63);",
        "driver/forward/route.o",
        (r"forward/route\.c:\d+:\d+: runtime error: signed integer overflow",),
    ),
    "a shift by too much": Fault(
        "forward/route.c",
        "r->slot_token[slot] = (uint32_t)t;",
        "r->slot_token[slot] = (uint32_t)t + (0u << (b->top_k + 30));",
        "driver/forward/route.o",
        (r"forward/route\.c:\d+:\d+: runtime error: shift exponent 32 is too large",),
    ),
    "a number that is not aligned": Fault(
        "forward/rows.c",
        "own[c] = kt_bf16_from_f32(f32[c]);",
        "own[c] = kt_bf16_from_f32(*(const float *)((const char *)&f32[c] - (c > 0)));",
        "driver/forward/rows.o",
        (r"forward/rows\.c:\d+:\d+: runtime error: load of misaligned address",),
    ),
    "an index beyond an array": Fault(
        "forward/phase_b.c",
        "    kt_panel_row *const d[2] = {w->scratch->g, w->scratch->u};",
        "    kt_panel_row *const d[2] = {w->scratch->g, w->scratch->u};\n    (void)*(void *const volatile *)&d[panels + 1];",
        "driver/forward/phase_b.o",
        ("stack-buffer-overflow|index 2 out of bounds", r"forward/phase_b\.c"),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory):
    if not works("address,undefined", tmp_path_factory.mktemp("probe")):
        pytest.skip("the compiler has no -fsanitize=address,undefined that works here")
    return build()


def was_built(subject):
    return ways.SUBJECTS[subject].isa in os.environ.get("KTMOE_TEST_SANITIZE_ISAS", ",".join(ways.WAYS)).split(",")


@pytest.mark.parametrize("subject", [subject for subject in (PORTABLE, WIDE, TILES) if was_built(subject)])
def test_without_a_fault_nothing_is_reported(module, subject):
    done = run_cases(module, 0, 0, subject)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if was_built(fault.calls)])
def test_a_fault_is_reported(tmp_path, name):
    fault = FAULTS[name]
    done = run_cases(fault.module(tmp_path), 0, 0, fault.calls)
    assert done.returncode != 0
    assert "Sanitizer" in done.stderr or "runtime error" in done.stderr, done.stderr
    for pattern in fault.reported:
        assert re.search(pattern, done.stderr), f"{pattern} is not in\n{done.stderr[:4000]}"
