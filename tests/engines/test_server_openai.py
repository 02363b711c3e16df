"""OpenAI's own client at `ktmoe serve`: names, streams and errors are what it expects, and nothing is dropped in silence."""

from __future__ import annotations

import openai
import pytest
from commands import PATIENCE
from servers import hooked, running

from ktmoe import synthetic
from ktmoe.synthetic.chat import TEMPLATE
from ktmoe.transformers import serving

NAME = "Tiny-1.5"
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
TEXT = {"model": NAME, "prompt": "x", "max_tokens": 2}
RESPONSE = {"model": NAME, "input": "x", "max_output_tokens": 2}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / NAME
    synthetic.write_chat_model(folder, seed=3)
    template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + TEMPLATE
    (folder / "chat_template.jinja").write_text(template)
    with (
        running(folder, serving.ServerLimits(context=200)) as server,
        openai.OpenAI(base_url=f"{server.found.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as found,
    ):
        yield found


@pytest.mark.smoke
def test_the_name_of_the_model(client):
    """Each answer has the name that clients use."""
    names = [found.id for found in client.models.list()]
    names += [client.chat.completions.create(**CHAT).model, client.completions.create(**TEXT).model]
    names += [client.responses.create(**RESPONSE).model]
    names += [chunk.model for chunk in client.chat.completions.create(**CHAT, stream=True)]
    names += [chunk.model for chunk in client.completions.create(**TEXT, stream=True)]
    names += [event.response.model for event in client.responses.create(**RESPONSE, stream=True) if hasattr(event, "response")]
    assert (set(names), len(names) > 10) == ({NAME}, True)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"n": 2}, "n", "unsupported_value"),
        ({"logprobs": True, "top_logprobs": 2}, "logprobs", "unsupported_value"),
        ({"extra_body": {"guided_json": {}}}, "guided_json", "unsupported_parameter"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools", None),
        ({"temperature": -1}, "temperature", None),
    ],
)
def test_what_is_not_served(client, fields, param, code):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**CHAT, **fields)
    assert (error.value.param, error.value.code, error.value.type) == (param, code, "invalid_request_error")


def test_what_asks_for_nothing(client):
    """It must not reach transformers, which refuses some of it."""
    options = {"logprobs": False, "stop": [], "logit_bias": {}, "extra_body": {"best_of": 1, "guided_json": None}}
    assert client.chat.completions.create(**CHAT, n=1, **options).usage.completion_tokens == 2


def test_tools_for_a_template_that_reads_them(client):
    """Of both forms, nested and flat. A character is a token."""
    prompt = client.chat.completions.create(**CHAT).usage.prompt_tokens
    nested, flat = [{"type": "function", "function": {"name": "abcd"}}], [{"type": "function", "name": "abcd"}]
    assert client.chat.completions.create(**CHAT, tools=nested).usage.prompt_tokens == prompt + 4
    assert client.responses.create(**RESPONSE, tools=flat).usage.input_tokens == prompt + 4


def test_integers_as_biases(client):
    """The forced token is the whole answer."""
    found = client.chat.completions.create(**CHAT, temperature=0, logit_bias={str(ord("q")): 100})
    assert found.choices[0].message.content == "qq"


def test_a_checkpoint_that_does_not_sample(client):
    """It does for a client that asks for it."""

    def answers(**fields: float) -> set[str]:
        return {client.completions.create(**TEXT | {"max_tokens": 8}, seed=seed, **fields).choices[0].text for seed in range(3)}

    greedy = answers()
    assert len(greedy) == 1
    assert answers(temperature=0, top_p=0.9) == greedy
    assert [len(answers(**fields)) > 1 for fields in ({"temperature": 2}, {"top_p": 1})] == [True, True]


def test_errors_of_the_model(client):
    """The client has the reason, with a stream and without."""

    def fail(module, _arguments) -> None:
        raise RuntimeError("no room")

    words = "the model cannot answer: RuntimeError: no room"
    with hooked(fail):
        with pytest.raises(openai.InternalServerError, match=words) as error:
            client.chat.completions.create(**CHAT)
        assert error.value.type == "server_error"
        with pytest.raises(openai.APIError, match=f"^{words}$") as error:
            list(client.chat.completions.create(**CHAT, stream=True))
        assert error.value.type == "server_error"
        (failed,) = [event for event in client.responses.create(**RESPONSE, stream=True) if event.type == "response.failed"]
        assert failed.response.error.message == words
