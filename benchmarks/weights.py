"""What a policy update costs: how long it takes, how long generation stands still, and how many bytes travel.

    python -m benchmarks.weights [--transports filesystem,stream] [--updates 3] [--layers 8] [--out build/weights.json]
    python -m benchmarks.weights --vllm <python of the vLLM environment>
    python -m benchmarks.weights --changes [--steps 12] [--layers 8]

A random model of about 100 MB (float32), a real proxy, a real worker with the embedded engine or vLLM, all on this machine;
agents' turns run all the while. `stream` and `filesystem` are also measured by difference (`stream-delta`, `filesystem-delta`).
`nccl` needs GPUs on both sides and is not measured here.

`--changes` counts instead: how many weights change, and how large what is sent of them is, for AdamW at some learning rates with
gradients that are drawn anew at each step; weights are kept in float32 and sent in bfloat16, as under ZeRO-3. How large a
gradient is says little, since AdamW divides by it; rewards are not looked at.
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

from steno.client.client import AsyncClient
from steno.models import TINY
from steno_trainer.data.staleness import PolicyVersion
from steno_trainer.weights.files.copies import WeightsCopies
from steno_trainer.weights.files.differences import WeightsDifferences
from steno_trainer.weights.files.patches import write_patch
from steno_trainer.weights.publisher import Publisher
from steno_trainer.weights.source import ModelWeights
from steno_trainer.weights.transports import FilesystemTransport, StreamTransport, Transport
from tests.support.programs.stack import Stack, running
from tests.support.sources import SOURCES
from tests.support.weights.probe import make_probe, probe_ids

STREAMS = 2
BUCKET_BYTES = 16 << 20
CHANGES = [(1e-6, torch.bfloat16), (3e-6, torch.bfloat16), (1e-5, torch.bfloat16), (1e-6, torch.float32)]
WARM_STEPS = 10
"""AdamW's first steps are larger than its others."""
SKIPPED = (2, 4, 8, 16)
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
    how, _, push = kind.partition("-")
    copies = WeightsDifferences(folder / kind) if push else WeightsCopies(folder / kind)
    transport: Transport = FilesystemTransport(copies) if how == "filesystem" else StreamTransport(copies)
    source = ModelWeights(model, bucket_bytes=BUCKET_BYTES)
    copies_rate = 1e-6 if push else 1e-3  # a full copy costs the same whatever has changed
    rounds: list[dict[str, float]] = []
    with Publisher(transport, [AsyncClient(stack.url)]) as sending:
        for step in range(updates + bool(push)):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=copies_rate)
            started = time.perf_counter()
            probe = make_probe(model, probe_ids(model.config.vocab_size))
            probed = time.perf_counter()
            publication = sending.publish(PolicyVersion(f"bench-{kind}", step), source, probe)
            update = sending.wait(publication, 600)
            whole_s = time.perf_counter() - started
            if update.state != "done":
                raise SystemExit(f"update {update.version}: {update.state}: {publication.failed}\n{stack.logs()}")
            [worker] = update.workers
            manifest = publication.spec.manifest
            if push and not manifest.patches:
                continue  # the first, which is full
            size = sum(shard.size for shard in manifest.shards)
            rounds.append({
                "whole_s": whole_s, "probe_s": probed - started, "copy_s": publication.copy_s,
                "load_s": worker.load_s or 0.0, "pause_s": worker.pause_s or 0.0,
                "bytes": size, "uploaded_bytes": publication.bytes_sent,
                "sent_bytes": manifest.patches[-1].size if push else size,
            })  # fmt: skip
    medians: dict[str, float] = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    medians["pause_share"] = statistics.median(one["pause_s"] / one["whole_s"] for one in rounds)
    medians["largest_pause_share"] = max(one["pause_s"] / one["whole_s"] for one in rounds)
    return {"medians": medians, "rounds": rounds}


