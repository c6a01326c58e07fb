"""Six template families (tests/templates) and tokenizers of three kinds, built here, small, in well under a second.

A family's `text_of` is what its model would sample for a message: what a scripted policy in these tests says.
"""

# ruff: noqa: RUF001  DeepSeek's markers are written with full-width bars.

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from steno.contracts.chat import Message, Tool
from steno_worker.chat.hf import HfChatFormat

TEMPLATES = Path(__file__).parents[3] / "templates"
CORPUS = [
    "the user asks the assistant for the weather in Oslo and the tool says that it is cold",
    '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}',
    "<|im_start|>assistant function name arguments parameters system content type string object",
    "let me think about this first. I will call the tool, then answer the user.",
    "naïve café – déjà vu; 東京 の 天気 は 晴れ です 🙂",
]
TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Get the {name}.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("weather", "time")
]
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Tokenizer:
    """BPE over bytes (GPT-2, Qwen, Llama 3, DeepSeek)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def spaced_bpe() -> Tokenizer:
    """BPE over characters with a dummy space in front and byte fallback (Llama 2, Mistral)."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    alphabet = [chr(code) for code in range(33, 127)]
    trained.train_from_iterator(
        CORPUS[:4], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    learned = json.loads(trained.to_str())["model"]
    vocab = {token: index for index, token in enumerate(["<unk>", *_BYTE_TOKENS, *learned["vocab"]])}
    merges = [tuple(pair) for pair in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = _sentencepiece_decoder()
    return tokenizer


def unigram() -> Tokenizer:
    """Unigram over metaspaces with byte fallback (T5, ALBERT, XGLM)."""
    words = {f"▁{word}" for line in CORPUS[:3] for word in line.split()}
    characters = {chr(code) for code in range(33, 127)} | {"▁"}
    vocab = [("<unk>", 0.0), *((token, -20.0) for token in _BYTE_TOKENS)]
    vocab += [(char, -8.0) for char in sorted(characters)] + [(word, -9.0) for word in sorted(words - characters)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = _sentencepiece_decoder()
    return tokenizer


def _sentencepiece_decoder() -> decoders.Decoder:
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "spaced_bpe": spaced_bpe,
    "unigram": unigram,
}


@dataclass(frozen=True)
class Family:
    """special: its special tokens. words: added tokens that are plain text to the tokenizer. stops: its stop ids' tokens."""

    name: str
    special: tuple[str, ...]
    words: tuple[str, ...]
    stops: tuple[str, ...]
    text_of: Callable[[Message], str]
    bos: str | None = None
    parallel: bool = True

    @property
    def by_header(self) -> bool:
        return self.name == "glm"


def _json_call(call: Message, key: str = "arguments") -> str:
    return f'{{"name": "{call["function"]["name"]}", "{key}": {call["function"]["arguments"]}}}'


def _thought(message: Message) -> str:
    thought = message.get("reasoning_content")
    return f"<think>\n{thought}\n</think>\n\n" if thought else ""


def _chatml_text(message: Message) -> str:
    calls = [f"<tool_call>\n{_json_call(call)}\n</tool_call>" for call in message.get("tool_calls", [])]
    return _thought(message) + "\n".join(([message["content"]] if message["content"] else []) + calls)


def _llama_text(message: Message) -> str:
    calls = message.get("tool_calls", [])
    return _json_call(calls[0], "parameters") if calls else message["content"]


def _mistral_text(message: Message) -> str:
    calls = [f'{_json_call(call)[:-1]}, "id": "{call["id"]}"}}' for call in message.get("tool_calls", [])]
    return f"[TOOL_CALLS] [{', '.join(calls)}]" if calls else f" {message['content']}"


def _deepseek_text(message: Message) -> str:
    text = _thought(message) + message["content"]
    calls = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call['function']['name']}\n```json\n"
        f"{call['function']['arguments']}\n```<｜tool▁call▁end｜>"
        for call in message.get("tool_calls", [])
    ]
    return text + (f"<｜tool▁calls▁begin｜>{chr(10).join(calls)}<｜tool▁calls▁end｜>" if calls else "")


def _glm_text(message: Message) -> str:
    text = f"\n<think>{message.get('reasoning_content', '')}</think>"
    if message["content"]:
        text += f"\n{message['content']}"
    for call in message.get("tool_calls", []):
        text += f"\n<tool_call>{call['function']['name']}"
        for key, value in json.loads(call["function"]["arguments"]).items():
            written = value if isinstance(value, str) else json.dumps(value)
            text += f"\n<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>"
        text += "\n</tool_call>"
    return text


_QWEN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_DEEPSEEK_TOOLS = tuple(
    f"<｜tool▁{part}｜>"
    for part in (
        *("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"),
        *("outputs▁begin", "outputs▁end", "output▁begin", "output▁end"),
    )
)
FAMILIES = {
    family.name: family
    for family in (
        Family("chatml", ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), _QWEN[:4], ("<|im_end|>",), _chatml_text),
        Family(
            "qwen3",
            ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
            _QWEN,
            ("<|im_end|>", "<|endoftext|>"),
            _chatml_text,
        ),
        Family(
            "llama3",
            ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
            (),
            ("<|eot_id|>", "<|eom_id|>"),
            _llama_text,
            bos="<|begin_of_text|>",
            parallel=False,
        ),
        Family(
            "mistral",
            (
                *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
                *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
            ),
            (),
            ("</s>",),
            _mistral_text,
            bos="<s>",
        ),
        Family(
            "deepseek",
            ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
            (*_DEEPSEEK_TOOLS, "<think>", "</think>"),
            ("<｜end▁of▁sentence｜>",),
            _deepseek_text,
            bos="<｜begin▁of▁sentence｜>",
        ),
        Family(
            "glm",
            ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
            (*_QWEN, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            ("<|endoftext|>", "<|user|>", "<|observation|>"),
            _glm_text,
        ),
    )
}


@cache
def transformers_tokenizer(family: str, kind: str) -> PreTrainedTokenizerFast:
    about = FAMILIES[family]
    tokenizer = TOKENIZERS[kind]()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in about.special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in about.words])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=about.bos,
        eos_token=about.stops[0],
        chat_template=(TEMPLATES / f"{family}.jinja").read_text(),
    )


@cache
def chat_format(family: str, kind: str = "byte_level") -> HfChatFormat:
    tokenizer = transformers_tokenizer(family, kind)
    vocab = tokenizer.get_vocab()
    return HfChatFormat(tokenizer, name=family, stop_ids=[vocab[token] for token in FAMILIES[family].stops])


def encoded(family: str, kind: str, text: str) -> list[int]:
    return list(transformers_tokenizer(family, kind).backend_tokenizer.encode(text, add_special_tokens=False).ids)


def one_by_one(family: str, kind: str, text: str) -> list[int]:
    """Ids of `text` as its tokenizer would never give them: each character on its own, added tokens whole."""
    added = transformers_tokenizer(family, kind).added_tokens_decoder
    format, single = chat_format(family, kind), _single_characters(family, kind)
    ids: list[int] = []
    for token_id in encoded(family, kind, text):
        raw = format.token_text(token_id)[1]
        split = token_id not in added and all(bytes([byte]) in single for byte in raw)
        ids += [single[bytes([byte])] for byte in raw] if split else [token_id]
    return ids


@cache
def _single_characters(family: str, kind: str) -> dict[bytes, int]:
    format = chat_format(family, kind)
    return {format.token_text(token_id)[1]: token_id for token_id in reversed(range(format.vocab_size))}
