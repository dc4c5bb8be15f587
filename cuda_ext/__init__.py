"""The movement: executes transfer plans on host memory and on CUDA devices.

Numbered contracts, beside those of `lamella.reference`, defended by the tests that cite them:

POOL-1  Every slot of a pool is free or holds exactly one object.
POOL-2  An object that is pinned or being written keeps its slot and its bytes.
POOL-3  An allocation gets every slot it asked for, or none, and then nothing was evicted for it.
POOL-4  When all holders are gone, every pin count is zero.
POOL-5  Free slots side by side are one run, so a prefix is consecutive whenever it can be.
POOL-6  Memory that could not be registered for its device is never handed out, and is reported.
POOL-7  Objects are evicted in the order of `lamella.reference.prefix_ages` (KEEP-1), where what is pinned or being
        written is kept.
SHM-1   Shared memory that no process holds any more is removed by the next creator, whatever became of its own.
SHM-2   Attaching never removes a name.
XFER-2  A host object stays referenced until its last copy has completed, not until it was enqueued.
XFER-3  A copy into a block starts only after the engine's earlier work on that block.
SAFE-1  A transfer is final only when nothing of it is in flight.
SAFE-5  Every wait has a bound.
"""

if __name__ != "lamella.cuda_ext":
    raise ImportError(f"import lamella.cuda_ext, not {__name__}: a second module object would have its own types")
