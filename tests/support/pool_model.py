"""What a pool must hold, in dictionaries: the model that the cache engine's machine runs beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

NUM_SLOTS = 3

Prefix = tuple[int, ...]


@dataclass
class Object:
    """What the model knows of an object in the pool."""

    prefix: Prefix
    pins: int = 0


@dataclass
class PoolModel:
    """The pool in dictionaries: least recently used, counted pins, all or nothing."""

    ready: dict[Prefix, Object] = field(default_factory=dict)
    writing: set[Prefix] = field(default_factory=set)
    zombies: list[Object] = field(default_factory=list)  # discarded while pinned
    age: list[Prefix] = field(default_factory=list)  # unpinned and ready, oldest first

    def pin(self, prefixes: list[Prefix]) -> list[Object]:
        found = [self.ready[prefix] for prefix in prefixes]
        for one in found:
            one.pins += 1
            if one.prefix in self.age:
                self.age.remove(one.prefix)
        return found

    def unpin(self, objects: list[Object]) -> None:
        for one in reversed(objects):
            one.pins -= 1
            if one.pins:
                continue
            if self.ready.get(one.prefix) is one:
                self.age.append(one.prefix)
            else:
                self.zombies.remove(one)

    def reserve(self, prefixes: list[Prefix]) -> list[Prefix] | None:
        if len(prefixes) > NUM_SLOTS:
            return None
        missing = [one for one in prefixes if one not in self.ready and one not in self.writing]
        free = NUM_SLOTS - len(self.ready) - len(self.writing) - len(self.zombies)
        candidates = [one for one in self.age if one not in prefixes]
        needed = max(0, len(missing) - free)
        if needed > len(candidates):
            return None
        for victim in candidates[:needed]:
            self.age.remove(victim)
            del self.ready[victim]
        self.writing.update(missing)
        return missing

    def commit(self, prefixes: list[Prefix]) -> None:
        for prefix in reversed(prefixes):
            self.writing.remove(prefix)
            self.ready[prefix] = Object(prefix)
            self.age.append(prefix)

    def discard(self, prefixes: list[Prefix]) -> None:
        for prefix in prefixes:
            one = self.ready.pop(prefix, None)
            if one is None:
                continue
            if prefix in self.age:
                self.age.remove(prefix)
            if one.pins:
                self.zombies.append(one)
