"""The text of chapter 15: sentences made by rule, the same ones on every machine, for a training that takes seconds.

No download and no file: a small grammar, and a generator of whole numbers that says which word comes next. A token is
a character, and there are 32 of them, so that blocks of 32 divide every matrix of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

CHARACTERS = "\n ,.;?abcdefghijklmnopqrstuvwxyz"
_ONE = "the engineer,a student,this tensor,the optimizer,a gradient,the scale,one block,my model,the exponent,a code"
_MANY = "two engineers,the students,these tensors,all gradients,some scales,the blocks,small models,few codes"
_VERBS = "round,keep,lose,store,read,move,need,find,add,count"
_WHICH = "the nearest value,half of the bits,a larger range,the last digit,every zero,an old maximum,its own error"
_WHEN = "in the morning,before the sum,after each step,without a loss,on a quiet machine,by the rule"


def _numbers(seed: int) -> Iterator[int]:
    """Whole numbers below 2^31 that look random: the linear congruential generator of Knuth's MMIX, its upper bits."""
    state = seed
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 33


def sentences(seed: int, characters: int) -> str:
    """At least so many characters of text."""
    numbers = _numbers(seed)

    def one_of(words: str, mark: str = ",") -> str:
        choices = words.split(mark)
        return choices[next(numbers) % len(choices)]

    def clause() -> str:
        plural = next(numbers) % 2
        verb = one_of(_VERBS)
        words = [one_of(_MANY if plural else _ONE), verb if plural else f"{verb}s", one_of(_WHICH)]
        if next(numbers) % 3 == 0:
            words.append(one_of(_WHEN))
        return " ".join(words)

    parts, length = [], 0
    while length < characters:
        text = clause()
        if next(numbers) % 2:
            text += (", and then ", "; but ", ", so ")[next(numbers) % 3] + clause()
        parts.append(text + ("?\n" if next(numbers) % 8 == 0 else ".\n"))
        length += len(parts[-1])
    return "".join(parts)


@cache
def tokens(split: str) -> Tensor:
    """The tokens of "train" or "validation", int64: two texts of the same rules, from different numbers."""
    text = sentences(1, 60_000) if split == "train" else sentences(2, 9_000)
    return torch.tensor([CHARACTERS.index(character) for character in text])
