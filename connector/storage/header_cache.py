"""Headers of objects that were read before, so that each further slice of an object costs one question less."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final, Generic, TypeVar

from lamella.connector.storage.object_format import Header
from lamella.reference.keys import ChunkKey

_MAX_HEADERS: Final = 4096

Identity = TypeVar("Identity")


class HeaderCache(Generic[Identity]):
    """The headers of the objects read last, each for one identity of its stored bytes. Thread-safe.

    An object that was removed and put anew can have other bytes for the same key, since a GPU does not compute the same
    twice to the last bit; its header is then not that of the old one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._headers: OrderedDict[ChunkKey, tuple[Identity, Header]] = OrderedDict()

    def get(self, key: ChunkKey, identity: Identity) -> Header | None:
        """The header, if it is known for this identity."""
        with self._lock:
            found = self._headers.get(key)
            if found is None or found[0] != identity:
                return None
            self._headers.move_to_end(key)
            return found[1]

    def keep(self, key: ChunkKey, identity: Identity, header: Header) -> None:
        """The header is known from now on, while it is among the last used."""
        with self._lock:
            self._headers[key] = (identity, header)
            self._headers.move_to_end(key)
            if len(self._headers) > _MAX_HEADERS:
                self._headers.popitem(last=False)

    def forget(self, key: ChunkKey) -> None:
        """The header is not known any more."""
        with self._lock:
            self._headers.pop(key, None)
