"""As much of a Kubernetes API as a chart's `lookup` asks for: discovery, and objects by name.

A fake at the protocol's seam: no API server can be had as a package, and what a release finds again at its upgrade can be
seen in no other way. Owns no semantics: it answers with the objects that it was given.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any


def _not_found() -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}


def _discovery(manifests: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Path -> answer: the kinds of these manifests, by their groups."""
    kinds: dict[str, set[str]] = {"v1": {"Secret", "PersistentVolumeClaim"}}
    for manifest in manifests:
        kinds.setdefault(manifest["apiVersion"], set()).add(manifest["kind"])
    answers: dict[str, dict[str, Any]] = {
        "/version": {"major": "1", "minor": "31", "gitVersion": "v1.31.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
    }
    groups = []
    for version, names in kinds.items():
        group, _, number = version.rpartition("/")
        if group:
            entry = {"groupVersion": version, "version": number}
            groups.append({"name": group, "versions": [entry], "preferredVersion": entry})
        answers[f"/apis/{version}" if group else "/api/v1"] = {
            "kind": "APIResourceList",
            "groupVersion": version,
            "resources": [
                {"name": _plural(name), "kind": name, "namespaced": True, "verbs": ["get"]} for name in names
            ],
        }
    answers["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    return answers


def _plural(kind: str) -> str:
    word = kind.lower()
    return word[:-1] + "ies" if word.endswith("y") else word + "s"


@contextlib.contextmanager
def holding(objects: list[dict[str, Any]], manifests: list[dict[str, Any]]) -> Iterator[str]:
    """A cluster with these objects that knows the kinds of these manifests; yields its URL."""
    answers = _discovery(manifests)
    for found in objects:
        meta = found["metadata"]
        version = found["apiVersion"]
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        answers[f"{root}/namespaces/{meta['namespace']}/{_plural(found['kind'])}/{meta['name']}"] = found

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found = answers.get(self.path.partition("?")[0])
            body = json.dumps(found or _not_found()).encode()
            self.send_response(200 if found else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Not into the tests' output."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
