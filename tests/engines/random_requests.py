"""Requests to `ktmoe serve` that are nearly right, by number."""

from __future__ import annotations

import copy
import json
import random

CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
#: A request of each route that is served.
FIRST = {
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "temperature": 1},
    TEXT: {"prompt": "x", "max_tokens": 1},
    RESPONSE: {"input": "x", "max_output_tokens": 1},
}
#: What stands in the place of a value.
STRANGE = [
    None,
    True,
    0,
    -1,
    1,
    0.5,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
    10**12,
    10**30,
    2**63,
    "",
    "x",
    "\0\x1b[31m",
    "\ud800",
]
STRANGE += [[], {}, [[]], [None], [1], ["x"], [{}], {"type": "text"}, {"role": "user"}, {"type": []}, "a" * 300, ["a"] * 50]
#: Deep in other ways than a reader of JSON stops.
DEEP = [150, 400, 900, 980, 5000]
FIELDS = (
    "model",
    "messages",
    "prompt",
    "input",
    "instructions",
    "tools",
    "stop",
    "stream",
    "seed",
    "temperature",
    "top_p",
    "n",
)
FIELDS += (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "frequency_penalty",
    "logit_bias",
    "chat_template_kwargs",
)
FIELDS += ("tool_choice", "response_format", "stream_options", "user", "type", "content", "role", "tool_calls", "name", "text")
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
#: Requests that are changed, by route.
SOURCES = {
    CHAT: [
        FIRST[CHAT],
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "max_tokens": 1, "stream": True},
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "x"}], "max_tokens": 1},
        FIRST[CHAT] | {"stop": ["a"], "logit_bias": {"97": 1}, "seed": 1, "top_p": 0.5, "tools": [CALL]},
    ],
    TEXT: [FIRST[TEXT], FIRST[TEXT] | {"stop": "a", "seed": 1, "stream": True, "frequency_penalty": 1, "temperature": 1}],
    RESPONSE: [
        FIRST[RESPONSE],
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}], "max_output_tokens": 1, "stream": True},
        {"input": [{"role": "user", "content": "x"}, {"type": "function_call_output", "output": "x"}], "max_output_tokens": 1},
    ],
}
#: What transformers' chat client sends, as text.
CLIENT = {"do_sample": True, "max_new_tokens": 1, "temperature": 1, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9}
CLIENT |= {"repetition_penalty": 1.1, "no_repeat_ngram_size": 2, "eos_token_id": [1], "pad_token_id": 0, "epsilon_cutoff": 0.1}


def made(number: int) -> tuple[str, bytes]:
    """(path, body): a request that is served, changed in one to three places, and sometimes in its bytes."""
    rng = random.Random(number)
    path = rng.choice([*SOURCES, CHAT])
    request = json.loads(json.dumps(rng.choice(SOURCES[path])))
    if rng.random() < 0.3:
        config = CLIENT | {rng.choice([*CLIENT]): rng.choice(STRANGE) for _ in range(rng.randrange(1, 3))}
        request["generation_config"] = json.dumps(config)
    else:
        for _ in range(rng.randrange(1, 4)):
            _change(request, rng)
    body = json.dumps(request).encode()
    if rng.random() < 0.05:
        depth = rng.choice(DEEP)
        opened, closed = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
        body = body[:-1] + b', "%s": %s1%s}' % (rng.choice(FIELDS).encode(), opened * depth, closed * depth)
    if rng.random() < 0.1:
        at = rng.randrange(len(body))
        body = body[:at] + rng.randbytes(rng.randrange(3)) + body[at + rng.randrange(3) :]
    return path, body


def _change(request: dict, rng: random.Random) -> None:
    """One place, at any depth."""
    places, holders = [], [request]
    for holder in holders:
        for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
            places.append((holder, key))
            if isinstance(value, dict | list):
                holders.append(value)
    holder, key = rng.choice(places) if places else (request, "")
    if isinstance(holder, dict) and rng.random() < 0.3:
        key = rng.choice(FIELDS)
    if places and rng.random() < 0.1:
        del holder[key if isinstance(holder, list) or key in holder else next(iter(holder))]
    else:
        holder[key] = copy.deepcopy(rng.choice(STRANGE))
