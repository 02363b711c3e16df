"""`ktmoe serve`: transformers' own server, with OpenAI's interface, for one model."""

from __future__ import annotations

import json
import os
import sys
import time

import click

from ktmoe.cli import engine, options
from ktmoe.cli.signals import signals_as_exit

HELP = """An OpenAI-compatible server for one model.

DIR is a checkpoint's folder, or the id of a model on the Hugging Face Hub. The server is `transformers serve`, with its
streaming, tools and chat templates. It loads the model first. Clients name it by the folder's name, or by its Hub id.
Ctrl-C ends it.

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
@options.BACKEND
@options.ACTIVATIONS
@options.TUNED_FOR
@options.THREADS
@options.CACHE
def command(
    model: str,
    arguments: tuple[str, ...],
    host: str,
    port: int,
    backend: str,
    activations: str,
    tuned_for: str,
    threads: int | None,
    cache: str | None,
) -> None:
    engine.start(server=True)
    import typer

    from ktmoe.transformers import answer, serving
    from ktmoe.transformers.view import view

    chosen = {"backend": backend, "activations": activations, "tuned_for": tuned_for, "threads": threads}
    chosen["cache"] = cache and os.path.abspath(cache)
    with signals_as_exit(), view(model, progress=sys.stderr.isatty(), **chosen) as made:
        try:
            context = serving.parse(serving.arguments(made, host, port, arguments), "ktmoe serve DIR --")
            serving.check_address(host, port)
            tokenizer = answer.load_tokenizer(made.folder, trust_remote_code=context.params["trust_remote_code"])
            with serving.serving(made, context) as url:
                click.echo(f"{made.name} is served at {url}/v1: {_example(url, made.name, bool(tokenizer.chat_template))}")
                while True:
                    time.sleep(3600)
        except typer.Exit:  # --help
            return
        except typer.TyperException as error:  # some arguments are checked when the server starts
            raise click.UsageError(f"transformers serve: {error.format_message()}") from None


def _example(url: str, name: str, converses: bool) -> str:
    """A call of curl. converses: whether the model has a chat template; without one it only continues a text."""
    asked = {"messages": [{"role": "user", "content": "Hello"}]} if converses else {"prompt": "Hello"}
    path, body = "chat/completions" if converses else "completions", json.dumps({"model": name, **asked})
    return f"curl {url}/v1/{path} -H 'Content-Type: application/json' -d '{body}'"
