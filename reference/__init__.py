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
REL-2   No layer is read before it landed: a step waits for every released load, whether or not it is in the batch.
REL-3   No policy releases a request whose first layer, by forecast, will not have landed when its step starts: an
        engine that starts on nothing only stalls.
REL-4   A layer that lands earlier never makes a release later.
ARR-1   landed <= recorded <= slices, and neither count falls within a generation.
ARR-3   A step waits for each slice at most once, and every layer's wait comes before its read.
ORD-1   Slices of one request leave in order: only its next slice competes, so keys need not rise within a request.
ORD-2   A slice that began is finished: the link is preempted between slices, never inside one.
ORD-3   An order key fits a signed 64-bit integer, because the native thread keeps it in one.
TIME-1  One request alone takes at least the longer of transfer and prefill, and at most their sum, overheads apart.
TIME-2  The width of all layers with whole release is chunk-major exactly.
TIME-3  Without a request, no other's landing is later under FIFO.
REC-1   A recorded request's instants never go back: arrival, admission, submission, ready, release, start, first token,
        end.
REC-2   Its slices hold every layer once and in order, and none lands before submission.
REC-3   Recorded steps do not overlap; a stall lies inside its step, and who caused it is in the recording or
        said to be left out.
REC-4   A request is in the step with which it starts, and in the one that gives its first token, seen no earlier
        than that step ends.
REC-5   What occupies a station belongs to a request of the recording.
SAFE-2  What a former owner of a slot or an id still records releases nothing of the present one.
KEEP-1  A chunk leaves a pool only when nothing that comes behind it is kept; of those that may leave, the longest
        unused goes first.
KEEP-2  A chunk counts as used at least as lately as whatever has left from behind it.
AUTO-1  The chosen arm's cost is the least of all arms the engine can do; in a tie the order of `Arm` holds.
AUTO-2  Same view, same correction, same choice.
AUTO-3  A correction moves towards what is observed, never beyond it, and stays within its range.
"""

if __name__ != "lamella.reference":
    raise ImportError(f"import lamella.reference, not {__name__}: two copies of these classes would not compare equal")
