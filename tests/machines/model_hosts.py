"""Hosts of one model: `python -m ktmoe.vllm` on each of several machines, and what the first one's server answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import runs

from bench.namespaces import Machines

#: Where the hosts meet, and where the server listens. Each machine has all ports.
MEETING, PORT = "29501", "8000"
#: A tiny model needs no compiled graph. All dense layers that ktmoe knows are its own.
OPTIONS = ("--enforce-eager", "--max-model-len", "128", "--port", PORT)
NEW = 16
#: On a machine: asks its server, and waits for it.
_ASK = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode() or None, {"Content-Type": "application/json"})
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
for line in opener.open(request, timeout=float(sys.argv[3])):
    print(line.decode(), end="", flush=True)
"""


@dataclass(frozen=True)
class Host:
    process: subprocess.Popen
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def lines(self, words: str) -> list[str]:
        """What it said with these words in it, without vLLM's mark of process and time."""
        return [line.partition("] ")[2] for line in self.said.splitlines() if words in line]

    def seconds_to_end(self, patience: float) -> float:
        start = time.monotonic()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs after {patience} s:\n{self.said[-3000:]}") from None
        return time.monotonic() - start


class Hosts:
    """Those of one model, the first on the first machine, and so on."""

    def __init__(self, machines: Machines, model: Path, folder: Path):
        self.machines, self.model, self.folder = machines, model, folder
        self.all: list[Host] = []

    def start(self, *options: str) -> None:
        """The next machine's, which is known by the number of those before."""
        number = len(self.all)
        folder = self.folder / f"host{number}"
        cpus = sorted(os.sched_getaffinity(0))
        places = [str(cpu) for cpu in cpus] if len(self.machines.names) == 1 else [str(cpus[number % len(cpus)])]
        variables = runs.prepared(folder) | {
            "GLOO_SOCKET_IFNAME": self.machines.interface,
            "VLLM_HOST_IP": self.machines.addresses[number],
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(places),
            "KTMOE_VLLM_DENSE": "all",
        }
        command = [sys.executable, "-m", "ktmoe.vllm", self.model, *OPTIONS, *options]
        log = folder / "log"
        with log.open("w") as output:
            process = self.machines.start(number, command, env=variables, cwd=folder, stdout=output, stderr=output)
        self.all.append(Host(process, log))

    def start_all(self, *options: str) -> None:
        """One on each machine, for two tensor parallel processes in all."""
        for number in range(len(self.machines.names)):
            self.start("--tensor-parallel-size", "2", *self.place(number), *options)

    def place(self, number: int, meeting: str | None = None) -> list[str]:
        """Options that say which of several hosts one is. meeting: the first one's address, if it is not told the true one."""
        count = len(self.machines.names)
        if count == 1:
            return []
        address = meeting or self.machines.addresses[0]
        where = ["--nnodes", str(count), "--node-rank", str(number), "--master-addr", address, "--master-port", MEETING]
        return where + ["--headless"] * (number > 0)

    def wait(self) -> None:
        """Until the first host's server answers."""
        until = time.monotonic() + runs.PATIENCE
        while self.ask("/health", patience=5).wait():
            for host in self.all:
                assert host.process.poll() is None, host.said[-5000:]
            assert time.monotonic() < until, self.all[0].said[-5000:]
            time.sleep(0.2)

    def ask(self, path: str, fields: dict | None = None, patience: float = 60.0) -> subprocess.Popen:
        """Whose output is the answer, and whose exit code is not 0 if there is none."""
        body = json.dumps({"model": str(self.model), **fields}) if fields else ""
        command = [sys.executable, "-c", _ASK, f"http://127.0.0.1:{PORT}{path}", body, str(patience)]
        return self.machines.start(0, command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def begin(self, prompt: list[int], new: int = NEW, *, stream: bool = False) -> subprocess.Popen:
        """stream: whether the answer comes token by token, a line of it for each."""
        fields = {"prompt": prompt, "max_tokens": new, "temperature": 0, "logprobs": 4, "ignore_eos": True, "stream": stream}
        return self.ask("/v1/completions", fields | {"return_token_ids": True})

    def texts(self) -> list[Text]:
        """Of each of runs.PROMPTS, one after the other."""
        return [Text.of(self.begin(prompt)) for prompt in runs.PROMPTS]


@dataclass(frozen=True)
class Text:
    """tokens: greedy ones. logprobs: of each, {token: log-probability} for the likeliest few."""

    tokens: list[int]
    logprobs: list[dict[str, float]]

    @classmethod
    def of(cls, request: subprocess.Popen) -> Text:
        with request:
            answer = request.stdout.read()
        assert request.returncode == 0, answer
        [choice] = json.loads(answer)["choices"]
        return cls(choice["token_ids"], choice["logprobs"]["top_logprobs"])


@contextmanager
def serving(count: int, model: Path, folder: Path, *options: str, rate: str | None = None) -> Iterator[Hosts]:
    """Two tensor parallel processes of a model, on so many machines, once they answer. options: of all hosts."""
    with Machines(count, rate) as machines:
        hosts = Hosts(machines, model, folder)
        hosts.start_all(*options)
        hosts.wait()
        yield hosts
