"""Make the model that ships with the project: `python -m scripts.make_tiny [--out DIR] [--steps N]`.

A Qwen3 of 0.6 M parameters with a byte-level BPE tokenizer, trained on a CPU in minutes to follow the demo's notes
(`steno_cli/demo/task.py`) by copying from what its tool returned. Seeded: the same machine and versions give the same weights.
Three sizes are not free choices: the output head is untied (vLLM on CPU keeps the old weights of a tied one after an
update), head_dim is 32 (its CPU attention refuses 16), and float32, so that log-probabilities compare to 1e-3.
"""

# mypy: disallow-untyped-calls=False
# torch and transformers leave much of themselves untyped.

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from scripts.tiny_corpus import example, tokenizer_corpus
from steno.models import TINY
from steno_cli.demo.task import SYSTEM, TOOL, call_tool, make_world

VOCAB_SIZE = 1024
"""At most; the merges run out a little earlier."""
CONTEXT_TOKENS = 32768
"""Positions that are allowed, not positions that were trained (about 700): agents with long prompts can be served,
scripted or not, and what the model says there is noise."""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
BACKGROUND = 0.05
"""Loss weight of tokens that the model need not say: what it reads teaches it the language, and costs nothing to learn."""
BRIEF = 0.5
"""Fraction of the steps, the first ones, that train on conversations without system prompt and tools."""


def make_tokenizer(template: str, seed: int) -> Any:
    """Byte-level BPE; every name of the task becomes one token, alone and after a space."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    # Before any tokenizer exists its template can be rendered by a blank one: rendering does not touch the vocabulary.
    blank: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template)
    corpus = tokenizer_corpus(random.Random(seed), _templater(blank))
    for piece in SPECIAL + MARKUP:
        corpus = [text.replace(piece, "\n") for text in corpus]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL + MARKUP),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    bpe.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in SPECIAL])
    bpe.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in MARKUP])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def _templater(tokenizer: Any) -> Any:
    def render(messages: list[dict[str, Any]], tools: Any, add_generation_prompt: bool = True, **options: Any) -> str:
        text: str = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **options
        )
        return text

    return render


def make_model(tokenizer: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=CONTEXT_TOKENS,
            tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            dtype="float32",
        )
    )


def batch_of(tokenizer: Any, rng: random.Random, size: int, brief: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, weights), int64 and float32 of (size, T), padded on the right with weight 0."""
    rows, render = [], _templater(tokenizer)
    for _ in range(size):
        ids: list[int] = []
        weights: list[float] = []
        for text, trained in example(render, rng, brief):
            piece = tokenizer.encode(text, add_special_tokens=False)
            ids += piece
            weights += [1.0 if trained else BACKGROUND] * len(piece)
        rows.append((ids, weights))
    longest = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    return (
        torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows]),
        torch.tensor([weights + [0.0] * (longest - len(weights)) for _, weights in rows]),
    )


def train(model: Any, tokenizer: Any, *, steps: int, batch: int, lr: float, seed: int) -> None:
    """AdamW, 50 steps of warm-up, cosine to zero: the last small steps make the template's own tokens nearly certain."""
    rng = random.Random(seed)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimiser = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}], lr=lr, betas=(0.9, 0.97)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / 50, 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    began = time.monotonic()
    model.train()
    for step in range(steps):
        ids_BT, weights_BT = batch_of(tokenizer, rng, batch, brief=step < steps * BRIEF)
        logits_BTV = model(input_ids=ids_BT[:, :-1], use_cache=False).logits
        losses_BT = torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), ids_BT[:, 1:].reshape(-1), reduction="none"
        ).view(ids_BT.shape[0], -1)
        loss = (losses_BT * weights_BT[:, 1:]).sum() / weights_BT[:, 1:].sum()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 25 == 0 or step == steps - 1:
            said = weights_BT[:, 1:] == 1.0
            print(
                f"step {step:5d}  loss {loss.item():.4f}  said {losses_BT[said].mean().item():.4f}  "
                f"T {ids_BT.shape[1]}  {time.monotonic() - began:.0f} s",
                flush=True,
            )
    model.eval()


@torch.inference_mode()
def solved_fraction(model: Any, tokenizer: Any, runs: int, seed: int) -> float:
    """Fraction of fresh worlds that the model solves, sampling every token at temperature 1 without truncation."""
    torch.manual_seed(seed)
    render, end = _templater(tokenizer), tokenizer.eos_token_id
    worlds = [make_world(f"check-{seed}-{index}") for index in range(runs)]
    texts = [
        render([{"role": "system", "content": SYSTEM}, {"role": "user", "content": world.question()}], [TOOL])
        for world in worlds
    ]
    open_runs, solved, failures = list(range(runs)), 0, []
    for _ in range(6):
        inputs = tokenizer(
            [texts[i] for i in open_runs],
            return_tensors="pt",
            padding=True,
            padding_side="left",
            add_special_tokens=False,
            return_token_type_ids=False,
        )
        out = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=80)
        going_on = []
        for i, row in zip(open_runs, out[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            said = tokenizer.decode(row[: row.index(end)] if end in row else row)
            if "<tool_call>" not in said:
                solved += worlds[i].solved_by(said.split("</think>")[-1])
                if not worlds[i].solved_by(said.split("</think>")[-1]):
                    failures.append(said)
                continue
            try:
                call = json.loads(said.split("<tool_call>")[1].split("</tool_call>")[0])
                result = call_tool(worlds[i], call["name"], json.dumps(call["arguments"]))
            except (ValueError, KeyError, TypeError):
                failures.append(said)
                continue
            if result.startswith(("There is no", "The arguments")):
                failures.append(said)
            texts[i] += (
                f"{said}<|im_end|>\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
            )
            going_on.append(i)
        open_runs = going_on
        if not open_runs:
            break
    for said in failures[:8]:
        print("  went wrong:", repr(said))
    return solved / runs


def save(model: Any, tokenizer: Any, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.temperature = model.generation_config.top_p = 1.0
    model.generation_config.top_k = 0
    model.generation_config.do_sample = True
    model.save_pretrained(out, safe_serialization=True)
    tokenizer.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors writes for the owner only
    if out != TINY:
        shutil.copy(TINY / "chat_template.jinja", out / "chat_template.jinja")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=TINY)
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=200, help="worlds that the finished model is measured on")
    arguments = parser.parse_args()
    tokenizer = make_tokenizer((TINY / "chat_template.jinja").read_text(), arguments.seed)
    model = make_model(tokenizer, arguments.seed)
    save(model, tokenizer, arguments.out)
    train(model, tokenizer, steps=arguments.steps, batch=arguments.batch, lr=arguments.lr, seed=arguments.seed)
    save(model, tokenizer, arguments.out)
    print(f"solved {solved_fraction(model, tokenizer, arguments.runs, arguments.seed):.1%} of {arguments.runs} worlds")


if __name__ == "__main__":
    main()
