"""The serving side: cache engine, storage tiers, and what plugs Lamella into an inference engine."""

if __name__ != "lamella.connector":
    raise ImportError(f"import lamella.connector, not {__name__}: a second module object would have its own types")
