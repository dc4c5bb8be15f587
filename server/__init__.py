"""The cache server: one process a host that owns memory, keys, locks and tiers for several engines and ranks.

Numbered contracts, beside those of `lamella.cuda_ext` and `lamella.connector`, defended by the tests that cite them:

SRV-1   A chunk that a transfer holds is neither evicted nor written, however long the transfer takes.
SRV-2   What a peer held comes back after its end, whatever ended it: its locks, its half-written chunks, its session.
SRV-3   A lookup answers the minimum over an engine's ranks, and locks on every rank what it answers, or nothing.
SRV-4   Bytes that are not a message of this protocol are answered with an error, and change nothing.
SRV-5   Peers of another user, another version or another tenant get nothing.
SRV-6   A lease of an earlier server, or one that has ended, gives no access to a slot.
"""

if __name__ != "lamella.server":
    raise ImportError(f"import lamella.server, not {__name__}: a second module object would have its own types")
