"""A cloud's metadata service on loopback: a real HTTP server whose answers a test sets."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Asked:
    """One request as it came."""

    method: str
    path: str
    headers: Message
    body: str = ""


@dataclass(frozen=True)
class Answer:
    """What to say; ``stall`` sets the time at which to say it, if ever."""

    status: int = 200
    text: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    stall: threading.Event | None = None


@dataclass
class Metadata:
    """What was asked, and where."""

    url: str
    asked: list[Asked] = field(default_factory=list)

    def paths(self, method: str = "GET") -> list[str]:
        return [asked.path for asked in self.asked if asked.method == method]


@contextmanager
def metadata(answer: Callable[[Asked], Answer]) -> Iterator[Metadata]:
    """Serve ``answer`` until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length).decode()
            asked = Asked(self.command, self.path, self.headers, body)
            service.asked.append(asked)
            said = answer(asked)
            if said.stall:
                said.stall.wait(30)
                self.close_connection = True
                return
            self.send_response_only(said.status)
            headers = {"Date": self.date_time_string(), "Content-Length": str(len(said.text))}
            for name, value in {**headers, **said.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(said.text.encode())

        do_GET = do_PUT = do_POST = _do  # noqa: N815 - the library's names

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        service = Metadata(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield service
        finally:
            server.shutdown()
            thread.join()
