// The kernels: pieces between the engine's paged blocks and a dense side, with the address rules of address.cuh.
//
// A group of threads moves one token of one kv and one layer (an item), as vectors of the widest size that every
// address involved is aligned to. Grids are short and wide: an item is a few loads and stores a thread, and beside a
// busy engine many small thread blocks finish sooner than few long ones (EVIDENCE §4).
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lamella/address.cuh"
#include "lamella/errors.hpp"
#include "lamella/plan.hpp"
#include "lamella/request.hpp"
#include "scatter.hpp"

namespace lamella {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;                        // independent loads in flight a thread
constexpr std::int32_t kWideCtas = 1024;          // scatter: short and wide
constexpr std::int32_t kGatherCtas = 128;         // gather: enough loads in flight for the wire
constexpr std::int64_t kLeastBytesACta = 8 << 10; // below this a thread block does little but start

// ---- the dense sides

// Staging images of one window.
struct Staged {
  std::uint64_t staging;

  LM_HD std::uint64_t token(const Group& g, const Piece& p, std::int64_t kv, std::int64_t slot,
                            std::int64_t token) const {
    return staging + p.staging_offset + staged_token(g, selector_of(p), p.num_tokens, kv, slot, token);
  }
  LM_HD std::uint64_t block(const Group& g, const Piece& p, std::int64_t slot, std::int64_t block) const {
    return staging + p.staging_offset + staged_block(g, p.num_tokens, slot, block);
  }
};

// Host objects, mapped.
struct Mapped {
  const std::uint64_t* objects;

