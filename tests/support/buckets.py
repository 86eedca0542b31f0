"""A bucket of Google's storage that is a local folder: for etils (through fsspec) and for tensorstore (over HTTP)."""

import http.server
import io
import os
import tempfile
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
from etils.epath.backend import fsspec_backend
from fsspec.implementations.local import LocalFileSystem
from typing_extensions import override


class _Object(io.BytesIO):
    """What is written; it is there when it is closed, and whole."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    @override
    def close(self) -> None:
        if not self.closed:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._file.parent, suffix="~", delete=False) as whole:
                whole.write(self.getvalue())
            os.replace(whole.name, self._file)
        super().close()


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

        @override
        def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
            assert mode in ("rb", "wb")
            return _Object(Path(path)) if mode == "wb" else super()._open(path, mode, *args, **options)

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
        kept = fsspec_backend._get_filesystem  # by the scheme alone
        kept.cache_clear()
        try:
            yield asked
        finally:
            kept.cache_clear()
            server.shutdown()
            server.server_close()
