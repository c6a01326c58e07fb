"""The optimisation step alone, on fixed completions, beside TRL's GRPOTrainer: seconds, peak memory, and whether both do the
same.

    python -m benchmarks.train_step                          CPU, float32: about ten minutes; installs TRL the first time
    python -m benchmarks.train_step --lengths 1024,4096      longest samples, in tokens
    python -m benchmarks.train_step --even                   nothing to pad, nothing to mask: the best case of both
    python -m benchmarks.train_step --threads 2 --steps 3 --out build/train_step.json
    python -m benchmarks.train_step --case group --shared half     one JSON line: samples that begin alike

Both get one model with random weights, one batch (prompts and completions of uneven lengths, half of each completion's tokens
are not the policy's, as with tools), one sample per micro-batch, activation checkpointing, AdamW. TRL runs as its own
documentation says, without DeepSpeed; Steno's step runs as always, on ZeRO-3 (here of one rank). The gradient's norm of each
step is compared: if it differs, the two did not do the same work, and the run fails. Memory is the kernel's high-water mark
after a first step.

The group: eight trials with one prompt of 60 % of each path, and two branches of each trial that share none, half, or all but the
last turn of the rest. Steno computes it once as tries and once as paths (`steno_paths_s`: each sample whole, in micro-batches of
as many tokens). TRL's trainer computes paths; `trl_tree_tokens` is what its experimental AsyncGRPO would compute, on GPUs.
`of_flops` is what tries gain over what they save: (paths' seconds / tries' seconds) / (paths' FLOPs / tries' FLOPs), of processor
time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
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
GROUP_BUDGET = 8
"""Paths' tokens to a micro-batch of a group."""
GROUP_CHUNK = 128
"""Trained tokens whose logits exist at once: so few that memory is that of the tokens, and not of the head."""


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


def run_group(options: argparse.Namespace, trl: Path) -> dict[str, Any]:
    """The case of a group; what its line says."""
    path = int(options.lengths.split(",")[0])
    with tempfile.TemporaryDirectory(prefix="steno-train-step-") as folder:
        make_model(Path(folder) / "model")
        job = {
            "model": f"{folder}/model", "tokenizer": str(ROOT / "steno/models/tiny"), "path": path, "shared": options.shared,
            "vocabulary": SHAPE["vocab_size"], "steps": options.steps, "folder": folder,
            "micro_batch_tokens": GROUP_BUDGET * path, "chunk_tokens": GROUP_CHUNK,
        }  # fmt: skip
        ours, ways = "benchmarks.train_step_steno", (job | {"share": True}, job | {"share": False})
        rounds = [[run(sys.executable, ours, way, options.threads) for way in ways] for _ in range(options.rounds)]
        tries, paths = (middle(found) for found in zip(*rounds, strict=True))
        peer = run(trl, "benchmarks.train_step_trl", job, options.threads)
    same_work(peer, tries)
    same_work(peer, paths)
    gained = paths["cpu_s"] / tries["cpu_s"]
    saved = paths["flops"] / tries["flops"]
    return {
        "case": "group", "shared": options.shared, "path": path, "steno_s": tries["step_s"],
        "steno_paths_s": paths["step_s"], "trl_s": peer["step_s"], "steno_cpu_s": tries["cpu_s"],
        "steno_paths_cpu_s": paths["cpu_s"], "trl_cpu_s": peer["cpu_s"], "trl_tree_tokens": peer["tree_tokens"],
        "unique_tokens": int(tries["unique_tokens"]), "computed_tokens": tries["computed_tokens"],
        "path_tokens": tries["path_tokens"], "flops_ratio": saved, "cpu_ratio": gained, "of_flops": gained / saved,
        "steno_peak_bytes": tries["peak_bytes"], "steno_paths_peak_bytes": paths["peak_bytes"],
        "trl_peak_bytes": peer["peak_bytes"],
    }  # fmt: skip


def middle(found: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Of several runs of the same: medians of what was measured."""
    runs = list(found)
    same_work(*runs)
    measured = ("step_s", "cpu_s", "rest_bytes", "peak_bytes")
    return runs[0] | {name: statistics.median(one[name] for one in runs) for name in measured}


def same_work(*found: dict[str, Any]) -> None:
    norms = [one["grad_norms"] for one in found]
    if any(abs(other - first) > 1e-3 * abs(first) for first, *others in zip(*norms, strict=True) for other in others):
        raise SystemExit(f"not the same work: gradient norms {norms}")


def main() -> None:
    parser = argparse.ArgumentParser(description="The optimisation step beside TRL's")
    parser.add_argument("--case", choices=("lengths", "group"), default="lengths")
    parser.add_argument(
        "--shared", choices=("none", "half", "turn"), default="half", help="by the two branches of a group's trial"
    )
    parser.add_argument("--lengths", default="512,2048,4096", help="tokens of the longest completion, by commas")
    parser.add_argument("--steps", type=int, default=3, help="measured steps, after one that is not")
    parser.add_argument(
        "--rounds", type=int, default=1, help="of a group: runs of both ways, one after the other; medians count"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=ROOT / "build/train_step.json")
    parser.add_argument("--even", action="store_true", help="equally long completions, every token of them trained")
    options = parser.parse_args()
    trl = trl_environment(Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "steno")
    if options.case == "group":
        print(json.dumps(run_group(options, trl)))
        return
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
                "steps": options.steps, "folder": folder, "micro_batch_tokens": PROMPT_TOKENS + length,
            }  # fmt: skip
            case = report["cases"][length] = {
                "trl": run(trl, "benchmarks.train_step_trl", job, options.threads),
                "steno": run(sys.executable, "benchmarks.train_step_steno", job, options.threads),
            }
            for name, found in case.items():
                peak, above = (found["peak_bytes"] - less for less in (0, found["rest_bytes"]))
                cells = (f"{found['step_s']:.2f}", f"{found['cpu_s']:.2f}", _mib(peak), _mib(above))
                print(row([str(length + PROMPT_TOKENS), name, *cells, f"{found['grad_norms'][0]:.5f}"]), flush=True)
            same_work(case["trl"], case["steno"])
            report["finished"] = time.strftime("%Y-%m-%d %H:%M")
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
