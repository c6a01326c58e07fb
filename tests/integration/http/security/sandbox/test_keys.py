"""What a trial's key opens: the generation routes of its own trial and nothing else (I8)."""

from __future__ import annotations

import re

import pytest
import websockets.sync.client
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.integration.http.security.sandbox.conftest import ADMIN, CHAT, HTTP, NAMES, WORKER, Target, statuses

CONTROL = """GET /sessions|POST /sessions|GET /sessions/victim|GET /sessions/mine|POST /sessions/mine|DELETE /sessions/victim
DELETE /sessions/mine|GET /sessions/mine/turns|GET /sessions/victim/turns|GET /sessions/mine/samples|GET /sessions/mine/events
POST /sessions/mine/complete|POST /sessions/victim/complete|POST /sessions/mine/rotate-key|POST /groups|GET /groups/g
POST /leases|POST /leases/l/ack|POST /leases/l/release|POST /leases/l/extend|GET /runs/r|GET /workers|GET /policy
POST /tokenize|POST /policy/updates|GET /policy/updates/u|PUT /policy/updates/u/shards/s|DELETE /policy/updates/u|GET /metrics
POST /detokenize"""


@pytest.mark.parametrize("call", re.split(r"[|\n]", CONTROL))
def test_its_key_opens_nothing_of_the_control_plane(proxy: Target, call: str) -> None:
    method, path = call.split()
    body = {"reward": 1.0} if path.endswith("complete") else {}
    carried = [{"authorization": f"Bearer {proxy.key}"}, {"x-api-key": proxy.key}, {"x-goog-api-key": proxy.key}, {}]
    for headers in carried:
        for query in ("", f"?key={proxy.key}"):
            answer = HTTP.request(method, proxy.url + path + query, json=body, headers=headers, timeout=60)
            assert answer.status_code in (401, 403, 404, 405), (answer.status_code, answer.text)
            assert proxy.key not in answer.text and "a secret" not in answer.text
    assert proxy.admin("/sessions/mine").json()["status"] == "open"


def test_a_harness_key_made_of_its_own_opens_nothing(proxy: Target) -> None:
    for key in (
        proxy.key.replace("sk-", "hk-"),
        proxy.key.replace("sk-steno-", "sk-steno-2-"),
        proxy.key + "\x00",
        proxy.key[:-1],
        "",
        proxy.key.upper(),
        proxy.key + " " + ADMIN,
        "é",
        "Bearer " + proxy.key,
    ):
        for path in ("/sessions/mine", "/sessions/mine/turns", f"/victim{CHAT}"):
            head = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {key}\r\n\r\n"
            answer = proxy.raw(head.encode())
            assert statuses(answer)[0] in (400, 401, 403, 405), answer


