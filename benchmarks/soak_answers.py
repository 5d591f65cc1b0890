"""Answers of a server under load against those of a quiet one, with what rounding may do to them.

The same request in another batch has sums in another order, so that its log probabilities differ in
their last digits, and with them now and then which of two nearly equal tokens comes next. So not
only tokens are compared but, up to the first token that differs, the log probabilities of the most
likely tokens, within a tolerance: they tell a wrong cache even where the tokens are right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Choice:
    """One answer.

    Attributes:
        tokens: of it.
        likely: for each of them, log probabilities of the most likely tokens and of itself.
    """

    tokens: list[int]
    likely: list[dict[int, float]]


def choices_of(parts: list[dict[str, Any]]) -> list[Choice]:
    """Return the answers in a server's response, or in the parts of one that was streamed."""
    found: dict[int, Choice] = {}
    for part in parts:
        for choice in part["choices"]:
            own = found.setdefault(choice["index"], Choice([], []))
            own.tokens.extend(choice["token_ids"])
            own.likely.extend(
                {int(name.removeprefix("token_id:")): value for name, value in likely.items()}
                for likely in choice["logprobs"]["top_logprobs"]
            )
    return [found[index] for index in sorted(found)]


@dataclass
class Comparison:
    """What was found so far; `faults` tells what is wrong.

    Attributes:
        tolerance: between two log probabilities of a token.
        tokens: compared.
        equal, near_ties: greedy answers that have the same tokens; that went on with another one of
            tokens as likely as each other, within twice the tolerance.
        sampled_equal, sampled_others: the same for sampled answers; at which token chance decides
            otherwise cannot be told from log probabilities alone.
        largest: difference of log probabilities.
        faults: in sentences.
    """

    tolerance: float
    tokens: int = 0
    equal: int = 0
    near_ties: int = 0
    sampled_equal: int = 0
    sampled_others: int = 0
    largest: float = 0.0
    faults: list[str] = field(default_factory=list)

    def add(self, label: str, sampled: bool, got: list[Choice], wanted: list[Choice]) -> None:
        """Compare a request's answers.

        Args:
            label: of the request, for faults.
            sampled: or greedy.
            got: under load.
            wanted: of the quiet server.
        """
        if [len(c.tokens) for c in got] != [len(c.tokens) for c in wanted]:
            self.faults.append(f"{label}: number or lengths of the answers differ")
            return
        for a, b in zip(got, wanted, strict=True):
            self._add(label, sampled, a, b)

    def _add(self, label: str, sampled: bool, got: Choice, wanted: Choice) -> None:
        for place, (mine, theirs) in enumerate(zip(got.likely, wanted.likely, strict=True)):
            self.tokens += 1
            both = mine.keys() & theirs.keys()
            apart = max((abs(mine[token] - theirs[token]) for token in both), default=float("inf"))
            self.largest = max(self.largest, apart)
            if apart > self.tolerance:
                self.faults.append(f"{label}: log probabilities of token {place} differ by {apart}")
                return
            if got.tokens[place] == wanted.tokens[place]:
                continue
            if sampled:
                self.sampled_others += 1
                return
            gap = theirs[wanted.tokens[place]] - theirs.get(got.tokens[place], float("-inf"))
            if gap > 2 * self.tolerance:
                self.faults.append(f"{label}: token {place} is less likely by {gap}")
            else:
                self.near_ties += 1
            return
        if sampled:
            self.sampled_equal += 1
        else:
            self.equal += 1

    def rare(self) -> list[str]:
        """Return faults of all answers together: that chance decided otherwise is rare."""
        pairs = (
            ("greedy", self.near_ties, self.near_ties + self.equal),
            ("sampled", self.sampled_others, self.sampled_others + self.sampled_equal),
        )
        return [
            f"{others} of {answers} {kind} answers go on otherwise, more than rounding would"
            for kind, others, answers in pairs
            if others > 1 + 0.02 * answers
        ]
