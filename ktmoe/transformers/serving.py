"""transformers' own server and chat client, on a view of a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import typer
from huggingface_hub import set_async_client_factory
from huggingface_hub.utils import httpx
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers.cli.chat import Chat
from transformers.cli.serve import Serve

from ktmoe.errors import UnavailableError
from ktmoe.messages import install
from ktmoe.transformers.refusals import in_one_line
from ktmoe.transformers.view import View

#: What the server needs besides transformers: the extra `serve` has it.
PACKAGES = ("fastapi", "openai", "pydantic", "starlette", "uvicorn")
#: Seconds at most until clients were told that the server stops; seconds for it to start once the model is loaded.
GRACE, PATIENCE = 10, 60
#: What transformers calls the thread of its server.
THREAD = "uvicorn-thread"


def check_packages() -> None:
    """Raise UnavailableError, which says how to install them, if packages of the server are missing."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        verb = "is" if len(missing) == 1 else "are"
        raise UnavailableError(
            f"transformers' server needs {', '.join(missing)}, which {verb} not installed: {install('serve')}"
        )


def parse(arguments: Sequence[str], program: str) -> typer.Context:
    """Arguments of `transformers serve`, checked; --help prints its help.

    program: the command's name in that. Raises typer.TyperException for wrong usage, typer.Exit after the help.
    """
    app = typer.Typer(add_completion=False)
    app.command()(Serve)
    return typer.main.get_command(app).make_context(program, list(arguments))


def check_address(host: str, port: int) -> None:
    """Raise UnavailableError if nobody could listen there: before a model is loaded, not after."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise UnavailableError(f"{host} port {port}: a server cannot listen there: {error.strerror}") from None


@contextlib.contextmanager
def serving(view: View, context: typer.Context) -> Iterator[str]:
    """Load the model, and run the server in a thread until the context ends; its URL, without /v1.

    context: what parse() made; the model in it is view.name, which clients name, too. The working directory is the view's
    meanwhile, so that this name is a path. Raises what loading raises, and UnavailableError if the server does not start.
    """
    with contextlib.chdir(view.root):
        with in_one_line(view.name):
            serve: Serve = context.command.invoke(context)
        try:
            _list_model(serve, view.name)
            yield _url(serve)
        finally:
            with _no_forward_calls():
                serve.server.config.timeout_graceful_shutdown = GRACE
                serve.server.should_exit = True
                serve.kill_server()
                for thread in threading.enumerate():
                    if thread.name == THREAD:
                        thread.join()


@contextlib.contextmanager
def _no_forward_calls() -> Iterator[None]:
    """Answers end at once, with an error. The thread that generates them is a daemon: if Python ended while it is in torch, the
    process would abort.
    """

    def refuse(*_: object) -> None:
        raise UnavailableError("the server was stopped")

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def arguments(view: View, host: str, port: int, further: Sequence[str] = ()) -> list[str]:
    """For parse(): a server of one model."""
    return [view.name, "--non-blocking", "--device", "cpu", "--host", host, "--port", str(port), *further]


def _list_model(serve: Serve, name: str) -> None:
    """Let /v1/models name the model: transformers' own answer lists the Hub's cache, and fails where there is none."""
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "ktmoe"}
    route = Route("/v1/models", lambda request: JSONResponse({"object": "list", "data": [model]}))
    serve.server.config.app.router.routes.insert(0, route)


def _url(serve: Serve) -> str:
    """Wait until the server listens. The port is the true one, where any free one was asked for."""
    deadline = time.monotonic() + PATIENCE
    while not serve.server.started:
        if time.monotonic() > deadline:
            raise UnavailableError(f"{serve.server.config.host} port {serve.server.config.port}: the server did not start")
        time.sleep(0.01)
    port = serve.server.servers[0].sockets[0].getsockname()[1]
    host = serve.server.config.host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def converse(name: str, url: str, *, flags: Sequence[str], system: str | None, save_folder: Path) -> None:
    """transformers' chat client on this terminal, until !exit or the end of the input.

    flags: of generate(), such as "max_new_tokens=256". save_folder: where !save puts a conversation.
    Raises KeyboardInterrupt after Ctrl-C.
    """
    # the Hub's own client refuses all addresses, even this machine's, where HF_HUB_OFFLINE is set
    set_async_client_factory(lambda: httpx.AsyncClient(timeout=None))
    interrupted = threading.Event()

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    # in the place of Python's own handler asyncio puts one of its own, which the prompt does not notice
    old = signal.signal(signal.SIGINT, interrupt)
    try:
        Chat(name, url, list(flags), system_prompt=system, save_folder=str(save_folder))
    except EOFError:  # the input's end
        pass
    finally:
        signal.signal(signal.SIGINT, old)
    if interrupted.is_set():  # the client takes it for !exit
        raise KeyboardInterrupt
