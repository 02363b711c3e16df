"""fuzz.py PARSER FOLDER [libFuzzer's options]: headers that atheris makes by what they reach in ktmoe's Python.

PARSER is one of tests/soak/hostile_parsers.py. FOLDER keeps what was found, so that another run goes on. Files of it that reach
something new belong into tests/corpus/PARSER if they are small: `make soak` makes its headers of these, too. A run ends at the
first exception that is no KtmoeError, or at a header that takes over a second; -max_total_time=600, say, ends it before.
Needs pip install '.[fuzz]'.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

#: CPU time that a header may take.
SECONDS = 1.0
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "soak")]


def main(arguments: list[str]) -> int:
    """Never returns where atheris is: libFuzzer ends the process."""
    try:
        import atheris
    except ImportError:
        print("ktmoe: nothing was fuzzed: atheris is not installed; pip install '.[fuzz]' where it has a wheel", flush=True)
        return 0
    with atheris.instrument_imports(include=["ktmoe"], exclude=["ktmoe._native"]):
        from hostile_mutations import of_header
        from hostile_parsers import PARSERS
        from hostile_seeds import seeds

        from ktmoe.errors import KtmoeError
    if len(arguments) < 2 or arguments[0] not in PARSERS:
        print(f"fuzz.py PARSER FOLDER: expected one of {', '.join(PARSERS)} and a folder", file=sys.stderr)
        return 2
    name, corpus = arguments[0], Path(arguments[1])
    corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for part in ("seeds", "parser"):
            (Path(folder) / part).mkdir()
        for number, seed in enumerate(itertools.chain(*seeds(name, Path(folder) / "seeds"))):
            (corpus / f"seed-{number}").write_bytes(seed)
        parser, counts = PARSERS[name](Path(folder) / "parser"), Counter()

        def one(data: bytes) -> None:
            begun = time.process_time()
            try:
                parser(data or b"\0")
            except KtmoeError:
                counts["refused"] += 1
            else:
                counts["loaded"] += 1
            if (took := time.process_time() - begun) > SECONDS:
                raise RuntimeError(f"took {took:.2f} s of CPU time")

        def mutated(data: bytes, most: int, seed: int) -> bytes:
            random = Random(seed)
            return of_header(name, random, [data])[:most] if data and random.random() < 0.5 else atheris.Mutate(data, most)

        options = [sys.argv[0], "-timeout=60", "-rss_limit_mb=1024", *arguments[2:], str(corpus)]
        atheris.Setup(options, one, custom_mutator=mutated)
        try:
            atheris.Fuzz()
        finally:
            print(f"ktmoe: {name}: {dict(counts)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
