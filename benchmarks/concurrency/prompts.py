"""Documents and requests of a concurrency run, from a seed: the same for every arm and repeat."""

from __future__ import annotations

import random
from typing import Final

from concurrency.cells import Cell, Group
from concurrency.closed_loop import Request

BYSTANDER_TOKENS: Final = 1024
BYSTANDER_OUTPUT: Final = 6000
_SEED: Final = 20_261_129


class Prompts:
    """See the module.

    Args:
        group: how many documents, and how long.
        tiny: for a vocabulary of 512.
        fresh: new tokens differ from repeat to repeat, for connectors that keep whatever they have seen.
    """

    def __init__(self, group: Group, tiny: bool, fresh: bool) -> None:
        self._group, self._tiny, self._fresh = group, tiny, fresh
        self.alphabet = range(3, 500) if tiny else range(1000, 100_000)
        """Token ids that prompts are made of."""
        self._documents: dict[int, list[int]] = {}
        self._prompts: tuple[str, list[list[int]]] = ("", [])

    def document(self, number: int) -> list[int]:
        """The tokens of a document; another number differs from the first token on."""
        if number not in self._documents:
            rng = random.Random(f"{_SEED} document {number}")
            self._documents[number] = rng.choices(self.alphabet, k=self._group.document_tokens)
        return self._documents[number]

    def requests(self, cell: Cell, tag: str) -> list[Request]:
        """The cell's requests: the same tokens for every arm and repeat, and names of their own by `tag`.

        A peer keeps what it has seen, so it gets new tokens of their own in each repeat.
        """
        rng = random.Random(f"{_SEED} {cell.name} {tag if self._fresh else ''}")
        if self._prompts[0] != cell.name or len(self._prompts[1]) < cell.requests or self._fresh:
            self._prompts = cell.name, [self._prompt(cell, number, rng) for number in range(cell.requests)]
        rng = random.Random(f"{_SEED} {cell.name} arrivals")
        at_s = [0.0]
        for _ in range(cell.requests if cell.rate_per_s else 0):
            at_s.append(at_s[-1] + rng.expovariate(cell.rate_per_s or 1.0))
        return [
            Request(f"{tag}.{number}", tokens, cell.output, int(at_s[min(number, len(at_s) - 1)] * 1e9))
            for number, tokens in enumerate(self._prompts[1][: cell.requests])
        ]

    def _prompt(self, cell: Cell, number: int, rng: random.Random) -> list[int]:
        hit, new = cell.shapes[number % len(cell.shapes)]
        own = cell.miss_every and number % cell.miss_every == cell.miss_every - 1
        head = rng.choices(self.alphabet, k=hit) if own else self.document(number % self._group.documents)[:hit]
        return head + rng.choices(self.alphabet, k=new)

    def bystanders(self, cell: Cell, tag: str) -> list[Request]:
        """Requests that only decode, with output enough for any repeat."""
        rng = random.Random(f"{_SEED} bystanders")
        tokens = BYSTANDER_TOKENS // 32 if self._tiny else BYSTANDER_TOKENS
        room = 500 if self._tiny else BYSTANDER_OUTPUT
        return [
            Request(f"{tag}.bystander{number}", rng.choices(self.alphabet, k=tokens), room)
            for number in range(cell.bystanders)
        ]
