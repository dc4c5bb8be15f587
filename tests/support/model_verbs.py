"""`lamella simulate` and `lamella sweep` as a test calls them."""

from typer.testing import CliRunner

from lamella.cli.main import build_app


def run(*arguments: str) -> str:
    """What a command that succeeds prints on stdout."""
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments: str) -> str:
    """The last line on stderr, its one sentence, of a command that is refused."""
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr.strip().splitlines()[-1]


QUICK: dict[str, tuple[str, ...]] = {
    "simulate": ("--requests", "2"),
    "sweep": ("--concurrencies", "1,2", "--concurrency", "2", "--ratios", "1,2", "--requests", "2", "--repeats", "2"),
}
