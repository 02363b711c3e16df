"""uvicorn's connections, which end where a client does not finish what it began."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

#: A connection that has waited for a request for that many seconds, and at most twice as many, is closed.
HEAD_SECONDS = 10


class Connection(H11Protocol):
    """uvicorn itself waits without end for the rest of a request's head, and for a client that reads no answer."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._look(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server stops: nobody waits for the rest of a request."""
        super().shutdown()
        if self.cycle is not None and self.cycle.more_body:
            self.transport.abort()

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
