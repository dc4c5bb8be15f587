"""The Typer application: finds the verbs, and runs the one named on the command line.

A verb is a module of this package with a function ``register(app)`` that adds its command. Nothing here
lists the verbs, so adding one is adding a file. Modules whose name starts with an underscore are shared
pieces, not verbs. Heavy imports (torch, matplotlib) belong inside a verb's function: every start pays for
what stands at the top of a verb's module.
"""

from __future__ import annotations

import codecs
import errno
import importlib
import io
import os
import pkgutil
import sys
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

import lamella
import lamella.cli

_CANNOT_WRITE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lamella {lamella.__version__}")
        raise typer.Exit


class _Verbs(TyperGroup):
    """The verbs, and what is said of a value that Typer could not read: its sentence alone does not name it."""

    def invoke(self, ctx: Any) -> Any:
        """What the verb returns.

        Raises:
            typer.BadParameter: an option's value is not of its type or range; the message ends with the value.
        """
        try:
            return super().invoke(ctx)
        except typer.BadParameter as mistake:
            details = getattr(mistake.__cause__, "errors", None)  # of Pydantic, whose sentences are general
            if callable(details):
                mistake.message = f"{mistake.message}; got {details()[0]['input']!r}"
            raise


def build_app() -> typer.Typer:
    """The application with every verb of this package registered, in alphabetical order.

    Raises:
        TypeError: a module of the package is neither a verb nor named with a leading underscore.
    """
    # Plain text, not panels: an error must be one sentence that a terminal, a log and a test read alike.
    app = typer.Typer(
        name="lamella",
        cls=_Verbs,
        help="Moves an LLM's KV cache one slice of layers at a time, and says beforehand whether that pays.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def _options(
        version: Annotated[
            bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
        ] = False,
    ) -> None:
        """Options that stand before the verb."""

    for found in pkgutil.iter_modules(lamella.cli.__path__):
        if found.name == "main" or found.name.startswith("_"):
            continue
        verb = importlib.import_module(f"lamella.cli.{found.name}")
        register = getattr(verb, "register", None)
        if register is None:
            raise TypeError(f"{verb.__name__} has no register(app); a piece that verbs share starts with an underscore")
        register(app)
    return app


def _print_anything() -> None:
    """A character that stdout's encoding lacks, such as ± in a locale without UTF-8, is printed as a question mark."""
    # In the C locale Python takes "surrogateescape", which saves bytes of file names and no other character.
    if isinstance(sys.stdout, io.TextIOWrapper) and (
        sys.stdout.errors == "strict" or codecs.lookup(sys.stdout.encoding).name != "utf-8"
    ):
        sys.stdout.reconfigure(errors="replace")


def main() -> None:
    """Entry point of the ``lamella`` command; what cannot be written is one sentence and exit code 1."""
    _print_anything()
    try:
        try:
            build_app()()
        finally:
            if sys.stdout:
                sys.stdout.flush()
    except OSError as failure:
        if failure.errno != errno.EPIPE and failure.errno not in _CANNOT_WRITE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered has nowhere to go
        if failure.errno != errno.EPIPE:
            what = f" {failure.filename}" if failure.filename else ""
            print(f"Error: cannot write{what}: {failure.strerror}", file=sys.stderr)
        sys.exit(1)
