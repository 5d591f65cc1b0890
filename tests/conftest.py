"""Shared settings: one thread, offline, deterministic; and a tiny model folder."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ["OMP_NUM_THREADS"] = "1"  # tests run side by side; tiny models gain nothing from more

import pytest
import torch
from hypothesis import settings
from tiny import VOCABULARY, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

torch.set_num_threads(1)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci")

CHAT_TEMPLATE = (
    "{% for m in messages %}<user> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tiny_tokenizer(chat: bool) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words: w3 is token 3 and so on."""
    words = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, VOCABULARY - 3))]
    words += ["<user>", "<assistant>", "<unk>"]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE if chat else None,
        padding_side="left",
    )


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer without chat template, saved as users have it."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_model("llama", "sdpa").save_pretrained(folder)
    tiny_tokenizer(chat=False).save_pretrained(folder)
    return folder


def words(count: int) -> str:
    """A prompt of `count` tokens for the tiny tokenizer."""
    return " ".join(f"w{3 + (7 * i) % (VOCABULARY - 6)}" for i in range(count))