  static LM_HD std::int64_t layer(const Piece& p, std::int64_t slot) {
    return engine_layer(selector_of(p), static_cast<std::int32_t>(slot));
  }
  LM_HD std::uint64_t token(const Group& g, const Piece& p, std::int64_t kv, std::int64_t slot,
                            std::int64_t token) const {
    return objects[p.object_index] + object_token(g, kv, layer(p, slot), p.first_token + token);
  }
  LM_HD std::uint64_t block(const Group& g, const Piece& p, std::int64_t slot, std::int64_t block) const {
    return objects[p.object_index] + object_block(g, layer(p, slot), block_index(g, p.first_token) + block);
  }
};

// ---- vectors

template <int kBytes>
struct Vector;
template <>
struct Vector<16> {
  using type = uint4;
};
template <>
struct Vector<8> {
  using type = uint2;
};
template <>
struct Vector<4> {
  using type = std::uint32_t;
};
template <>
struct Vector<2> {
  using type = std::uint16_t;
};
template <>
struct Vector<1> {
  using type = std::uint8_t;
};

// Pieces as a kernel parameter: no table in device memory, and none to keep alive.
template <int kCapacity>
struct PieceTable {
  std::int32_t count;
  Piece pieces[kCapacity];
};
constexpr int kFewPieces = 32;
constexpr int kManyPieces = 480;

struct Shape {
  std::int32_t threads_an_item;  // a power of two, at most 32
  bool dense_tokens;             // a token's bytes are one run on the engine's side too
  bool to_engine;
};

// Where an item begins on either side.
struct Item {
  std::uint64_t engine;
  std::uint64_t dense;
};

template <typename Dense>
LM_HD Item token_item(const Group& g, const Piece& p, const std::int32_t* block_ids, const Dense& dense,
                      std::uint32_t index) {
  const std::uint32_t token = index % static_cast<std::uint32_t>(p.num_tokens);
  const std::uint32_t row = index / static_cast<std::uint32_t>(p.num_tokens);
  const std::uint32_t layers = static_cast<std::uint32_t>(staged_layers(g, selector_of(p)));
  const std::uint32_t slot = row % layers;
  const std::uint32_t kv = row / layers;
  const std::int64_t place = sequence_token(g, p.object_index, p.first_token + static_cast<std::int64_t>(token));
  const std::int64_t block = block_of(block_ids, block_index(g, place));
  const std::int32_t layer = engine_layer(selector_of(p), static_cast<std::int32_t>(slot));
  return {engine_address(g, layer, kv, block, token_in_block(g, place)) +
              static_cast<std::uint64_t>(strided_element(g, 0, 0) - dense_element(g, 0, 0)),
          dense.token(g, p, kv, slot, token)};
}

// In block form an item is one token's share of a block's bytes, whatever lies there.
template <typename Dense>
LM_HD Item block_item(const Group& g, const Piece& p, const std::int32_t* block_ids, const Dense& dense,
                      std::uint32_t index) {
  const std::uint32_t part = index % static_cast<std::uint32_t>(g.block_tokens);
  const std::uint32_t plane = index / static_cast<std::uint32_t>(g.block_tokens);
  const std::uint32_t kv = plane % static_cast<std::uint32_t>(g.kv);
  const std::uint32_t of_piece = plane / static_cast<std::uint32_t>(g.kv);
  const std::uint32_t blocks = static_cast<std::uint32_t>(blocks_for(g, p.num_tokens));
  const std::uint32_t in_layer = of_piece % blocks;
  const std::uint32_t slot = of_piece / blocks;
  const std::int64_t first = sequence_token(g, p.object_index, p.first_token);
  const std::int64_t block = block_of(block_ids, block_index(g, first) + in_layer);
  const std::int32_t layer = engine_layer(selector_of(p), static_cast<std::int32_t>(slot));
  const std::int64_t within = part * hidden_bytes(g);
  return {engine_address(g, layer, kv, block, 0) + static_cast<std::uint64_t>(within),
          dense.block(g, p, slot, in_layer) + static_cast<std::uint64_t>(kv * plane_bytes(g) + within)};
}

// The engine's distance from an item's start to its byte `offset`.
LM_HD std::int64_t engine_offset(const Group& g, bool dense_tokens, std::int32_t offset) {
  if (dense_tokens) return offset;
  const std::int32_t element = offset / g.element_bytes;
  return strided_element(g, element / g.head_dim, element % g.head_dim) - strided_element(g, 0, 0);
}

template <int kBytes, typename Dense, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    move_pieces(const __grid_constant__ Group g, const std::int32_t* __restrict__ block_ids,
                const __grid_constant__ Dense dense, const __grid_constant__ PieceTable<kCapacity> table,
                const __grid_constant__ Shape shape) {
  using V = typename Vector<kBytes>::type;
  const std::int32_t vectors = static_cast<std::int32_t>(hidden_bytes(g) / kBytes);
  const std::int32_t lane = static_cast<std::int32_t>(threadIdx.x) % shape.threads_an_item;
  const std::uint32_t in_cta = threadIdx.x / shape.threads_an_item;
  const std::uint32_t items_a_cta = kThreads / shape.threads_an_item;

  for (std::int32_t index = blockIdx.y; index < table.count; index += gridDim.y) {
    const Piece& p = table.pieces[index];
    const std::uint32_t items = static_cast<std::uint32_t>(piece_bytes(g, p) / hidden_bytes(g));
    for (std::uint32_t i = blockIdx.x * items_a_cta + in_cta; i < items; i += gridDim.x * items_a_cta) {
      const Item item = g.form == Form::kToken ? token_item(g, p, block_ids, dense, i)
                                               : block_item(g, p, block_ids, dense, i);
      for (std::int32_t first = lane; first < vectors; first += shape.threads_an_item * kUnroll) {
        V held[kUnroll];
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) {
          const std::int32_t v = first + k * shape.threads_an_item;
          if (v >= vectors) continue;
          const std::uint64_t engine =
              item.engine + static_cast<std::uint64_t>(engine_offset(g, shape.dense_tokens, v * kBytes));
          const std::uint64_t from = shape.to_engine ? item.dense + static_cast<std::uint64_t>(v) * kBytes : engine;
          held[k] = __ldcs(reinterpret_cast<const V*>(from));
        }
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) {
          const std::int32_t v = first + k * shape.threads_an_item;
          if (v >= vectors) continue;
          const std::uint64_t engine =
              item.engine + static_cast<std::uint64_t>(engine_offset(g, shape.dense_tokens, v * kBytes));
          const std::uint64_t to = shape.to_engine ? engine : item.dense + static_cast<std::uint64_t>(v) * kBytes;
          *reinterpret_cast<V*>(to) = held[k];
        }
      }
    }
  }
}

// ---- host side

// The largest of 16, 8, 4, 2, 1 that divides every number OR-ed into `bits`.
int widest_vector(std::uint64_t bits) {
  const std::uint64_t lowest = bits & (~bits + 1);
  return lowest == 0 || lowest > 16 ? 16 : static_cast<int>(lowest);
}

bool dims_are_dense(const Group& g) { return g.head_dim == 1 || g.dim_stride == g.element_bytes; }

bool tokens_are_dense(const Group& g) {
  if (g.form == Form::kBlock) return true;
  return dims_are_dense(g) && (g.num_heads == 1 || g.head_stride == std::int64_t{g.head_dim} * g.element_bytes);
}

