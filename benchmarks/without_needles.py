"""Is it the compressed cache that is read? Scores must fall when the needle's tokens are evicted.

Each sample is answered from the full cache, from a compressed one, from one of the same size that
may not keep the sentence with the answer, and from one that may not keep as many tokens elsewhere.
If answers came from anywhere but the kept tokens, the third would be as good as the second.

    python benchmarks/without_needles.py --model M [--tokens 2048] [--budget 512] [--samples 20]
"""

from __future__ import annotations

from typing import Any

import common
import torch

from pyramidkv import loading
from pyramidkv.cli.evaluate import measure
from pyramidkv.compression import Compression, make_compression
from pyramidkv.evaluation.answers import encode_sample
from pyramidkv.evaluation.exclusion import exclude, sentence_tokens
from pyramidkv.evaluation.haystacks import find_haystack
from pyramidkv.evaluation.needles import needle_samples
from pyramidkv.evaluation.runner import answer
from pyramidkv.evaluation.sample import Sample

ARMS = ("full", "compressed", "without the needle", "without others")


def arms_for(tokenizer: Any, sample: Sample, budget: int) -> dict[str, Compression]:
    """Return what answers a sample."""
    ids = encode_sample(tokenizer, sample, None).ids
    compressed = make_compression("snapkv", budget)
    needle = sentence_tokens(tokenizer, ids, sample.answers[0])
    others = [place for place in range(len(ids)) if place not in needle]
    start = (len(others) - len(needle)) // 2
    arms = (
        make_compression("full"),
        compressed,
        exclude(compressed, needle, len(ids)),
        exclude(compressed, others[start : start + len(needle)], len(ids)),
    )
    return dict(zip(ARMS, arms, strict=True))


def main() -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(tokens=2048, budget=512)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--haystack", default="constitution")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = loading.load_tokenizer(arguments.model)
    model = loading.load_model(arguments.model, dtype=arguments.dtype, device="cpu")
    samples = needle_samples(
        lambda *texts: measure(tokenizer, *texts),
        [arguments.tokens],
        [10, 30, 50, 70, 90],
        samples=-(-arguments.samples // 5),
        haystack=find_haystack(arguments.haystack),
    )[: arguments.samples]
    lines = []
    for sample in samples:
        arms = arms_for(tokenizer, sample, arguments.budget)
        lines.append(answer(model, tokenizer, sample, arms, False, None))
        print({name: given["text"] for name, given in lines[-1]["arms"].items()}, flush=True)
    for name in ARMS:
        found = sum(line["arms"][name]["score"] for line in lines)
        print(f"{name:>20}: {found:.0f} of {len(lines)} needles found")
    common.report(arguments, {"lines": lines})


if __name__ == "__main__":
    main()
