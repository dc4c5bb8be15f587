"""The rules that make early release right, each of which a test can switch off to see that it is needed.

vLLM takes a report "received" for "all bytes are there": it then commits the blocks to its prefix cache, frees them if
the request is aborted, and drops errors of requests it is not running. These rules close each of the holes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SafetyRules:
    """All on, outside the tests that show what each is for.

    Attributes:
        whole_blocks: a hit is whole blocks and never the last token; the engine writes a partial block's new tokens
            before it waits, and the load would overwrite them.
        report_once: a load is reported received exactly once (REL-1).
        hold_on_abort: blocks of a request that ends while something of it is in flight are held until that has ended,
            and reported then, once (SAFE-1).
        wait_for_released: each layer of each step waits for every released load of which the batch holds a block,
            whosever request that is (REL-2).
        evict_on_abort: blocks of an aborted load leave the prefix cache, so that nobody else can hit them.
        keep_errors: an error after release is kept by block, and reported in every step whose batch holds one (SAFE-3).
        report_in_same_step: a wait that fails is reported in the step that waited.
        evict_on_error: blocks that failed, and those computed behind them, leave the prefix cache.
        remember_failures: a request whose load failed is answered a miss until it has run.
        free_on_minimum: with several ranks, what has landed is what has landed on each (SAFE-6).
        share_loads: a request waits for a load in flight of the same chunks instead of loading them again.
    """

    whole_blocks: bool = True
    report_once: bool = True
    hold_on_abort: bool = True
    wait_for_released: bool = True
    evict_on_abort: bool = True
    keep_errors: bool = True
    report_in_same_step: bool = True
    evict_on_error: bool = True
    remember_failures: bool = True
    free_on_minimum: bool = True
    share_loads: bool = True


ALL_RULES = SafetyRules()
