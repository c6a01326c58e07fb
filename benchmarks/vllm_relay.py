"""What the relay costs beside vLLM's own server: tokens a second and the time to the first token, on whatever vLLM runs on.

    <python of the vLLM environment> -m benchmarks.vllm_relay --model DIR [--clients 64,256] [-- arguments of vLLM]

The same model, prompts and clients (`load.py`) twice: straight at `vllm serve`, and through `steno proxy` with a worker
on vLLM. Each is started anew and warmed up first. The model's tokens must read ` tok…`, as those do that `--make` writes: a
random Qwen3 of that shape, in bfloat16, with the shipped tokenizer filled up to the whole vocabulary.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from steno.models import TINY
from tests.support.programs.ports import free_port
from tests.support.programs.stack import running

READY_S = 420.0
END_S = 30.0
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 32},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128},
}  # fmt: skip
"""Of Qwen3-0.6B and Qwen3-1.7B, and one that a CPU runs."""


def make_model(folder: Path, shape: str, vocabulary: int) -> None:
    """Write a random model, whose tokens above the shipped tokenizer's each read ` tok` and their number."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        **SHAPES[shape], vocab_size=vocabulary, tie_word_embeddings=True, max_position_embeddings=32768,
        initializer_range=0.05, eos_token_id=json.loads((TINY / "config.json").read_text())["eos_token_id"],
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    for number in range(len(words) + len(tokenizer["added_tokens"]), vocabulary):
        words[f"\u0120tok{number}"] = number
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(TINY / name, folder / name)


@contextlib.contextmanager
def served(folder: Path, model: str, words: list[str]) -> Iterator[str]:
    """vLLM's own server. Yields the URL of its chat completions."""
    port = free_port()
    log = folder / "serve.log"
    command = [
        "vllm.entrypoints.openai.api_server",
        "--model",
        model,
        "--port",
        str(port),
        "--served-model-name",
        "bench",
    ]
    with log.open("wb") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", *command, "--disable-uvicorn-access-log", *words],
            stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    try:
        until = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                    break
            if child.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"vllm serve did not start\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1/chat/completions"
    finally:
        child.terminate()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextlib.contextmanager
def recorded(folder: Path, model: str, words: list[str]) -> Iterator[str]:
    """Proxy and worker. Yields the URL of a trial's chat completions."""
    worker = ["--engine", "vllm", "--model", model, *(["--", *words] if words else [])]
    with running(folder / "stack", None) as stack:
        stack.start_worker(*worker)
        stack.wait_for_model(READY_S)
        yield stack.url + "/{client}/v1/chat/completions"


def load(url: str, clients: int, tokens: int, seconds: float) -> dict[str, Any]:
    options = {"--url": url, "--clients": clients, "--tokens": tokens, "--seconds": seconds}
    command = [sys.executable, "-m", "benchmarks.load", "streams", *(str(x) for pair in options.items() for x in pair)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="its directory; made first with --make")
    parser.add_argument("--make", choices=sorted(SHAPES), help="write a random model of this shape to --model")
    parser.add_argument("--vocabulary", type=int, default=151936, help="of the model that is made")
    parser.add_argument("--clients", default="64,256")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--ways", default="vllm,steno")
    parser.add_argument("--out", type=Path, default=Path("build/vllm-relay.json"))
    parser.add_argument("words", nargs="*", metavar="-- ARGUMENT", help="of vLLM, the same both ways")
    options = parser.parse_args()
    if options.make:
        make_model(options.model, options.make, options.vocabulary)
    ways = {"vllm": served, "steno": recorded}
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory(prefix="steno-relay-") as name:
        for way in options.ways.split(","):
            results[way] = {}
            with ways[way](Path(name), str(options.model), options.words) as url:
                for clients in map(int, options.clients.split(",")):
                    load(url, clients, options.tokens, 3.0)
                    runs = [load(url, clients, options.tokens, options.seconds) for _ in range(options.repeat)]
                    results[way][str(clients)] = runs
                    for run in runs:
                        print(
                            f"{way:6} {clients:4} streams: {run['tokens_per_s']:8.0f} tokens/s, first token p50 "
                            f"{1e3 * run['ttft_p50_s']:6.1f} ms, p99 {1e3 * run['ttft_p99_s']:6.1f} ms, gap p99 "
                            f"{1e3 * run['gap_p99_s']:5.1f} ms, {run['finished']} finished, {run['failed']} failed",
                            flush=True,
                        )
    import torch
    import vllm

    report = {
        "machine": {
            "cpus": os.cpu_count(), "platform": platform.platform(), "load": os.getloadavg(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "setup": {"tokens": options.tokens, "seconds": options.seconds, "vllm": options.words},
        "ways": results,
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
