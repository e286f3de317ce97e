"""An S3 server on this machine, which counts what is read and can be told to be slow or to be gone.

GET /_control?mark=NAME    requests from here on are logged under that name
GET /_control?hold=PUT     requests with that method wait until they are released; GET waits, too, where it is named
GET /_control?release=1    they go on
GET /_control?close=1      the server hears nobody from here on
"""

import threading
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote

_STUCK_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One that was answered.

    Attributes:
        mark: the name under which it is logged.
        method: of HTTP.
        path: bucket and key.
        range: its header, such as ``bytes=0-99``; "" for the whole object.
    """

    mark: str
    method: str
    path: str
    range: str

    @property
    def bytes_read(self) -> range:
        """Those that its range names."""
        first, _, last = self.range.removeprefix("bytes=").partition("-")
        return range(int(first), int(last) + 1)


@dataclass
class Server:
    """The application in front of moto's.

    Attributes:
        url: of the server.
        requests: all of them.
        held: how many requests have waited.
    """

    inner: Any
    url: str = ""
    close: Any = None
    requests: list[Request] = field(default_factory=list)
    held: int = 0
    _mark: str = ""
    _holds: str = ""
    _released: threading.Event = field(default_factory=threading.Event)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path, method = unquote(environ["PATH_INFO"]), environ["REQUEST_METHOD"]
        if path == "/_control":
            self._control(dict(parse_qsl(environ["QUERY_STRING"])))
            start_response("200 OK", [("Content-Length", "0")])
            return [b""]
        if self._holds and method in self._holds.split(","):
            self.held += 1
            self._released.wait(_STUCK_S)
        self.requests.append(Request(mark=self._mark, method=method, path=path, range=environ.get("HTTP_RANGE", "")))
        return self.inner(environ, start_response)

    def _control(self, said: dict[str, str]) -> None:
        self._mark = said.get("mark", self._mark)
        if "hold" in said:
            self._released.clear()
            self._holds = said["hold"]
        if "release" in said:
            self._holds = ""
            self._released.set()
        if "close" in said:
            threading.Thread(target=self.close).start()


@contextmanager
def s3_server(bucket: str) -> Iterator[Server]:
    """A server with an empty bucket, as long as the block runs."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log_request(self, *_: Any) -> None:
            pass

    front = Server(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, front, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)

    def close() -> None:
        server.shutdown()
        server.server_close()

    front.url, front.close = f"http://127.0.0.1:{server.server_port}", close
    thread.start()
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{front.url}/{bucket}", method="PUT")):
            pass
        yield front
    finally:
        front._released.set()
        if thread.is_alive():
            close()
        thread.join()


def environment(url: str) -> dict[str, str]:
    """The variables by which a program's S3 client finds the server, and gives up soon."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def tell(url: str, **said: str) -> None:
    """Control the server."""
    query = "&".join(f"{key}={value}" for key, value in said.items())
    with urllib.request.urlopen(f"{url}/_control?{query}"):
        pass
