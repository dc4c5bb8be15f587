"""Bytes of every kind for the cache server's protocol, and a run against its rules for as long as one likes.

python tests/support/protocol_fuzz.py 600
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import tempfile
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import msgspec
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lamella.server import protocol
from lamella.server.frames import RefusedError, decode_request, encode
from lamella.server.protocol import PROTOCOL, Lookup, Message, Ping, Retrieve, Stats
from lamella.server.wire import HEADER, MAGIC, Code, Kind
from server_driver import LOCAL, Bench, keys_of, registration

LAYERWISE = Retrieve(1, 2, 0, "r", (b"\x01\x00\x00\x00",), 4, 0, -1, "board 1", (b"handle", b"other"), (1, 1, 2))
CHUNK_MAJOR = msgspec.structs.replace(LAYERWISE, board=None, events=None, layers_per_slice=0)
EXAMPLES: dict[Kind, Message] = {
    Kind.REGISTER: registration(alive="alive-0"),  # that of a `Bench`'s first client
    Kind.LOOKUP: Lookup(1, b"p" * 64, 4, 1, -1, True),
    Kind.RETRIEVE: LAYERWISE,
    Kind.STORE: protocol.Store(1, protocol.Phase.ALLOCATE, 0, b"p" * 32, 4, 0, b"", -1, "", (), 0, 0, -1, None),
    Kind.RELEASE: protocol.Release(1, 2, 0),
    Kind.ABORT: protocol.Abort(1, 2, -1),
    Kind.STATS: Stats(),
    Kind.PING: Ping(1, 5),
}

KEPT = keys_of(1, 2)
"""What the server keeps when the frames come."""
TAIL = msgspec.structs.replace(EXAMPLES[Kind.STORE], first_chunk=2, after=KEPT[1].prefix)
BACKWARDS = msgspec.structs.replace(EXAMPLES[Kind.STORE], prefixes=b"p" * 32 + KEPT[1].prefix + KEPT[0].prefix)
MESSAGES = (*EXAMPLES.values(), TAIL, BACKWARDS)

bodies = st.one_of(
    st.binary(max_size=200),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.binary(max_size=40)
        | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=20,
    ).map(msgspec.msgpack.encode),
)
headers = st.tuples(st.sampled_from([MAGIC, b"LMLB"]), st.integers(0, 3), st.integers(0, 10), st.integers(0, 2**64 - 1))


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    """A good frame with bytes changed, cut out or put in."""
    frame = bytearray(encode(draw(st.integers(0, 9)), EXAMPLES[draw(st.sampled_from(Kind))]))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(frame) - 1))
        match draw(st.sampled_from(["change", "cut", "insert"])):
            case "change":
                frame[at] = draw(st.integers(0, 255))
            case "cut":
                del frame[at : at + draw(st.integers(1, 30))]
            case _:
                frame[at:at] = draw(st.binary(min_size=1, max_size=30))
        if not frame:
            break
    return bytes(frame)


@st.composite
def wild(draw: st.DrawFn) -> bytes:
    """A well-formed message with some of its fields drawn anew."""
    message = EXAMPLES[draw(st.sampled_from(Kind))]
    fields = {
        name: draw(st.integers(-1, 5) | st.sampled_from([2**31 - 1, 2**62]) | st.binary(max_size=64) | st.none())
        for name in message.__struct_fields__
        if draw(st.booleans())
    }
    return encode(draw(st.integers(0, 9)), msgspec.structs.replace(message, **fields))


any_frames = st.lists(
    st.binary(max_size=64)
    | st.builds(lambda header, body: HEADER.pack(*header) + body, headers, bodies)
    | spoiled()
    | wild(),
    max_size=3,
)


def random_frames(chance: random.Random) -> list[bytes]:
    """As `any_frames`, far faster and less clever: a good message, often with fields or bytes changed."""
    message = chance.choice(MESSAGES)
    for name in message.__struct_fields__:
        if chance.random() < 0.1:
            value: object = chance.choice(WILD_FIELDS)
            message = msgspec.structs.replace(message, **{name: value})
    frame = bytearray(encode(chance.randrange(10), message))
    for _ in range(chance.choice((0, 0, 0, 1, 1, 2, 8))):
        at = chance.randrange(max(1, len(frame)))
        match chance.randrange(4):
            case 0:
                frame[at : at + 1] = chance.randbytes(1)
            case 1:
                del frame[at : at + chance.randrange(1, 40)]
            case 2:
                frame[at:at] = chance.randbytes(chance.randrange(1, 40))
            case _:
                frame[at : at + 1] = bytes([chance.choice(LENGTH_BYTES)])
    return [bytes(frame), *[b"more"] * (chance.random() < 0.01)]


WILD_FIELDS = (
    -1,
    0,
    1,
    2,
    3,
    4,
    5,
    2**31 - 1,
    2**31,
    2**62,
    None,
    True,
    "",
    "x" * 600,
    b"",
    b"p" * 32,
    bytes(96),
    (),
    1.5,
)
LENGTH_BYTES = (0x90, 0x9F, 0xC4, 0xC6, 0xD9, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0xFF)
FRAMES_AT_ONCE = 200


def fuzz(folder: Path, *, seconds: float = 1e9, examples: int = 10**9) -> Counter[str]:
    """Frames are sent to a server's rules, for so long or so many times 200; how many, by what became of them.

    Raises:
        AssertionError: slots went lost, or an answer was neither the protocol's nor a refusal.
    """
    counts: Counter[str] = Counter()
    deadline = time.monotonic() + seconds

    @settings(
        max_examples=examples,
        derandomize=examples < 10**9,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False, note_method_calls=False), st.lists(any_frames, max_size=3))
    def run(drawn: random.Random, first: list[list[bytes]]) -> None:
        if time.monotonic() > deadline:
            raise TimeoutError
        chance = random.Random(drawn.getrandbits(64))
        with Bench(folder, num_slots=4, models=2) as bench:
            client = bench.rank()
            assert client.session == 1, "so that messages made up by chance are of a session"
            client.store(KEPT)
            for frames in (*first, *(random_frames(chance) for _ in range(FRAMES_AT_ONCE))):
                counts[_answered(bench, frames)] += 1
            for mark in tuple(bench.living):
                bench.living.discard(mark)
            bench.pass_s(1000)
            bench.pass_s(1000)
            free, writing, ready, pins = bench.occupancy()
            assert free + ready == sum(pool.num_slots for pool in bench.pools)
            assert (writing, pins) == (0, 0), "nothing that was held outlives its holder"
            for pool in bench.pools:
                fresh = pool.reserve([key._replace(space=b"fresh") for key in keys_of(*range(pool.num_slots))])
                assert fresh is not None, "nothing is kept for ever"
                fresh.abandon()

    with contextlib.suppress(TimeoutError):
        run()
    return counts


def _answered(bench: Bench, frames: list[bytes]) -> str:
    try:
        request = decode_request(frames)
        answer = bench.service.handlers.answer(request, LOCAL)
        if isinstance(answer, Future):
            bench.settle(answer)
            answer = answer.result()
    except RefusedError as refused:
        assert refused.code is not Code.INTERNAL
        return f"refused: {refused.code.value}"
    assert isinstance(answer, PROTOCOL[request.kind].answer)
    encode(request.number, answer, request.kind)
    return f"answered: {request.kind.name}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float, help="how long it goes on")
    options = parser.parse_args()
    logging.disable()
    with tempfile.TemporaryDirectory() as made:
        for outcome, count in fuzz(Path(made), seconds=options.seconds).most_common():
            print(f"{count:9d}  {outcome}")
