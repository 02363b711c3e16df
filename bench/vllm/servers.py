"""Servers of the OpenAI API, one after the other: vLLM with the plug-in and without it, and llama.cpp's. vLLM's own
`bench serve` is the client of all."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ktmoe
from bench.engines import byte_tokenizer, session
from bench.engines.session import LIMIT_SECONDS
from bench.engines.shapes import Engine
from bench.peers import environments
from bench.peers.peers import LLAMA_CPP, LLAMA_SERVER
from bench.peers.processes import WorkerError
from bench.vllm import client, ways
from bench.vllm.serving import Server, free_port
from bench.vllm.ways import WAYS, Way

#: The tokens for which a server has room, for each user.
ROOM = 1024
#: What the text has that wakes a server's threads: prompt, new tokens.
WARM = 64, 8
GGUF = "model.gguf"
#: The names of a server's counts: tokens of prompts, new tokens.
VLLM_COUNTS = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
LLAMA_COUNTS = "llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total"
#: How often a run is tried in which texts are not completed.
TRIES = 2
#: Seconds that a server may need until its counts have all of a run that has ended.
COUNTING_SECONDS = 3.0


@dataclass(frozen=True)
class Kind:
    """A server to measure. way: of vLLM; None: llama.cpp's server."""

    name: str
    weights: str
    way: Way | None = None

    @property
    def counts(self) -> tuple[str, str]:
        return VLLM_COUNTS if self.way else LLAMA_COUNTS


#: The first one is what the others are compared with.
KINDS = (
    Kind(WAYS[0].name, WAYS[0].weights, WAYS[0]),
    Kind(WAYS[-1].name, WAYS[-1].weights, WAYS[-1]),
    Kind("llama.cpp MXFP4, dense BF16", "MXFP4"),
)


@dataclass(frozen=True)
class Programs:
    """What runs them: vLLM's Python, and llama.cpp's server, or why there is none."""

    python: Path
    llama_server: Path | None
    missing: str = ""


def measure(
    engine: Engine, layers: int, rounds: int, users: Sequence[int], folder: Path, progress: Callable[[str], object]
) -> dict:
    """The result, which is JSON. A server that cannot be measured is out, and the result says why. Raises WorkerError if none
    can."""
    programs = _programs(progress)
    config = engine.config(layers)
    ways.write(config, folder, progress, GGUF)
    for name in {kind.weights for kind in KINDS}:
        byte_tokenizer.write(folder / name, config["vocab_size"])
    failures, measured = {}, []
    with session.reading(engine) as limits:
        for number in range(rounds):
            record = {}
            for kind in KINDS[:: -1 if number % 2 else 1]:
                if kind.name in failures:
                    continue
                title = f"servers, round {number + 1} of {rounds}, {kind.name}"
                turn = _Turn(kind, programs, layers, folder, number, lambda text, title=title: progress(f"{title}: {text}"))
                read = limits.read(LIMIT_SECONDS)
                try:
                    points = turn.points(users)
                except WorkerError as error:
                    failures[kind.name] = str(error)
                    progress(f"out: {kind.name}: {error}")
                    continue
                record[kind.name] = {"read": read, "points": points}
            measured.append(record)
        streams = limits.streams
    points = [point for record in measured for turn in record.values() for point in turn["points"]]
    if not points:
        raise WorkerError("; ".join(f"{name}: {reason}" for name, reason in failures.items()))
    return {
        "layers": layers,
        "version": points[0]["vllm"],
        "prompt": client.PROMPT,
        "new": client.NEW,
        "read_streams": streams,
        "base": KINDS[0].name,
        "servers": {
            kind.name: {
                "weights": kind.weights,
                "environment": kind.way.environment if kind.way else {},
                "of": "vLLM" if kind.way else LLAMA_CPP,
                "options": " ".join(_options(kind, users[-1])),
                "failure": failures.get(kind.name),
            }
            for kind in KINDS
        },
        "rounds": measured,
    }


def _programs(progress: Callable[[str], object]) -> Programs:
    python = environments.python(environments.VLLM, progress)
    try:
        return Programs(python, environments.program(LLAMA_SERVER, "llama-server", progress))
    except environments.SetUpError as error:
        return Programs(python, None, str(error))


