"""Texts made of common words, for runs in which only their lengths matter."""

from __future__ import annotations

import random

WORDS = (
    "river",
    "stone",
    "paper",
    "window",
    "garden",
    "engine",
    "letter",
    "music",
    "winter",
    "number",
    "story",
)


def random_words(rng: random.Random, count: int) -> str:
    """`count` words with a space between them."""
    return " ".join(rng.choice(WORDS) for _ in range(count))
