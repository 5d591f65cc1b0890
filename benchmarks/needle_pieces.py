"""What do pieces cost? A code planted in a text is asked for; early pieces choose without knowing.

For each sample the document is compressed four ways at the same budget: in one piece and in
smaller ones, with the question in the prompt.

    python benchmarks/needle_pieces.py --model M [--tokens 3000] [--budget 256] [--samples 10]
"""

from __future__ import annotations

import random
from importlib.resources import files
from typing import Any

import common
import torch

import pyramidkv
from pyramidkv import loading

QUESTION = "What is the access code of the archive in {city}? Answer with the code only."
NEEDLE = "The access code of the archive in {city} is {code}."
CITIES = ("Lisbon", "Oslo", "Vienna", "Dublin", "Prague", "Athens", "Turin", "Riga", "Bern", "Kyiv")


def sample(tokenizer: Any, tokens: int, index: int, count: int) -> tuple[str, str]:
    """Return a prompt of about this many tokens and the code it asks for."""
    draw = random.Random(index)
    text = files("pyramidkv").joinpath("data/constitution.txt").read_text("utf-8")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    paragraphs = tokenizer.decode(ids[: tokens - 60]).split("\n\n")
    city, code = CITIES[index % len(CITIES)], str(draw.randrange(10**6, 10**7))
    place = round(len(paragraphs) * (index + 0.5) / count)
    paragraphs.insert(place, NEEDLE.format(city=city, code=code))
    return "\n\n".join([*paragraphs, QUESTION.format(city=city)]), code


def main() -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(tokens=3000, budget=256)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--chunks", default="0,2048,1024,512,256", help="0: one piece")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = loading.load_tokenizer(arguments.model)
    model = loading.load_model(arguments.model, dtype=arguments.dtype, device="cpu")
    chunks = [int(part) for part in arguments.chunks.split(",")]
    arms: dict[str, list[dict[str, Any]]] = {"full": []}
    for index in range(arguments.samples):
        prompt, code = sample(tokenizer, arguments.tokens, index, arguments.samples)
        for name, chunk in [("full", 0), *((str(chunk or "one piece"), chunk) for chunk in chunks)]:
            method = "full" if name == "full" else arguments.method
            result = pyramidkv.generate(
                model,
                tokenizer,
                prompt,
                method,
                None if name == "full" else arguments.budget,
                prefill_chunk=chunk or None,
                max_new_tokens=16,
            )
            arms.setdefault(name, []).append(
                {
                    "code": code,
                    "text": result.text,
                    "found": code in result.text,
                    "tokens": result.record["prompt_tokens"],
                }
            )
            print(index, name, code, repr(result.text), flush=True)
    for name, results in arms.items():
        found = sum(result["found"] for result in results)
        print(f"{name:>10}: {found} of {len(results)} codes found")
    common.report(arguments, {"arms": arms})


if __name__ == "__main__":
    main()
