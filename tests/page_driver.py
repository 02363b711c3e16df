"""Runs the blocks of a page, in a process of its own: page_driver.py STEPS RESULT, both JSON files.

STEPS: {"page", "before": Python code that makes names which the page takes as given, "check": "module:function" or "",
"path": folders for that module, "steps": [[language, line, text], ...]}. Python blocks share one namespace. Each shell block is
a bash of its own, in the page's folder. A server that a shell block starts lives until the page's end.
RESULT: {"failed": "", or what failed and where, "ran": lines of the blocks that ran}.

It imports nothing that an empty environment lacks.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
import urllib.request
from contextlib import suppress
from pathlib import Path

#: A command that serves until it is ended.
SERVER = re.compile(r"(\bktmoe serve|\bvllm serve|-m ktmoe\.vllm)\b(?!.*--help)")
#: Seconds that a page may take, a shell block of it, a server to answer, and to end.
PAGE, BLOCK, START, END = 540, 240, 240, 60


class BlockError(Exception):
    """A block of the page did not work."""


class Servers:
    """Those that run, by their ports."""

    def __init__(self):
        self.running: dict[str, tuple[str, subprocess.Popen, Path]] = {}

    def start(self, command: str) -> None:
        """Start it, wait until it answers, and ask it for text."""
        found = re.search(r"--port[ =](\d+)", command)
        port = found[1] if found else "8000"
        self.end(port)
        log = Path(os.environ["TMPDIR"], f"server-{port}")
        with log.open("w") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.running[port] = command, process, log
        deadline = time.monotonic() + START
        url = f"http://127.0.0.1:{port}/v1"
        while True:
            with suppress(OSError):
                model = ask(f"{url}/models")["data"][0]["id"]
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise BlockError(f"{command}: does not answer at {url}\n{log.read_text()[-4000:]}")
            time.sleep(0.1)
        message = {"role": "user", "content": "Hello"}
        asked = {"model": model, "messages": [message], "max_tokens": 4}
        if not ask(f"{url}/chat/completions", asked)["choices"]:
            raise BlockError(f"{command}: its answer is empty")

    def end(self, *ports: str) -> None:
        """By Ctrl-C, as a user would; all of them without ports."""
        for port in ports or [*self.running]:
            if port in self.running:
                command, process, log = self.running.pop(port)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGINT)
                try:
                    status = process.wait(END)
                finally:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                if status not in (0, 130, -signal.SIGINT):
                    raise BlockError(f"{command}: ended with {status}\n{log.read_text()[-4000:]}")


def ask(url: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def finish(script: str) -> None:
    """Run a script to its end. What it leaves behind ends with it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(["bash", "-e", "-o", "pipefail", "-c", script], start_new_session=True, **pipes)
    try:
        # what a command that asks on the terminal reads; then its input ends
        out, err = process.communicate("Hello\n", timeout=BLOCK)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise BlockError(f"exit code {process.returncode}\n{out[-2000:]}\n{err[-4000:]}")


def shell(text: str, servers: Servers) -> None:
    """A block; its lines before a server's are one script, and those behind it another one."""
    script: list[str] = []
    for line in [*text.replace("\\\n", " ").splitlines(), None]:
        serves = line is not None and SERVER.search(line.partition(" #")[0])
        if (line is None or serves) and script:
            finish("\n".join(script))
            script = []
        if serves:
            servers.start(line.partition(" #")[0].strip())
        elif line is not None:
            script.append(line)


def python(text: str, page: str, line: int, names: dict) -> None:
    """A block, whose traceback names the page's lines."""
    exec(compile("\n" * (line - 1) + text, page, "exec"), names)


def too_long(*_) -> None:
    raise BlockError(f"the page takes more than {PAGE} seconds")


def run(page: str, steps: list, before: str, check: str) -> dict:
    names: dict = {"__name__": "__main__"}
    after, ran, at = [], [], "before the page"
    servers = Servers()
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(PAGE)
    try:
        exec(before, names)
        for language, line, text in steps:
            at = f"{page}:{line}"
            if language == "sh":
                shell(text, servers)
            else:
                python(text, page, line, names)
                after.append(dict(names))
            ran.append(line)
        at = f"{page}: its servers' end"
        servers.end()
        if check:
            at = f"{page}: {check}"
            module, _, function = check.partition(":")
            getattr(importlib.import_module(module), function)(after)
    except Exception as error:  # whatever a block raises
        shown = str(error) if isinstance(error, BlockError) else traceback.format_exc()
        return {"failed": f"{at}: {shown}", "ran": ran}
    finally:
        with suppress(BlockError):
            servers.end()
    return {"failed": "", "ran": ran}


def main(steps: str, result: str) -> None:
    asked = json.loads(Path(steps).read_text())
    sys.path[:] = [*sys.path[1:], *asked["path"]]  # a script's own folder would stand first
    sys.path.insert(0, "")  # as where python is started by hand
    found = run(asked["page"], asked["steps"], asked["before"], asked["check"])
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
