"""The model that ships with the project does what the demo needs, and is what its configuration says."""

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.make_tiny import make_tokenizer, solved_fraction
from steno.models import TINY
from steno_cli.demo.task import MAX_HOPS, MIN_HOPS, WORDS, make_world


def test_it_solves_the_demo_sampling_every_token() -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    assert solved_fraction(model, AutoTokenizer.from_pretrained(TINY), 100, seed=1) >= 0.97


def test_the_tokenizer_is_the_one_that_the_script_makes() -> None:
    made = make_tokenizer((TINY / "chat_template.jinja").read_text(), 0)
    assert made.get_vocab() == AutoTokenizer.from_pretrained(TINY).get_vocab()


def test_every_name_is_one_token_so_that_copying_is_exact() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    assert all(len(tokenizer.encode(space + word)) == 1 for word in WORDS for space in ("", " "))


def test_the_weights_are_small_float32_and_the_head_is_its_own() -> None:
    with safe_open(TINY / "model.safetensors", "pt") as tensors:  # type: ignore[no-untyped-call]
        names = set(tensors.keys())
        assert {tensors.get_slice(name).get_dtype() for name in names} == {"F32"}
    assert "lm_head.weight" in names
    assert (TINY / "model.safetensors").stat().st_size < 4 * 2**20


def test_a_world_needs_three_calls_or_more_and_nothing_but_them() -> None:
    for seed in range(50):
        world = make_world(seed)
        path, hops = world.start, 0
        while True:
            note, hops = world.read_note(path), hops + 1
            if world.solved_by(note):
                break
            path = note.removeprefix("Go on to ").removesuffix(".")
        assert MIN_HOPS <= hops == len(world.notes) <= MAX_HOPS
    assert make_world(3) == make_world(3)
