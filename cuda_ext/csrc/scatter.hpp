// Launchers of the kernels that move pieces between the engine's blocks and staging, or mapped host objects.
//
// Each enqueues on the stream it is given and returns at once. Piece tables travel as kernel parameters, so the arrays
// passed here may be reused on return; what `group.bases`, `block_ids`, `staging` and `objects` point to must stay as it
// is until the stream has passed the launch.
#pragma once

#include <cstdint>

#include "lamella/items.cuh"
#include "lamella/lamella.h"

struct CUstream_st;

namespace lamella {

// Loads every kernel into the present context, by launches on `stream` that move nothing. CUDA would load each at its
// first launch, and waits for the device to do so: behind a stream that waits for what that very launch brings, it would
// wait forever. Throws CudaError.
void load_kernels(CUstream_st* stream);

// Between a window's staging images at `staging` and the engine's blocks. All pieces are of `target`'s group; a store
// fills the images from the blocks. `num_ctas` bounds the grid; 0 picks short and wide.
// Throws CudaError.
void scatter_staged(const KernelGroup& target, const Piece* pieces, std::int64_t num_pieces, std::uint64_t staging,
                    lm_direction direction, std::int32_t num_ctas, CUstream_st* stream);

// Between mapped host objects and the engine's blocks, with no staging: the SM gather, and for a store its reverse.
// `objects` is a device-readable table by absolute chunk of addresses that kernels can use; `object_bits` is all of
// them OR-ed together. Throws CudaError.
void move_mapped(const KernelGroup& target, const Piece* pieces, std::int64_t num_pieces, const std::uint64_t* objects,
                 std::uint64_t object_bits, lm_direction direction, std::int32_t num_ctas, CUstream_st* stream);

}  // namespace lamella
