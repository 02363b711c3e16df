"""`python -m bench.graphs`: a decode step of KTMoEWrapper's layers, as a replayed CUDA graph and in other ways, by turns.

On a GPU, with torch: eager calls on its tensors against a replay. Without one: a replay on the stand-in for CUDA of
tests/fake_cuda against plain forward calls on numpy arrays. The stand-in has threads as CUDA has, and not its speed: it shows
what queue, host functions and their wake-ups take, not what a GPU's step takes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from ktmoe import synthetic
from ktmoe.compat.kt_kernel import KTMoEWrapper

TESTS = Path(__file__).resolve().parents[2] / "tests"


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, or 1 if a result was wrong."""
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ktmoe-graphs-") as folder:
        sizes = {"num_experts": options.experts, "hidden": options.hidden, "intermediate": options.intermediate}
        synthetic.write_deepseek_v4(folder, **sizes, top_k=options.top_k, layers=options.layers)
        wrappers = [_wrapper(folder, layer, options) for layer in range(options.layers)]
        try:
            cases = [_case(layer, options) for layer in range(options.layers)]
            ways = _on_gpu(wrappers, cases) or _on_stand_in(wrappers, cases, Path(folder))
            return _measure(ways, [w.forward(*case).copy() for w, case in zip(wrappers, cases, strict=True)], options)
        finally:
            for wrapper in wrappers:
                wrapper.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.graphs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, what in (
        ("layers", 4, "of a step"),
        ("tokens", 1, "of a step"),
        ("experts", 16, "of a layer"),
        ("top-k", 6, "experts of a token"),
        ("hidden", 4096, "columns"),
        ("intermediate", 2048, "rows of gate and up"),
        ("rounds", 200, "steps of each way"),
    ):
        parser.add_argument(f"--{name}", metavar="N", type=int, default=default, help=f"{what} (%(default)s)")
    return parser


def _wrapper(folder: str, layer: int, options) -> KTMoEWrapper:
    wrapper = KTMoEWrapper(
        layer_idx=layer,
        num_experts=options.experts,
        num_experts_per_tok=options.top_k,
        hidden_size=options.hidden,
        moe_intermediate_size=options.intermediate,
        gpu_experts_mask=None,
        cpuinfer_threads=None,
        threadpool_count=1,
        weight_path=folder,
        chunked_prefill_size=options.tokens,
        method="MXFP4",
    )
    wrapper.load_weights()
    return wrapper


def _case(seed: int, options) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    bits = rng.standard_normal((options.tokens, options.hidden)).astype(np.float32).view(np.uint32) >> 16
    ids = np.stack([rng.permutation(options.experts)[: options.top_k] for _ in range(options.tokens)])
    return bits.astype(np.uint16), ids, rng.random(ids.shape, np.float32)


def _calls(wrappers, inputs, stream) -> list:
    outputs = []
    for wrapper, given in zip(wrappers, inputs, strict=True):
        wrapper.submit_forward(*given, stream)
        outputs.append(wrapper.sync_forward(given[0], stream))
    return outputs


def _on_gpu(wrappers, cases) -> dict | None:
    """What runs a step, by name, and then returns what reads its results as bfloat16 bits; None without a GPU.

    The first is what others are compared with.
    """
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None

    def on_device(x, *others):
        return [
            torch.from_numpy(x.view(np.int16)).to("cuda").view(torch.bfloat16),
            *(torch.from_numpy(a).to("cuda") for a in others),
        ]

    def step(run):
        outputs = run()
        torch.cuda.synchronize()
        return lambda: [y.view(torch.int16).cpu().numpy().view(np.uint16) for y in outputs]

    inputs, graph = [on_device(*case) for case in cases], torch.cuda.CUDAGraph()
    _calls(wrappers, inputs, torch.cuda.current_stream())
    with torch.cuda.graph(graph):
        outputs = _calls(wrappers, inputs, torch.cuda.current_stream())
    return {
        "eager calls": lambda: step(lambda: _calls(wrappers, inputs, torch.cuda.current_stream())),
        "a replay": lambda: step(lambda: graph.replay() or outputs),
    }


def _on_stand_in(wrappers, cases, folder: Path) -> dict:
    """The same without a GPU."""
    sys.path.insert(0, str(TESTS))
    from fake_cuda.runtime import Runtime, build
    from fake_cuda.torch import Torch

    library = build(folder).rename(folder / "libcudart.so.12")
    torch = sys.modules["torch"] = Torch(Runtime(library))
    inputs, graph = [[torch.on_device(array) for array in case[:2]] for case in cases], torch.cuda.CUDAGraph()
    for given, case in zip(inputs, cases, strict=True):
        given.append(torch.on_device(case[2], torch.float32))
    with torch.cuda.graph(graph):
        outputs = _calls(wrappers, inputs, torch.cuda.current_stream())
    default = torch.cuda.default_stream()

    def plain():
        found = [wrapper.moe.forward(*case) for wrapper, case in zip(wrappers, cases, strict=True)]
        return lambda: found

    def eager():
        found = _calls(wrappers, inputs, default)
        default.synchronize()
        return lambda: [y.array for y in found]

    def replay():
        graph.replay()
        default.synchronize()
        return lambda: [y.array for y in outputs]

    return {"plain forward calls": plain, "eager calls on the stand-in": eager, "a replay on the stand-in": replay}


def _measure(ways: dict, expected: list[np.ndarray], options) -> int:
    """Measure the ways by turns, and print them; a ratio is the median of the rounds' own."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for name, run in ways.items():
        if not all(np.array_equal(*pair) for pair in zip(run()(), expected, strict=True)):
            print(f"graphs: {name}: WRONG", file=sys.stderr)
            return 1
    for number in range(options.rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            begin = time.perf_counter()
            ways[name]()
            took[name].append(time.perf_counter() - begin)
    first = next(iter(ways))
    print(f"a step of {options.layers} layers, {options.tokens} tokens, medians of {options.rounds} rounds")
    for name, times in took.items():
        ratio = statistics.median(a / b for a, b in zip(times, took[first], strict=True))
        more = statistics.median(a - b for a, b in zip(times, took[first], strict=True)) / options.layers
        print(f"{name:28} {1e3 * statistics.median(times):8.3f} ms   {ratio:5.2f} x   {1e6 * more:+7.1f} us a layer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
