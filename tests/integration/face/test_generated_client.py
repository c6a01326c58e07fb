"""A client that a generator makes of `/openapi.json` works against the proxy that served it: registers, reads, completes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import openapi_python_client
import pytest
from openapi_python_client.config import Config, ConfigFile, MetaType

from steno.client.client import Client
from steno_proxy.api.openapi import EXAMPLES
from tests.integration.face.conftest import ADMIN
from tests.support.programs.stack import Stack

PACKAGE = "generated_steno"


@pytest.fixture(scope="module")
def generated(locked: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The package, made without one warning. `api("sessions", "read_session")` is the module of an operation."""
    folder: Path = tmp_path_factory.mktemp("generated")
    document = folder / "openapi.json"
    document.write_bytes(httpx.get(f"{locked.url}/openapi.json", timeout=60).raise_for_status().content)
    config = Config.from_sources(
        ConfigFile(post_hooks=[]), MetaType.NONE, document, "utf-8", overwrite=False, output_path=folder / PACKAGE
    )
    problems = openapi_python_client.generate(config=config)
    assert [(problem.level, problem.header, problem.detail) for problem in problems] == []
    sys.path.insert(0, str(folder))
    yield importlib.import_module(PACKAGE)
    sys.path.remove(str(folder))


def operation(name: str) -> Any:
    return importlib.import_module(f"{PACKAGE}.api.{name}")


def model(name: str, **fields: Any) -> Any:
    return getattr(importlib.import_module(f"{PACKAGE}.models"), name)(**fields)


def test_a_generated_client_reads_token_arrays_as_numbers(generated: Any, locked: Stack) -> None:
    with generated.AuthenticatedClient(base_url=locked.url, token=ADMIN) as client:
        trial = operation("sessions.register_named_session").sync(
            "generated-1", client=client, body=model("SessionSpec")
        )
        agent = openai.OpenAI(base_url=trial.urls["openai"], api_key=trial.api_key)
        agent.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hello"}])
        done = operation("sessions.complete_session").sync(
            "generated-1", client=client, body=model("Completion", reward=0.5)
        )
        assert (done.status, done.reward) == ("completed", 0.5)
        page = operation("sessions.read_turns").sync("generated-1", client=client)
        found = operation("sessions.read_samples").sync("generated-1", client=client)
    with Client(locked.url, ADMIN) as steno:
        (turn,), (sample,) = steno.turns("generated-1"), steno.samples("generated-1")
    (shown,) = page.items
    assert shown.completion_ids == turn.to_numpy().completion_ids.tolist() and len(shown.completion_ids) > 0
    assert shown.prompt_digest == turn.prompt_digest.hex()
    (read,) = found.items
    arrays = sample.to_numpy()
    assert read.token_ids == arrays.token_ids.tolist() and all(type(each) is int for each in read.token_ids)
    assert read.loss_mask == arrays.loss_mask.tolist()
    assert [value is not None for value in read.sampling_logprobs] == read.loss_mask
    assert read.reward == 0.5


def test_a_refusal_is_read_as_one(generated: Any, locked: Stack) -> None:
    with generated.AuthenticatedClient(base_url=locked.url, token=ADMIN) as client:
        error = operation("sessions.read_session").sync("never-generated", client=client).error
    assert error.code == "not_found"


def test_every_example_is_taken(locked: Stack) -> None:
    """One after the other, as somebody would who follows the document."""
    document = httpx.get(f"{locked.url}/openapi.json", timeout=60).json()
    assert document["servers"][0]["url"] == "/"
    asked = {
        operation["operationId"]: (method, path, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    agents_key = ""
    for name in sorted(EXAMPLES, key="complete_session".__eq__):  # which ends the trial: last
        method, path, described = asked[name]
        assert described["security"] == [{"bearer": []}, {"x-api-key": []}, {"x-goog-api-key": []}]
        body = described["requestBody"]["content"]["application/json"]["example"]
        if name == "lease_groups":
            body = body | {"wait_s": 0}  # nothing is ready, and nobody waits here
        key = agents_key if path.startswith("/{trial_id}") else ADMIN
        url = locked.url + path.format(trial_id="my-trial", model="any")
        answer = httpx.request(method, url, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)
        assert answer.status_code == 200, (name, answer.text)
        agents_key = agents_key or answer.json()["api_key"]


def test_operations_have_short_names_of_their_own(locked: Stack) -> None:
    document = httpx.get(f"{locked.url}/openapi.json", timeout=60).json()
    names = [each["operationId"] for path in document["paths"].values() for each in path.values()]
    assert len(names) == len(set(names)) and not [name for name in names if "__" in name or len(name) > 32]
