"""A conversation with `ktmoe serve`: each turn is answered as without a kept cache, and computes only what is new."""

from __future__ import annotations

import json

import pytest
import torch
from servers import running
from texts import Oracle

from ktmoe import synthetic
from ktmoe.transformers import serving

TOKENS = 12
GREEDY = {"temperature": 0, "max_tokens": TOKENS}
#: The same, as transformers' chat client says it.
OF_CHAT = {"generation_config": json.dumps({"do_sample": False, "max_new_tokens": TOKENS})}
#: Tokens from an answer to the next one, without the question: of the answer, the last one was not computed. A byte is a token,
#: and so is each of the four that begin and end a message.
BETWEEN = len("x" + "\nuser\n" + "\nassistant\n") + 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Its answers have no spaces at their ends, which a client would not get."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    synthetic.write_chat_model(folder, seed=12)
    return folder


@pytest.fixture(scope="module")
def oracle(model):
    """In float32, as the server: in bfloat16 the number of tokens that are computed at once often decides on the next one."""
    return Oracle(model, dtype=torch.float32)


@pytest.fixture
def server(model):
    with running(model, serving.ServerLimits(), "--dtype", "float32") as found:
        yield found


class Conversation:
    """A client of a server. computed: how many tokens the model was called with for the last answer."""

    def __init__(self, server, *, stream: bool, fields: dict = GREEDY):
        self.server, self.stream, self.fields = server, stream, fields
        self.messages: list[tuple[str, str]] = []
        self.computed = 0

    def say(self, text: str) -> str:
        """The server's answer."""
        self.messages.append(("user", text))
        messages = [{"role": role, "content": content} for role, content in self.messages]
        before = self.server.tokens
        connection = self.server.send("/v1/chat/completions", messages=messages, stream=self.stream, **self.fields)
        with connection.getresponse() as response:
            found = _streamed(response.read()) if self.stream else _whole(response.read())
        connection.close()
        self.computed = self.server.tokens - before
        self.messages.append(("assistant", found))
        return found


def _whole(text: bytes) -> str:
    return json.loads(text)["choices"][0]["message"]["content"]


def _streamed(text: bytes) -> str:
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.decode().splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def expected(oracle, conversation: Conversation) -> str:
    return oracle.answer(*conversation.messages[:-1], max_new_tokens=TOKENS)


@pytest.mark.smoke
@pytest.mark.parametrize(("stream", "fields"), [(False, GREEDY), (True, OF_CHAT)], ids=["whole", "chat"])
def test_turns(server, oracle, stream, fields):
    conversation = Conversation(server, stream=stream, fields=fields)
    for text in ("Hello there", "Why", "And then"):
        answer = conversation.say(text)
        assert answer == expected(oracle, conversation)
        if len(conversation.messages) > 2:
            assert conversation.computed == BETWEEN + len(text) + TOKENS - 1


def test_another_client_in_between(server, oracle):
    """What both prompts begin with stays; the rest is computed anew."""
    first, second = Conversation(server, stream=False), Conversation(server, stream=True)
    for conversation, text in ((first, "Hello there"), (second, "Hello you"), (first, "Why"), (second, "Why not")):
        assert conversation.say(text) == expected(oracle, conversation)
    new = len("you" + "\nassistant\n") + 2 + TOKENS - 1 + BETWEEN + len("Why not")
    assert second.computed == new + TOKENS - 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes(server, oracle, stream):
    """What was computed of its prompt serves the next one."""
    text = "Hello there"
    long = {"messages": [{"role": "user", "content": text}], "max_tokens": 3000, "temperature": 0}
    connection = server.send("/v1/chat/completions", stream=stream, **long)
    server.wait_for_steps(3)
    connection.close()
    assert server.ask("/v1/completions", prompt="", max_tokens=1)[0] == 400  # waits for its turn, and has no prompt
    conversation = Conversation(server, stream=stream)
    assert conversation.say(text) == expected(oracle, conversation)
    assert conversation.computed == 1 + TOKENS - 1


def test_a_completion_after_an_answer(server, oracle):
    """Other routes share the cache."""
    conversation = Conversation(server, stream=False)
    conversation.say("Hello there")
    before = server.tokens
    prompt = "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    found = server.ask("/v1/completions", prompt=prompt + "x", **GREEDY)[1]["choices"][0]["text"]
    assert server.tokens - before == 1 + TOKENS - 1
    assert found == oracle.continuation(prompt + "x", max_new_tokens=TOKENS)
