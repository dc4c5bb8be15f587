"""The meaning of a layerwise KV-cache transfer: pure Python and NumPy, no clock, no I/O, no threads.

Numbered contracts, defended by the tests that cite them:

XFER-1  Every width, order and copy method leaves exactly chunk-major's bytes; the source is unchanged and every
        destination byte that the request does not name is untouched.
XFER-4  A plan moves every (layer, token) of its request exactly once, and never holds more bytes in one window than
        the staging budget allows.
XFER-5  A slice is complete only with its last window, and slices complete in layer order.
KEY-1   Two objects share a key only if their bytes mean the same: same tokens and prefix, model, dtype, object form
        and inner layout, rank, layers and tenant.
REL-1   A request is released exactly once.
REL-2   No layer is read before it landed.
SAFE-2  What a former owner of a slot or an id still records releases nothing of the present one.
"""

if __name__ != "lamella.reference":
    raise ImportError(f"import lamella.reference, not {__name__}: two copies of these classes would not compare equal")
