"""Workers as processes: started, asked, stopped while it is not their turn, and their deaths explained."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path

#: No answer takes longer, loading included.
PATIENCE_SECONDS = 300.0


class WorkerError(Exception):
    """A worker cannot do what it was asked, or is gone; the text says why."""


class Process:
    """A worker's process. Once asked, it runs only while ask() waits for it: else it is stopped, spinning threads and all.

    It is not stopped before: until its first answer it may not have arranged to end with this process.
    """

    def __init__(self, command: list[str | Path], log: Path, environment: dict[str, str] | None = None):
        self._log = log.open("w+")
        self._answers = b""
        self._process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,  # a dead worker's unread message must not be written again when its pipe is closed
            env=os.environ | (environment or {}),
        )

    def ask(self, *, patience: float = PATIENCE_SECONDS, **message) -> dict:
        """The answer to a message. Raises WorkerError if it is an error, if the worker died, or if it takes too long."""
        if self._process.returncode is not None:
            raise WorkerError(self._death())
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            answer = json.loads(self._line(patience))
        except BrokenPipeError:
            self._process.wait()
            raise WorkerError(self._death()) from None
        finally:
            self._pause()
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def resident_bytes(self) -> int:
        """Memory that the process has now."""
        try:
            pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        except OSError:
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()

    def _line(self, patience: float) -> bytes:
        until = time.monotonic() + patience
        while b"\n" not in self._answers:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                self._process.kill()
                self._process.wait()
                raise WorkerError(f"no answer within {patience:.0f} s")
            read = os.read(self._process.stdout.fileno(), 1 << 16)
            if not read:
                self._process.wait()
                raise WorkerError(self._death())
            self._answers += read
        line, _, self._answers = self._answers.partition(b"\n")
        return line

    def _pause(self) -> None:
        """Stop all of its threads, and wait until they stand still."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _death(self) -> str:
        code = self._process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        self._log.seek(0)
        last = [line.strip() for line in self._log.read().splitlines() if line.strip()][-1:]
        return ": ".join([f"the worker was {how}" if code < 0 else f"the worker {how}", *last])
