"""An object store over HTTP that this process serves: moto's S3, with faults before it."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "weights"
KEY_ID, SECRET = "AKIAEXAMPLEEXAMPLE12", "a-secret-of-forty-characters-0123456789x"
Answer = tuple[int, str]
"""(status, S3's code)"""


@dataclass
class ObjectServer:
    """fault: asked for each request, by method and path; what it returns is the answer, None: moto's. asked: all requests."""

    url: str = ""
    fault: Callable[[str, str], Answer | None] = lambda method, path: None
    asked: list[tuple[str, str]] = field(default_factory=list)

    @property
    def variables(self) -> dict[str, str]:
        """What the programs have in their environment."""
        return {
            "AWS_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip

    @property
    def client(self) -> Any:
        """boto3's, which knows nothing of fsspec."""
        return boto3.client(
            "s3", endpoint_url=self.url, aws_access_key_id=KEY_ID, aws_secret_access_key=SECRET, region_name="us-east-1"
        )

    def objects(self) -> dict[str, int]:
        """Bytes by key."""
        found = self.client.list_objects_v2(Bucket=BUCKET)
        return {each["Key"]: each["Size"] for each in found.get("Contents", [])}

    def asks_for_keys(self) -> None:
        """From here on, requests with keys that nobody made are refused."""
        self.post("/moto-api/reset-auth", b"0")

    def post(self, path: str, body: bytes) -> None:
        link = http.client.HTTPConnection(self.url.removeprefix("http://"))
        link.request("POST", path, body)
        assert link.getresponse().status == 200
        link.close()


def once(
    status: int, code: str, method: str, ending: str = "", *, times: int = 1
) -> Callable[[str, str], Answer | None]:
    """A fault for the first requests of a method whose path ends so."""
    left = [times]

    def fault(asked: str, path: str) -> Answer | None:
        if asked != method or not path.endswith(ending) or not left[0]:
            return None
        left[0] -= 1
        return status, code

    return fault


@contextlib.contextmanager
def object_server() -> Iterator[ObjectServer]:
    """With one empty bucket."""
    moto = DomainDispatcherApplication(create_backend_app)
    server = ObjectServer()

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        server.asked.append((method, path))
        fault = server.fault(method, path)
        if fault is None:
            return moto(environ, start)  # type: ignore[no-any-return]
        status, code = fault
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start(f"{status} {http.client.responses[status]}", [("Content-Type", "application/xml")])
        said = f"refused for {KEY_ID} with {SECRET}"  # as no store should
        return [f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{said}</Message></Error>".encode()]

    http_server = make_server("127.0.0.1", 0, answer, threaded=True)
    server.url = f"http://127.0.0.1:{http_server.server_port}"
    thread = threading.Thread(target=http_server.serve_forever, name="moto", daemon=True)
    thread.start()
    try:
        server.post("/moto-api/reset", b"")
        server.post("/moto-api/reset-auth", b"inf")  # of all that this process serves
        server.client.create_bucket(Bucket=BUCKET)
        yield server
    finally:
        http_server.shutdown()
        thread.join()
        http_server.server_close()
