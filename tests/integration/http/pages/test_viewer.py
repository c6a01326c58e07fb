"""`/ui`: who may look, by what, and that looking is all it is."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from steno_proxy.auth import viewer_cookie
from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.viewer.assets import FOLDER, assets
from tests.integration.http.conftest import Proxy, running

KEYS = {"admin_key": "admin", "viewer_key": "viewer", "trial_secret": "secret"}
OWN = {"sec-fetch-site": "same-origin"}


@contextlib.asynccontextmanager
async def logged_in(proxy: Proxy, key: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=proxy.url, headers=OWN, timeout=60) as browser:
        assert (await browser.post("/ui/login", json={"key": key})).status_code == 204
        yield browser


async def with_cookie(proxy: Proxy, value: str) -> int:
    [name] = proxy.app.state.services.keys.cookie_names
    async with httpx.AsyncClient(base_url=proxy.url, timeout=60) as client:
        return (await client.get("/sessions", headers={"cookie": f"{name}={value}"})).status_code


def read_paths(proxy: Proxy) -> list[str]:
    """All GETs of the control plane that a viewer may use."""
    found = [
        path for path, methods in proxy.app.openapi()["paths"].items()
        if "get" in methods and not path.startswith("/{trial_id}")
    ]  # fmt: skip
    return [path for path in found if path not in ("/metrics", "/healthz", "/readyz", "/health", "/ping")]


def filled(path: str) -> str:
    path = path.replace("{key}", "0" * 16)
    return re.sub(r"\{group_id\}", "g", re.sub(r"\{trial_id\}", "g.0", re.sub(r"\{run_id\}", "r", path)))


async def test_a_cookie_or_a_viewer_key_reads_all_there_is_and_shows_no_key() -> None:
    async with running(**KEYS) as proxy:
        made = (await proxy.http.post("/groups", json={"group_id": "g", "run_id": "r", "size": 1})).json()
        await proxy.chat("g.0", "hello")
        run_key = (await proxy.http.post("/runs/r/key", json={})).json()["key"]
        kept = [*KEYS.values(), made["harness_key"], made["trials"][0]["api_key"], run_key]
        paths = read_paths(proxy)
        assert len(paths) >= 12, paths
        async with logged_in(proxy, "viewer") as browser, logged_in(proxy, "admin") as operator:
            for path in map(filled, paths):
                if path.endswith("/events"):
                    continue  # answers for as long as the session is open
                for ask in (browser, operator):
                    by_cookie = await ask.get(path)
                    by_key = await proxy.http.get(path, headers={"authorization": "Bearer viewer"})
                    for answer in (by_cookie, by_key):
                        known = answer.status_code == 200 or answer.json()["error"]["code"] in ("not_found", "conflict")
                        assert known, (path, answer.text)
                        assert not [key for key in kept if len(key) > 8 and key in answer.text], path


async def test_neither_a_cookie_nor_a_viewer_key_writes_anything() -> None:
    async with running(**KEYS) as proxy:
        await proxy.http.post("/groups", json={"group_id": "g", "run_id": "r", "size": 1})
        writes = [
            (method.upper(), filled(path)) for path, methods in proxy.app.openapi()["paths"].items() for method in methods
            if method in ("post", "put", "delete", "patch") and path not in ("/ping",)
        ]  # fmt: skip
        assert len(writes) > 15
        async with logged_in(proxy, "admin") as browser:
            for method, path in writes:
                by_cookie = await browser.request(method, path, json={})
                assert by_cookie.status_code == 401, (method, path, by_cookie.text)
                by_key = await proxy.http.request(method, path, json={}, headers={"authorization": "Bearer viewer"})
                assert by_key.status_code == 403, (method, path, by_key.text)
        session = (await proxy.http.get("/sessions/g.0")).json()
        assert (session["status"], session["counts"]["turns"]) == ("open", 0)


async def test_the_cookie_is_for_this_page_alone_and_for_a_while(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    async with running(**KEYS, worker=False) as proxy:
        async with httpx.AsyncClient(base_url=proxy.url, headers=OWN, timeout=60) as browser:
            said = (await browser.post("/ui/login", json={"key": "viewer"})).headers["set-cookie"].lower()
            assert "httponly" in said and "samesite=strict" in said and f"max-age={viewer_cookie.LASTS_S}" in said
            assert (await browser.get("/sessions")).status_code == 200
            for other in ("cross-site", "same-site"):  # a page at another port of the same host is `same-site`
                assert (await browser.get("/sessions", headers={"sec-fetch-site": other})).status_code == 401
                assert (
                    await browser.post("/ui/login", json={"key": "viewer"}, headers={"sec-fetch-site": other})
                ).status_code == 403
            [value] = browser.cookies.values()
            forged = value.replace(value[:3], "999", 1)
            for bad in (forged, "", "x", value + "A", value[: value.index(".")]):
                assert await with_cookie(proxy, bad) == 401, bad
            now = viewer_cookie.time.time()
            monkeypatch.setattr(viewer_cookie.time, "time", lambda: now + viewer_cookie.LASTS_S + 1)
            assert (await browser.get("/sessions")).status_code == 401
            monkeypatch.undo()
            assert (await browser.get("/sessions")).status_code == 200
            await browser.post("/ui/logout", json={})
            assert (await browser.get("/sessions")).status_code == 401
        for key in ("", "agent", "admi"):
            wrong = await proxy.http.post("/ui/login", json={"key": key})
            assert wrong.status_code in (401, 403) and "set-cookie" not in wrong.headers


async def test_another_replica_takes_the_cookie_and_it_ends_with_its_key() -> None:
    store = MemoryStore()
    async with running(store=store, **KEYS, worker=False) as one, running(store=store, **KEYS, worker=False) as two:
        async with logged_in(one, "viewer") as browser:
            [value] = browser.cookies.values()
        assert await with_cookie(two, value) == 200
        two.app.state.services.keys.replace("admin", None, "secret", None, "another")
        assert [await with_cookie(proxy, value) for proxy in (two, one)] == [401, 200]


async def test_two_proxies_of_one_host_do_not_log_each_others_browsers_out() -> None:
    """Browsers keep cookies by host, whatever the port, and send the oldest first."""
    other = {**KEYS, "trial_secret": "another"}
    async with (
        running(**KEYS, worker=False) as one,
        running(**other, worker=False) as two,
        logged_in(one, "viewer") as browser,
    ):
        login, sessions, logout = (f"{two.url}{path}" for path in ("/ui/login", "/sessions", "/ui/logout"))
        assert (await browser.post(login, json={"key": "viewer"})).status_code == 204
        assert [(await browser.get(url)).status_code for url in ("/sessions", sessions)] == [200, 200]
        assert (await browser.post(logout, json={})).status_code == 204
        assert [(await browser.get(url)).status_code for url in ("/sessions", sessions)] == [200, 401]


async def test_who_logs_out_after_the_secret_was_rotated_is_logged_out() -> None:
    async with running(**KEYS, worker=False) as proxy, logged_in(proxy, "viewer") as browser:
        proxy.app.state.services.keys.replace("admin", None, "newer\nsecret", None, "viewer")
        assert (await browser.get("/sessions")).status_code == 200
        await browser.post("/ui/logout", json={})
        assert (await browser.get("/sessions")).status_code == 401


async def test_until_the_store_is_there_a_cookie_is_not_said_to_be_wrong() -> None:
    """The page would ask for the key again, though the cookie is good."""
    async with running(**KEYS, worker=False) as proxy, logged_in(proxy, "viewer") as browser:
        keys = proxy.app.state.services.keys
        keys.pending = b"whatever the store has kept"
        for path in ("/sessions", "/ui/state", "/runs/r"):
            assert (await browser.get(path)).status_code == 503, path
        assert (await proxy.http.get("/ui/state", headers={"authorization": ""})).json()["reads"] is False
        keys.pending = None
        assert (await browser.get("/sessions")).status_code == 200


async def test_the_page_is_told_to_run_nothing_but_its_own_files() -> None:
    async with running(**KEYS, worker=False) as proxy, httpx.AsyncClient(base_url=proxy.url, timeout=60) as browser:
        led = await browser.get("/ui")
        assert led.status_code == 307 and led.headers["location"] == "ui/"
        page = await browser.get("/ui/")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert not re.search(r"<script(?![^>]*src=)|style=|\son\w+=|https?://", page.text)
        named = set(re.findall(r'(?:src|href)="static/([^"]+)"', page.text))
        assert {"app.js", "theme.css", "mark.svg"} <= named
        for name in sorted(assets()):
            answer = await browser.get(f"/ui/static/{name}")
            assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff", name
            again = await browser.get(f"/ui/static/{name}", headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for name in ("nothing.js", "..%2fassets.py", "%2e%2e"):
            assert (await browser.get(f"/ui/static/{name}")).status_code in (404, 307), name


def test_modules_name_files_that_are_there_and_make_no_html() -> None:
    for path in FOLDER.glob("*.js"):
        text = path.read_text()
        for imported in re.findall(r'from "\./([^"]+)"', text):
            assert Path(FOLDER / imported).is_file(), (path.name, imported)
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser", text
        ), path.name


async def test_without_keys_there_is_nothing_to_log_in_to() -> None:
    async with running() as proxy, httpx.AsyncClient(base_url=proxy.url, timeout=60) as browser:
        assert (await browser.get("/ui/state")).json()["keys"] is False
        assert (await browser.get("/sessions")).status_code == 200
        assert (await browser.get("/ui/", headers={"host": "evil.example"})).status_code == 403
