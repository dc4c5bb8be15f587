// The kernels: pieces between the engine's paged blocks and a dense side; what a thread does is in items.cuh.
//
// Grids are short and wide: an item is a few loads and stores a thread, and beside a busy engine many small thread
// blocks finish sooner than few long ones.
#include "scatter.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lamella/errors.hpp"
#include "lamella/plan.hpp"
#include "lamella/request.hpp"

namespace lamella {
namespace {

constexpr int kThreads = 256;
constexpr std::int32_t kWideCtas = 1024;           // scatter: short and wide
constexpr std::int32_t kGatherCtas = 128;          // gather: enough loads in flight for the wire
constexpr std::int64_t kLeastBytesACta = 8 << 10;  // below this a thread block does little but start

// Pieces as a kernel parameter: no table in device memory, and none to keep alive.
template <int kCapacity>
struct PieceTable {
  std::int32_t count;
  Piece pieces[kCapacity];
};
constexpr int kFewPieces = 32;
constexpr int kManyPieces = 480;

// Grid: x shares one piece's items, y the pieces.
template <int kBytes, typename Dense, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    move_pieces(const __grid_constant__ Group g, const std::int32_t* __restrict__ block_ids,
                const __grid_constant__ Dense dense, const __grid_constant__ PieceTable<kCapacity> table,
                const __grid_constant__ Shape shape) {
  const std::uint32_t items_a_cta = kThreads / shape.threads_an_item;
  const std::uint32_t first = blockIdx.x * items_a_cta + threadIdx.x / shape.threads_an_item;
  const std::int32_t lane = static_cast<std::int32_t>(threadIdx.x) % shape.threads_an_item;
  for (std::int32_t index = blockIdx.y; index < table.count; index += gridDim.y) {
    const Piece& p = table.pieces[index];
    const std::uint32_t items = item_count(g, p);
    for (std::uint32_t item = first; item < items; item += gridDim.x * items_a_cta) {
      move_item<kBytes>(g, p, block_ids, dense, shape, item, lane);
    }
  }
}

template <int kBytes, typename Dense, int kCapacity>
void launch_table(const KernelGroup& target, const Piece* pieces, std::int32_t count, const Dense& dense,
                  bool to_engine, std::int32_t num_ctas, CUstream_st* stream) {
  const Group& g = target.group;
  PieceTable<kCapacity> table{};
  table.count = count;
  std::int64_t largest = 0;
  for (std::int32_t i = 0; i < count; ++i) {
    table.pieces[i] = with_default_selector(g, pieces[i]);
    largest = std::max(largest, piece_bytes(g, pieces[i]));
  }
  const std::int64_t useful = (largest + kLeastBytesACta - 1) / kLeastBytesACta;
  const std::int64_t share = std::max(1, num_ctas / count);
  const dim3 grid(static_cast<unsigned>(std::min(useful, share)), static_cast<unsigned>(std::min(count, num_ctas)));
  move_pieces<kBytes, Dense, kCapacity>
      <<<grid, kThreads, 0, stream>>>(g, target.block_ids, dense, table, shape_of(g, kBytes, to_engine));
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw CudaError(format("launching a move of %d pieces: %s", count, cudaGetErrorString(error)));
  }
}

template <typename Dense>
void launch(const KernelGroup& target, const Piece* pieces, std::int64_t count, const Dense& dense, std::uint64_t bits,
            lm_direction direction, std::int32_t num_ctas, CUstream_st* stream) {
  const bool to_engine = direction == LM_RETRIEVE;
  with_widest_vector(engine_bits(target) | bits, [&](auto width) {
    for (std::int64_t done = 0; done < count;) {
      const std::int32_t now = static_cast<std::int32_t>(std::min<std::int64_t>(count - done, kManyPieces));
      if (now <= kFewPieces) {
        launch_table<width, Dense, kFewPieces>(target, pieces + done, now, dense, to_engine, num_ctas, stream);
      } else {
        launch_table<width, Dense, kManyPieces>(target, pieces + done, now, dense, to_engine, num_ctas, stream);
      }
      done += now;
    }
  });
}

// Launched with no piece to move.
template <int kBytes, typename Dense>
void load(CUstream_st* stream) {
  const Shape shape{.threads_an_item = 1};
  move_pieces<kBytes, Dense, kFewPieces><<<1, kThreads, 0, stream>>>({}, nullptr, {}, {}, shape);
  move_pieces<kBytes, Dense, kManyPieces><<<1, kThreads, 0, stream>>>({}, nullptr, {}, {}, shape);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw CudaError(format("loading a kernel: %s", cudaGetErrorString(error)));
}

KernelGroup kernel_group(const lm_request& request, std::uint64_t base_bits) {
  if (request.num_groups != 1) throw Invalid(format("a launch is of one kernel group, got %d", request.num_groups));
  return {group_of(request, request.groups[0]), request.groups[0].block_ids, base_bits};
}

std::vector<Piece> pieces_of(const lm_request& request, const lm_piece* pieces, std::int64_t count) {
  std::vector<Piece> found;
  for (std::int64_t i = 0; i < count; ++i) {
    check_rectangle(request, pieces[i]);
    found.push_back(piece_of(pieces[i]));
  }
  return found;
}

}  // namespace

