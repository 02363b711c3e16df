"""A server as a process of its own: started, waited for, asked for a first text and for its counts, and ended with its own
processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from bench.peers.processes import WorkerError

#: Seconds until a server is ready, and until it has ended after it was asked to.
PATIENCE, END_PATIENCE = 900.0, 20.0
#: Seconds that a request may take which only wakes a server's threads.
REQUEST_PATIENCE = 300.0
LAST_WORDS = 300


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Server:
    """A server that runs. Its processes are a group, so that all of them end, and Ctrl-C is not theirs."""

    def __init__(self, command: list[str | Path], port: int, log: Path, environment: dict[str, str]):
        self.url, self._log = f"http://127.0.0.1:{port}", log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | environment,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        """Its log so far."""
        return self._log.read_text(errors="replace")

    def wait(self) -> None:
        """Until it is ready. Raises WorkerError if it ends, or is not ready in time."""
        until = time.monotonic() + PATIENCE
        while True:
            if self._process.poll() is not None:
                raise WorkerError(f"the server ended with status {self._process.returncode}: {self.last_words()}")
            try:
                self._ask("/health", patience=5.0)
                return
            except OSError:  # not there yet, or there and loading
                if time.monotonic() > until:
                    raise WorkerError(f"the server is not ready after {PATIENCE:.0f} s: {self.last_words()}") from None
            time.sleep(0.2)

    def complete(self, **fields: object) -> None:
        """A text of the OpenAI API. Raises WorkerError."""
        try:
            self._ask("/v1/completions", json.dumps(fields).encode(), REQUEST_PATIENCE)
        except urllib.error.HTTPError as error:
            words = error.read().decode(errors="replace")[:LAST_WORDS]
            raise WorkerError(f"the server answers {error.code}: {words}") from None
        except OSError as error:
            raise WorkerError(f"the server does not answer ({error}): {self.last_words()}") from None

    def counted(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """What the server has counted of each name of its metrics, all labels together. Raises WorkerError."""
        try:
            text = self._ask("/metrics", patience=30.0)
        except OSError as error:
            raise WorkerError(f"the server does not say what it has counted ({error}): {self.last_words()}") from None
        return tuple(sum(map(_number, re.findall(rf"^{re.escape(n)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))) for n in names)

    def last_words(self) -> str:
        lines = [line.strip() for line in self.said.splitlines() if line.strip()]
        return " / ".join(lines[-2:])[-LAST_WORDS:]

    def close(self) -> None:
        """End it and the processes that it has started."""
        self._send(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_PATIENCE)
        self._send(signal.SIGKILL)
        self._process.wait()

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self._process.pid, number)

    def _ask(self, path: str, body: bytes | None = None, patience: float = 5.0) -> str:
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would not reach this machine's servers
        with opener.open(request, timeout=patience) as answer:
            return answer.read().decode(errors="replace")


def _number(text: str) -> int:
    return round(float(text))
