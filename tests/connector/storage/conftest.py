"""Servers that the tier tests share, each started once a run and only if a test asks for it."""

from collections.abc import Iterator

import pytest

from storage_servers import REDIS_MISSING, RedisProcess, redis_cluster, redis_server, s3_server


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    if REDIS_MISSING:
        pytest.skip(REDIS_MISSING)
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisProcess]]:
    if REDIS_MISSING:
        pytest.skip(REDIS_MISSING)
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("moto", reason="moto is not installed (it comes with the dev extra)")
    patched = pytest.MonkeyPatch()
    for name, value in (("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"), ("AWS_REGION", "us-east-1")):
        patched.setenv(name, value)
    with s3_server() as address:
        yield address
    patched.undo()
