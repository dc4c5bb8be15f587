"""The model: a discrete-event world that runs the same policies as the engine, on SimPy clocks.

Numbered contracts, defended by the tests that cite them:

SIM-1   Where the recursions of `lamella.reference.timeline` and `lamella.reference.pathway` have an answer, the world
        gives the same to the nanosecond.
SIM-2   A stretch of decode steps run as one event is what its steps are, to the nanosecond.
SIM-3   What went in comes out: requests, tokens, bytes and blocks, whatever fails or is preempted on the way.
SIM-4   The same requests and seed give the same records.
SIM-5   Where the profile was not measured nothing is answered, unless extrapolation was asked for.
SIM-6   The parts of an explained time to first token add up to it, to the nanosecond.
SIM-7   Cells give the same results however they ran: in one process, in several, on several machines, in one go or
        resumed.
"""

if __name__ != "lamella.sim":
    raise ImportError(f"import lamella.sim, not {__name__}: a second module object would have its own types")
