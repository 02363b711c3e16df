"""Who may ask the server, and for what: by a request's path, and by its Host and Origin."""

from __future__ import annotations

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


def is_local(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    try:
        found = {address[0] for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(address).is_loopback for address in found)


class Access:
    """host: where the server listens. cors: whether pages of other sites may use it, too."""

    def __init__(self, host: str, *, cors: bool):
        self._host, self._local, self._cors = host, is_local(host), cors

    def check(self, scope: dict) -> None:
        """Raise Refusal unless this may be asked. scope: ASGI's, of HTTP.

        A browser names the page's own site in Origin. A page that has pointed its own name at this machine has that in Host.
        """
        headers = dict(scope["headers"])
        host, origin = (headers.get(name, b"").decode("latin-1").lower() for name in (b"host", b"origin"))
        if self._local and host and not self._is_own(_without_port(host)):
            raise Refusal(403, f"Host: expected {self._host}, where this server listens, found {show(host)}")
        if origin and not self._cors and origin.partition("://")[2] != host:
            raise Refusal(403, f"Origin: pages of other sites are not served without --enable-cors, found {show(origin)}")
        methods = ROUTES.get(scope["path"])
        if methods is None:
            raise Refusal(404, f"{show(scope['path'])}: expected one of {', '.join(ROUTES)}", "not_found")
        if scope["method"] not in methods and not (self._cors and scope["method"] == "OPTIONS"):
            raise Refusal(405, f"{scope['path']}: expected the method {', '.join(methods)}, found {show(scope['method'])}")

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
