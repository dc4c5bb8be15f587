// What one thread of a kernel does, for the host and for kernels: the host's launches run it in a loop, so that every
// line of index arithmetic is tested on machines without a GPU.
//
// An item is one token of one kv and one layer (block form: as many bytes of a block). A group of threads moves it as
// vectors of the widest size that every address involved is aligned to.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "lamella/address.cuh"

#ifdef __CUDA_ARCH__
#define LM_UNROLL _Pragma("unroll")
#else
#define LM_UNROLL
#endif

namespace lamella {

// One kernel group as a launch needs it.
struct KernelGroup {
  Group group;                    // `bases` readable from where the launch runs
  const std::int32_t* block_ids;  // as well
  std::uint64_t base_bits;        // every base address OR-ed together: how they are aligned
};

// ---- the dense sides

// Staging images of one window.
struct Staged {
  std::uint64_t staging;

  LM_HD std::uint64_t token(const Group& g, const Piece& p, std::int64_t kv, std::int64_t slot,
                            std::int64_t token) const {
    return staging + static_cast<std::uint64_t>(p.staging_offset +
                                                staged_token(g, selector_of(p), p.num_tokens, kv, slot, token));
  }
  LM_HD std::uint64_t block(const Group& g, const Piece& p, std::int64_t slot, std::int64_t block) const {
    return staging + static_cast<std::uint64_t>(p.staging_offset + staged_block(g, p.num_tokens, slot, block));
  }
};

// Host objects, mapped: a table by absolute chunk.
struct Mapped {
  const std::uint64_t* objects;

