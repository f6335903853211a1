"""HTTP for clients that may be slow: whoever does not finish a request in time is left."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LONGEST_HEAD = 1 << 16  # bytes
PATIENCE = 10.0  # seconds


class ImpatientProtocol(HttpToolsProtocol):
    """Closes connections whose next request does not begin and end its head in time.

    What is left of a body that was refused is read and thrown away, for as long.
    """

    patience = PATIENCE
    _timer: asyncio.TimerHandle | None = None
    _head = 0

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        """Take data; wait on if no request has begun with it."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
            return
        self._await_request()
        in_head = self.cycle is None or not self.cycle.more_body
        self._head += len(data) if in_head else 0
        if self._head > LONGEST_HEAD and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_request(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.patience, self.transport.close)

    def _stop_waiting(self) -> None:
        self._head = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
