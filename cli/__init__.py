"""The ``lamella`` command: one file a verb, parsing and printing only."""

if __name__ != "lamella.cli":
    raise ImportError(f"import lamella.cli, not {__name__}: a second module object would have its own types")
