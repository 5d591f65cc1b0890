"""The tokenizer inside a GGUF file, for vocabularies that transformers converts wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_CONTROL = 3  # GGUF token type of special tokens


def tokenizer_from_gguf(path: Path) -> PreTrainedTokenizerBase | None:
    """Build the byte-level BPE tokenizer of a SmolLM2 GGUF file.

    transformers would make a SentencePiece-like tokenizer of it, because the model is a Llama.

    Returns:
        The tokenizer, or None if the file's vocabulary is one that transformers converts rightly.
    """
    if not path.is_file():
        return None
    from gguf import GGUFReader

    fields = GGUFReader(path).fields

    def value(name: str) -> Any:
        field = fields.get(f"tokenizer.{name}")
        return None if field is None else field.contents()

    if value("ggml.model") != "gpt2" or value("ggml.pre") != "smollm":
        return None
    tokens: list[str] = value("ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in value("ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        t for t, kind in zip(tokens, value("ggml.token_type"), strict=True) if kind == _CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[value("ggml.bos_token_id")],
        eos_token=tokens[value("ggml.eos_token_id")],
        unk_token=tokens[value("ggml.unknown_token_id")],
        pad_token=tokens[value("ggml.padding_token_id")],
        chat_template=value("chat_template"),
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
