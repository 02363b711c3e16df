"""Who may ask the server, and for what: by a request's path, its Host and Origin, and its key."""

from __future__ import annotations

import hmac
import ipaddress
import socket

from ktmoe.messages import show
from ktmoe.transformers.server.refusal import Refusal

#: All that is served, with the methods: OpenAI's interface for one model, and what transformers' chat client asks for first.
#: transformers' server has more routes; they load, unload and look for models.
ROUTES = {
    "/health": {"GET"},
    "/v1/models": {"GET"},
    "/v1/chat/completions": {"POST"},
    "/v1/completions": {"POST"},
    "/v1/responses": {"POST"},
    "/load_model": {"POST"},
}
#: What everybody may ask, whoever has a key: it says nothing of the model.
OPEN = "/health"
#: Bytes of a request's head.
HEAD_BYTES = 16_384


def is_local(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    try:
        found = {address[0] for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(address).is_loopback for address in found)


class Access:
    """host: where the server listens. cors: whether other sites' pages may ask. key: clients must know it, if it is set."""

    def __init__(self, host: str, *, cors: bool, key: str | None = None):
        self._host, self._local, self._cors = host, is_local(host), cors
        self._key = None if key is None else key.encode()

    def check(self, scope: dict) -> None:
        """Raise Refusal unless this may be asked. scope: ASGI's, of HTTP.

        A browser names the page's own site in Origin. A page that has pointed its own name at this machine has that in Host.
        """
        size = len(scope["path"]) + sum(len(name) + len(value) for name, value in scope["headers"])
        if size > HEAD_BYTES:
            raise Refusal(431, f"the request's head has {size} bytes: expected at most {HEAD_BYTES}")
        headers = dict(scope["headers"])
        host, origin = (headers.get(name, b"").decode("latin-1").lower() for name in (b"host", b"origin"))
        if self._local and host and not self._is_own(_without_port(host)):
            raise Refusal(403, f"Host: expected {self._host}, where this server listens, found {show(host)}")
        if origin and not self._cors and origin.partition("://")[2] != host:
            raise Refusal(403, f"Origin: pages of other sites are not served without --enable-cors, found {show(origin)}")
        asks_first = self._cors and scope["method"] == "OPTIONS"  # a browser, which sends no key with that
        if self._key is not None and scope["path"] != OPEN and not asks_first:
            self._check_key(headers.get(b"authorization", b""))
        methods = ROUTES.get(scope["path"])
        if methods is None:
            raise Refusal(404, f"{show(scope['path'])}: expected one of {', '.join(ROUTES)}", "not_found")
        if scope["method"] not in methods and not asks_first:
            words = f"{scope['path']}: expected the method {', '.join(methods)}, found {show(scope['method'])}"
            raise Refusal(405, words, headers={"allow": ", ".join(methods)})

    def _check_key(self, found: bytes) -> None:
        """Raise Refusal unless Authorization has the key. The time does not tell how much of it is right."""
        scheme, _, key = found.partition(b" ")
        if not hmac.compare_digest(key.strip(), self._key) or scheme.lower() != b"bearer":
            words = "expected this server's key, as Authorization: Bearer KEY"
            raise Refusal(401, words, "invalid_api_key", headers={"www-authenticate": "Bearer"})

    def _is_own(self, host: str) -> bool:
        """Whether the name can only mean this machine."""
        try:
            return ipaddress.ip_address(host.strip("[]")).is_loopback
        except ValueError:
            return host in ("localhost", self._host.lower())


def _without_port(host: str) -> str:
    """localhost for localhost:8000, [::1] for [::1]:8000 and for [::1]."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() and (name.endswith("]") or ":" not in name) else host
