"""`ktmoe serve`: transformers' own server, with OpenAI's interface, for one model."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

import click

from ktmoe.cli import engine, options
from ktmoe.cli.signals import signals_as_exit
from ktmoe.machine import environment

if TYPE_CHECKING:
    from ktmoe.transformers import serving

HELP = """An OpenAI-compatible server for one model.

DIR is a checkpoint's folder, a .gguf file, or the id of a model on the Hugging Face Hub. The server is `transformers
serve`, with its streaming, tools and chat templates. It loads the model first. Clients name it by the folder's name, by the
file's without .gguf, or by its Hub id.
Whoever reaches it may use it, unless it has a key. Ctrl-C ends it.

ARGUMENTS after -- go to `transformers serve`; `ktmoe serve DIR -- --help` lists them. Paths in them must be absolute.
"""


@click.command("serve", help=HELP)
@options.MODEL
@click.argument("arguments", metavar="[-- ARGUMENTS ...]", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--host", metavar="NAME", default="localhost", show_default=True, help="Where to listen; 0.0.0.0 is every address."
)
@click.option(
    "--port", metavar="N", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes any free port."
)
@click.option(
    "--api-key",
    metavar="KEY",
    help="Clients must send it, as Authorization: Bearer KEY. Other users see arguments; KTMOE_API_KEY is not seen.",
)
@click.option(
    "--context",
    metavar="TOKENS",
    type=click.IntRange(2),
    help="Most tokens of a prompt and its answer together; by default what the model was made for, or what memory allows.",
)
@click.option(
    "--request-timeout",
    metavar="S",
    type=click.IntRange(1),
    default=3600,
    show_default=True,
    help="Most seconds for one answer.",
)
@options.BACKEND
@options.ACTIVATIONS
@options.TUNED_FOR
@options.THREADS
@options.CACHE
@options.DENSE
@options.EXPERTS
def command(
    model: str,
    arguments: tuple[str, ...],
    host: str,
    port: int,
    api_key: str | None,
    context: int | None,
    request_timeout: int,
    backend: str,
    activations: str,
    tuned_for: str,
    threads: int | None,
    cache: str | None,
    dense: str,
    experts: str | None,
) -> None:
    key = _key(api_key)
    engine.start(server=True)
    import typer

    from ktmoe.transformers import load_tokenizer, serving
    from ktmoe.transformers.view import view

    chosen = {"backend": backend, "activations": activations, "tuned_for": tuned_for, "threads": threads, "dense": dense}
    chosen |= {"cache": cache and os.path.abspath(cache), "experts": experts and os.path.abspath(experts)}
    with signals_as_exit(), view(model, progress=True, **chosen) as made:
        try:
            parsed = serving.parse(serving.arguments(made, host, port, arguments), "ktmoe serve DIR --")
            given = parsed.params
            serving.check_address(given["host"], given["port"])
            tokenizer = load_tokenizer(made.folder, trust_remote_code=given["trust_remote_code"])
            with serving.serving(made, parsed, serving.ServerLimits(context, request_timeout), key) as found:
                _warn(given["host"], found, context, key)
                example = _example(found.url, made.name, bool(tokenizer.chat_template), key)
                click.echo(f"{made.name} is served at {found.url}/v1: {example}")
                while True:
                    time.sleep(3600)
        except typer.Exit:  # --help
            return
        except typer.TyperException as error:  # some arguments are checked when the server starts
            raise click.UsageError(f"transformers serve: {error.format_message()}") from None


def _key(given: str | None) -> str | None:
    """The key that clients must know, if any; what is given stands before the environment."""
    if given is None:
        return environment.api_key()
    if not environment.is_key(given):
        raise click.UsageError(f"--api-key: expected {environment.KEY}")
    return given


def _warn(host: str, found: serving.Listening, context: int | None, key: str | None) -> None:
    """Warn on stderr of what someone may not expect."""
    from ktmoe.transformers.server.access import is_local

    if key is None and not is_local(host):
        click.echo(f"ktmoe: {host} is not a local address: whoever reaches it can use the model; see --api-key", err=True)
    if context is None and found.context < found.declared:
        reason = f"since memory may not suffice for the model's {found.declared}"
        click.echo(f"ktmoe: prompt and answer may have {found.context} tokens together, {reason}; see --context", err=True)


def _example(url: str, name: str, converses: bool, key: str | None) -> str:
    """A call of curl, without the key itself. converses: whether the model has a chat template; without one it only continues a
    text."""
    asked = {"messages": [{"role": "user", "content": "Hello"}]} if converses else {"prompt": "Hello"}
    path, body = "chat/completions" if converses else "completions", json.dumps({"model": name, **asked})
    authorization = "" if key is None else " -H 'Authorization: Bearer KEY'"
    return f"curl {url}/v1/{path}{authorization} -H 'Content-Type: application/json' -d '{body}'"