void load_kernels(CUstream_st* stream) {
  for (const std::uint64_t bits : {1, 2, 4, 8, 16}) {
    with_widest_vector(bits, [stream](auto width) {
      load<width, Staged>(stream);
      load<width, Mapped>(stream);
    });
  }
}

void scatter_staged(const KernelGroup& target, const Piece* pieces, std::int64_t num_pieces, std::uint64_t staging,
                    lm_direction direction, std::int32_t num_ctas, CUstream_st* stream) {
  const Staged dense{staging};
  launch(target, pieces, num_pieces, dense, dense_bits(dense, pieces, num_pieces), direction,
         num_ctas > 0 ? num_ctas : kWideCtas, stream);
}

void move_mapped(const KernelGroup& target, const Piece* pieces, std::int64_t num_pieces, const std::uint64_t* objects,
                 std::uint64_t object_bits, lm_direction direction, std::int32_t num_ctas, CUstream_st* stream) {
  const std::uint64_t bits = object_bits | static_cast<std::uint64_t>(target.group.object_offset);
  launch(target, pieces, num_pieces, Mapped{objects}, bits, direction, num_ctas > 0 ? num_ctas : kGatherCtas, stream);
}

}  // namespace lamella

extern "C" {

lm_status lm_cuda_scatter(const lm_request* request, const lm_piece* pieces, int64_t num_pieces, uint64_t staging,
                          uint64_t base_bits, int32_t num_ctas, void* stream) {
  return lamella::guarded([&] {
    const lamella::KernelGroup target = lamella::kernel_group(*request, base_bits);
    const std::vector<lamella::Piece> moved = lamella::pieces_of(*request, pieces, num_pieces);
    lamella::scatter_staged(target, moved.data(), num_pieces, staging, static_cast<lm_direction>(request->direction),
                            num_ctas, static_cast<CUstream_st*>(stream));
  });
}

lm_status lm_cuda_move_mapped(const lm_request* request, const lm_piece* pieces, int64_t num_pieces,
                              const uint64_t* objects, uint64_t object_bits, uint64_t base_bits, int32_t num_ctas,
                              void* stream) {
  return lamella::guarded([&] {
    const lamella::KernelGroup target = lamella::kernel_group(*request, base_bits);
    const std::vector<lamella::Piece> moved = lamella::pieces_of(*request, pieces, num_pieces);
    lamella::move_mapped(target, moved.data(), num_pieces, objects, object_bits,
                         static_cast<lm_direction>(request->direction), num_ctas, static_cast<CUstream_st*>(stream));
  });
}

}  // extern "C"
