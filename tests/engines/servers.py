"""Servers of `ktmoe serve` in this process, and what the model is called with."""

from __future__ import annotations

import http.client
import json
import time
from contextlib import contextmanager
from urllib.parse import urlsplit

import commands
from torch.nn.modules.module import register_module_forward_pre_hook

from ktmoe.transformers import serving
from ktmoe.transformers.view import view


class Served:
    """A server in this process. steps: how often the model was called. tokens: how many it was called with."""

    def __init__(self, name: str, found: serving.Listening):
        self.name, self.found, self.steps, self.tokens = name, found, 0, 0
        self.address = urlsplit(found.url)

    def count(self, module, arguments) -> None:
        self.steps += type(module).__name__ == "Qwen3MoeForCausalLM"
        if type(module).__name__ == "Embedding":
            self.tokens += arguments[0].numel()

    def send(self, path: str, method: str = "POST", headers: dict | None = None, **body: object) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.address.hostname, self.address.port, timeout=commands.PATIENCE)
        text = json.dumps(body) if method == "POST" else None
        connection.request(method, path, text, {"Content-Type": "application/json"} | (headers or {}))
        return connection

    def ask(self, path: str, method: str = "POST", headers: dict | None = None, **body: object) -> tuple[int, dict]:
        connection = self.send(path, method, headers, **body)
        with connection.getresponse() as response:
            text = response.read()
        connection.close()
        return response.status, json.loads(text)

    def wait_for_steps(self, steps: int) -> None:
        end = time.monotonic() + commands.PATIENCE
        while self.steps < steps:
            assert time.monotonic() < end
            time.sleep(0.001)


@contextmanager
def hooked(before):
    """Call it before each module."""
    handle = register_module_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def running(folder, limits: serving.ServerLimits, *further: str, key: str | None = None):
    """further: arguments of `transformers serve`. key: what clients must know."""
    with view(folder) as made:
        arguments = serving.arguments(made, "127.0.0.1", 0, ["--log-level", "error", *further])
        with serving.serving(made, serving.parse(arguments, "test"), limits, key) as found:
            served = Served(made.name, found)
            with hooked(served.count):
                yield served
