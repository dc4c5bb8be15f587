"""What a pool must hold, in dictionaries: the model that the cache engine's machine runs beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefix_model import Prefix, PrefixModel

NUM_SLOTS = 3


@dataclass
class Object:
    """What the model knows of an object in the pool."""

    prefix: Prefix
    pins: int = 0


@dataclass
class PoolModel:
    """The pool in dictionaries: counted pins, all or nothing, and who leaves as `PrefixModel` says."""

    ready: dict[Prefix, Object] = field(default_factory=dict)
    writing: set[Prefix] = field(default_factory=set)
    zombies: list[Object] = field(default_factory=list)  # discarded while pinned
    ages: PrefixModel = field(default_factory=PrefixModel)  # ready and writing

    def pin(self, prefixes: list[Prefix]) -> list[Object]:
        found = [self.ready[prefix] for prefix in prefixes]
        for one in found:
            one.pins += 1
        return found

    def unpin(self, objects: list[Object]) -> None:
        for one in objects:
            one.pins -= 1
            if not one.pins and self.ready.get(one.prefix) is not one:
                self.zombies.remove(one)
        freed = [one for one in objects if not one.pins and self.ready.get(one.prefix) is one]
        self.ages.use([one.prefix for one in freed])

    def reserve(self, prefixes: list[Prefix]) -> list[Prefix] | None:
        if len(prefixes) > NUM_SLOTS:
            return None
        missing = [one for one in prefixes if one not in self.ready and one not in self.writing]
        free = NUM_SLOTS - len(self.ready) - len(self.writing) - len(self.zombies)
        unpinned = {prefix for prefix, one in self.ready.items() if not one.pins}
        leaving = self.ages.leaving(max(0, len(missing) - free), unpinned, prefixes) if missing else []
        if leaving is None:
            return None
        for victim in leaving:
            self.ages.remove(victim)
            del self.ready[victim]
        self.writing.update(missing)
        self.ages.add(missing)
        return missing

    def commit(self, prefixes: list[Prefix]) -> None:
        for prefix in prefixes:
            self.writing.remove(prefix)
            self.ready[prefix] = Object(prefix)
        self.ages.use(prefixes)

    def give_up(self, prefixes: list[Prefix]) -> None:
        for prefix in prefixes:
            self.writing.remove(prefix)
            self.ages.remove(prefix)

    def discard(self, prefixes: list[Prefix]) -> None:
        for prefix in prefixes:
            one = self.ready.pop(prefix, None)
            if one is None:
                continue
            self.ages.remove(prefix)
            if one.pins:
                self.zombies.append(one)
