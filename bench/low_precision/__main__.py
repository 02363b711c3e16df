"""What activation modes change in the results, into docs/low-precision.md.

python -m bench.low_precision layer       # one layer on random data: seconds
python -m bench.low_precision text        # a tiny model on a text: first installs torch and transformers, then 10 minutes
python -m bench.low_precision document    # the page's tables and its picture, from the file alone; the others do this, too
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys

from bench import machine
from bench.low_precision import document, results
from bench.peers import environments


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, or 1 if something is missing or went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["layer", "text", "document"], nargs="?", default="layer")
    command = parser.parse_args(arguments).command
    try:
        if command == "layer":
            results.renew("layer", _layer())
        elif command == "text":
            results.renew("text", _text())
        from bench.low_precision import plots  # matplotlib is there for this alone

        print(f"drawn: {plots.draw(results.read(), document.PICTURE)}")
        document.write()
    except (OSError, ValueError, environments.SetUpError) as error:
        print(f"low precision: {error}", file=sys.stderr)
        return 1
    print(f"written: {document.PAGE}")
    return 0


def _layer() -> dict:
    from bench.low_precision import layer

    found = [dataclasses.asdict(error) for error in layer.errors()]
    return {**_made(), "model": layer.MODEL, "experts": layer.EXPERTS, "tokens": layer.TOKENS, "error": found}


def _text() -> dict:
    from bench.low_precision import text

    return {**_made(), **text.measured(lambda line: print(f"ktmoe: {line}", flush=True))}


def _made() -> dict:
    return {"date": datetime.date.today(), "commit": machine.commit()}


if __name__ == "__main__":
    sys.exit(main())