@pytest.mark.parametrize("name", NAMES)
def test_no_spelling_of_another_trials_id_opens_it(proxy: Target, name: str) -> None:
    body = b'{"messages": [{"role": "user", "content": "taken"}]}'
    length = f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
    for path in (CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/v1beta/models/m:generateContent"):
        answer = proxy.raw(proxy.head(f"/{name}{path}") + length + body)
        assert statuses(answer) and statuses(answer)[0] in (400, 401, 403, 404, 405), answer
        assert b"a secret" not in answer
    answer = proxy.raw(proxy.head(f"/{name}/v1/models", "GET") + b"connection: close\r\n\r\n")
    assert statuses(answer)[0] != 200, answer


def test_no_path_of_its_own_leads_out_of_its_trial(proxy: Target) -> None:
    for path in (
        "/mine/../sessions/victim",
        "/mine/v1/../../sessions",
        "/mine/v1/models/../../../sessions/victim",
        "/mine//sessions",
        "/mine/sessions/victim",
        "/mine/v1/models/%2e%2e/%2e%2e/%2e%2e/metrics",
        "/mine/v1/responses/..%2f..%2fsessions",
        "/mine/v1/responses/resp_victim",
        "/mine/metrics",
        "/mine/v1/v1/v1/models",
        "/mine/v1/chat/completions/../../../workers",
        "/mine/v1beta/models/../../../sessions:generateContent",
        "http://x/sessions",
        "*",
        "/%2fsessions",
        "/\\sessions",
    ):
        for method in ("GET", "POST", "DELETE", "PATCH", "TRACE", "CONNECT"):
            answer = proxy.raw(proxy.head(path, method) + b"content-length: 0\r\nconnection: close\r\n\r\n")
            assert not statuses(answer) or statuses(answer)[0] >= 400, (path, method, answer)


def test_another_trials_stored_response_is_not_read(proxy: Target) -> None:
    made = HTTP.post(
        f"{proxy.url}/mine/v1/responses", json={"input": "x"}, headers={"x-api-key": proxy.key}, timeout=60
    ).json()["id"]
    victim = proxy.register("other")
    for trial, key in (("other", victim), ("other", proxy.key), ("victim", proxy.key)):
        for method in ("GET", "DELETE"):
            answer = HTTP.request(
                method, f"{proxy.url}/{trial}/v1/responses/{made}", headers={"x-api-key": key}, timeout=60
            )
            assert answer.status_code in (403, 404)
    own = HTTP.get(f"{proxy.url}/mine/v1/responses/{made}", headers={"x-api-key": proxy.key}, timeout=60)
    assert own.status_code == 200


def test_another_trials_stored_response_is_not_gone_on_with(proxy: Target) -> None:
    victim = proxy.register("storing")
    first = {"input": "a secret word", "instructions": "another secret"}
    made = HTTP.post(f"{proxy.url}/storing/v1/responses", json=first, headers={"x-api-key": victim}).json()["id"]
    for named in (made, made.replace("resp_", "resp_resp_"), "resp_", made + "\x00", "../storing/" + made):
        body = {"input": "say it again", "previous_response_id": named}
        answer = HTTP.post(f"{proxy.url}/mine/v1/responses", json=body, headers={"x-api-key": proxy.key})
        assert answer.status_code in (400, 404) and "secret" not in answer.text, answer.text
    own = HTTP.post(
        f"{proxy.url}/storing/v1/responses",
        json={"input": "on", "previous_response_id": made},
        headers={"x-api-key": victim},
    )
    assert own.status_code == 200


def test_tool_call_ids_of_another_trials_turn_lead_nowhere(proxy: Target) -> None:
    """They name their turn, but in its own trial."""
    tools = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
    victim = proxy.register("calling")
    asked = {"role": "user", "content": "a secret file"}
    said = proxy.ask("calling", victim, messages=[asked], tools=tools).json()["choices"][0]["message"]
    [call] = said["tool_calls"]
    before = proxy.admin("/sessions/calling/turns").json()
    result = {"role": "tool", "tool_call_id": call["id"], "content": "x"}
    taken = proxy.register("taking")
    for messages in ([asked, said, result], [{"role": "user", "content": "y"}, said, result], [said, result], [result]):
        answer = proxy.ask("taking", taken, messages=messages, tools=tools)
        assert answer.status_code in (200, 400), answer.text
    turns = proxy.admin("/sessions/taking/turns").json()["items"]
    assert turns and before == proxy.admin("/sessions/calling/turns").json()
    assert {turn["parent_id"] for turn in turns} <= {None, *(turn["turn_id"] for turn in turns)}
    assert before["items"][0]["turn_id"] not in str([turn["parent_id"] for turn in turns])


def test_a_groups_harness_key_reads_and_completes_its_own_trials_and_nothing_else(proxy: Target) -> None:
    one, two = (
        proxy.admin("/groups", "POST", json={"group_id": name, "run_id": "r", "size": 2, "task": {}}).json()
        for name in ("harnessed", "others")
    )
    key = {"authorization": f"Bearer {one['harness_key']}"}
    assert one["harness_key"] != two["harness_key"]
    for path in ("/groups/harnessed", *(f"/sessions/harnessed.0{rest}" for rest in ("", "/turns", "/samples"))):
        assert HTTP.get(proxy.url + path, headers=key).status_code == 200, path
    for path in ("/groups/others", "/sessions/others.0", "/sessions/mine/turns", "/sessions/victim/samples"):
        assert HTTP.get(proxy.url + path, headers=key).status_code == 403, path
    for path in ("/sessions/others.0/complete", "/sessions/victim/complete"):
        assert HTTP.post(proxy.url + path, json={"reward": 1.0}, headers=key).status_code == 403, path
    for call in re.split(r"[|\n]", CONTROL):
        method, path = call.split()
        answer = HTTP.request(method, proxy.url + path, json={}, headers=key)
        assert answer.status_code in (403, 404, 405), (call, answer.status_code)
    assert HTTP.delete(proxy.url + "/sessions/harnessed.0", headers=key).status_code == 403
    assert HTTP.post(proxy.url + "/sessions/harnessed.0/rotate-key", headers=key).status_code == 403
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert HTTP.post(f"{proxy.url}/harnessed.0{CHAT}", json=body, headers=key).status_code == 403
    done = HTTP.post(proxy.url + "/sessions/harnessed.0/complete", json={"reward": 1.0}, headers=key)
    assert done.status_code == 200, done.text


def test_the_workers_socket_does_not_take_its_key_nor_the_admins(proxy: Target) -> None:
    where = proxy.url.replace("http", "ws") + "/workers/connect"
    for headers in (
        {"authorization": f"Bearer {proxy.key}"},
        {"authorization": f"Bearer {ADMIN}"},
        {"x-api-key": WORKER},
        {},
    ):
        with (
            websockets.sync.client.connect(where, additional_headers=headers, open_timeout=60) as socket_,
            pytest.raises(ConnectionClosed),
        ):
            socket_.send(b"\x93\x01\x02\x03")
            for _ in range(5):
                socket_.recv(timeout=60)
        assert socket_.close_code in (4400, 4401)
    for path in (CHAT, "/v1/models", "/v1/messages"):
        with pytest.raises(InvalidStatus):
            websockets.sync.client.connect(
                f"{proxy.url.replace('http', 'ws')}/mine{path}",
                additional_headers={"authorization": f"Bearer {proxy.key}"},
                open_timeout=60,
            )


def test_a_key_in_the_query_opens_only_what_googles_clients_ask_for(proxy: Target) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert HTTP.post(f"{proxy.url}/mine{CHAT}?key={proxy.key}", json=body, timeout=60).status_code == 401
    gemini = {"contents": [{"role": "user", "parts": [{"text": "x"}]}]}
    for trial, wanted in (("mine", 200), ("victim", 403)):
        url = f"{proxy.url}/{trial}/v1beta/models/m:generateContent?key={proxy.key}"
        assert HTTP.post(url, json=gemini, timeout=60).status_code == wanted
