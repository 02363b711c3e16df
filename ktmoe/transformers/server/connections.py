"""uvicorn's connections: bounded in number, and in how long they wait for a client. Their errors have the form of OpenAI's."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from ktmoe.transformers.server.refusal import Refusal

#: A connection that has waited for a request for that many seconds, and at most twice as many, is closed.
HEAD_SECONDS = 10
#: Connections at a time; asyncio takes up to BACKLOG more before it calls one of them.
CONNECTIONS, BACKLOG = 1000, 100
#: Seconds to read a refusal before the connection is closed: closed at once, it could be reset, and the refusal be lost.
LINGER_SECONDS = 2
#: File descriptors that are left to everything else; seconds from one line about too many connections to the next.
OTHER_FILES, QUIET_SECONDS = 32, 60
#: Bytes of further requests that a client may send while it is answered.
AHEAD_BYTES = 65_536


def most_connections() -> int:
    """Connections at a time for which there are file descriptors, too."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS if files == resource.RLIM_INFINITY else max(8, min(CONNECTIONS, files - BACKLOG - OTHER_FILES))


class Connection(H11Protocol):
    """uvicorn itself takes any number of them, and waits without end for the rest of a request's head, and for a client that
    reads no answer."""

    _timer: asyncio.TimerHandle | None = None
    #: When a line about too many connections was last written.
    said = -QUIET_SECONDS
    _ended = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._began = self.loop.time()
        self._look(self)
        if len(self.connections) > most_connections():
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        super().data_received(data)
        if self.cycle is None or self.cycle.more_body or self.cycle.response_complete:
            return
        if len(self.conn.trailing_data[0]) > AHEAD_BYTES:
            self.transport.abort()
        else:  # uvicorn stops reading at a request ahead, and would not notice that its client goes
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Called where h11 raises."""
        error = sys.exc_info()[1]
        self._end(Refusal(getattr(error, "error_status_hint", 400), f"expected a request of HTTP/1.1: {error}"))

    def shutdown(self) -> None:
        """The server stops: nobody waits for the rest of a request."""
        super().shutdown()
        if self.cycle is not None and self.cycle.more_body:
            self.transport.abort()

    def _should_upgrade(self) -> bool:
        return False  # without uvicorn's two lines about it

    def _end(self, refusal: Refusal) -> None:
        """Tell the client, unless an answer has begun, and close."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # what would answer has no connection any more
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
        else:
            body = json.dumps(refusal.content()).encode()
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            start = h11.Response(
                status_code=refusal.status, headers=list(headers.items()), reason=STATUS_PHRASES[refusal.status]
            )
            for event in (start, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
            self._ended = True
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _make_room(self) -> None:
        """Close the connection that has sent no whole request for the longest time; if there is none, refuse this one."""
        if time.monotonic() - Connection.said > QUIET_SECONDS:
            Connection.said = time.monotonic()
            self.logger.warning("Over %d connections: those without a whole request are closed.", most_connections())
        waiting = [one for one in self.connections if one._waits() and one is not self]
        if waiting:
            min(waiting, key=lambda one: one._began).transport.abort()
        else:
            self._end(Refusal(503, "too many connections", "server_overloaded"))

    def _waits(self) -> bool:
        """Whether it has no whole request."""
        whole = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        return not whole and not self.transport.is_closing()

    def _look(self, seen: object) -> None:
        """Close the connection if it has waited too long for a request, or for a client that does not read.

        seen: the request that was answered when this looked before, None for none yet; self if one was being answered.
        """
        if self.transport.is_closing():
            self.transport.abort()  # the client has not read the last bytes since
            return
        waits = self.cycle is None or self.cycle.response_complete
        if waits and seen is self.cycle:
            self.transport.close()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._look, self.cycle if waits else self)
