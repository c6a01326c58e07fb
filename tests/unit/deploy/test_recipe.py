"""The recipe of two nodes with 8 GPUs each, on a paper cluster: what its files say fits together."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from steno_rollouts.config import RolloutSettings
from steno_trainer.model.memory_estimate import SAMPLES, Machine, MemoryOptions, ModelShape, longest_sample
from steno_trainer.run_config import RunSettings
from steno_worker.config import WorkerSettings

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "deploy/kustomize/overlays/two-nodes"
EXAMPLE = ROOT / "deploy/examples/qwen2.5-3b-mini-swe-agent"
DEPLOYMENT = (ROOT / "docs/deployment.md").read_text()
GPUS_OF_A_NODE = 8
HEADS = {"Qwen2.5-3B": (16, 2), "Qwen2.5-7B": (28, 4), "Qwen2.5-14B": (40, 8), "Qwen2.5-32B": (40, 8)}


def pod(file: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The manifest, its pod's spec, and what its container's environment says in plain."""
    manifest = next(
        one for one in yaml.safe_load_all((RECIPE / file).read_text()) if one["kind"] in ("Job", "Deployment")
    )
    spec = manifest["spec"]["template"]["spec"]
    return manifest, spec, {one["name"]: one["value"] for one in spec["containers"][0]["env"] if "value" in one}


def settings(environment: dict[str, str], prefix: str) -> dict[str, str]:
    return {name.removeprefix(prefix).lower(): value for name, value in environment.items() if name.startswith(prefix)}


@pytest.fixture
def run() -> RunSettings:
    given = {
        name: value for name, value in settings(pod("trainer.yaml")[2], "STENO_TRAIN_").items() if name != "key_file"
    }
    found = RunSettings(**given)  # type: ignore[arg-type]
    found.check()
    return found


@pytest.fixture
def rollouts() -> RolloutSettings:
    """Those of the command in docs/deployment.md."""
    [line] = re.findall(r"steno rollout (--proxy .* --run two-nodes .*) -- ", DEPLOYMENT)
    words = line.split()
    given = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)
    }
    return RolloutSettings(**given)


def parallel_sizes() -> Iterator[tuple[str, int]]:
    yield "two-nodes", int(json.loads(pod("worker.yaml")[2]["STENO_WORKER_ENGINE_ARGS"])[1])
    for found in re.finditer(r'--tensor-parallel-size, "(\d+)"', DEPLOYMENT):
        yield "docs/deployment.md", int(found[1])


def test_tensor_parallelism_divides_the_heads_of_all_models_that_it_is_for() -> None:
    found = list(parallel_sizes())
    assert len(found) == 3
    for model, (heads, key_heads) in HEADS.items():
        known = next((shape for name, shape, _ in SAMPLES.values() if name == model), None)
        assert known is None or (known.heads, known.key_heads) == (heads, key_heads)
        for where, size in found if model != "Qwen2.5-3B" else []:
            # vLLM copies key heads where there are fewer of them than processes.
            assert heads % size == 0 and max(size, key_heads) % min(size, key_heads) == 0, (where, model)


