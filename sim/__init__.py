"""The model: a discrete-event world that runs the same policies as the engine, on SimPy clocks."""

if __name__ != "lamella.sim":
    raise ImportError(f"import lamella.sim, not {__name__}: a second module object would have its own types")
