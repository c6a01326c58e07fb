"""The optimisation step alone, on fixed completions, beside TRL's GRPOTrainer: seconds, peak memory, and whether both do the
same.

    python -m benchmarks.train_step                          CPU, float32: about ten minutes; installs TRL the first time
    python -m benchmarks.train_step --lengths 1024,4096      longest samples, in tokens
    python -m benchmarks.train_step --even                   nothing to pad, nothing to mask: the best case of both
    python -m benchmarks.train_step --threads 2 --steps 3 --out build/train_step.json

Both get one model with random weights, one batch (prompts and completions of uneven lengths, half of each completion's tokens
are not the policy's, as with tools), one sample per micro-batch, activation checkpointing, AdamW. TRL runs as its own
documentation says, without DeepSpeed; Steno's step runs as always, on ZeRO-3 (here of one rank). The gradient's norm of each
step is compared: if it differs, the two did not do the same work, and the run fails. Memory is the kernel's high-water mark
after a first step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.report import describe_machine
from benchmarks.targets import ROOT
from tests.support.sources import SOURCES

TRL = ("trl==1.16.0", "transformers==5.19.0", "accelerate==1.15.0")
TORCH = "torch==2.13.0"
SHARES = (1.0, 0.75, 0.5, 0.25)
"""Lengths of the batch's completions, of the longest."""
SHAPE = {"vocab_size": 32768, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 64}
PROMPT_TOKENS = 64


def trl_environment(cache: Path) -> Path:
    """A virtual environment with TRL, made once and named after its pins; returns its Python."""
    home = cache / f"benchmark-trl-{sha256(' '.join((TORCH, *TRL)).encode()).hexdigest()[:12]}"
    if not (home / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        pip = [str(home / "bin/pip"), "install", "-q", "--disable-pip-version-check"]
        # The CPU build where there is one to be had; else what PyPI has.
        if subprocess.run([*pip, f"{TORCH}+cpu"], stderr=subprocess.DEVNULL).returncode:
            subprocess.run([*pip, TORCH], check=True)
        subprocess.run([*pip, *TRL], check=True)
        (home / "installed").touch()
    return home / "bin/python"


def make_model(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        **SHAPE, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
        max_position_embeddings=131072,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def run(python: str | Path, module: str, job: dict[str, Any], threads: int) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": SOURCES}
    done = subprocess.run(
        [str(python), "-m", module, json.dumps(job)], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode:
        raise SystemExit(f"{module} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description="The optimisation step beside TRL's")
    parser.add_argument("--lengths", default="512,2048,4096", help="tokens of the longest completion, by commas")
    parser.add_argument("--steps", type=int, default=3, help="measured steps, after one that is not")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=ROOT / "build/train_step.json")
    parser.add_argument("--even", action="store_true", help="equally long completions, every token of them trained")
    options = parser.parse_args()
    trl = trl_environment(Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "steno")
    report: dict[str, Any] = {
        "machine": describe_machine() | {"peers": [TORCH, *TRL], "threads": options.threads},
        "model": SHAPE, "prompt_tokens": PROMPT_TOKENS, "shares": SHARES, "even": options.even, "cases": {},
    }  # fmt: skip
    columns = ("longest sample", "what", "s/step", "CPU s/step", "peak RSS", "of it above rest", "gradient norm")
    print(row(columns) + "\n" + row(["---"] * len(columns)))
    with tempfile.TemporaryDirectory(prefix="steno-train-step-") as folder:
        make_model(Path(folder) / "model")
        for length in map(int, options.lengths.split(",")):
            completions = [length if options.even else int(share * length) for share in SHARES]
            job = {
                "model": f"{folder}/model", "tokenizer": str(ROOT / "steno/models/tiny"), "prompt": PROMPT_TOKENS,
                "completions": completions, "vocabulary": SHAPE["vocab_size"], "even": options.even,
                "steps": options.steps, "folder": folder,
            }  # fmt: skip
            case = report["cases"][length] = {
                "trl": run(trl, "benchmarks.train_step_trl", job, options.threads),
                "steno": run(sys.executable, "benchmarks.train_step_steno", job, options.threads),
            }
            for name, found in case.items():
                peak, above = (found["peak_bytes"] - less for less in (0, found["rest_bytes"]))
                cells = (f"{found['step_s']:.2f}", f"{found['cpu_s']:.2f}", _mib(peak), _mib(above))
                print(row([str(length + PROMPT_TOKENS), name, *cells, f"{found['grad_norms'][0]:.5f}"]), flush=True)
            norms = [case[name]["grad_norms"] for name in ("trl", "steno")]
            if any(abs(a - b) > 1e-3 * abs(a) for a, b in zip(*norms, strict=True)):
                raise SystemExit(f"not the same work: gradient norms {norms}")
            report["finished"] = time.strftime("%Y-%m-%d %H:%M")
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
