"""The `ktmoe` command."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import ktmoe
from ktmoe.errors import KtmoeError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit status: 0, 1 for an error or a wrong result, 2 for wrong usage, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (KtmoeError, OSError) as error:
        print(f"ktmoe: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ktmoe: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ktmoe", description=ktmoe.__doc__.partition("\n")[0])
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    config = commands.add_parser("config", help="what was compiled, what this CPU supports, what was chosen and why")
    config.set_defaults(run=_config)

    inspect = commands.add_parser("inspect", help="what a checkpoint holds: loader, layers, format")
    inspect.add_argument("model", metavar="DIR", help="a checkpoint folder or a .safetensors file")
    inspect.set_defaults(run=_inspect)

    load = commands.add_parser("load", help="load a whole checkpoint: how fast it goes, what memory it takes, whether it fits")
    load.add_argument("model", metavar="DIR", help="a checkpoint folder or a .safetensors file")
    load.add_argument("--layers", metavar="0-3,7", type=_layers, help="by default all that have routed experts")
    load.add_argument("--backend", metavar="NAME", default="auto", help="by default the best that runs here")
    load.set_defaults(run=_load)

    demo = commands.add_parser("demo", help="load a layer, check it and measure it on every backend this CPU has")
    demo.add_argument("--model", metavar="DIR", help="a checkpoint; by default a synthetic one, written and removed again")
    demo.add_argument("--layer", metavar="L", type=_layer, help="its number, or a name such as mtp.0; by default the first")
    demo.add_argument("--experts", metavar="N", type=_positive, default=32, help="of the synthetic checkpoint (%(default)s)")
    demo.add_argument("--seconds", metavar="S", type=_seconds, default=2.0, help="to measure each row for (%(default)s)")
    demo.set_defaults(run=_demo)
    return parser


def _config(options: argparse.Namespace) -> int:
    ktmoe.show_config()
    return 0


def _inspect(options: argparse.Namespace) -> int:
    with Checkpoint(options.model) as checkpoint:
        loader = find_loader(checkpoint)
        name = next(name for name in ktmoe.loaders.names() if ktmoe.loaders.get(name) is loader)
        layers = loader.layers(checkpoint)
        print(f"{options.model}: {len(checkpoint)} tensors, read by loader {name}")
        print(f"layers with routed experts: {', '.join(map(str, layers)) or 'none'}")
        if layers:
            experts = loader.load(checkpoint, layers[0])
            sizes = f"hidden {experts.hidden}, intermediate {experts.intermediate}"
            print(f"layer {layers[0]}: {experts.num_experts} experts, {sizes}")
            for projection in PROJECTIONS:
                print(f"  {projection}: {list(experts.shape(projection))}, {experts.formats[projection].description}")
            print(f"  {experts.nbytes / 1e9:.3f} GB, {experts.activation}")
    return 0


def _load(options: argparse.Namespace) -> int:
    start = time.perf_counter()
    with ktmoe.MoEModel.from_checkpoint(options.model, options.layers, options.backend, progress=True) as model:
        seconds = time.perf_counter() - start
        _, total = model.loaded
        backends = ", ".join(sorted({model[layer].backend for layer in model}))
        print(f"{options.model}: {len(model)} layers, {total / 1e9:.2f} GB in the checkpoint, backend {backends}")
        print(f"loaded in {seconds:.2f} s, {total / seconds / 1e9:.2f} GB/s")
        print(f"packed weights {model.nbytes / 1e9:.2f} GB, peak RSS {_peak_rss_bytes() / 1e9:.2f} GB")
    return 0


def _peak_rss_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


def _demo(options: argparse.Namespace) -> int:
    try:
        from ktmoe import demo
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        print("ktmoe: the demo draws with rich, which is not installed: pip install 'ktmoe[cli]'", file=sys.stderr)
        return 2
    with _signals_as_exit():
        return demo.run(options.model, options.layer, experts=options.experts, seconds=options.seconds)


@contextmanager
def _signals_as_exit():
    """Left alone, these signals would end the process without removing the temporary checkpoint."""

    def leave(number, frame):
        sys.exit(128 + number)

    old = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _layers(text: str) -> list[int | str]:
    """[0, 1, 2, 3, 7, "mtp.0"] for "0-3,7,mtp.0"."""
    layers: list[int | str] = []
    for item in text.split(","):
        first, dash, last = item.partition("-")
        if dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last) < 10**6:
            layers += range(int(first), int(last) + 1)
        elif item and not dash:
            layers.append(_layer(item))
        else:
            raise argparse.ArgumentTypeError(f"expected numbers, ranges such as 0-3 and names, found {item!r}")
    return layers


def _layer(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {value}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be from 0 to 3600, found {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
