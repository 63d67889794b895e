"""A real S3 server on loopback (moto's) that fails as stores do."""

import random
import socket
import threading
from collections.abc import Callable, Iterator

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class FaultyS3:
    """While `fault_fraction` is above 0, that part of the requests fails: 503, a connection closed without an answer,
    or a body cut short; with `is_late` also no answer at all. `faults` counts them. `before_change` is called before
    each request that changes something; if it returns False, that request is lost. While `is_refusing`, every request
    is answered with 403, and `refusals` counts them."""

    def __init__(self):
        self._s3 = DomainDispatcherApplication(create_backend_app)
        self.fault_fraction = 0.0
        self.faults = self.refusals = 0
        self.is_refusing = self.is_late = False
        self.before_change = lambda: True
        self._random = random.Random(0)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_QuietHandler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def next_fault(self) -> str | None:
        if self._random.random() >= self.fault_fraction:
            return None
        self.faults += 1
        return self._random.choice(["503", "close", "cut", *["late"] * self.is_late])

    def _answer(self, environ: dict, start_response: Callable) -> Iterator[bytes]:
        fault, connection = self.next_fault(), environ["werkzeug.socket"]
        is_lost = environ["REQUEST_METHOD"] in ("PUT", "POST", "DELETE") and not self.before_change()
        if self.is_refusing or fault == "503":
            self.refusals += self.is_refusing
            status, code = ("403", "AccessDenied") if self.is_refusing else ("503", "ServiceUnavailable")
            content = f"<Error><Code>{code}</Code></Error>".encode()
            start_response(f"{status} {code}", [("Content-Length", str(len(content)))])
            yield b"" if environ["REQUEST_METHOD"] == "HEAD" else content
        elif fault in ("close", "late") or is_lost:
            if fault == "late":
                environ["wsgi.input"].read()
                connection.recv(1)  # until the other side has waited long enough
            connection.shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError
        else:
            content = b"".join(self._s3(environ, start_response))
            yield content[: len(content) // 2] if fault == "cut" else content
            if fault == "cut":
                connection.shutdown(socket.SHUT_RDWR)


class _QuietHandler(WSGIRequestHandler):
    def log(self, *_):
        pass
