"""A real S3 server on loopback (moto's), and a proxy before it that fails as stores do."""

import contextlib
import http.client
import random
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from moto.server import ThreadedMotoServer


class FaultyS3:
    """`url` is the proxy's. While `fault_fraction` is above 0, that part of the requests for objects fails: 503, a
    connection closed without an answer, or a body cut short; with `is_late` also no answer at all. `faults` counts
    them. `before_change` is called before each request that changes something; if it returns False, that request is
    lost. While `is_refusing`, every request is answered with 403, and `refusals` counts them."""

    def __init__(self):
        self._server = ThreadedMotoServer(port=0, verbose=False)
        self._server.start()
        self._moto = self._server.get_host_and_port()
        self.fault_fraction = 0.0
        self.faults = self.refusals = 0
        self.is_refusing = self.is_late = False
        self.before_change = lambda: True
        self._random = random.Random(0)
        self._proxy = ThreadingHTTPServer(("127.0.0.1", 0), self._make_handler())
        self._thread = threading.Thread(target=self._proxy.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._proxy.server_port}"

    def close(self) -> None:
        self._proxy.shutdown()
        self._proxy.server_close()
        self._thread.join()
        self._server.stop()

    def next_fault(self) -> str | None:
        if self._random.random() >= self.fault_fraction:
            return None
        self.faults += 1
        return self._random.choice(["503", "close", "cut", *["late"] * self.is_late])

    def _make_handler(self):
        s3 = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self):
                body = self._read_body()
                fault = s3.next_fault()
                is_lost = self.command in ("PUT", "POST", "DELETE") and not s3.before_change()
                if s3.is_refusing:
                    s3.refusals += 1
                    return self._refuse(403, "AccessDenied")
                if fault == "late":
                    self.rfile.read(1)  # until the other side has waited long enough
                if fault in ("close", "late") or is_lost:
                    self.close_connection = True
                    with contextlib.suppress(OSError):
                        self.connection.shutdown(socket.SHUT_RDWR)
                    return None
                if fault == "503":
                    return self._refuse(503, "ServiceUnavailable")
                connection = http.client.HTTPConnection(*s3._moto)
                connection.request(self.command, self.path, body, dict(self.headers))
                response = connection.getresponse()
                content = response.read()
                connection.close()
                return self._answer(response.status, dict(response.getheaders()), content, cut=fault == "cut")

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward

            def _read_body(self) -> bytes:
                if self.headers.get("Expect") == "100-continue":
                    self.send_response_only(100)
                    self.end_headers()
                if self.headers.get("Transfer-Encoding") == "chunked":
                    parts = []
                    while size := int(self.rfile.readline().split(b";")[0], 16):
                        parts.append(self.rfile.read(size))
                        self.rfile.readline()
                    self.rfile.readline()
                    return b"".join(parts)
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))

            def _refuse(self, status: int, code: str) -> None:
                content = f"<Error><Code>{code}</Code></Error>".encode()
                self._answer(status, {"Content-Type": "application/xml"}, content)

            def _answer(self, status: int, headers: dict, content: bytes, cut: bool = False) -> None:
                self.send_response_only(status)
                length = headers.get("Content-Length") or str(len(content))
                for name, value in headers.items():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.send_header("Content-Length", length)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content[: len(content) // 2] if cut else content)
                if cut:
                    self.wfile.flush()
                    self.close_connection = True

            def handle_expect_100(self) -> bool:
                return True

            def log_message(self, *_):
                pass

        return Handler
