"""The numbers in sentences are those of docs/results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks import report, sentences
from benchmarks.intervals import Interval
from benchmarks.sentences import COMPLETE_PAGES, SENTENCES, Sentence, text_of, without_source

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("sentence", SENTENCES, ids=lambda sentence: sentence.text[:60])
def test_a_sentence_has_the_measured_numbers(sentence: Sentence) -> None:
    assert sentence.filled() in sentence.page_text()


@pytest.mark.parametrize("sentence", SENTENCES, ids=lambda sentence: sentence.text[:60])
def test_a_sentence_with_exchanged_numbers_is_false(sentence: Sentence) -> None:
    values = [source() for source in sentence.sources]
    for first in range(len(values)):
        for second in range(first):
            if values[first] != values[second]:
                exchanged = list(values)
                exchanged[first], exchanged[second] = values[second], values[first]
                assert sentence.text.format(*exchanged) not in sentence.page_text()


def test_a_difference_that_the_words_do_not_fit_is_an_error() -> None:
    clear, unclear = Interval(0.5, 0.1), Interval(0.05, 0.1)
    assert sentences.require(clear, shown=True) == clear
    assert sentences.require(unclear, shown=False) == unclear
    with pytest.raises(ValueError, match="should contain zero"):
        sentences.require(clear, shown=False)
    with pytest.raises(ValueError, match="should exclude zero"):
        sentences.require(unclear, shown=True)


@pytest.mark.parametrize("page", COMPLETE_PAGES)
def test_every_result_on_a_page_has_a_source(page: str) -> None:
    assert list(without_source(page)) == []


@pytest.mark.parametrize("page", COMPLETE_PAGES)
def test_parts_without_a_source_are_on_the_page(page: str) -> None:
    assert all(part in text_of(page) for part in COMPLETE_PAGES[page])


def test_numbers_without_a_source_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "It is 0.5 on\nMNIST.\n\n- It is 7 % here.\n\n| 0.9 |\n\n```\n0.8\n```\nBeta is 3.\n"
    (tmp_path / "page.md").write_text(text)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    known = Sentence("page.md", "It is {} on MNIST.", (lambda: "0.5",))
    monkeypatch.setattr(sentences, "SENTENCES", (known,))
    (found,) = without_source("page.md")
    assert "It is 7 % here" in found
