"""What the model is asked to read: messages, their parts, and tools. transformers would drop what it does not know."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ktmoe.messages import show
from ktmoe.transformers.server.refusal import Refusal

_TEXT = {"text", "input_text", "output_text"}
_MEDIA = {"image_url", "input_image", "video_url", "audio_url", "input_audio"}


def check_messages(messages: object, media: Collection[str]) -> None:
    """`messages` of a chat. media: parts that the model reads besides text."""
    if not isinstance(messages, list) or not messages or not all(_is_message(message) for message in messages):
        raise _refusal("messages", f"messages: expected a list of messages, each with a role, found {show(messages)}")
    for message in messages:
        _check_parts("messages", message.get("content"), media)


def check_prompt(prompt: object) -> None:
    """`prompt` of a continued text."""
    if not isinstance(prompt, str):
        raise _refusal("prompt", f"prompt: expected one text, found {show(prompt)}")


def check_input(items: object, media: Collection[str]) -> None:
    """`input` of a response: a text, the parts of one message, or messages among other items."""
    if isinstance(items, str):
        return
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise _refusal("input", f"input: expected a text or a list of objects, found {show(items)}")
    if "role" not in items[0]:
        _check_parts("input", items, media)
        return
    for item in items:
        _check_parts("input", item.get("content" if "role" in item else "output"), media)


def check_tools(tools: object, *, read: bool) -> None:
    """read: whether the model's chat template reads tools."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and tool.get("type") == "function" for tool in tools):
        raise _refusal("tools", f"tools: expected functions, found {show(tools)}")
    if not read:
        words = f"tools: expected none, since the model's chat template does not read them, found {show(tools)}"
        raise _refusal("tools", words)


def media_of(request: dict, kinds: Collection[str]) -> Iterator[str]:
    """Images, sounds and videos, of kinds that the model reads.

    Raises Refusal for another kind, which transformers would drop, and for one that is elsewhere: it would fetch it, or read
    a file.
    """
    for name, field in request.items():
        found: list[object] = [field]
        while found:
            value = found.pop()
            if isinstance(value, dict):
                kind = value.get("type")
                if isinstance(kind, str) and kind in _MEDIA:
                    if kind not in kinds:
                        raise _refusal(name, f"{kind}: expected {_readable(kinds)}, which this model reads")
                    yield _medium(name, kind, value)
                found += value.values()
            elif isinstance(value, list):
                found += value


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def _check_parts(name: str, content: object, media: Collection[str]) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise _refusal(name, f"content: expected a text or a list of parts, found {show(content)}")
    for part in content:
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in {*_TEXT, *media}:
            words = f"a part's type: expected {_readable(media)}, which this model reads, found {show(kind)}"
            raise _refusal(name, f"{name}: {words}")
        if kind in _TEXT and not isinstance(part.get("text"), str):
            raise _refusal(name, f"{kind}: expected a text, found {show(part.get('text'))}")


def _medium(name: str, kind: str, part: dict) -> str:
    value = part.get("image_url" if kind == "input_image" else kind)
    if kind == "input_audio":
        # without a format, transformers takes the data for a path
        data, form = (value.get(key) if isinstance(value, dict) else None for key in ("data", "format"))
        if isinstance(data, str) and isinstance(form, str) and form.isalnum():
            return data
        raise _refusal(name, f"input_audio: expected data and their format, found {show(value)}")
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url.startswith("data:"):
        raise _refusal(name, f"{kind}: expected a URL that begins with data:, found {show(url)}")
    return url


def _readable(media: Collection[str]) -> str:
    return ", ".join(["text", *sorted(media)])


def _refusal(name: str, words: str) -> Refusal:
    return Refusal(400, words, param=name)