  static LM_HD std::int64_t layer(const Piece& p, std::int64_t slot) {
    return engine_layer(selector_of(p), static_cast<std::int32_t>(slot));
  }
  LM_HD std::uint64_t token(const Group& g, const Piece& p, std::int64_t kv, std::int64_t slot,
                            std::int64_t token) const {
    return objects[p.object_index] +
           static_cast<std::uint64_t>(object_token(g, kv, layer(p, slot), p.first_token + token));
  }
  LM_HD std::uint64_t block(const Group& g, const Piece& p, std::int64_t slot, std::int64_t block) const {
    return objects[p.object_index] +
           static_cast<std::uint64_t>(object_block(g, layer(p, slot), block_index(g, p.first_token) + block));
  }
};

// ---- items

// Where an item begins on either side.
struct Item {
  std::uint64_t engine;
  std::uint64_t dense;
};

LM_HD std::uint32_t item_count(const Group& g, const Piece& p) {
  return static_cast<std::uint32_t>(piece_bytes(g, p) / hidden_bytes(g));
}

template <typename Dense>
LM_HD Item token_item(const Group& g, const Piece& p, const std::int32_t* block_ids, const Dense& dense,
                      std::uint32_t index) {
  const std::uint32_t tokens = static_cast<std::uint32_t>(p.num_tokens);
  const std::uint32_t layers = static_cast<std::uint32_t>(staged_layers(g, selector_of(p)));
  const std::uint32_t token = index % tokens;
  const std::uint32_t slot = index / tokens % layers;
  const std::uint32_t kv = index / tokens / layers;
  const std::int64_t place = sequence_token(g, p.object_index, p.first_token + std::int64_t{token});
  const std::int64_t block = block_of(block_ids, block_index(g, place));
  const std::int32_t layer = engine_layer(selector_of(p), static_cast<std::int32_t>(slot));
  return {engine_address(g, layer, kv, block, token_in_block(g, place)), dense.token(g, p, kv, slot, token)};
}

template <typename Dense>
LM_HD Item block_item(const Group& g, const Piece& p, const std::int32_t* block_ids, const Dense& dense,
                      std::uint32_t index) {
  const std::uint32_t parts = static_cast<std::uint32_t>(g.block_tokens);
  const std::uint32_t blocks = static_cast<std::uint32_t>(blocks_for(g, p.num_tokens));
  const std::uint32_t planes = static_cast<std::uint32_t>(g.kv);
  const std::int64_t within = index % parts * hidden_bytes(g);
  const std::uint32_t kv = index / parts % planes;
  const std::uint32_t in_piece = index / parts / planes % blocks;
  const std::uint32_t slot = index / parts / planes / blocks;
  const std::int64_t first = block_index(g, sequence_token(g, p.object_index, p.first_token));
  const std::int64_t block = block_of(block_ids, first + in_piece);
  const std::int32_t layer = engine_layer(selector_of(p), static_cast<std::int32_t>(slot));
  return {engine_address(g, layer, kv, block, 0) + static_cast<std::uint64_t>(within),
          dense.block(g, p, slot, in_piece) + static_cast<std::uint64_t>(kv * plane_bytes(g) + within)};
}

// ---- vectors

#ifdef __CUDACC__
using Bytes16 = uint4;
using Bytes8 = uint2;
#else
struct alignas(16) Bytes16 {
  std::uint64_t words[2];
};
using Bytes8 = std::uint64_t;
#endif

template <int kBytes>
struct Vector;
template <>
struct Vector<16> {
  using type = Bytes16;
};
template <>
struct Vector<8> {
  using type = Bytes8;
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

#ifndef __CUDA_ARCH__
// A device traps on a vector that is not aligned; the host would not, so it looks.
inline void* aligned(std::uint64_t address, std::size_t bytes) {
  if (address % bytes != 0) throw std::logic_error("a vector is not aligned to its own size");
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
}
#endif

// Each byte is read once, so it need not stay in a cache.
template <typename V>
LM_HD V load(std::uint64_t address) {
#ifdef __CUDA_ARCH__
  return __ldcs(reinterpret_cast<const V*>(address));
#else
  V value;
  std::memcpy(&value, aligned(address, sizeof value), sizeof value);
  return value;
#endif
}

template <typename V>
LM_HD void store(std::uint64_t address, const V& value) {
#ifdef __CUDA_ARCH__
  *reinterpret_cast<V*>(address) = value;
#else
  std::memcpy(aligned(address, sizeof value), &value, sizeof value);
#endif
}

// ---- how a launch moves its items

struct Shape {
  std::int32_t threads_an_item;  // a power of two, at most 32
  bool dense_tokens;             // an item's bytes are one run on the engine's side too
  bool to_engine;
};

// From an item's start to its byte `offset`, on the engine's side.
LM_HD std::int64_t engine_offset(const Group& g, bool dense_tokens, std::int32_t offset) {
  if (dense_tokens) return strided_element(g, 0, 0) + offset;
  const std::int32_t element = offset / g.element_bytes;
  return strided_element(g, element / g.head_dim, element % g.head_dim) + offset % g.element_bytes;
}

constexpr int kUnroll = 4;  // independent loads in flight a thread

// Thread `lane` of an item's group moves its share of the item.
template <int kBytes, typename Dense>
LM_HD void move_item(const Group& g, const Piece& p, const std::int32_t* block_ids, const Dense& dense,
                     const Shape& shape, std::uint32_t index, std::int32_t lane) {
  using V = typename Vector<kBytes>::type;
  const Item item = g.form == Form::kToken ? token_item(g, p, block_ids, dense, index)
                                           : block_item(g, p, block_ids, dense, index);
  const std::int32_t vectors = static_cast<std::int32_t>(hidden_bytes(g) / kBytes);
  const std::int32_t step = shape.threads_an_item;
  for (std::int32_t first = lane; first < vectors; first += step * kUnroll) {
    V held[kUnroll] = {};
    std::uint64_t engine[kUnroll] = {};
    LM_UNROLL
    for (int k = 0; k < kUnroll; ++k) {
      const std::int32_t v = first + k * step;
      if (v >= vectors) continue;
      engine[k] = item.engine + static_cast<std::uint64_t>(engine_offset(g, shape.dense_tokens, v * kBytes));
      held[k] = load<V>(shape.to_engine ? item.dense + static_cast<std::uint64_t>(v) * kBytes : engine[k]);
    }
    LM_UNROLL
    for (int k = 0; k < kUnroll; ++k) {
      const std::int32_t v = first + k * step;
      if (v >= vectors) continue;
      store<V>(shape.to_engine ? engine[k] : item.dense + static_cast<std::uint64_t>(v) * kBytes, held[k]);
    }
  }
}

// ---- choices of a launch, made on the host

inline std::uint64_t or_of(const std::uint64_t* addresses, std::int64_t count) {
  std::uint64_t bits = 0;
  for (std::int64_t i = 0; i < count; ++i) bits |= addresses[i];
  return bits;
}

// The largest of 16, 8, 4, 2, 1 that divides every number OR-ed into `bits`.
inline int widest_vector(std::uint64_t bits) {
  const std::uint64_t lowest = bits & (~bits + 1);
  return lowest == 0 || lowest > 16 ? 16 : static_cast<int>(lowest);
}

inline bool dims_are_dense(const Group& g) { return g.head_dim == 1 || g.dim_stride == g.element_bytes; }
inline bool items_are_dense(const Group& g) {
  return g.form == Form::kBlock ||
         (dims_are_dense(g) && (g.num_heads == 1 || g.head_stride == std::int64_t{g.head_dim} * g.element_bytes));
}

// Every number that a vector's address on the engine's side is a sum of.
inline std::uint64_t engine_bits(const KernelGroup& target) {
  const Group& g = target.group;
  const auto bits_of = [](std::int64_t number) { return static_cast<std::uint64_t>(number); };
  std::uint64_t bits = target.base_bits | bits_of(hidden_bytes(g)) | bits_of(g.block_stride);
  if (g.form == Form::kBlock) return bits;
  if (g.block_tokens > 1) bits |= bits_of(g.token_stride);
  if (items_are_dense(g)) return bits;
  if (g.num_heads > 1) bits |= bits_of(g.head_stride);
  if (dims_are_dense(g)) return bits | bits_of(std::int64_t{g.head_dim} * g.element_bytes);
  return bits | bits_of(g.dim_stride) | bits_of(g.element_bytes);
}

// And on the dense side.
inline std::uint64_t dense_bits(const Staged& dense, const Piece* pieces, std::int64_t num_pieces) {
  std::uint64_t bits = dense.staging;
  for (std::int64_t i = 0; i < num_pieces; ++i) bits |= static_cast<std::uint64_t>(pieces[i].staging_offset);
  return bits;
}

inline Shape shape_of(const Group& g, int vector_bytes, bool to_engine) {
  Shape shape{1, items_are_dense(g), to_engine};
  while (shape.threads_an_item < 32 && shape.threads_an_item * vector_bytes < hidden_bytes(g)) {
    shape.threads_an_item *= 2;
  }
  return shape;
}

// Calls launch(std::integral_constant<int, width>{}) with the widest vector that fits.
template <typename Launch>
void with_widest_vector(std::uint64_t bits, const Launch& launch) {
  switch (widest_vector(bits)) {
    case 16: return launch(std::integral_constant<int, 16>{});
    case 8: return launch(std::integral_constant<int, 8>{});
    case 4: return launch(std::integral_constant<int, 4>{});
    case 2: return launch(std::integral_constant<int, 2>{});
    default: return launch(std::integral_constant<int, 1>{});
  }
}

}  // namespace lamella