def table(transports: dict[str, Any]) -> str:
    lines = [
        "| transport | whole update | trainer stands still | generation stands still | share | sent / model's bytes |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in transports.items():
        m = result["medians"]
        lines.append(
            f"| {name} | {m['whole_s']:.2f} s | {m['probe_s'] + m['copy_s']:.2f} s | {m['pause_s']:.3f} s "
            f"| {100 * m['pause_share']:.1f} % | {m['sent_bytes'] / m['bytes']:.3f} |"
        )
    return "\n".join(lines)


def count_changes(rate: float, model: Any, steps: int, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """AdamW at one rate, warmed up first. Returns: per step, and from the first of `steps` to each later one: shares of the
    weights that changed, and of a full copy's bytes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    source = ModelWeights(model, dtype=dtype, bucket_bytes=1 << 30)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    def sent() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for bucket in source.buckets() for name, tensor in bucket.items()}

    def changed(before: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> dict[str, float]:
        file, _ = write_patch(folder / "change.patch", before, now)
        count = sum(tensor.numel() for tensor in now.values())
        size = sum(tensor.nbytes for tensor in now.values())
        moved = sum(int((now[name] != tensor).sum()) for name, tensor in before.items())
        return {"weights": moved / count, "bytes": file.size / size}

    for _ in range(WARM_STEPS):
        step()
    first = last = sent()
    each, since = [], {}
    for number in range(1, steps + 1):
        step()
        now = sent()
        each.append(changed(last, now))
        if number in SKIPPED:
            since[number] = changed(first, now)
        last = now
    mean = {key: statistics.mean(one[key] for one in each) for key in each[0]}
    return {"rate": rate, "dtype": str(dtype).removeprefix("torch."), "step": mean, "since": since}


def report_changes(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Prints a table. Weights are drawn with a standard deviation of 0.02, as models of this kind begin."""
    rows = []
    print("| learning rate | sent as | | " + " | ".join(f"after {number} steps" for number in (1, *SKIPPED)) + " |")
    print("|---|---|---|" + "---|" * (1 + len(SKIPPED)))
    for rate, dtype in CHANGES:
        row = count_changes(rate, make_model(folder / f"{rate}-{dtype}", options.layers), options.steps, folder, dtype)
        rows.append(row)
        for key in ("weights", "bytes"):
            values = [row["step"][key], *(one[key] for one in row["since"].values())]
            cells = " | ".join(f"{100 * value:.2f} %" for value in values)
            print(f"| {rate:g} | {row['dtype']} | {key} | {cells} |", flush=True)
    return {"changes": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default="filesystem,filesystem-delta,stream,stream-delta")
    parser.add_argument("--changes", action="store_true", help="count what changes, and measure no time")
    parser.add_argument("--steps", type=int, default=max(SKIPPED), help="with --changes")
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vllm", help="a Python that has vLLM")
    parser.add_argument("--out", type=Path, default=Path("build/weights.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="steno-weights-") as name:
        folder = Path(name)
        if options.changes:
            write_report(options.out, report_changes(options, folder))
            return
        model = make_model(folder / "model", options.layers)
        staging = folder / "staging"
        arguments = ["--model", str(folder / "model"), "--staging-dir", str(staging)]
        if options.vllm:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            os.environ["PYTHONPATH"] = SOURCES  # that Python has none of our packages
            arguments += ["--engine", "vllm", "--", *VLLM]
        python = options.vllm or sys.executable
        with running(folder / "stack", arguments, python=python) as stack, Agents(stack):
            for kind in options.transports.split(","):
                results[kind] = measure(kind, model, folder, stack, options.updates)
    print(table(results))
    write_report(options.out, {"engine": "vllm" if options.vllm else "transformers", "transports": results})


def write_report(path: Path, measured: dict[str, Any]) -> None:
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "load": os.getloadavg()},
        "revision": revision.stdout.strip(),
        **measured,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1))
    print(f"load average {os.getloadavg()[0]:.1f}; the whole report is in {path}")


if __name__ == "__main__":
    main()
