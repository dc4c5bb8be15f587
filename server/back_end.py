"""The cache server as the vLLM connector's back end: see `lamella.connector.back_end`, which finds this by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lamella.connector.engine_facts import EngineFacts
from lamella.connector.mover import Mover, RankPlace, settings_named
from lamella.connector.objects import Objects
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.cuda_ext.slots import SlotMemory
from lamella.server.connection import ServerLostError
from lamella.server.engine_mover import EngineMover
from lamella.server.engine_objects import EngineObjects


class ServerBackEnd:
    """Objects are in a server's memory, which outlives the engine."""

    def objects(self, settings: ConnectorSettings, facts: EngineFacts) -> Objects:
        """As `BackEnd.objects`.

        Raises:
            ValueError: no server in the folder.
        """
        folder = _folder(settings)
        with _explained(folder):
            return EngineObjects(folder, facts, settings.load_timeout_s)

    def mover(self, place: RankPlace, make_memory: Callable[[int], SlotMemory]) -> Mover:
        """As `BackEnd.mover`.

        Raises:
            ValueError: no server in the folder.
            RefusedError, OSError: it refuses this rank, or its memory cannot be mapped.
            MemoryError: no room for the staging ring.
        """
        folder = _folder(place.settings)
        with _explained(folder), settings_named(place.settings):
            return EngineMover(folder, place)


def _folder(settings: ConnectorSettings) -> Path:
    assert settings.server is not None, "this back end is for engines with a server"
    return settings.server


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except (ServerLostError, FileNotFoundError) as lost:
        raise ValueError(
            f"no cache server answers in {folder} ({lost}): start one there before the engine, `lamella serve --folder "
            f"{folder}`, or leave server out of kv_connector_extra_config"
        ) from lost
