"""`python -m bench.engines`: measure generate() of transformers and llama.cpp, or show or draw a result."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench import runs, tables
from bench.engines import assisted, cold, cold_report, report, whole, whole_report
from bench.engines.session import about, compare
from bench.engines.shapes import Engine, engines
from bench.engines.ways import COLD, COMPARISONS, OF_GGUF, OF_WHOLE, WHOLE
from bench.peers import environments
from bench.peers.__main__ import progress_line
from bench.peers.peers import LLAMA
from bench.peers.processes import WorkerError

RESULT = runs.STORAGE / "engines.json"
#: Where each owner's processes run.
ENVIRONMENTS = {"ktmoe": environments.ENGINES, "transformers": environments.ENGINES, "llama.cpp": LLAMA}


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, or 1 if logits were wrong or something is missing, or 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (OSError, ValueError, WorkerError, environments.SetUpError) as error:
        print(f"engines: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("engines: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.engines", description="generate() of transformers, by way of ktmoe.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="install transformers, measure, print the tables and save the result")
    run.add_argument("--models", nargs="+", choices=list(engines()), default=list(engines()), help="all by default")
    run.add_argument(
        "--comparisons",
        nargs="+",
        choices=list(COMPARISONS),
        default=[name for name in COMPARISONS if name != "contexts"],
        help="all but contexts by default. whole: the whole model beside llama.cpp; contexts: the same after long texts; "
        "gguf: ktmoe and llama.cpp on one GGUF file; cold: until the first token of such a file; "
        "beside: transformers' own experts take part; alone: ktmoe alone, with more layers; threads: ktmoe with and without "
        "OMP_WAIT_POLICY=passive",
    )
    run.add_argument(
        "--layers",
        metavar="N",
        type=_layers,
        help="of each model, or all; by default as many as fit into memory beside each other",
    )
    run.add_argument("--prompts", metavar="N", type=int, nargs="+", default=[512, 1024], help="of whole: tokens (512 1024)")
    run.add_argument("--contexts", metavar="N", type=int, nargs="+", default=[4096, 16384], help="of contexts (4096 16384)")
    named = [process.dense for process in WHOLE]
    run.add_argument("--dense", nargs="+", choices=named, default=named, help="ways of whole and contexts, by dense matrices")
    run.add_argument("--rounds", metavar="N", type=int, default=5, help="(%(default)s)")
    run.add_argument("--folder", metavar="DIR", type=Path, help="for checkpoints of up to 20 GB, removed afterwards")
    run.add_argument("--save", metavar="FILE", type=Path, default=RESULT, help="(%(default)s)")
    run.add_argument(
        "--add", action="store_true", help="keep what the file has of other models and comparisons, of the same commit"
    )
    run.set_defaults(run=_run)
    show = commands.add_parser("show", help="print the tables of a saved result")
    show.add_argument("result", type=Path)
    show.set_defaults(run=_show)
    with_help = commands.add_parser("assisted", help="measure prompt lookup and an assistant model beside plain decoding")
    with_help.add_argument("--model", choices=list(engines()), default="gpt-oss-20b", help="(%(default)s)")
    with_help.add_argument("--layers", metavar="N", type=int, default=6, help="(%(default)s)")
    with_help.add_argument("--rounds", metavar="N", type=int, default=3, help="(%(default)s)")
    with_help.set_defaults(run=_assisted)
    plot = commands.add_parser("plot", help="draw whole models of a saved result")
    plot.add_argument("result", type=Path)
    plot.add_argument("--into", metavar="FOLDER", type=Path, default=runs.STORAGE, help="(%(default)s)")
    plot.set_defaults(run=_plot)
    return parser


def _layers(text: str) -> int | str:
    return text if text == "all" else int(text)


def _run(options: argparse.Namespace) -> int:
    if options.rounds < 1 or (options.layers not in (None, "all") and options.layers < 1):
        raise ValueError(f"expected --rounds and --layers above 0, found {options.rounds} and {options.layers}")
    whole_ones = (*OF_WHOLE, COLD)
    others = set(options.comparisons) - set(whole_ones)
    if options.layers == "all" and others:
        raise ValueError(
            f"expected --layers all with --comparisons of {', '.join(whole_ones)}, found {', '.join(sorted(others))}"
        )
    result = about() | {"comparisons": []}
    kept = _others(options, result)
    options.save.parent.mkdir(parents=True, exist_ok=True)
    with progress_line() as progress:
        for comparison in options.comparisons:
            for name in options.models:
                if comparison in (OF_GGUF, COLD) and not engines()[name].as_gguf:
                    continue
                with tempfile.TemporaryDirectory(prefix="ktmoe-engines-", dir=options.folder) as folder:
                    found = _compared(engines()[name], comparison, options, Path(folder) / "model", progress)
                result["comparisons"].append(found)
                # each is minutes of work
                options.save.write_text(json.dumps(result | {"comparisons": kept + result["comparisons"]}, indent=1) + "\n")
    _print(result)
    print(f"saved: {options.save}")
    return 1 if report.wrong(result) else 0


def _compared(
    engine: Engine, comparison: str, options: argparse.Namespace, folder: Path, progress: Callable[[str], object]
) -> dict:
    def python(owner: str) -> Path:
        return environments.python(ENVIRONMENTS[owner], progress)

    if comparison == COLD:
        return cold.compare(engine, options, python, folder, progress)
    if comparison in OF_WHOLE:
        return whole.compare(engine, comparison, options, python, folder, progress)
    return compare(engine, comparison, options, python("ktmoe"), folder, progress)


def _others(options: argparse.Namespace, result: dict) -> list[dict]:
    """The comparisons of the file that stay. Raises ValueError if they were made elsewhere or of another commit."""
    if not options.add or not options.save.exists():
        return []
    saved = json.loads(options.save.read_text())
    for name in ("cpu", "commit"):
        if saved[name] != result[name]:
            raise ValueError(f"{options.save}: expected results of this {name} to add to, found another: {saved[name]}")
    made = {(model, comparison) for model in options.models for comparison in options.comparisons}
    return [found for found in saved["comparisons"] if (found["model"], found["comparison"]) not in made]


def _print(result: dict) -> None:
    report.show(result)
    whole_report.show(result)
    cold_report.show(result)


def _show(options: argparse.Namespace) -> int:
    _print(json.loads(options.result.read_text()))
    return 0


def _assisted(options: argparse.Namespace) -> int:
    engine = engines()[options.model]
    with progress_line() as progress, tempfile.TemporaryDirectory(prefix="ktmoe-engines-") as folder:
        python = environments.python(environments.ENGINES, progress)
        found = assisted.compare(engine, options.layers, options.rounds, python, Path(folder) / "model", progress)
    title = f"{engine.name}, {options.layers} layers; assistant: {assisted.ASSISTANT_LAYERS} layer"
    tables.console(100).print(assisted.table(title, found))
    return 0


def _plot(options: argparse.Namespace) -> int:
    from bench.engines import plots  # matplotlib is there for this alone

    result = json.loads(options.result.read_text())
    for comparison in result["comparisons"]:
        if comparison["comparison"] in OF_WHOLE:
            print(f"drawn: {plots.draw(result, comparison, options.into)}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by exceptions, workers end and their weights are removed
    sys.exit(main())
