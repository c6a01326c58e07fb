"""What clients of vLLM ask beside its `/v1`, and what is said of a path that there is not, in the words of who asks."""

from __future__ import annotations

import anthropic
import pytest
from google.genai import errors

from tests.integration.http.conftest import Proxy, running

GOOGLE = {"x-goog-api-client": "google-genai-sdk/1"}
ANTHROPIC = {"anthropic-version": "2023-06-01"}


async def test_probes_ask_for_no_key_and_versions_for_the_key_of_their_place() -> None:
    async with running(admin_key="admin", worker=False) as proxy:
        await proxy.http.post("/sessions/t", json={})
        await proxy.http.post("/sessions/health", json={})
        for root in ("", "/t", "/nobody"):
            for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
                answer = await proxy.http.request(method, root + path, headers={"authorization": "Bearer wrong"})
                assert (answer.status_code, answer.content) == (200, b""), (root, path, answer.text)
        opens = {"": "admin", "/t": proxy.agent_key("t")}
        for root, key in opens.items():
            for shown, status in ((key, 200), (proxy.agent_key("other"), 403), ("", 401)):
                headers = {"authorization": f"Bearer {shown}" if shown else ""}
                answer = await proxy.http.get(root + "/version", headers=headers)
                assert answer.status_code == status, (root, shown, answer.text)
                assert status != 200 or answer.json() == {"version": proxy.app.version}
        assert (await proxy.http.get("/sessions/health")).json()["trial_id"] == "health"  # names stay free
        assert (await proxy.http.get("/health/health")).status_code == 200
        assert (await proxy.http.get("/groups/ping")).status_code == 404


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_tokens_are_said_to_the_key_of_the_place_and_not_by_a_worker_that_knows_no_such_question(
    path: str,
) -> None:
    """This worker's card is that of an older release."""
    body = {"prompt": "hi", "tokens": [1]}
    async with running(admin_key="admin") as proxy:
        await proxy.http.post("/sessions/t", json={})
        for root, key in {"": "admin", "/t": proxy.agent_key("t")}.items():
            for shown, status in ((key, 400), (proxy.agent_key("other"), 403), ("", 401)):
                headers = {"authorization": f"Bearer {shown}" if shown else ""}
                answer = await proxy.http.post(root + path, json=body, headers=headers)
                assert answer.status_code == status, (root, shown, answer.text)
                error = answer.json()["error"]
                assert {"message", "type", "param", "code"} <= error.keys() and answer.headers["x-request-id"]
                assert status != 400 or "older release" in error["message"]
        assert await proxy.turns("t") == []


async def test_without_keys_a_web_page_gets_none_of_them(proxy: Proxy) -> None:
    for root in ("", "/t"):
        for path in ("/health", "/ping", "/version", "/v1/models/any"):
            assert (await proxy.http.get(root + path, headers={"host": "evil.example"})).status_code == 403, root + path


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_unknown_path_is_a_404_in_the_words_of_who_asks(proxy: Proxy, method: str) -> None:
    for path in ("/t/v1/embeddings", "/t/anything", "/t/v1/audio/speech"):
        said = f"{method} {path} is not served here: agents' routes are generation, token counts and models"

        async def asked(headers: dict[str, str], path: str = path) -> dict[str, object]:
            answer = await proxy.http.request(method, path, headers=headers)
            assert answer.status_code == 404 and answer.headers["x-request-id"]
            found: dict[str, object] = answer.json()
            return found

        openai = {"message": said, "type": "invalid_request_error", "param": None, "code": "not_found"}
        assert await asked({}) == {"error": openai}
        found = await asked(ANTHROPIC)
        assert (found["type"], found["error"]) == ("error", {"type": "not_found_error", "message": said})
        google = await asked(GOOGLE)
        assert errors.ClientError(404, google).status == "NOT_FOUND" and said in str(google)


async def test_a_model_of_any_name_is_there_and_no_path_hides_in_it(proxy: Proxy) -> None:
    context = (await proxy.http.get("/t/v1/models")).json()["data"][0]["max_model_len"]
    for name in ("gpt-4o", "org/name", "a/b/c:8b", "gpt%204"):
        answer = await proxy.http.get(f"/t/v1/models/{name}")
        assert (answer.status_code, answer.json()["max_model_len"]) == (200, context), answer.text
    for name in ("../x", "a/%2e%2e/b", "a/..", "./a", "a%5c..%5cb"):
        answer = await proxy.http.get(f"{proxy.url}/t/v1/models/x/{name.replace('..', '%2e%2e').replace('./', '%2e/')}")
        assert answer.status_code == 404, (name, answer.text)


async def test_a_model_that_is_not_there_yet_is_described_without_its_lengths() -> None:
    async with running(worker=False) as proxy:
        answer = await proxy.http.get("/t/v1/models/gpt-4o")
        assert (answer.status_code, answer.json()["id"], answer.json()["max_model_len"]) == (200, "gpt-4o", None)
        client = anthropic.AsyncAnthropic(base_url=proxy.url + "/t", api_key="x", max_retries=0)
        assert (await client.models.retrieve("claude")).max_input_tokens is None
