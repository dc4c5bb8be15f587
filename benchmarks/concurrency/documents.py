"""Which of a group's documents are in an engine's host pool: what must be filled in before a cell, and kept between."""

from __future__ import annotations

from typing import Any

from concurrency.cells import Cell, Group
from concurrency.prompts import Prompts


class StoredDocuments:
    """See the module.

    Args:
        group: whose documents; with a peer's connector nothing can be asked, and what was filled once counts as there.
        prompts: the documents' tokens.
        scheduler: vLLM's, whose connector is asked, whichever it has at the time.
    """

    def __init__(self, group: Group, prompts: Prompts, scheduler: Any) -> None:
        self._group, self._prompts, self._scheduler = group, prompts, scheduler
        self._known: dict[int, set[int]] = {}

    @property
    def _side(self) -> Any:
        return self._scheduler.connector.scheduler

    @property
    def chunk_tokens(self) -> int:
        """Of what the connector in place stores."""
        return int(self._side._facts.space.chunk_tokens)

    def missing(self, cell: Cell) -> list[int]:
        """Documents that the cell draws on and that are not there, as the connector in place has it."""
        wanted = range(min(self._group.documents, cell.requests))
        if self._group.peer is not None:
            return [number for number in wanted if number not in self._known.setdefault(0, set())]
        return [number for number in wanted if not self._is_stored(number, cell)]

    def filled(self, numbers: list[int], cell: Cell) -> list[int]:
        """These have been computed and stored; those of them that are not there all the same."""
        if self._group.peer is not None:
            self._known[0].update(numbers)
            return []
        return [number for number in numbers if not self._is_stored(number, cell)]

    def forget(self) -> None:
        """The pool may hold anything."""
        self._known.clear()

    def keep_only_these(self, cell: Cell) -> None:
        """Nothing but documents is left in the pool, in chunks of the cell's size."""
        kept = {key for number in range(self._group.documents) for key in self._keys(number, cell)}
        index = self._side.objects.index
        index.discard([key for key in index.ready_keys() if key not in kept])
        self._known.clear()

    def _keys(self, number: int, cell: Cell) -> Any:
        from lamella.reference.keys import chunk_keys

        full = self._group.document_tokens // cell.chunk * cell.chunk
        return chunk_keys(self._side._facts.space, self._prompts.document(number)[:full])

    def _is_stored(self, number: int, cell: Cell) -> bool:
        known = self._known.setdefault(cell.chunk, set())
        if number in known and not cell.stores:
            return True
        keys = self._keys(number, cell)
        if self._side.objects.index.leading_hits(keys) < len(keys):
            return False
        known.add(number)
        return True
