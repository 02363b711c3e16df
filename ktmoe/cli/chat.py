"""`ktmoe chat`: one answer to a prompt, or transformers' own chat client for a conversation."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from ktmoe.cli import engine, options, output, units
from ktmoe.cli.signals import signals_as_exit
from ktmoe.errors import InputError
from ktmoe.messages import printable

HELP = """Talk to a model.

DIR is a checkpoint's folder, a .gguf file, or the id of a model on the Hugging Face Hub. PROMPT, or what a pipe brings,
gets one answer, on stdout; tokens and times go to stderr. Without either, a conversation begins: `transformers chat`, with
a server that ends with it. A model without a chat template continues the bare PROMPT.
"""


@click.command("chat", help=HELP)
@options.MODEL
@click.argument("prompt", required=False)
@click.option("--system", metavar="TEXT", help="A system prompt.")
@click.option(
    "--max-new-tokens", metavar="N", type=click.IntRange(1), default=256, show_default=True, help="Most tokens of an answer."
)
@click.option("--temperature", metavar="T", type=click.FloatRange(0, min_open=True), help="Sample, at this temperature.")
@click.option("--greedy", is_flag=True, help="Always take the likeliest token.")
@options.BACKEND
@options.ACTIVATIONS
@options.TUNED_FOR
@options.THREADS
@options.CACHE
@options.DENSE
@options.EXPERTS
@click.option("--trust-remote-code", "trusted", is_flag=True, help="Run Python code of the checkpoint, if it has some.")
@options.JSON
def command(
    model: str,
    prompt: str | None,
    system: str | None,
    max_new_tokens: int,
    temperature: float | None,
    greedy: bool,
    backend: str,
    activations: str,
    tuned_for: str,
    threads: int | None,
    cache: str | None,
    dense: str,
    experts: str | None,
    trusted: bool,
    as_json: bool,
) -> None:
    if greedy and temperature is not None:
        raise click.UsageError("--greedy and --temperature exclude each other")
    chosen = {"backend": backend, "activations": activations, "tuned_for": tuned_for, "threads": threads, "dense": dense}
    chosen |= {"cache": cache and os.path.abspath(cache), "experts": experts and os.path.abspath(experts)}
    generation = {"max_new_tokens": max_new_tokens, **_sampling(temperature, greedy)}
    if prompt is None and not sys.stdin.isatty():
        prompt = _piped()
    for name, text in (("PROMPT", prompt), ("--system", system)):
        _check_utf8(name, text or "")
    if prompt is not None:
        _answer(model, prompt, system, generation, chosen, trusted, as_json)
    elif as_json:
        raise click.UsageError("--json needs a PROMPT")
    else:
        _converse(model, system, generation, chosen, trusted)


def _piped() -> str:
    """The prompt on stdin."""
    try:
        prompt = sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        raise InputError(f"stdin: expected text in UTF-8: {error}") from None
    if not prompt:
        raise InputError("expected a PROMPT or one on stdin, found neither")
    return prompt


def _check_utf8(name: str, text: str) -> None:
    """Raise InputError for bytes of an argument, or of stdin in some locales, that Python could not decode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name}: expected text in UTF-8, found another byte at character {error.start}") from None


def _sampling(temperature: float | None, greedy: bool) -> dict:
    """Arguments of generate(); by default what the checkpoint's generation_config.json says."""
    if greedy:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {} if temperature is None else {"do_sample": True, "temperature": temperature}


def _answer(model: str, prompt: str, system: str | None, generation: dict, chosen: dict, trusted: bool, as_json: bool) -> None:
    engine.start()
    import ktmoe.transformers
    from ktmoe.transformers import answer
    from ktmoe.transformers.folder import model_folder
    from ktmoe.transformers.refusals import in_one_line

    trust = {"trust_remote_code": trusted}
    everything = chosen["dense"] == "torch"
    with signals_as_exit(), in_one_line(model), model_folder(model, everything=everything) as folder:
        name = str(folder) if os.path.isdir(os.path.expanduser(model)) else model
        tokenizer = ktmoe.transformers.load_tokenizer(folder, **trust)
        with in_one_line(name, "encode the prompt for"):
            inputs = answer.encode(tokenizer, prompt, system)
        if not tokenizer.chat_template:
            click.echo(f"ktmoe: {printable(model)} has no chat template: the prompt is continued as it is", err=True)
        start = time.perf_counter()
        with in_one_line(name):
            loaded = ktmoe.transformers.load(folder, progress=True, **chosen, **trust)
        seconds = time.perf_counter() - start
    with in_one_line(name, "generate text with"):
        found = answer.answer(loaded, tokenizer, inputs, _no_text if as_json else _print, **generation)
    if as_json:
        output.print_json({"path": printable(model), "load_seconds": seconds, **found.data()})
        return
    click.echo()
    click.echo(_words(found), err=True)


def _print(text: str) -> None:
    click.echo(text, nl=False)


def _no_text(text: str) -> None:
    """Print nothing of the text while it is made: all of it is in the JSON."""


def _words(found) -> str:
    """Tokens, seconds and rates of an ktmoe.transformers.answer.Answer."""
    prefill = f"{units.count(found.prompt_tokens, 'token')} in {found.prefill_seconds:.2f} s"
    words = f"prefill {prefill}, {units.tokens_s(found.prefill_tokens_s)}"
    if found.decode_tokens_s is not None:
        decode = f"{units.count(found.new_tokens - 1, 'token')} in {found.decode_seconds:.2f} s"
        words += f"; decode {decode}, {units.tokens_s(found.decode_tokens_s)}"
    return words if found.stopped else f"{words}; stopped at --max-new-tokens"


def _converse(model: str, system: str | None, generation: dict, chosen: dict, trusted: bool) -> None:
    engine.start(server=True)
    from ktmoe.transformers import load_tokenizer, serving
    from ktmoe.transformers.view import view

    save_folder = Path.cwd() / "chat_history"
    with signals_as_exit(), _quiet(), view(model, progress=True, **chosen) as made:
        if not load_tokenizer(made.folder, trust_remote_code=trusted).chat_template:
            raise InputError(f"{model} has no chat template, so it cannot converse; with a PROMPT it continues that")
        further = ["--log-level", "error", *(["--trust-remote-code"] if trusted else [])]
        context = serving.parse(serving.arguments(made, "127.0.0.1", 0, further), "ktmoe chat")
        with serving.serving(made, context, serving.ServerLimits()) as found:
            flags = [f"{name}={value}" for name, value in generation.items()]
            serving.converse(made.name, found.url, flags=flags, system=system, save_folder=save_folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Log nothing of requests: the server's log would be drawn into the conversation."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