def test_workers_fill_one_node_together_and_the_trainer_the_other() -> None:
    worker, worker_pod, environment = pod("worker.yaml")
    _, trainer_pod, trainer_environment = pod("trainer.yaml")
    gpus = [p["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for p in (worker_pod, trainer_pod)]
    assert (
        worker["spec"]["replicas"] * gpus[0]
        == GPUS_OF_A_NODE
        == gpus[1]
        == int(trainer_environment["PET_NPROC_PER_NODE"])
    )
    assert int(json.loads(environment["STENO_WORKER_ENGINE_ARGS"])[1]) == gpus[0], "each process of an engine has a GPU"
    [together] = worker_pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert together["labelSelector"]["matchLabels"].items() <= worker["spec"]["template"]["metadata"]["labels"].items()
    for line in re.findall(r"^  resources: .*gpu: (\d+)", DEPLOYMENT, re.MULTILINE):
        assert int(line) == 4, "as --tensor-parallel-size in the examples of the chart"


def test_agents_keep_all_gpus_busy_and_workers_take_them(run: RunSettings, rollouts: RolloutSettings) -> None:
    worker, _, environment = pod("worker.yaml")
    assert (rollouts.run, rollouts.groups_per_step) == (run.run, run.groups_per_step)
    assert rollouts.max_staleness_steps == run.max_staleness_steps
    admitted = run.groups_per_step * (run.max_staleness_steps + 1) * rollouts.group_size
    assert rollouts.in_flight == admitted > 8 * GPUS_OF_A_NODE
    streams = worker["spec"]["replicas"] * int(environment["STENO_WORKER_MAX_STREAMS"])
    assert streams >= rollouts.in_flight


def test_whatever_a_worker_samples_can_be_trained(run: RunSettings) -> None:
    given = settings(pod("worker.yaml")[2], "STENO_WORKER_")
    context = WorkerSettings.model_fields["context_tokens"]
    assert context is not None and int(given["context_tokens"]) <= run.micro_batch_tokens


def test_the_micro_batch_fits_the_gpus_that_there_are(run: RunSettings) -> None:
    model, shape, _ = SAMPLES["7b"]
    buckets = json.loads((RECIPE / "deepspeed.json").read_text())["zero_optimization"]
    choice = MemoryOptions(
        live=buckets["stage3_max_live_parameters"],
        buckets=buckets["reduce_bucket_size"] + buckets["stage3_prefetch_bucket_size"],
    )
    assert run.micro_batch_tokens <= longest_sample(shape, Machine(GPUS_OF_A_NODE), choice), model
    small = AutoConfig.for_model(
        "qwen2", hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
        num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True,
    ).to_dict()  # fmt: skip
    example = RunSettings.load({}, EXAMPLE / "train.yaml")
    assert example.micro_batch_tokens <= longest_sample(ModelShape.of(small), Machine(GPUS_OF_A_NODE), MemoryOptions())


def test_copies_do_not_go_to_the_checkpoints_volume(run: RunSettings) -> None:
    _, spec, _ = pod("trainer.yaml")
    mounts = {one["mountPath"]: one["name"] for one in spec["containers"][0]["volumeMounts"]}
    volumes = {one["name"]: one for one in spec["volumes"]}
    assert run.transport == "stream"
    assert "emptyDir" in volumes[mounts[str(run.weights_dir)]]
    assert "persistentVolumeClaim" in volumes[mounts[str(run.checkpoint_dir.parent)]]
    script = (EXAMPLE / "trainer-node.sh").read_text()
    assert '--weights-dir "$weights"' in script and '--checkpoint-dir "$data' in script


def test_the_last_step_has_the_time_that_it_is_given() -> None:
    _, spec, environment = pod("trainer.yaml")
    assert spec["terminationGracePeriodSeconds"] > int(environment["PET_SHUTDOWN_TIMEOUT"]) >= 600
    assert "--shutdown-timeout 600" in (EXAMPLE / "trainer-node.sh").read_text()


def test_adam_in_the_hosts_memory_needs_no_cuda_compiler() -> None:
    """14B and 32B have their optimizer there, and the image has g++ alone."""
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    builder = CUDA_Accelerator().get_op_builder("CPUAdamBuilder")
    assert builder is not None and not issubclass(builder, CUDAOpBuilder)
    assert not any(source.endswith(".cu") for source in builder().sources())
    trainer = (ROOT / "Dockerfile").read_text().partition(" AS trainer\n")[2]
    assert "install -y --no-install-recommends g++" in trainer
    assert re.search(r"^ninja==", (ROOT / "requirements/trainer.txt").read_text(), re.MULTILINE)


def test_vllm_is_the_version_whose_private_names_are_used() -> None:
    """`weight_receiver.py` and `nccl/vllm_group.py` are written against it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    beside, wanted = extras["vllm"]
    dockerfile = (ROOT / "Dockerfile").read_text()
    [pinned] = re.findall(r"^ARG VLLM_VERSION=(\S+)$", dockerfile, re.MULTILINE)
    tested = re.search(r"^vllm==([\d.]+)", (ROOT / "requirements/vllm-cpu.txt").read_text(), re.MULTILINE)
    assert wanted == "vllm>=0.32,<0.33" and pinned.startswith("0.32.") and (tested is None or tested[1] == pinned)
    assert f"--build-arg VLLM={pinned}" in dockerfile, "the trainer's image, for nccl"
    installs = re.findall(r"^.* install .*\"vllm==.*$", dockerfile, re.MULTILINE)
    assert len(installs) == 2 and all(f'"{beside}"' in line for line in installs)


def test_the_line_for_two_machines_is_one_that_torchrun_takes() -> None:
    from torch.distributed.run import get_args_parser

    found = re.search(r"python -m steno_cli\.torchrun ((?:.*\\\n)?.*--nnodes 2[^`]*?)\n```", DEPLOYMENT)
    assert found is not None
    given = get_args_parser().parse_args(found[1].replace("\\\n", " ").split())
    assert (given.nnodes, given.node_rank, given.module, given.training_script) == ("2", 0, True, "steno")
    assert given.shutdown_timeout >= 600 and given.master_addr and given.master_port
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "MASTER_ADDR"):
        assert name in DEPLOYMENT