// Everything on the engine's side that a vector's address is made of.
std::uint64_t engine_bits(const KernelGroup& target) {
  const Group& g = target.group;
  std::uint64_t bits = target.base_bits | static_cast<std::uint64_t>(hidden_bytes(g)) |
                       static_cast<std::uint64_t>(g.block_stride);
  if (g.form == Form::kBlock) return bits;
  if (g.block_tokens > 1) bits |= static_cast<std::uint64_t>(g.token_stride);
  if (tokens_are_dense(g)) return bits;
  if (g.num_heads > 1) bits |= static_cast<std::uint64_t>(g.head_stride);
  const std::int64_t run = dims_are_dense(g) ? std::int64_t{g.head_dim} * g.element_bytes : g.element_bytes;
  bits |= static_cast<std::uint64_t>(run);
  return dims_are_dense(g) ? bits : bits | static_cast<std::uint64_t>(g.dim_stride);
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
  const std::int64_t vectors = hidden_bytes(g) / kBytes;
  Shape shape{1, tokens_are_dense(g), to_engine};
  while (shape.threads_an_item < 32 && shape.threads_an_item < vectors) shape.threads_an_item *= 2;
  const std::int64_t useful = (largest + kLeastBytesACta - 1) / kLeastBytesACta;
  const std::int64_t share = std::max<std::int64_t>(1, num_ctas / count);
  const dim3 grid(static_cast<unsigned>(std::min(useful, share)), static_cast<unsigned>(std::min(count, num_ctas)));
  move_pieces<kBytes, Dense, kCapacity><<<grid, kThreads, 0, stream>>>(g, target.block_ids, dense, table, shape);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw CudaError(format("launching a move of %d pieces: %s", count, cudaGetErrorString(error)));
  }
}

template <int kBytes, typename Dense>
void launch_pieces(const KernelGroup& target, const Piece* pieces, std::int64_t count, const Dense& dense,
                   bool to_engine, std::int32_t num_ctas, CUstream_st* stream) {
  while (count > 0) {
    const std::int32_t now = static_cast<std::int32_t>(std::min<std::int64_t>(count, kManyPieces));
    if (now <= kFewPieces) {
      launch_table<kBytes, Dense, kFewPieces>(target, pieces, now, dense, to_engine, num_ctas, stream);
    } else {
      launch_table<kBytes, Dense, kManyPieces>(target, pieces, now, dense, to_engine, num_ctas, stream);
    }
    pieces += now;
    count -= now;
  }
}

template <typename Dense>
void launch(const KernelGroup& target, const Piece* pieces, std::int64_t count, const Dense& dense,
            std::uint64_t dense_bits, lm_direction direction, std::int32_t num_ctas, CUstream_st* stream) {
  const bool to_engine = direction == LM_RETRIEVE;
  switch (widest_vector(engine_bits(target) | dense_bits)) {
    case 16: return launch_pieces<16>(target, pieces, count, dense, to_engine, num_ctas, stream);
    case 8: return launch_pieces<8>(target, pieces, count, dense, to_engine, num_ctas, stream);
    case 4: return launch_pieces<4>(target, pieces, count, dense, to_engine, num_ctas, stream);
    case 2: return launch_pieces<2>(target, pieces, count, dense, to_engine, num_ctas, stream);
    default: return launch_pieces<1>(target, pieces, count, dense, to_engine, num_ctas, stream);
  }
}

}  // namespace

void scatter_staged(const KernelGroup& target, const Piece* pieces, std::int64_t num_pieces, std::uint64_t staging,
                    lm_direction direction, std::int32_t num_ctas, CUstream_st* stream) {
  std::uint64_t bits = staging;
  for (std::int64_t i = 0; i < num_pieces; ++i) bits |= static_cast<std::uint64_t>(pieces[i].staging_offset);
  launch(target, pieces, num_pieces, Staged{staging}, bits, direction, num_ctas > 0 ? num_ctas : kWideCtas, stream);
}

void move_mapped(const KernelGroup& target, const Piece* pieces, std::int64_t num_pieces, const std::uint64_t* objects,
                 std::uint64_t object_bits, lm_direction direction, std::int32_t num_ctas, CUstream_st* stream) {
  const std::uint64_t bits = object_bits | static_cast<std::uint64_t>(target.group.object_offset);
  launch(target, pieces, num_pieces, Mapped{objects}, bits, direction, num_ctas > 0 ? num_ctas : kGatherCtas, stream);
}

namespace {

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
