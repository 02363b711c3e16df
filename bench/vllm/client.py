"""vLLM's `bench serve` as the client of any server of the OpenAI API: its prompts, its command, and what its result says.

Prompts are tokens, not text, so that all servers get the same ones: random ones of the whole vocabulary, which the client draws
for each line of a trace. So many texts as there are users are asked for at a time, the next one when one is done.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from itertools import accumulate, pairwise
from pathlib import Path

from bench.engines.session import ROOT
from bench.peers.processes import WorkerError

#: Tokens of each prompt, and new ones of each text.
PROMPT, NEW = 512, 128
#: How many texts a number of users has in all: enough for a median, few enough for a round of minutes.
TEXTS = {1: 4, 4: 8, 16: 16, 64: 64}
#: Seconds that a run may take.
PATIENCE = 3600


class TextsError(WorkerError):
    """Some texts were not completed; the server goes on."""


def run(python: Path, url: str, tokenizer: Path, users: int, number: int, folder: Path) -> dict:
    """What so many users found. number: each has prompts of its own. Raises WorkerError."""
    trace, result, log = (folder / name for name in ("prompts.jsonl", "result.json", "client.log"))
    trace.write_text(prompts(users, number))
    result.unlink(missing_ok=True)
    # prompts depend on Python's hashes; a proxy would not reach a server of this machine
    variables = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "NO_PROXY": "*", "no_proxy": "*", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        try:
            made = command(python, url, tokenizer, users, trace, result)
            subprocess.run(made, env=os.environ | variables, stdout=output, stderr=output, check=False, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            raise WorkerError(f"{users} users: the client took more than {PATIENCE} s") from None
    if not result.exists():
        last = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        raise WorkerError(": ".join([f"{users} users: the client has no result", *last]))
    return figures(json.loads(result.read_text()), users)


def prompts(users: int, number: int) -> str:
    """A trace in which no prompt comes twice, nor any of another number of users or run."""
    first = (1000 * number + users) * 1000
    draws = range(first, first + TEXTS[users])
    line = {"timestamp": 0, "input_length": PROMPT, "output_length": NEW}
    return "".join(json.dumps(line | {"hash_ids": [draw]}) + "\n" for draw in draws)


def command(python: Path, url: str, tokenizer: Path, users: int, trace: Path, result: Path) -> list[str | Path]:
    return [
        *(python, "-m", "bench.vllm.bench_serve"),
        *("--backend", "openai", "--endpoint", "/v1/completions", "--base-url", url),
        *("--model", "model", "--tokenizer", str(tokenizer)),
        *("--dataset-name", "timed_trace", "--dataset-path", str(trace), "--no-self-timed"),
        *("--timed-trace-chunk-hash-size", str(PROMPT)),  # a prompt is one draw
        *("--num-prompts", str(TEXTS[users]), "--max-concurrency", str(users)),
        *("--temperature", "0", "--ready-check-timeout-sec", "0", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(result.parent), "--result-filename", result.name),
    ]


def figures(result: dict, users: int) -> dict:
    """The figures of a result. Raises TextsError if a text failed.

    first: seconds until a text's first token, the median. decode: tokens a second of all texts, in the time in which as many as
    there are users are being written and none waits for its first token. seconds: of the whole run.
    """
    texts = TEXTS[users]
    if result["completed"] != texts:
        reasons = [error.strip().splitlines()[-1] for error in result.get("errors", ()) if error.strip()][:1]
        raise TextsError(": ".join([f"{users} users: {result['completed']} of {texts} texts were completed", *reasons]))
    return {
        "users": users,
        "texts": texts,
        "first": statistics.median(result["ttfts"]),
        "decode": _decode(result, users),
        "seconds": result["duration"],
        "vllm": result["vllm"],
    }


def _decode(result: dict, users: int) -> float:
    """By whole stretches of time, not by the times between tokens: a client that reads late gets several at once."""
    begun, firsts = result["start_times"], result["ttfts"]
    texts = zip(begun, firsts, result["itls"], strict=True)
    written = [[*accumulate(gaps, initial=start + first)] for start, first, gaps in texts]
    ends = sorted({*begun, *(times[0] for times in written), *(times[-1] for times in written)})
    chunks, seconds = 0, 0.0
    for start, end in pairwise(ends):
        waits = any(begins <= start < times[0] for begins, times in zip(begun, written, strict=True))
        if not waits and sum(times[0] <= start and end <= times[-1] for times in written) == users:
            chunks += sum(start < time <= end for times in written for time in times)
            seconds += end - start
    if not chunks:
        raise TextsError(f"{users} users: their texts were never written all at once")
    tokens = max(1.0, len(written) * (NEW - 1) / sum(map(len, result["itls"])))  # of a chunk
    return tokens * chunks / seconds
