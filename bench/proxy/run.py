"""A structural proxy for avx512_bf16 on CPUs that have AVX512_VNNI and no AVX512_BF16. Its figures are no speed of avx512_bf16.

The shipped kernels are compiled as they are, and in the compiler's assembly VPDPWSSD takes the place of every VDPBF16PS: the
same operands, the same instructions around it, meaningless numbers. The shares, of VPDPWSSD's own measured peak and of the
read bandwidth, say what the kernels' instruction stream (loads, lookups, shifts, spills, the driver) allows on a CPU that has
the ports but not the instruction. They say nothing about VDPBF16PS itself, which has another latency and, on some CPUs,
another rate.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import ktmoe
from ktmoe import backends, measure, synthetic, threads
from ktmoe._native import core, isa
from ktmoe.backends.native import NativeBackend

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parents[1] / "ktmoe" / "_native"
NAME = "avx512_bf16_PROXY"
TOP_K = 6


def unavailable() -> str | None:
    """Why the proxy cannot run here, or None."""
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    needed = [feature for feature in (*isa.required_features("avx512_bf16"), "avx512_vnni") if feature != "avx512_bf16"]
    missing = [feature for feature in needed if feature not in flags]
    return f"this CPU lacks {' '.join(missing)}" if missing else None


def build(folder: Path) -> Path:
    """The kernels as setup.py compiles them, with one mnemonic replaced in the compiler's assembly, and proxy.c."""
    words = [word for name in ("CC", "CFLAGS", "CCSHARED") for word in shlex.split(sysconfig.get_config_var(name) or "")]
    flags = [*words, *isa.C_FLAGS, *isa.compile_flags("avx512_bf16"), f"-I{NATIVE}", "-g0"]
    sources = [*sorted((NATIVE / "kernels" / "avx512_bf16").glob("*.c")), HERE / "proxy.c"]
    for source in sources:
        assembly = folder / f"{source.stem}.s"
        subprocess.run([*flags, "-S", source, "-o", assembly], check=True)
        text = re.sub(r"\bvdpbf16ps\b", "vpdpwssd", assembly.read_text())
        if found := re.search(r"\bv\w*bf16\w*\b(?=\s+[%(\d-])", text):
            raise SystemExit(f"proxy: {source.name} has {found[0]}, for which there is no stand-in")
        assembly.write_text(text)
    target = folder / "ktmoe_proxy.so"
    subprocess.run([*words, "-shared", *folder.glob("*.s"), "-o", target], check=True)
    return target


def load(path: Path) -> core.KernelTable:
    """The proxy's kernel table."""
    table = ctypes.CDLL(str(path)).kt_proxy
    table.restype = ctypes.c_void_p
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return core.KernelTable(capsule(table(), b"ktmoe.isa", None))


class Proxy(NativeBackend):
    """A backend with the proxy's kernel table; registered under NAME by this program alone."""

    def __init__(self, table: core.KernelTable):
        self._table = table

    def usable(self):
        return [self._table], []


def even_batches(rows: int, top_k: int, num_experts: int, hidden: int) -> Iterator[measure.Batch]:
    """Batches in which each of 2 * top_k experts, others every time, has exactly `rows` tokens: to tune kernels by."""
    for number, batch in enumerate(measure.random_batches(2 * rows, top_k, num_experts, hidden)):
        chosen = (np.arange(2 * top_k) + 2 * top_k * number) % num_experts
        ids = np.tile(chosen.reshape(2, top_k), (rows, 1))
        yield measure.Batch(batch.x, ids, batch.weights, chosen, ids.size)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 2, 4, 8, 16], help="tokens, top-6 of all experts")
    parser.add_argument("--prefill", type=int, nargs="*", default=[6, 24, 96], help="mean tokens per expert")
    parser.add_argument("--rows", type=int, nargs="*", default=[], help="exactly so many tokens on each of 12 experts")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--only-many", action="store_true", help="never the kernels for few tokens")
    options = parser.parse_args()
    reason = unavailable()
    if reason:
        print(f"proxy: cannot run here: {reason}")
        return 1
    if options.threads:
        ktmoe.set_num_threads(options.threads)
    core.tune(only_many=options.only_many)
    with tempfile.TemporaryDirectory(prefix="ktmoe-proxy-") as folder:
        backends.register(NAME, Proxy(load(build(Path(folder)))))
    size = {"num_experts": options.experts, "hidden": options.hidden, "intermediate": options.intermediate}
    experts = synthetic.deepseek_v4_experts(**size)
    layer = ktmoe.MoELayer(experts, backend=NAME)
    limits = measure.Limits(layer, backends.get(NAME).table(experts))
    print("PROXY: VPDPWSSD in the place of VDPBF16PS; the shares are of VPDPWSSD's peak, and no speed of avx512_bf16")
    print(f"{threads.cpu_name()}, {ktmoe.get_num_threads()} threads, {size}")
    print(f"{'PROXY row':>22} {'ms':>8} {'GB/s':>7} {'of read':>8} {'GOP/s':>8} {'of peak':>8}    limits: GB/s, GOP/s")
    shape = TOP_K, options.experts, options.hidden
    rows = [(f"decode {tokens}", measure.random_batches(tokens, *shape)) for tokens in options.decode]
    for mean in options.prefill:
        rows.append((f"prefill {mean}/expert", measure.random_batches(max(1, mean * options.experts // TOP_K), *shape)))
    rows += [(f"exactly {count}/expert", even_batches(count, *shape)) for count in options.rows]
    for name, batches in rows:
        r = measure.run(layer, limits, batches, seconds=options.seconds)
        print(
            f"{name:>22} {r.seconds * 1e3:8.2f} {r.bytes_rate / 1e9:7.2f} {r.read_share:8.1%} {r.flops_rate / 1e9:8.1f}"
            f" {r.peak_share:8.1%}    {r.read_limit / 1e9:.1f}, {r.peak_limit / 1e9:.0f}",
            flush=True,
        )
    layer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
