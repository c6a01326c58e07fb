"""What tests of the step share: random models and batches."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from steno_trainer.data.rows import TrainingRow
from steno_trainer.data.staleness import StalenessVerdict
from steno_trainer.step.step_plan import StepBatch

VOCABULARY = 97


def random_model(
    folder: Path, *, tied: bool = False, heads: int = 4, groups: int = 2, layers: int = 2, seed: int = 0,
    vocabulary: int = VOCABULARY, positions: int = 512, tokens: int = 0,
) -> Path:  # fmt: skip
    """A Qwen3 with random weights, larger than its own initialisation: so that log-probabilities differ.

    Args: tokens: of its tokenizer; 0: it has none."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=groups, head_dim=32, tie_word_embeddings=tied, max_position_embeddings=positions,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    if tokens:
        from tokenizers import Tokenizer, models

        words = {f"word-{number}": number for number in range(tokens)}
        Tokenizer(models.WordLevel(words, unk_token="word-0")).save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def random_batch(
    seed: int = 0,
    *,
    trials: int = 6,
    longest: int = 40,
    scale: float = 1.0,
    alphabet: int = VOCABULARY,
    alike: float = 0.0,
) -> StepBatch:
    """Rows of uneven lengths and of two completions each, some trials with two; advantages of both signs, times `scale`.

    Args: alphabet: ids are below it. alike: the probability that a row begins as an earlier one does, up to some token.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, advantages = [], {}
    for trial in range(trials):
        for _ in range(rng.choice([1, 1, 2])):
            tokens = rng.randint(6, longest)
            mask = torch.rand(tokens, generator=generator) < 0.5
            mask[0], mask[-1] = False, True
            ids = torch.randint(0, alphabet, (tokens,), generator=generator)
            if alike and rows and rng.random() < alike:
                stem = rng.choice(rows).token_ids_T[: rng.randint(1, longest)][:tokens]
                ids[: len(stem)] = stem
            rows.append(
                TrainingRow(
                    trial_id=f"t{trial}", group_id="g",
                    token_ids_T=ids,
                    loss_mask_T=mask,
                    sampling_logprobs_T=torch.where(mask, -4.6 + torch.randn(tokens, generator=generator), torch.nan),
                    temperatures_T=torch.full((tokens,), rng.choice([0.7, 1.0])),
                    version_T=torch.where(mask, 0, -1), versions=(f"a/{trial % 2}",), verdict=StalenessVerdict(None),
                    completion_starts=(1, tokens // 3),
                )
            )  # fmt: skip
        advantages[f"t{trial}"] = rng.choice([-1.0, 1.0]) * (0.5 + rng.random()) * scale
    return StepBatch(rows, advantages)
