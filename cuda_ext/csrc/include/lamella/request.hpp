// What must hold before the first byte moves: the C boundary trusts no size, no block id and no address.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lamella/address.cuh"
#include "lamella/errors.hpp"
#include "lamella/lamella.h"
#include "lamella/plan.hpp"

namespace lamella {

// Whether a block's bytes are dense for each kv, in either inner order; only then can an object hold it as it is.
inline bool is_dense_block(const lm_group& g) {
  const auto fits = [](std::int64_t size, std::int64_t stride, std::int64_t& expected) {
    if (size > 1 && stride != expected) return false;
    expected *= size;
    return true;
  };
  std::int64_t thd = g.element_bytes;
  std::int64_t htd = g.element_bytes;
  return (fits(g.head_dim, g.dim_stride, thd) && fits(g.num_heads, g.head_stride, thd) &&
          fits(g.block_tokens, g.token_stride, thd)) ||
         (fits(g.head_dim, g.dim_stride, htd) && fits(g.block_tokens, g.token_stride, htd) &&
          fits(g.num_heads, g.head_stride, htd));
}

// Throws Invalid for a piece outside the objects, or one that cuts a block of the block form.
inline void check_rectangle(const lm_request& request, const lm_piece& p) {
  const auto refuse_unless = [](bool holds, const char* name, long long value) {
    if (!holds) throw Invalid(format("a piece's %s is out of range: got %lld", name, value));
  };
  refuse_unless(0 <= p.group && p.group < request.num_groups, "group", p.group);
  const lm_group& source = request.groups[p.group];
  const Group g = group_of(request, source);
  const bool by_default = p.first_layer == 0 && p.num_layers == 0;
  refuse_unless(0 <= p.first_layer && p.first_layer < g.num_layers, "first_layer", p.first_layer);
  refuse_unless(by_default || (1 <= p.num_layers && p.num_layers <= g.num_layers - p.first_layer), "num_layers",
                p.num_layers);
  refuse_unless(0 <= p.first_token && p.first_token < g.chunk_tokens, "first_token", p.first_token);
  refuse_unless(1 <= p.num_tokens && p.num_tokens <= g.chunk_tokens - p.first_token, "num_tokens", p.num_tokens);
  if (g.form == Form::kBlock) {
    refuse_unless(p.first_token % g.block_tokens == 0, "first_token", p.first_token);
    refuse_unless(p.num_tokens % g.block_tokens == 0, "num_tokens", p.num_tokens);
  }
  refuse_unless(p.object_index >= 0, "object_index", p.object_index);
  refuse_unless(p.staging_offset >= 0, "staging_offset", p.staging_offset);
}

// Throws Invalid for a piece that a planner could not have made of the request, the default selector apart.
inline void check_piece(const lm_request& request, const lm_piece& p) {
  check_rectangle(request, p);
  const lm_group& source = request.groups[p.group];
  const Group g = group_of(request, source);
  const std::int64_t first = sequence_token(g, p.object_index, p.first_token);
  const std::int64_t end = first + p.num_tokens;
  bool mapped = request.skip_tokens <= first && end <= request.num_tokens;
  for (std::int64_t i = block_index(g, first); mapped && i < blocks_for(g, end); ++i) {
    mapped = is_mapped(block_of(source.block_ids, i), request.has_null_block != 0, request.null_block);
  }
  if (!mapped) {
    throw Invalid(format("a piece's tokens %lld .. %lld are not all of the request's", static_cast<long long>(first),
                         static_cast<long long>(end - 1)));
  }
}

// Throws Invalid for a cache without addresses, a block id outside it, or a block that a retrieve would write twice.
inline void check_engines(const lm_request& request) {
  for (std::int32_t index = 0; index < request.num_groups; ++index) {
    const lm_group& source = request.groups[index];
    if (source.bases == nullptr || source.num_blocks < 1) {
      throw Invalid(format("kernel group %d has no cache to move to or from", index));
    }
    if (request.form == LM_FORM_BLOCK && !is_dense_block(source)) {
      throw Invalid("the block form needs engine blocks without gaps; use the token form for this view");
    }
    if (request.skip_tokens == request.num_tokens) continue;
    const Group g = group_of(request, source);
    std::vector<bool> seen(static_cast<std::size_t>(source.num_blocks));
    const std::int64_t end = blocks_for(g, request.num_tokens);
    for (std::int64_t i = block_index(g, request.skip_tokens); i < end; ++i) {
      const std::int64_t block = block_of(source.block_ids, i);
      if (!is_mapped(block, request.has_null_block != 0, request.null_block)) continue;
      if (block < 0 || block >= source.num_blocks) {
        throw Invalid(format("block id %lld is outside the cache's 0 .. %d", static_cast<long long>(block),
                             source.num_blocks - 1));
      }
      if (seen[static_cast<std::size_t>(block)] && request.direction == LM_RETRIEVE) {
        throw Invalid(format("block %lld would be written twice by one retrieve; name it once, or as null_block",
                             static_cast<long long>(block)));
      }
      seen[static_cast<std::size_t>(block)] = true;
    }
  }
}

// What a request moves if no block of it is the null block.
inline std::int64_t request_bytes(const lm_request& request) {
  std::int64_t bytes = 0;
  for (std::int32_t index = 0; index < request.num_groups; ++index) {
    const Group g = group_of(request, request.groups[index]);
    bytes += (request.num_tokens - request.skip_tokens) * g.num_layers * token_layer_bytes(g);
  }
  return bytes;
}

// Staging that no window of the request exceeds.
inline std::int64_t staging_bytes(const lm_request& request) {
  return std::min(request.window_bytes, request_bytes(request));
}

// Whether any block of a chunk's requested tokens is there, in any group: only then is its object touched.
inline bool touches(const lm_request& request, std::int64_t chunk) {
  const std::int64_t start = chunk * request.chunk_tokens;
  const std::int64_t first = start > request.skip_tokens ? start : request.skip_tokens;
  const std::int64_t last = start + request.chunk_tokens < request.num_tokens ? start + request.chunk_tokens
                                                                              : request.num_tokens;
  for (std::int32_t index = 0; index < request.num_groups; ++index) {
    const lm_group& source = request.groups[index];
    const Group g = group_of(request, source);
    for (std::int64_t i = block_index(g, first); i < blocks_for(g, last); ++i) {
      if (is_mapped(block_of(source.block_ids, i), request.has_null_block != 0, request.null_block)) return true;
    }
  }
  return false;
}

// Throws Invalid for a chunk that is touched but has no object, or an object before the pool's first registered byte.
inline void check_objects(const lm_request& request, const lm_host_objects& objects) {
  if (objects.registered_piece_bytes < 0) {
    throw Invalid(format("registered_piece_bytes must not be negative, got %lld",
                         static_cast<long long>(objects.registered_piece_bytes)));
  }
  if (request.skip_tokens == request.num_tokens) return;
  const std::int64_t end = (request.num_tokens + request.chunk_tokens - 1) / request.chunk_tokens;
  if (objects.num_objects < end) {
    throw Invalid(format("%lld tokens need %lld objects of %d, got %lld", static_cast<long long>(request.num_tokens),
                         static_cast<long long>(end), request.chunk_tokens,
                         static_cast<long long>(objects.num_objects)));
  }
  for (std::int64_t chunk = request.skip_tokens / request.chunk_tokens; chunk < end; ++chunk) {
    const std::uint64_t address = objects.addresses[chunk];
    if (address == 0 && !touches(request, chunk)) continue;
    if (address == 0) throw Invalid(format("chunk %lld has no object", static_cast<long long>(chunk)));
    if (objects.registered_piece_bytes > 0 && address < objects.registered_base) {
      throw Invalid(format("the object of chunk %lld lies before registered_base", static_cast<long long>(chunk)));
    }
  }
}

}  // namespace lamella
