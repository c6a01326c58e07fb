"""What a policy update costs: how long it takes, how long generation stands still, and how many bytes travel.

    python -m benchmarks.weights [--transports filesystem,stream] [--updates 3] [--layers 8] [--out build/weights.json]
    python -m benchmarks.weights --vllm <python of the vLLM environment>

A random model of about 100 MB (float32), a real proxy, a real worker with the embedded engine or vLLM, all on this machine;
agents' turns run all the while. `nccl` needs GPUs on both sides and is not measured here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from steno.client.client import AsyncSteno
from steno.models import TINY
from steno_trainer.data.staleness import PolicyVersion
from steno_trainer.weights.copies import WeightsCopies
from steno_trainer.weights.probe import make_probe, probe_ids
from steno_trainer.weights.publisher import Publisher
from steno_trainer.weights.source import ModelWeights
from steno_trainer.weights.transports import FilesystemTransport, StreamTransport, Transport
from tests.support.stack import Stack, running

STREAMS = 2
BUCKET_BYTES = 16 << 20
VLLM = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8"]


def make_model(folder: Path, layers: int) -> Qwen3ForCausalLM:
    """Of the tiny model's vocabulary, with its tokenizer beside it."""
    torch.manual_seed(0)
    vocabulary = json.loads((TINY / "config.json").read_text())["vocab_size"]
    config = Qwen3Config(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, vocab_size=vocabulary, max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(TINY / name, folder / name)
    return model


class Agents:
    """Turns one after the other on some streams, for as long as the block lasts."""

    def __init__(self, stack: Stack) -> None:
        self._stack, self._stopping = stack, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(STREAMS)]

    def __enter__(self) -> Agents:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "Count."}], "max_tokens": 64}
        while not self._stopping.is_set():
            url = self._stack.base_url(f"bench-{number}") + "/chat/completions"
            httpx.post(url, json=body, timeout=300).raise_for_status()


def measure(kind: str, model: Any, folder: Path, stack: Stack, updates: int) -> dict[str, Any]:
    copies = WeightsCopies(folder / kind)
    transport: Transport = FilesystemTransport(copies) if kind == "filesystem" else StreamTransport(copies)
    rounds: list[dict[str, float]] = []
    with Publisher(transport, [AsyncSteno(stack.url)]) as sending:
        for step in range(updates):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)
            started = time.perf_counter()
            probe = make_probe(model, probe_ids(model.config.vocab_size))
            probed = time.perf_counter()
            publication = sending.publish(
                PolicyVersion(f"bench-{kind}", step), ModelWeights(model, bucket_bytes=BUCKET_BYTES), probe
            )
            update = sending.wait(publication, 600)
            whole_s = time.perf_counter() - started
            if update.state != "done":
                raise SystemExit(f"update {update.version}: {update.state}: {publication.failed}\n{stack.logs()}")
            [worker] = update.workers
            size = publication.spec.manifest.size
            rounds.append({
                "whole_s": whole_s, "probe_s": probed - started, "copy_s": publication.copy_s,
                "load_s": worker.load_s or 0.0, "pause_s": worker.pause_s or 0.0,
                "bytes": size, "uploaded_bytes": publication.bytes_sent,
            })  # fmt: skip
    medians: dict[str, float] = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    medians["pause_share"] = statistics.median(one["pause_s"] / one["whole_s"] for one in rounds)
    medians["largest_pause_share"] = max(one["pause_s"] / one["whole_s"] for one in rounds)
    return {"medians": medians, "rounds": rounds}


def table(transports: dict[str, Any]) -> str:
    lines = [
        "| transport | whole update | trainer stands still | generation stands still | share | uploaded / model's bytes |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in transports.items():
        m = result["medians"]
        lines.append(
            f"| {name} | {m['whole_s']:.2f} s | {m['probe_s'] + m['copy_s']:.2f} s | {m['pause_s']:.3f} s "
            f"| {100 * m['pause_share']:.1f} % | {m['uploaded_bytes'] / m['bytes']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default="filesystem,stream")
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vllm", help="a Python that has vLLM")
    parser.add_argument("--out", type=Path, default=Path("build/weights.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="steno-weights-") as name:
        folder = Path(name)
        model = make_model(folder / "model", options.layers)
        staging = folder / "staging"
        arguments = ["--model", str(folder / "model"), "--staging-dir", str(staging)]
        if options.vllm:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            arguments += ["--engine", "vllm", "--", *VLLM]
        python = options.vllm or sys.executable
        with running(folder / "stack", arguments, python=python) as stack, Agents(stack):
            for kind in options.transports.split(","):
                results[kind] = measure(kind, model, folder, stack, options.updates)
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "load": os.getloadavg()},
        "engine": "vllm" if options.vllm else "transformers",
        "revision": revision.stdout.strip(),
        "transports": results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1))
    print(table(results))
    print(f"load average {os.getloadavg()[0]:.1f}; the whole report is in {options.out}")


if __name__ == "__main__":
    main()
