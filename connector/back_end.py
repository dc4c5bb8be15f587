"""Who keeps the objects: this process, or a cache server. The only place where the two are told apart."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol, cast

from lamella.connector.engine_facts import EngineFacts
from lamella.connector.mover import Mover, PoolMover, RankPlace
from lamella.connector.objects import Objects, PoolObjects
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.cuda_ext.slots import SlotMemory

_SERVER_MODULE = "lamella.server.back_end"
"""By name: the server's package is built on this one, and has an extra of its own."""


class BackEnd(Protocol):
    """Makes the two halves that know where objects are."""

    def objects(self, settings: ConnectorSettings, facts: EngineFacts) -> Objects:
        """For the scheduler side."""

    def mover(self, place: RankPlace, make_memory: Callable[[int], SlotMemory]) -> Mover:
        """For a rank; `make_memory(object_bytes)` gives it host memory of its own, where it needs some."""


class PoolBackEnd:
    """Every rank keeps its own, in host memory of its process."""

    def objects(self, settings: ConnectorSettings, facts: EngineFacts) -> Objects:
        """As `BackEnd.objects`."""
        return PoolObjects(settings, facts)

    def mover(self, place: RankPlace, make_memory: Callable[[int], SlotMemory]) -> Mover:
        """As `BackEnd.mover`."""
        return PoolMover(place, make_memory(place.caches.layout.object_bytes))


def back_end_of(settings: ConnectorSettings) -> BackEnd:
    """Who keeps the objects, by the settings.

    Raises:
        ImportError: a server is named and its extra is not installed, with the command that fixes it.
    """
    if settings.server is None:
        return PoolBackEnd()
    return cast("BackEnd", importlib.import_module(_SERVER_MODULE).ServerBackEnd())
