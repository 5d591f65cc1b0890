"""One prompt for many methods against runs of their own: how much faster is an evaluation?

All answer the same needle samples with the same methods and budgets, in turns: first all at once
(`answer_sample` with all of them), then method by method (the budgets of each at once), and for the
first samples also one method and budget after the other. The answers must be the same.

    python benchmarks/many.py [--model M] [--tokens 4096] [--samples 3] [--alone 1] [--agnostic]
        [--device D]
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
    parser.add_argument(
        "--alone", type=int, default=1, help="samples that are also answered one by one"
    )
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
    methods = [[make_compression("full")]]
    methods += [[make_compression(method, budget) for budget in BUDGETS] for method in METHODS]
    arms = [arm for arms in methods for arm in arms]
    runs = {"together": [arms], "method by method": methods, "one by one": [[arm] for arm in arms]}

    def answer(sample: Any, some: list[Any]) -> list[list[int]]:
        prompt = encode_sample(tokenizer, sample, None)
        new, agnostic = sample.max_new_tokens, arguments.agnostic
        answers = answer_sample(model, tokenizer, prompt, some, new, agnostic=agnostic)
        return [one.token_ids for one in answers]

    answer(samples[0], arms[:1])  # warm-up
    seconds: dict[str, list[float]] = {way: [] for way in runs}
    same = dict.fromkeys(list(runs)[1:], 0)
    for place, sample in enumerate(samples):
        found: dict[str, list[list[int]]] = {}
        for way, parts in runs.items():
            if way == "one by one" and place >= arguments.alone:
                continue
            start = time.perf_counter()
            found[way] = [answers for part in parts for answers in answer(sample, part)]
            seconds[way].append(time.perf_counter() - start)
        for way in found.keys() & same.keys():
            same[way] += sum(a == b for a, b in zip(found["together"], found[way], strict=True))
        print(", ".join(f"{seconds[way][-1]:.1f} s {way}" for way in found), flush=True)
    print(f"{len(arms)} methods and budgets, {arguments.tokens:,} tokens, together:")
    ratios = {}
    for way in same:
        samples_of_way = len(seconds[way])
        if samples_of_way:
            ratios[way] = sum(seconds[way]) / sum(seconds["together"][:samples_of_way])
            print(
                f"{ratios[way]:.1f}x as fast as {way} ({samples_of_way} samples); {same[way]} of "
                f"{samples_of_way * len(arms)} answers are the same to the token"
            )
    common.report(
        arguments, {"seconds": seconds, "ratios": ratios, "same": same, "arms": len(arms)}
    )


if __name__ == "__main__":
    main()
