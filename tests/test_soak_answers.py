"""How answers under load are compared with a quiet server's; no server here."""

from __future__ import annotations

import pytest
from soak_answers import Choice, Comparison, choices_of


def choice(tokens, *likely):
    return Choice(tokens, list(likely))


TWO = choice([7, 9], {7: -0.5, 8: -1.5}, {9: -0.7, 4: -0.701})


def compared(got, wanted=TWO, sampled=False):
    comparison = Comparison(0.01)
    comparison.add("one", sampled, [got], [wanted])
    return comparison


def test_equal_answers_are_counted():
    comparison = compared(TWO)
    assert (comparison.tokens, comparison.equal, comparison.largest) == (2, 1, 0.0)
    assert compared(TWO, sampled=True).sampled_equal == 1
    assert not comparison.faults
    assert not comparison.rare()


def test_nearly_equal_tokens_are_told_apart_from_wrong_ones():
    near = choice([7, 4], TWO.likely[0], {4: -0.7, 9: -0.701})
    comparison = compared(near)
    assert (comparison.equal, comparison.near_ties, comparison.faults) == (0, 1, [])
    assert comparison.largest == pytest.approx(0.001)
    wrong = choice([8, 9], *TWO.likely)
    assert compared(wrong).faults == ["one: token 0 is less likely by 1.0"]
    unknown = choice([5, 9], {7: -0.5, 5: -0.4}, TWO.likely[1])
    assert compared(unknown).faults == ["one: token 0 is less likely by inf"]


def test_other_log_probabilities_are_a_fault_even_with_the_same_tokens():
    other = choice([7, 9], TWO.likely[0], {9: -0.72, 4: -0.701})
    (fault,) = compared(other).faults
    assert fault.startswith("one: log probabilities of token 1 differ by 0.02")
    nothing_shared = choice([7, 9], {5: -0.5}, TWO.likely[1])
    assert compared(nothing_shared).faults == ["one: log probabilities of token 0 differ by inf"]
    assert compared(other, sampled=True).faults


def test_lengths_and_numbers_of_answers_must_agree():
    short = choice([7], TWO.likely[0])
    assert compared(short).faults == ["one: number or lengths of the answers differ"]
    comparison = Comparison(0.01)
    comparison.add("one", True, [TWO], [TWO, TWO])
    assert comparison.faults == ["one: number or lengths of the answers differ"]


def test_what_chance_decides_otherwise_is_rare():
    others = choice([8, 9], *TWO.likely)
    comparison = Comparison(0.01)
    for got in [TWO] * 97 + [others] * 3:
        comparison.add("many", True, [got], [TWO])
    assert (comparison.sampled_equal, comparison.sampled_others) == (97, 3)
    assert not comparison.rare()
    comparison.add("many", True, [others], [TWO])
    assert comparison.rare() == [
        "4 of 101 sampled answers go on otherwise, more than rounding would"
    ]


def test_parts_are_joined_by_answer():
    def part(index, tokens):
        likely = [{f"token_id:{token}": -0.1 * token} for token in tokens]
        return {"index": index, "token_ids": tokens, "logprobs": {"top_logprobs": likely}}

    streamed = [{"choices": [part(1, [3])]}, {"choices": [part(0, [4, 5])]}, {"choices": []}]
    streamed.append({"choices": [part(1, [6])]})
    whole = [{"choices": [part(0, [4, 5]), part(1, [3, 6])]}]
    assert choices_of(streamed) == choices_of(whole)
    assert choices_of(whole)[1].tokens == [3, 6]
    assert choices_of(whole)[1].likely == [{3: pytest.approx(-0.3)}, {6: pytest.approx(-0.6)}]
