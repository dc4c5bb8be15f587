"""Every way in which this machine can move a plan on host memory."""

import pytest

from lamella.cuda_ext.executors import Method, NativeExecutor, NumpyExecutor
from lamella.cuda_ext.trial import NamedMove, as_move, each_method
from native_build import NATIVE_MISSING

MOVES: list[NamedMove] = list(each_method(NumpyExecutor()))
if NATIVE_MISSING is None:
    MOVES += [*each_method(NativeExecutor(1)), as_move(NativeExecutor(3), Method.STAGED)]

needs_native = pytest.mark.skipif(NATIVE_MISSING is not None, reason=str(NATIVE_MISSING))
