"""`steno env` against a real proxy with keys: what it prints lets the official SDKs in, with nothing else told to them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from steno.client.client import Client
from steno.contracts.rest import Completion
from tests.integration.face.conftest import ADMIN
from tests.support.programs import forked
from tests.support.programs.stack import Stack

CALLS = {
    "openai": "import openai\nprint(openai.OpenAI().chat.completions.create("
    "model='m', messages=[{'role': 'user', 'content': 'hi'}]).choices[0].message.content)",
    "anthropic": "import anthropic\nprint(anthropic.Anthropic().messages.create("
    "model='m', max_tokens=99, messages=[{'role': 'user', 'content': 'hi'}]).content[0].text)",
    "google-genai": "from google import genai\nclient = genai.Client()\n"
    "print(client.models.generate_content(model='m', contents='hi').text)",
}


def steno(stack: Stack, *words: str) -> str:
    command = [sys.executable, "-m", "steno", "env", *words, "--proxy", stack.url, "--key", ADMIN]
    done = forked.run(command)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("sdk", CALLS)
def test_an_sdk_finds_its_trial_in_the_environment(locked: Stack, sdk: str, tmp_path: Path) -> None:
    printed = steno(locked, sdk, f"env-{sdk}")
    assert ADMIN not in printed
    call = tmp_path / "call.py"
    call.write_text(CALLS[sdk])
    script = f"{printed}{sys.executable} {call}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=120, env={"PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr[-2000:] + locked.logs()
    words = ("sessions", "show", f"env-{sdk}", "--proxy", locked.url, "--key", ADMIN, "--json")
    shown = forked.run([sys.executable, "-m", "steno", *words])
    assert json.loads(shown.stdout.splitlines()[0])["counts"]["turns"] == 1


def test_opencode_is_told_the_context_of_what_is_served(locked: Stack) -> None:
    printed = json.loads(steno(locked, "opencode", "env-context", "--json"))
    config = json.loads(printed["variables"]["OPENCODE_CONFIG_CONTENT"])
    with Client(locked.url, ADMIN) as client:
        served = client.workers()[0].models[0].context_tokens
    assert config["provider"]["steno"]["models"]["policy"]["limit"]["context"] == served


def test_a_trial_that_has_ended_is_not_handed_out(locked: Stack) -> None:
    steno(locked, "openai", "env-ended")
    with Client(locked.url, ADMIN) as client:
        client.complete("env-ended", Completion(reward=1.0))
    command = [sys.executable, "-m", "steno", "env", "openai", "env-ended", "--proxy", locked.url, "--key", ADMIN]
    done = forked.run(command)
    assert (done.returncode, done.stdout) == (2, "")
    assert "trial env-ended has ended (completed) and takes no more turns: give another id" in done.stderr


def test_the_same_trial_has_the_same_key(locked: Stack) -> None:
    first, again = (json.loads(steno(locked, "openai", "env-twice", "--json")) for _ in range(2))
    assert first == again and first["variables"]["OPENAI_API_KEY"].startswith("sk-steno-")
    assert first["variables"]["OPENAI_BASE_URL"] == f"{locked.url}/env-twice/v1"
