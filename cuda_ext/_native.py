"""The C++ executor, and the native planner it shares with the CUDA engine."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_uint64
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamella.cuda_ext import _library
from lamella.cuda_ext._execution import HostObjects, Method, SliceLanded
from lamella.reference.geometry import ObjectForm
from lamella.reference.layout import EngineLayout
from lamella.reference.plan import Direction, Piece, TransferPlan, Window, check_request


class NativePlan(NamedTuple):
    """What the native planner makes of a request."""

    pieces: tuple[Piece, ...]
    windows: tuple[Window, ...]


class NativeRequest:
    """`lm_request` with the arrays it points to, which live as long as this object.

    Args:
        plan: its compact request is taken, not its windows.
        direction: of the transfer.
        engines: the caches; None where only a plan is asked for.
    """

    def __init__(self, plan: TransferPlan, direction: Direction, engines: Sequence[EngineLayout] | None = None) -> None:
        layout, request = plan.layout, plan.request
        self._kept: list[Any] = []
        groups = (_library.GroupStruct * len(layout.groups))()
        for index, group in enumerate(layout.groups):
            geometry = group.geometry
            target = groups[index]
            target.num_layers, target.kv = geometry.num_layers, geometry.kv
            target.num_heads, target.head_dim = geometry.num_heads, geometry.head_dim
            target.element_bytes, target.block_tokens = geometry.element_bytes, group.block_tokens
            target.object_offset = layout.group_offset(index)
            target.layers = self._pointer(group.layers, np.int32, c_int32)
            target.block_ids = self._pointer(request.block_ids[index], np.int32, c_int32)
            target.num_block_ids = len(request.block_ids[index])
            if engines is not None:
                engine = engines[index]
                target.num_blocks = engine.num_blocks
                target.bases = self._pointer(engine.bases, np.uint64, c_uint64)
                target.block_stride, target.token_stride = engine.block_stride, engine.token_stride
                target.head_stride, target.dim_stride = engine.head_stride, engine.dim_stride
        cuts = (_library.SliceStruct * len(plan.slices))(*(_library.SliceStruct(*cut) for cut in plan.slices))
        self._kept += [groups, cuts]
        self.struct = _library.RequestStruct(
            form=0 if layout.form is ObjectForm.TOKEN else 1,
            direction=0 if direction is Direction.RETRIEVE else 1,
            chunk_tokens=layout.chunk_tokens,
            num_groups=len(groups),
            groups=groups,
            num_slices=len(cuts),
            has_null_block=request.null_block is not None,
            slices=cuts,
            null_block=request.null_block or 0,
            num_tokens=request.num_tokens,
            skip_tokens=request.skip_tokens,
            window_bytes=plan.window_bytes,
        )

    def _pointer(self, values: Any, dtype: Any, c_type: Any) -> Any:
        array = np.ascontiguousarray(values, dtype=dtype)
        self._kept.append(array)
        return array.ctypes.data_as(ctypes.POINTER(c_type))


def expand_natively(plan: TransferPlan, library: ctypes.CDLL | None = None) -> NativePlan:
    """The windows and pieces that native code makes of the plan's request, slices and window size.

    Raises:
        LibraryMissingError: there is no native library.
        ValueError: sizes that the native planner refuses.
    """
    native = library or _library.cpu_library()
    request = NativeRequest(plan, Direction.RETRIEVE)
    num_pieces, num_windows = c_int64(), c_int64()

    def expand(pieces: Any, windows: Any) -> None:
        status = native.lm_plan(request.struct, pieces, len(pieces), windows, len(windows), num_pieces, num_windows)
        _library.check(native, status)

    expand((_library.PieceStruct * 0)(), (_library.WindowStruct * 0)())
    pieces = (_library.PieceStruct * num_pieces.value)()
    windows = (_library.WindowStruct * num_windows.value)()
    expand(pieces, windows)
    found = tuple(
        Piece(
            piece.object_index,
            piece.group,
            piece.first_layer,
            piece.num_layers,
            piece.first_token,
            piece.num_tokens,
            piece.staging_offset,
        )
        for piece in pieces
    )
    return NativePlan(
        found,
        tuple(
            Window(
                found[window.first_piece : window.first_piece + window.num_pieces],
                window.num_bytes,
                window.completes_slice if window.completes_slice >= 0 else None,
            )
            for window in windows
        ),
    )


def host_objects_struct(objects: HostObjects) -> _library.HostObjectsStruct:
    """`lm_host_objects`, its table included."""
    return _library.HostObjectsStruct(
        addresses=(c_uint64 * len(objects.addresses))(*objects.addresses),
        num_objects=len(objects.addresses),
        registered_base=objects.registered_base,
        registered_piece_bytes=objects.registered_piece_bytes or 0,
    )


MAX_THREADS = 1024
"""As `lm_cpu_execute` has it; checked here too, since a larger number would be cut to 32 bits on its way there."""


class NativeExecutor:
    """The C++ executor: several threads, the GIL released, the address rules that the CUDA kernels use.

    One instance may be used by several threads at once.

    Args:
        threads: threads that share a window's work, the caller's among them.
        library: another build of the library; None for the installed one.

    Raises:
        ValueError: threads outside 1 .. MAX_THREADS.
        LibraryMissingError: there is no native library.
    """

    def __init__(self, threads: int = 1, library: ctypes.CDLL | None = None) -> None:
        if not 1 <= threads <= MAX_THREADS:
            raise ValueError(f"threads must be between 1 and {MAX_THREADS}, got {threads}")
        self._threads = threads
        self._library = library or _library.cpu_library()
        self._staging = threading.local()

    @property
    def name(self) -> str:
        """`native` and the number of threads."""
        return f"native-{self._threads}"

    def run(
        self,
        plan: TransferPlan,
        engines: Sequence[EngineLayout],
        objects: HostObjects,
        direction: Direction,
        *,
        method: Method = Method.AUTO,
        on_slice: SliceLanded | None = None,
    ) -> None:
        """As `Executor.run`; an exception in `on_slice` does not stop the transfer and is raised at its end."""
        check_request(plan.layout, engines, plan.request, direction)
        request = NativeRequest(plan, direction, engines)
        host = host_objects_struct(objects)
        options = _library.CpuOptionsStruct(method=int(method is Method.STAGED), threads=self._threads)
        if method is Method.STAGED:
            staging = self._staging_of(_staging_bytes(plan))
            options.staging, options.staging_bytes = staging.ctypes.data, staging.nbytes
        raised: list[BaseException] = []

        def landed(_context: object, index: int) -> None:
            try:
                if on_slice is not None and not raised:
                    on_slice(index)
            except BaseException as error:  # must not unwind through C
                raised.append(error)

        if on_slice is not None:
            options.on_slice = _library.OnSlice(landed)
        _library.check(self._library, self._library.lm_cpu_execute(request.struct, host, options))
        if raised:
            raise raised[0]

    def _staging_of(self, num_bytes: int) -> NDArray[np.uint8]:
        """This thread's staging memory, kept between calls because fresh pages cost more than the copies."""
        staging: NDArray[np.uint8] | None = getattr(self._staging, "array", None)
        if staging is None or staging.nbytes < num_bytes:
            staging = np.empty(num_bytes, dtype=np.uint8)
            self._staging.array = staging
        return staging


def _staging_bytes(plan: TransferPlan) -> int:
    """A window, or all that the request could move where that is less."""
    tokens = plan.request.num_tokens - plan.request.skip_tokens
    return min(plan.window_bytes, sum(tokens * group.geometry.token_bytes for group in plan.layout.groups))
