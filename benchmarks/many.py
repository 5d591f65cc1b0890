"""One prompt for many methods against one run for each: how much faster is an evaluation?

Both answer the same needle samples with the same methods and budgets, in turns: first all at once
(`answer_sample` with all of them), then one after the other. The answers must be the same.

    python benchmarks/many.py [--model M] [--tokens 4096] [--samples 3] [--agnostic] [--device D]
"""

from __future__ import annotations

import time
from typing import Any

import common

from pyramidkv import loading
from pyramidkv.cli.evaluate import measure
from pyramidkv.compression import make_compression
from pyramidkv.evaluation.answers import answer_sample, encode_sample
from pyramidkv.evaluation.needles import needle_samples

METHODS = ("streamingllm", "h2o", "snapkv-paper", "pyramidkv-paper", "snapkv", "pyramidkv")
BUDGETS = (64, 128, 256, 512)


def main() -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(tokens=4096)
    parser.add_argument("--device", default="cpu", help="such as cuda:0")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--agnostic", action="store_true")
    arguments = parser.parse_args()
    model, _ = common.load(arguments)
    tokenizer = loading.load_tokenizer(arguments.model)
    samples = needle_samples(
        lambda *texts: measure(tokenizer, *texts),
        [arguments.tokens],
        [100 * i / max(arguments.samples - 1, 1) for i in range(arguments.samples)],
        max_new_tokens=arguments.new_tokens,
    )
    arms = [make_compression("full")]
    arms += [make_compression(method, budget) for method in METHODS for budget in BUDGETS]

    def answer(sample: Any, some: list[Any]) -> list[list[int]]:
        prompt = encode_sample(tokenizer, sample, None)
        new, agnostic = sample.max_new_tokens, arguments.agnostic
        answers = answer_sample(model, tokenizer, prompt, some, new, agnostic=agnostic)
        return [one.token_ids for one in answers]

    answer(samples[0], arms[:1])  # warm-up
    seconds: dict[str, list[float]] = {"together": [], "one by one": []}
    same = total = 0
    for sample in samples:
        start = time.perf_counter()
        together = answer(sample, arms)
        middle = time.perf_counter()
        alone = [answer(sample, [arm])[0] for arm in arms]
        seconds["together"].append(middle - start)
        seconds["one by one"].append(time.perf_counter() - middle)
        same += sum(a == b for a, b in zip(together, alone, strict=True))
        total += len(arms)
        print(f"{seconds['together'][-1]:.1f} s together, {seconds['one by one'][-1]:.1f} s alone")
    ratio = sum(seconds["one by one"]) / sum(seconds["together"])
    print(f"{len(arms)} methods and budgets, {arguments.tokens:,} tokens: {ratio:.1f}x faster")
    print(f"{same} of {total} answers are the same to the token")
    common.report(arguments, {"seconds": seconds, "ratio": ratio, "same": same, "answers": total})


if __name__ == "__main__":
    main()
