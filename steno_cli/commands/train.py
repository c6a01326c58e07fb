"""`steno train`: one rank of a training run. `steno merge`: the adapter that it trained and its model as one model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steno_cli.terminal.output import check_can_be_written, console, require_modules

if TYPE_CHECKING:
    from steno_trainer.run_config import RunSettings


def train(settings: RunSettings) -> None:
    """Train a policy on the completed groups of a run, and push its weights to the workers after each step.

    One rank: start it alone, or on all of a node's GPUs with `torchrun --nproc-per-node 8 -m -- steno train …`, or with the
    deepspeed launcher. Started again with the same checkpoint folder it goes on where it was. Ctrl-C ends it after the step
    that runs, with a checkpoint.
    """
    require_modules("deepspeed", "torch", "transformers")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for noisy in ("httpx", "DeepSpeed", "deepspeed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    from steno_trainer.run.main import train as run

    run(settings)


def merge(
    adapter: Annotated[
        Path, typer.Argument(help="Folder of the adapter: CHECKPOINT_DIR/step-…/adapter-….", metavar="ADAPTER")
    ],
    into: Annotated[
        Path, typer.Option("--output", "-o", help="Folder to write; it must not exist yet.", metavar="DIR")
    ],
    model: Annotated[
        str | None, typer.Option(help="The model that it was trained on; unset: the one that the adapter names.")
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run the Python files of the model's directory.")] = False,
) -> None:
    """Merge an adapter that `steno train --lora-rank` trained into its model, in Hugging Face's layout.

    vLLM, transformers, `steno evaluate --model` and a new run load the result as they load any model. It needs the host's
    memory for the whole model, and no GPU.
    """
    require_modules("deepspeed", "peft", "torch", "transformers")
    check_can_be_written("--output", into)
    from steno_trainer.checkpoints.merging import merge_adapter

    merge_adapter(adapter, into, model=model, trust_remote_code=trust_remote_code)
    console(stderr=True).print(f"{into} is the merged model", markup=False, soft_wrap=True)
