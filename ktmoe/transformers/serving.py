"""transformers' own server and chat client, on a view of a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from huggingface_hub import set_async_client_factory
from huggingface_hub.errors import HfHubHTTPError, TextGenerationError
from huggingface_hub.utils import httpx
from transformers.cli.chat import Chat

from ktmoe.errors import UnavailableError
from ktmoe.messages import install
from ktmoe.transformers.refusals import in_one_line
from ktmoe.transformers.server.server import Listening, Server, ServerLimits
from ktmoe.transformers.view import View

#: What the server needs besides transformers: the extra `serve` has it.
PACKAGES = ("fastapi", "openai", "pydantic", "starlette", "uvicorn")


def check_packages() -> None:
    """Raise UnavailableError, which says how to install them, if packages of the server are missing."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        verb = "is" if len(missing) == 1 else "are"
        raise UnavailableError(
            f"transformers' server needs {', '.join(missing)}, which {verb} not installed: {install('serve')}"
        )
    if find_spec("accelerate") is None:  # in no extra: it requires torch, and pip would install torch's build for CUDA
        how = "uv pip install --torch-backend=cpu accelerate"
        raise UnavailableError(f"transformers' server needs accelerate, which is not installed: {how}")


def parse(arguments: Sequence[str], program: str) -> typer.Context:
    """Arguments of `transformers serve`, checked; --help prints its help.

    program: the command's name in that. Raises typer.TyperException for wrong usage, typer.Exit after the help.
    """
    app = typer.Typer(add_completion=False)
    app.command()(Server)
    context = typer.main.get_command(app).make_context(program, list(arguments))
    if context.params["continuous_batching"]:
        raise typer.BadParameter("--continuous-batching: expected answers one after the other, which is all that ktmoe serves")
    return context


def check_address(host: str, port: int) -> None:
    """Raise UnavailableError if nobody could listen there: before a model is loaded, not after."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise UnavailableError(f"{host} port {port}: a server cannot listen there: {error.strerror}") from None


@contextlib.contextmanager
def serving(view: View, context: typer.Context, limits: ServerLimits, key: str | None = None) -> Iterator[Listening]:
    """Load the model, and run the server in a thread until the context ends.

    context: what parse() made; the model in it is view.name, which clients name, too. The working directory is the view's
    meanwhile, so that this name is a path. key: what clients must know, if any.

    Raises what loading raises, InputError for limits that the model cannot keep, and
    UnavailableError if the server does not start.
    """
    with contextlib.chdir(view.root):
        with in_one_line(view.name):
            server: Server = context.command.invoke(context)
        with server.listening(view.name, limits, cors=context.params["enable_cors"], key=key) as found:
            yield found


def arguments(view: View, host: str, port: int, further: Sequence[str] = ()) -> list[str]:
    """Arguments for parse(): a server of one model."""
    return [view.name, "--non-blocking", "--device", "cpu", "--host", host, "--port", str(port), *further]


def converse(name: str, url: str, *, flags: Sequence[str], system: str | None, save_folder: Path) -> None:
    """transformers' chat client on this terminal, until !exit or the end of the input.

    flags: of generate(), such as "max_new_tokens=256". save_folder: where !save puts a conversation.
    Raises KeyboardInterrupt after Ctrl-C, UnavailableError if the server refuses to go on.
    """

    async def read_error(response: httpx.Response) -> None:
        if response.is_error:  # the client would drop its reason
            await response.aread()

    # the Hub's own client refuses all addresses, even this machine's, where HF_HUB_OFFLINE is set
    set_async_client_factory(lambda: httpx.AsyncClient(timeout=None, event_hooks={"response": [read_error]}))
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
    except (HfHubHTTPError, TextGenerationError) as error:
        raise UnavailableError(f"the conversation ends: {_reason(error)}") from None
    finally:
        signal.signal(signal.SIGINT, old)
    if interrupted.is_set():  # the client takes it for !exit
        raise KeyboardInterrupt


def _reason(error: Any) -> str:
    """What the server says of an error, in the form of OpenAI's if it could answer at all."""
    try:
        said = error.args[0] if isinstance(error, TextGenerationError) else error.response.json()["error"]
        return said["message"]
    except (AttributeError, LookupError, TypeError, ValueError):
        return str(error).strip()
