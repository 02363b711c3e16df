"""The fields of a request, by route: which are served, and which ask for nothing."""

from __future__ import annotations

from ktmoe.messages import show
from ktmoe.transformers.server.refusal import Refusal

_EVERYWHERE = {"generation_config", "model", "seed", "stream", "temperature", "top_p"}
_CHAT = {"chat_template_kwargs", "frequency_penalty", "logit_bias", "max_completion_tokens", "max_tokens", "messages", "stop"}
#: What transformers' server reads. `suffix` is missing: transformers puts it behind the answer, and the model never reads it.
SERVED = {
    "/v1/chat/completions": _EVERYWHERE | _CHAT | {"tools"},
    "/v1/completions": _EVERYWHERE | {"frequency_penalty", "max_tokens", "prompt", "stop"},
    "/v1/responses": _EVERYWHERE | {"input", "instructions", "max_output_tokens", "tools"},
    "/load_model": {"model"},
}
#: Fields that change no token of an answer, whatever they say.
_WITHOUT_EFFECT = {
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "user",
}
#: Values that ask for what happens anyway. transformers would drop others without a word, or refuse even these.
_NEUTRAL = {
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0, 0.0),
    "response_format": ({"type": "text"},),
    "stop": ([],),
    "suffix": ("",),
    "text": ({"format": {"type": "text"}}, {}),
    "tool_choice": ("auto",),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


#: The same of a request without tools.
_WITHOUT_TOOLS = {"parallel_tool_calls": (False,), "tool_choice": ("none",)}


def served(path: str, request: dict) -> dict:
    """The fields that ask for something. Raises Refusal if that is not served."""
    found = {}
    for name, value in request.items():
        neutral = _NEUTRAL.get(name, ())
        if value is None or name in _WITHOUT_EFFECT or any(_same(value, other) for other in neutral):
            continue
        if not request.get("tools") and any(_same(value, other) for other in _WITHOUT_TOOLS.get(name, ())):
            continue
        if name not in SERVED[path]:
            if neutral:
                words, code = (
                    f"expected {show(neutral[0])}, which is all that is served, found {show(value)}",
                    "unsupported_value",
                )
            else:
                words, code = (
                    f"{path} does not serve it: expected some of {', '.join(sorted(SERVED[path]))}",
                    "unsupported_parameter",
                )
            raise Refusal(400, f"{name}: {words}", code, param=name)
        found[name] = value
    return found


def _same(value: object, other: object) -> bool:
    """Equal, and of one type: in Python, True is 1, too."""
    return type(value) is type(other) and value == other
