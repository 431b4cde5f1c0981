"""Texts of a small grammar, and the least loss that any predictor can have.

A sentence is a determiner, a noun, a verb, a determiner and a noun, each drawn uniformly
from its list. A text is a sequence of characters, and begins with a new sentence, so that
the characters read so far determine the distribution of the next one.
"""

import itertools

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray


_DETERMINERS = "a", "every", "no", "the", "this"
_NOUNS = (
    *("bear", "bird", "cat", "cow", "crow", "dog"),
    *("fox", "frog", "goat", "hare", "hen", "horse"),
)
_VERBS = (
    *("calls", "fears", "finds", "hears", "helps"),
    *("leads", "likes", "meets", "seeks", "sees"),
)


def _ended(words: tuple[str, ...], end: str = " ") -> tuple[str, ...]:
    """End each word with a separator, so that no word is the beginning of another."""
    return tuple(word + end for word in words)


SENTENCE = (
    _ended(_DETERMINERS),
    _ended(_NOUNS),
    _ended(_VERBS),
    _ended(_DETERMINERS),
    _ended(_NOUNS, ". "),
)
CHARACTERS = "".join(sorted(set("".join(itertools.chain(*SENTENCE)))))


def texts(number: int, length: int, seed: int) -> Int[ndarray, "number length"]:
    """Return `number` texts, as the indices of their characters."""
    rng = np.random.default_rng(seed)
    numbers = {character: i for i, character in enumerate(CHARACTERS)}
    found = np.empty((number, length), np.int32)
    for row in found:
        text = ""
        while len(text) < length:
            text += "".join(words[rng.integers(len(words))] for words in SENTENCE)
        row[:] = [numbers[character] for character in text[:length]]
    return found


def least_losses(
    tokens: Int[ndarray, "number length"],
) -> Float[ndarray, "number length-1"]:
    """Return -log of the probability of each character but the first, given those before
    it."""
    return np.array([_least("".join(CHARACTERS[i] for i in row)) for row in tokens])


def _least(text: str) -> list[float]:
    losses, kinds, begun = [], itertools.cycle(SENTENCE), ""
    possible: tuple[str, ...] = next(kinds)
    for character in text:
        begun += character
        left = tuple(word for word in possible if word.startswith(begun))
        losses.append(np.log(len(possible) / len(left)))
        possible = left
        if left == (begun,):
            possible, begun = next(kinds), ""
    return losses[1:]
