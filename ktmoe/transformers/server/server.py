"""transformers' server for one model, behind the guard."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transformers import GenerationConfig
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import BaseHandler, Modality
from transformers.utils.chat_template_utils import _get_template_variables

from ktmoe.errors import KtmoeError, UnavailableError
from ktmoe.messages import show
from ktmoe.transformers.server.access import Access
from ktmoe.transformers.server.context import context_of, declared
from ktmoe.transformers.server.fields import Fields
from ktmoe.transformers.server.generation import Generations
from ktmoe.transformers.server.guard import Guard
from ktmoe.transformers.server.refusal import OF_REQUESTS, Refusal, refusal_of

#: Seconds at most for an answer to end, and then for clients to be told of it; for the start, once the model is loaded.
GRACE, PATIENCE = 2, 60
_IMAGES = {"image_url", "input_image", "video_url"}
#: Parts of a message that are no text, by what transformers passes on to a model; it drops all others.
_MEDIA = {Modality.VLM: _IMAGES, Modality.MULTIMODAL: {*_IMAGES, "audio_url", "input_audio"}}


@dataclass(frozen=True)
class ServerLimits:
    """context: tokens of a prompt and its answer together; None is what the model and memory allow. seconds: for an answer."""

    context: int | None = None
    seconds: float = 3600


@dataclass(frozen=True)
class Listening:
    """url: without /v1. context: tokens of a prompt and its answer together. declared: how many the model was made for."""

    url: str
    context: int
    declared: int


class Server(Serve):
    """transformers' own takes its arguments and loads the model; listening() does the rest."""

    def start_server(self) -> None:
        """What transformers calls once the model is loaded: too early, since nothing guards the server yet."""

    @contextlib.contextmanager
    def listening(self, name: str, limits: ServerLimits, *, cors: bool, key: str | None) -> Iterator[Listening]:
        """Run in a thread until the context ends. name: the model's, for clients. cors: whether pages of other sites may ask.
        key: what clients must know, if any.

        Raises InputError for limits that the model cannot keep, UnavailableError if the server does not start.
        """
        # uvicorn may be missing where this module is imported
        from ktmoe.transformers.server.connections import BACKLOG, Connection

        manager = self._model_manager
        load = functools.partial(manager.load_model_and_processor, manager.process_model_name(name))
        model, processor = load()
        config = self.server.config
        try:
            context = context_of(model, limits.context)
            generations = Generations(context)
            if not hasattr(self._generation_state, "get_manager"):  # else nothing would be bounded, without a word
                raise UnavailableError("expected transformers' GenerationState to have get_manager(), found another version")
            self._generation_state.get_manager = lambda *_, **__: generations
            for handler in (self._chat_handler, self._completion_handler, self._response_handler):
                _hold(handler, name, load)
            _add_routes(config.app, name)
            _add_errors(config.app)
            media = _MEDIA.get(self._model_manager.get_model_modality(model, processor=processor), set())
            read = _variables(processor)
            fields = Fields(name, context, _free(read, processor), media, "tools" in read)
            access = Access(config.host, cors=cors, key=key)
            config.app = Guard(config.app, access, fields, generations, limits.seconds)
            config.http, config.ws, config.timeout_graceful_shutdown = Connection, "none", GRACE
            config.backlog = BACKLOG
        except BaseException:
            self._model_manager.shutdown()
            raise
        # uvicorn's own run() closes its event loop in the end; transformers' start_server() leaves it open
        self._thread = threading.Thread(target=self.server.run, name="uvicorn-thread")
        self._thread.start()
        try:
            yield Listening(self._url(), context, declared(model))
        finally:
            generations.close(GRACE)
            self.server.should_exit = True
            self.kill_server()
            self._thread.join()

    def _url(self) -> str:
        """Wait until the server listens. The port is the true one, where any free one was asked for."""
        config, deadline = self.server.config, time.monotonic() + PATIENCE
        while not self.server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise UnavailableError(f"{config.host} port {config.port}: the server did not start")
            time.sleep(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        return f"http://[{config.host}]:{port}" if ":" in config.host else f"http://{config.host}:{port}"


def _variables(processor) -> frozenset[str]:
    """What the model's chat template reads."""
    templates = processor.chat_template
    templates = templates.values() if isinstance(templates, dict) else [templates]
    return frozenset().union(*(_get_template_variables(template) for template in templates))


def _free(variables: frozenset[str], processor) -> frozenset[str]:
    """Those that a client may set; the rest is transformers' to give."""
    return variables - inspect.signature(processor.apply_chat_template).parameters.keys() - {"messages"}


def _hold(handler: BaseHandler, name: str, load: Callable[[], tuple]) -> None:
    """Let a handler know one model, by the name that clients use: alone it loads what is asked for, and answers as NAME@main.

    load: gives the model and its processor.
    """
    build = handler._build_generation_config

    def sampling(body: dict, *arguments, **options) -> GenerationConfig:
        """Sample if the client asks for it. transformers ignores both fields where the checkpoint itself would not sample."""
        config = build(body, *arguments, **options)
        if body.get("temperature", body.get("top_p")):
            config.do_sample = True
        return config

    handler._resolve_model = lambda _: (name, *load())
    handler._build_generation_config = sampling


def _add_routes(app, name: str) -> None:
    """Add routes that come before transformers' own.

    Its own list of models is the Hub's cache, and its client asks for the model to be loaded.
    """
    from starlette.responses import JSONResponse, PlainTextResponse
    from starlette.routing import Route

    model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "ktmoe"}
    ready = 'data: {"status": "ready", "cached": true}\n\n'
    app.router.routes[:0] = [
        Route("/v1/models", lambda _: JSONResponse({"object": "list", "data": [model]})),
        Route("/load_model", lambda _: PlainTextResponse(ready, media_type="text/event-stream"), methods=["POST"]),
    ]


def _add_errors(app) -> None:
    """Errors have the form of OpenAI's, whoever raises them."""
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse

    def answer(_, refusal: Refusal) -> JSONResponse:
        return JSONResponse(refusal.content(), refusal.status, refusal.headers)

    def translated(request, error: HTTPException) -> JSONResponse:
        status = 400 if error.status_code == 422 else error.status_code  # as OpenAI's
        return answer(request, Refusal(status, str(error.detail)))

    def of_another_type(request, _: RequestValidationError) -> JSONResponse:
        """The guard has read the body already: only its declared type is left."""
        found = show(request.headers.get("content-type"))
        return answer(request, Refusal(400, f"Content-Type: expected application/json, found {found}"))

    def of_request(request, error: Exception) -> JSONResponse:
        if isinstance(error, KtmoeError):  # some are ValueErrors, too; no request is at fault
            raise error
        return failed(request, error)

    def failed(request, error: Exception) -> JSONResponse:
        return answer(request, refusal_of(error))

    app.add_exception_handler(Refusal, answer)
    app.add_exception_handler(HTTPException, translated)
    app.add_exception_handler(RequestValidationError, of_another_type)
    for kind in OF_REQUESTS:
        app.add_exception_handler(kind, of_request)
    app.add_exception_handler(Exception, failed)  # starlette raises these again, to the guard
