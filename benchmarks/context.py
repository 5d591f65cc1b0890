"""Many questions on one document: a compressed context against a full prompt for each question.

Also: how long the first answer takes from a saved context, against computing the context anew.

    python benchmarks/context.py [--model M] [--tokens 8000] [--budget 512] [--questions 10]
"""

from __future__ import annotations

import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import common
import torch
from transformers import DynamicCache

import pyramidkv
from pyramidkv import loading
from pyramidkv.engine import cache_parameter
from pyramidkv.generation import pad_token
from pyramidkv.records import format_bytes

QUESTIONS = (
    "Who has the power to declare war?",
    "How many senators does each state have?",
    "How long is the term of the President?",
    "Who tries all impeachments?",
    "How old must a senator be?",
    "What may the Congress borrow money on?",
    "Who is Commander in Chief?",
    "How are amendments proposed?",
    "What is treason?",
    "Where is the judicial power vested?",
)


def document(tokenizer: Any, tokens: int) -> str:
    """Return a text of about this many tokens."""
    text = files("pyramidkv").joinpath("data/constitution.txt").read_text("utf-8")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    ids = (ids * (tokens // len(ids) + 1))[: tokens - 40]  # the template adds some
    return str(tokenizer.decode(ids))


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=16)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = loading.load_tokenizer(arguments.model)
    model = loading.load_model(arguments.model, dtype=arguments.dtype, device="cpu")
    text = document(tokenizer, arguments.tokens)
    questions = [QUESTIONS[i % len(QUESTIONS)] for i in range(arguments.questions)]
    new = arguments.new_tokens

    def timed(run: Any) -> tuple[float, Any]:
        start = time.perf_counter()
        result = run()
        return time.perf_counter() - start, result

    def compress() -> pyramidkv.CompressedContext:
        return pyramidkv.compress_context(
            model, tokenizer, text, arguments.method, arguments.budget
        )

    with torch.inference_mode():
        model(torch.ones((1, 64), dtype=torch.long), logits_to_keep=1)  # warm-up
    compressing, context = timed(compress)
    held = context.kv_bytes
    context.ask(questions[0], max_new_tokens=new)
    asking = []
    for question in questions:
        seconds, _ = timed(lambda question=question: context.ask(question, max_new_tokens=new))
        asking.append(seconds)
        assert context.kv_bytes == held
    together, _ = timed(lambda: context.ask_batch(questions, max_new_tokens=new))

    def full_prompt(question: str) -> None:
        ids = torch.tensor([context.encode(question, [], new)])
        cache = {cache_parameter(model): DynamicCache(config=model.config)}
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=pad_token(tokenizer),
                **cache,
            )

    full = [timed(lambda question=question: full_prompt(question))[0] for question in questions]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "context.safetensors"
        saving, _ = timed(lambda: context.save(path))
        size = path.stat().st_size
        loading_times, first = [], []
        for _ in range(arguments.repeats):
            seconds, loaded = timed(
                lambda: pyramidkv.CompressedContext.load(path, model, tokenizer)
            )
            loading_times.append(seconds)
            answer, _ = timed(lambda loaded=loaded: loaded.ask(questions[0], max_new_tokens=1))
            first.append(seconds + answer)
        anew = [timed(lambda: compress().ask(questions[0], max_new_tokens=1))[0] for _ in range(2)]

    count = len(questions)
    total = compressing + sum(asking)
    print(f"context of {context.tokens_seen:,} tokens, cache {format_bytes(held)}")
    print(f"compressing the context once: {compressing:.1f} s")
    print(
        f"{count} questions on it, one by one: {sum(asking):.1f} s, median {common.spread(asking)}"
    )
    print(f"{count} questions on it as one batch: {together:.1f} s")
    print(f"all in all, one by one: {total:.1f} s")
    print(f"{count} full prompts: {sum(full):.1f} s, {sum(full) / total:.1f}x as long")
    print(f"saved in {saving:.2f} s, {format_bytes(size)}; loaded: {common.spread(loading_times)}")
    print(f"first token from the file: {common.spread(first)}")
    print(f"first token with the context computed anew: {common.spread(anew)}")
    print(f"ratio {common.median(anew) / common.median(first):.0f}")
    common.report(
        arguments,
        {
            "compressing_s": compressing,
            "asking_s": asking,
            "together_s": together,
            "full_s": full,
            "saving_s": saving,
            "file_bytes": size,
            "loading_s": loading_times,
            "first_from_file_s": first,
            "first_anew_s": anew,
        },
    )


if __name__ == "__main__":
    main()
