// Every address rule of a transfer, once, for the host and for kernels.
//
// Framework-free C++17. Each rule is one line with a name, so that a reader can check it, and so that the mutation
// suite can break exactly one of them and see the properties turn red. The spelling is reference.layout's:
// K = kv, L = layers of the group, T = tokens of a chunk, D = hidden = heads * head_dim.
//
//   engine   bases[layer][kv] + block * block_stride + token * token_stride + head * head_stride + dim * dim_stride
//   object   token form [K, L, T, D];  block form [L, B, K, block tokens * D]
//   staging  token form [K, staged layers, piece tokens, D];  block form [staged layers, blocks, K, block tokens * D]
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define LM_HD __host__ __device__ __forceinline__
#else
#define LM_HD inline
#endif

namespace lamella {

enum class Form : std::int32_t { kToken = 0, kBlock = 1 };

// One kernel group as the address rules see it; passed to kernels by value.
struct Group {
  const std::uint64_t* bases;  // [L][K]; readable from where the rule runs
  std::int64_t block_stride;   // bytes, any sign
  std::int64_t token_stride;
  std::int64_t head_stride;
  std::int64_t dim_stride;
  std::int64_t object_offset;  // of this group's array in the object
  std::int32_t num_layers;
  std::int32_t kv;
  std::int32_t num_heads;
  std::int32_t head_dim;
  std::int32_t element_bytes;
  std::int32_t block_tokens;
  std::int32_t chunk_tokens;
  Form form;
};

// Which of the group's layers a staging image holds. Both 0: all layers, the same bits as an explicit (0, L).
struct LayerSelector {
  std::int32_t layer_offset;
  std::int32_t staged_layers;
};

// A rectangle of one object: some layers of one group, some tokens of the chunk (reference.plan.Piece). A planner's
// piece names its layers; first_layer = num_layers = 0 is the default selector.
struct Piece {
  std::int32_t object_index;
  std::int32_t group;
  std::int32_t first_layer;
  std::int32_t num_layers;
  std::int32_t first_token;
  std::int32_t num_tokens;
  std::int64_t staging_offset;
};

struct ByteRange {
  std::int64_t offset;
  std::int64_t num_bytes;
};

// ---- sizes

// D in bytes: one token, one layer, one kv.
LM_HD std::int64_t hidden_bytes(const Group& g) { return std::int64_t{g.num_heads} * g.head_dim * g.element_bytes; }
// One token, one layer, every kv.
LM_HD std::int64_t token_layer_bytes(const Group& g) { return g.kv * hidden_bytes(g); }
// One layer of one kv of an object.
LM_HD std::int64_t row_bytes(const Group& g) { return g.chunk_tokens * hidden_bytes(g); }
// One block, one layer, one kv.
LM_HD std::int64_t plane_bytes(const Group& g) { return g.block_tokens * hidden_bytes(g); }
// One block, one layer, every kv.
LM_HD std::int64_t block_bytes(const Group& g) { return g.kv * plane_bytes(g); }
// ---- layers: the engine is addressed at layer_offset + slot, staging by slot

LM_HD LayerSelector selector_of(const Piece& p) { return {p.first_layer, p.num_layers}; }
LM_HD std::int32_t staged_layers(const Group& g, LayerSelector s) {
  return s.staged_layers == 0 ? g.num_layers : s.staged_layers;
}
LM_HD std::int32_t engine_layer(LayerSelector s, std::int32_t slot) { return s.layer_offset + slot; }
// A piece of every layer is launched with the default, as chunk-major is.
LM_HD Piece with_default_selector(const Group& g, Piece p) {
  if (p.num_layers == g.num_layers) p.num_layers = 0;
  return p;
}
// What a piece moves, and what it occupies in a window.
LM_HD std::int64_t piece_bytes(const Group& g, const Piece& p) {
  return std::int64_t{staged_layers(g, selector_of(p))} * p.num_tokens * token_layer_bytes(g);
}

// ---- tokens and blocks; a sequence token is counted from the sequence's first token, a chunk token from its chunk's

LM_HD std::int64_t sequence_token(const Group& g, std::int32_t object_index, std::int64_t chunk_token) {
  return std::int64_t{object_index} * g.chunk_tokens + chunk_token;
}
LM_HD std::int64_t block_index(const Group& g, std::int64_t sequence_token) { return sequence_token / g.block_tokens; }
LM_HD std::int64_t token_in_block(const Group& g, std::int64_t sequence_token) {
  return sequence_token % g.block_tokens;
}
LM_HD std::int64_t blocks_for(const Group& g, std::int64_t num_tokens) {
  return (num_tokens + g.block_tokens - 1) / g.block_tokens;
}
LM_HD std::int64_t block_of(const std::int32_t* block_ids, std::int64_t index) { return block_ids[index]; }
LM_HD bool is_mapped(std::int64_t block, bool has_null_block, std::int64_t null_block) {
  return !has_null_block || block != null_block;
}

// ---- inside one token: objects and staging hold [H, head_dim], the engine strides

LM_HD std::int64_t dense_element(const Group& g, std::int64_t head, std::int64_t dim) {
  return (head * g.head_dim + dim) * g.element_bytes;
}
LM_HD std::int64_t strided_element(const Group& g, std::int64_t head, std::int64_t dim) {
  return head * g.head_stride + dim * g.dim_stride;
}

// ---- the engine's paged cache

LM_HD std::uint64_t engine_base(const Group& g, std::int64_t layer, std::int64_t kv) {
  return g.bases[layer * g.kv + kv];
}
// Of head 0, dim 0; `token` counts within the block.
LM_HD std::uint64_t engine_address(const Group& g, std::int64_t layer, std::int64_t kv, std::int64_t block,
                                   std::int64_t token) {
  return engine_base(g, layer, kv) + static_cast<std::uint64_t>(block * g.block_stride + token * g.token_stride);
}

// ---- the object, bytes from its start

LM_HD std::int64_t object_token(const Group& g, std::int64_t kv, std::int64_t layer, std::int64_t chunk_token) {
  return g.object_offset + (kv * g.num_layers + layer) * row_bytes(g) + chunk_token * hidden_bytes(g);
}
LM_HD std::int64_t object_block(const Group& g, std::int64_t layer, std::int64_t block_in_chunk) {
  return g.object_offset + layer * g.kv * row_bytes(g) + block_in_chunk * block_bytes(g);
}

// ---- the staging image of one piece, bytes from the image's start

LM_HD std::int64_t staged_token(const Group& g, LayerSelector s, std::int64_t piece_tokens, std::int64_t kv,
                                std::int64_t slot, std::int64_t token) {
  return ((kv * staged_layers(g, s) + slot) * piece_tokens + token) * hidden_bytes(g);
}
LM_HD std::int64_t staged_block(const Group& g, std::int64_t piece_tokens, std::int64_t slot, std::int64_t block) {
  return (slot * blocks_for(g, piece_tokens) + block) * block_bytes(g);
}

// ---- a piece's ranges of the object, in the order in which they fill its staging image

LM_HD bool covers_chunk(const Group& g, const Piece& p) { return p.num_tokens == g.chunk_tokens; }
LM_HD std::int32_t planes_of(const Group& g) { return g.form == Form::kToken ? g.kv : 1; }
LM_HD std::int64_t range_count(const Group& g, const Piece& p) {
  return covers_chunk(g, p) ? planes_of(g) : std::int64_t{planes_of(g)} * p.num_layers;
}
LM_HD std::int64_t range_bytes(const Group& g, const Piece& p) { return piece_bytes(g, p) / range_count(g, p); }
LM_HD std::int64_t range_offset(const Group& g, const Piece& p, std::int64_t index) {
  const std::int64_t layers_a_range = covers_chunk(g, p) ? p.num_layers : 1;
  const std::int64_t plane = index * layers_a_range / p.num_layers;
  const std::int64_t layer = p.first_layer + index * layers_a_range % p.num_layers;
  return g.form == Form::kToken ? object_token(g, plane, layer, p.first_token)
                                : object_block(g, layer, block_index(g, p.first_token));
}
LM_HD ByteRange object_range(const Group& g, const Piece& p, std::int64_t index) {
  return {range_offset(g, p, index), range_bytes(g, p)};
}

// ---- host memory registered in pieces: a copy ends where two pieces meet, and the next goes on from there

LM_HD std::int64_t bytes_to_seam(std::uint64_t address, std::uint64_t registered_base, std::int64_t piece_bytes) {
  return piece_bytes - static_cast<std::int64_t>((address - registered_base) % static_cast<std::uint64_t>(piece_bytes));
}
LM_HD std::int64_t bytes_this_copy(std::uint64_t address, std::int64_t wanted, std::uint64_t registered_base,
                                   std::int64_t piece_bytes) {
  if (piece_bytes == 0) return wanted;
  const std::int64_t left = bytes_to_seam(address, registered_base, piece_bytes);
  return left < wanted ? left : wanted;
}
LM_HD std::uint64_t advanced(std::uint64_t address, std::int64_t copied) {
  return address + static_cast<std::uint64_t>(copied);
}

}  // namespace lamella