def command(kind: Kind, programs: Programs, users: int, port: int, folder: Path) -> list[str | Path]:
    """What starts a server. Raises WorkerError if its program is not there."""
    at = ("--host", "127.0.0.1", "--port", str(port))
    if kind.way:
        model = ("--model", folder / kind.weights, "--served-model-name", "model")
        return [programs.python, "-m", "vllm.entrypoints.openai.api_server", *model, *at, *_options(kind, users)]
    if not programs.llama_server:
        raise WorkerError(programs.missing)
    return [programs.llama_server, "--model", folder / GGUF, "--alias", "model", *at, *_options(kind, users)]


def _options(kind: Kind, users: int) -> list[str]:
    """Options besides the model and where it is served. No server knows a prompt from one before. llama.cpp's batches as many
    texts as it is told, each with its room; it adds to a batch whatever has come, which is its default."""
    if kind.way:
        return ["--dtype", "bfloat16", "--max-model-len", str(ROOM), "--no-enable-prefix-caching", "--enforce-eager"]
    threads = str(ktmoe.get_num_threads())
    slots = ["--parallel", str(users), "--ctx-size", str(users * ROOM)]
    batches = ["--threads", threads, "--batch-size", "2048", "--ubatch-size", "512"]
    return [*slots, *batches, "--no-cache-prompt", "--cache-ram", "0", "--ctx-checkpoints", "0", "--no-ui", "--metrics"]


@dataclass
class _Turn:
    """One server's turn in a round. options: what the server that runs was started with."""

    kind: Kind
    programs: Programs
    layers: int
    folder: Path
    number: int
    progress: Callable[[str], object]
    server: Server | None = None
    options: list[str] | None = None

    def points(self, users: Sequence[int]) -> list[dict]:
        """What each number of users found. Raises WorkerError."""
        found = []
        try:
            for count in users:
                self._start(count)
                self.progress(f"{count} user{'s' * (count > 1)}")
                found.append(self._tried(count))
        finally:
            self._end()
        return found

    def _end(self) -> None:
        if self.server:
            self.server.close()
        self.server = None

    def _start(self, users: int) -> None:
        """Start the server, unless one runs that would be started likewise."""
        if self.server and self.options == _options(self.kind, users):
            return
        self._end()
        self.progress("loading")
        kind, port = self.kind, free_port()
        made, self.options = command(kind, self.programs, users, port, self.folder), _options(kind, users)
        variables = ways.variables(self.folder, kind.way) | {"VLLM_CPU_OMP_THREADS_BIND": ways.all_cpus()} if kind.way else {}
        self.server = Server(made, port, self.folder / "server.log", variables)
        self.server.wait()
        if kind.way:
            expected = self.layers if kind.way.plugged_in else 0
            found = sum(map(int, re.findall(r"ktmoe computes the experts of (\d+) layer", self.server.said)))
            if found != expected:
                raise WorkerError(f"expected ktmoe in {expected} layers, found {found}")
        prompt, new = WARM
        self.server.complete(model="model", prompt=[*range(prompt)], max_tokens=new, temperature=0, ignore_eos=True)

    def _tried(self, users: int) -> dict:
        """A point, if need be of a second run with other prompts: llama.cpp's server now and then gives a text no token."""
        for again in range(TRIES):
            try:
                return {"tries": again + 1, **self._point(users, TRIES * self.number + again)}
            except client.TextsError as error:
                failure = error
                self.progress(f"{error}: once more")
        raise failure

    def _point(self, users: int, number: int) -> dict:
        """The server's own counts say whether all texts had their length: llama.cpp's says no number where the client looks."""
        expected = client.TEXTS[users] * client.PROMPT, client.TEXTS[users] * client.NEW
        before = self.server.counted(self.kind.counts)
        tokenizer = self.folder / self.kind.weights
        found = client.run(self.programs.python, self.server.url, tokenizer, users, number, self.folder)
        until = time.monotonic() + COUNTING_SECONDS
        while True:
            after = self.server.counted(self.kind.counts)
            counts = tuple(now - then for now, then in zip(after, before, strict=True))
            if counts == expected:
                return found
            if time.monotonic() > until:
                raise WorkerError(f"{users} users: expected {expected} tokens of prompts and new ones, found {counts}")
            time.sleep(0.1)
