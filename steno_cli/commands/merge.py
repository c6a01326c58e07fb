"""`steno merge`: a LoRA adapter and its model as one model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steno_cli.terminal.output import console, require_modules


def merge(
    adapter: Annotated[
        Path, typer.Argument(help="Folder of the adapter: CHECKPOINT_DIR/step-…/adapter-….", metavar="ADAPTER")
    ],
    into: Annotated[
        Path, typer.Option("--output", "-o", help="Folder to write, which must not be there.", metavar="DIR")
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
    from steno_trainer.checkpoints.merging import merge_adapter

    merge_adapter(adapter, into, model=model, trust_remote_code=trust_remote_code)
    console(stderr=True).print(f"{into} is the merged model", markup=False, soft_wrap=True)
