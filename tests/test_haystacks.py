"""Haystacks: endless, the same every time, and cut where sentences end."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyramidkv.evaluation.haystacks import (
    NOISE,
    Haystack,
    HaystackError,
    constitution,
    find_haystack,
    folder,
    noise,
    plant,
    sentences,
)
from pyramidkv.evaluation.words import ADJECTIVES, NOUNS


def test_noise_repeats_one_line():
    line = " ".join(NOISE)
    assert noise().beginning(3 * len(line.split())) == [line] * 3
    assert noise().separator == "\n"


def test_the_constitution_is_shipped_and_split_into_sentences():
    haystack = constitution()
    assert haystack.pieces[0].startswith("The Constitution of the United States of America")
    assert len(haystack.pieces) > 90
    assert "\n" not in "".join(haystack.pieces)
    assert "  " not in "".join(haystack.pieces)
    assert all(piece[-1] in '.!?;"' for piece in haystack.pieces)
    assert "we the people" in haystack
    assert "tulip-4821" not in haystack


def test_a_folder_is_its_texts_in_the_order_of_their_names(tmp_path):
    (tmp_path / "b.txt").write_text("Third. Fourth without an end", "utf-8")
    (tmp_path / "a.txt").write_text("First\none.  Second?\n\n", "utf-8")
    (tmp_path / "notes.md").write_text("Not this.", "utf-8")
    haystack = find_haystack(tmp_path)
    assert haystack == folder(str(tmp_path))
    assert haystack.name == tmp_path.name
    assert haystack.pieces == ("First one.", "Second?", "Third.", "Fourth without an end")
    assert find_haystack("noise") == noise()
    assert find_haystack("constitution") == constitution()


def test_sentences_end_at_their_marks_only():
    text = 'He said "Go." Then J. Smith met Dr. Brown at 3.5 miles, e.g. here; and left! (Why?) So.'
    assert list(sentences(text)) == [
        'He said "Go."',
        "Then J. Smith met Dr. Brown at 3.5 miles, e.g. here; and left!",
        "(Why?)",
        "So.",
    ]
    assert list(sentences(" \n ")) == []


def test_it_begins_anew_and_cuts_the_last_piece():
    haystack = Haystack("x", ("One two three.", "Four, five.", "Six."))
    assert haystack.beginning(0) == []
    assert haystack.beginning(4) == ["One two three.", "Four..."]
    assert haystack.beginning(7, start=2) == ["Six.", "One two three.", "Four, five.", "Six."]
    assert haystack.piece(7) == "Four, five."


@given(st.integers(0, 400), st.integers(0, 300))
def test_it_holds_as_many_words_as_asked_for(words, start):
    pieces = constitution().beginning(words, start)
    assert len(" ".join(pieces).split()) == words
    assert constitution().beginning(words + 50, start)[: max(0, len(pieces) - 1)] == pieces[:-1]


@given(st.lists(st.integers(1, 30), max_size=12), st.lists(st.floats(0, 100), max_size=5))
def test_needles_stand_at_the_nearest_end_of_a_sentence(sizes, depths):
    pieces = ["x" * size for size in sizes]
    needles = [(depth, f"<{index}>") for index, depth in enumerate(depths)]
    text, begins = plant(pieces, " ", needles)
    assert [word for word in text.split(" ") if word and word[0] == "x"] == pieces
    ends = [sum(size + 1 for size in sizes[:count]) for count in range(len(sizes) + 1)]
    for (depth, needle), begin in zip(needles, begins, strict=True):
        assert text[begin:].startswith(needle)
        before = sum(len(word) + 1 for word in text[:begin].split() if word[0] == "x")
        wanted = ends[-1] * depth / 100
        assert abs(before - wanted) == min(abs(end - wanted) for end in ends)


def test_needles_at_one_place_keep_their_order():
    text, begins = plant(["a", "b"], "\n", [(50, "one"), (100, "three"), (50, "two")])
    assert text == "a\none\ntwo\nb\nthree"
    assert [text[begin : begin + 3] for begin in begins] == ["one", "thr", "two"]


def test_what_cannot_be_read_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(HaystackError, match=r"no folder 'essays'; a haystack is noise, const"):
        find_haystack("essays")
    with pytest.raises(HaystackError, match="holds no text"):
        folder(tmp_path)
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(HaystackError, match="holds no text"):
        folder(tmp_path)
    (tmp_path / "latin.txt").write_bytes("Früh.".encode("latin-1"))
    with pytest.raises(HaystackError, match=r"latin\.txt' is not UTF-8 \(byte 2\)"):
        folder(tmp_path)
    with pytest.raises(HaystackError, match="no pieces or empty ones"):
        Haystack("x", ())
    with pytest.raises(HaystackError, match="no pieces or empty ones"):
        Haystack("x", ("a", " "))


def test_no_word_is_found_in_another_nor_in_noise():
    words = NOUNS + ADJECTIVES
    assert len(set(words)) == len(words) > 900
    assert all(word.isascii() and word.islower() and word.isalpha() for word in words)
    joined = f" {' '.join(words)} "
    assert [word for word in words if joined.count(word) > 1] == []
    assert [word for word in words if word in noise()] == []


def test_generators_need_no_torch():
    code = (
        "import sys, pyramidkv.evaluation.ruler, pyramidkv.evaluation.needles\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
