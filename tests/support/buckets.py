"""A bucket of Google's storage that is a local folder: for etils (through fsspec) and for tensorstore (over HTTP)."""

import http.server
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import fsspec
from fsspec.implementations.local import LocalFileSystem
from typing_extensions import override


@contextmanager
def bucket(folder: Path, name: str) -> Iterator[list[str]]:
    """gs://NAME shows the folder's files; the list grows by what tensorstore asks for."""
    asked: list[str] = []

    class Files(LocalFileSystem):
        protocol = ("gcs", "gs")
        cachable = False

        def __init__(self, **_: object) -> None:
            super().__init__()

        @classmethod
        @override
        def _strip_protocol(cls, path: str) -> str:
            return str(path).replace(f"gs://{name}", str(folder)).rstrip("/")

    class Answers(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            file = folder / urllib.parse.unquote(urllib.parse.urlparse(self.path).path.partition("/o/")[2])
            asked.append(str(file.relative_to(folder)))
            raw = file.read_bytes() if file.is_file() else None
            size, wanted = len(raw or b""), self.headers.get("Range")
            self.send_response(404 if raw is None else 206 if wanted else 200)
            if raw is not None and wanted:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start, stop = (size - int(last), size) if not first else (int(first), min(int(last or size) + 1, size))
                raw = raw[start:stop]
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
            self.send_header("Content-Length", str(len(raw or b"")))
            self.send_header("x-goog-generation", "1")
            self.end_headers()
            self.wfile.write(raw or b"")

        @override
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with mock.patch.dict("os.environ", {"TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{server.server_address[1]}"}):
        for scheme in Files.protocol:
            fsspec.register_implementation(scheme, Files, clobber=True)
        try:
            yield asked
        finally:
            server.shutdown()
            server.server_close()
