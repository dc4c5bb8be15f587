// The native planner: expands a compact request into the windows and pieces of reference.plan, one window at a time.
//
// reference/plan.py is the meaning; a test compares the two for random requests. Shared by the CPU executor and the
// CUDA engine's thread, which never hold more than one window's pieces.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lamella/address.cuh"
#include "lamella/errors.hpp"
#include "lamella/lamella.h"

namespace lamella {

inline Group group_of(const lm_request& request, const lm_group& source) {
  Group g{};
  g.bases = source.bases;
  g.block_stride = source.block_stride;
  g.token_stride = source.token_stride;
  g.head_stride = source.head_stride;
  g.dim_stride = source.dim_stride;
  g.object_offset = source.object_offset;
  g.num_layers = source.num_layers;
  g.kv = source.kv;
  g.num_heads = source.num_heads;
  g.head_dim = source.head_dim;
  g.element_bytes = source.element_bytes;
  g.block_tokens = source.block_tokens;
  g.chunk_tokens = request.chunk_tokens;
  g.form = static_cast<Form>(request.form);
  return g;
}

inline std::vector<Group> groups_of(const lm_request& request) {
  std::vector<Group> groups;
  groups.reserve(static_cast<std::size_t>(request.num_groups));
  for (std::int32_t i = 0; i < request.num_groups; ++i) groups.push_back(group_of(request, request.groups[i]));
  return groups;
}

inline Piece piece_of(const lm_piece& p) {
  return {p.object_index, p.group, p.first_layer, p.num_layers, p.first_token, p.num_tokens, p.staging_offset};
}

// Throws Invalid naming the first size that no plan can be made from. Caches and objects are not looked at.
inline void check_plan(const lm_request& request) {
  const auto refuse_unless = [](bool holds, const char* name, long long value) {
    if (!holds) throw Invalid(format("%s is out of range: got %lld", name, value));
  };
  refuse_unless(request.form == LM_FORM_TOKEN || request.form == LM_FORM_BLOCK, "form", request.form);
  refuse_unless(request.direction == LM_RETRIEVE || request.direction == LM_STORE, "direction", request.direction);
  refuse_unless(request.chunk_tokens >= 1, "chunk_tokens", request.chunk_tokens);
  refuse_unless(request.num_groups >= 1, "num_groups", request.num_groups);
  refuse_unless(request.num_slices >= 1, "num_slices", request.num_slices);
  refuse_unless(0 <= request.skip_tokens && request.skip_tokens <= request.num_tokens, "skip_tokens",
                request.skip_tokens);
  refuse_unless(request.num_tokens / request.chunk_tokens < INT32_MAX, "num_tokens", request.num_tokens);
  for (std::int32_t i = 0; i < request.num_groups; ++i) {
    const lm_group& g = request.groups[i];
    refuse_unless(g.num_layers >= 1, "num_layers", g.num_layers);
    refuse_unless(g.kv == 1 || g.kv == 2, "kv", g.kv);
    refuse_unless(g.num_heads >= 1, "num_heads", g.num_heads);
    refuse_unless(g.head_dim >= 1, "head_dim", g.head_dim);
    refuse_unless(g.element_bytes == 1 || g.element_bytes == 2 || g.element_bytes == 4, "element_bytes",
                  g.element_bytes);
    refuse_unless(g.block_tokens >= 1, "block_tokens", g.block_tokens);
    refuse_unless(g.object_offset >= 0, "object_offset", g.object_offset);
    const Group group = group_of(request, g);
    if (request.window_bytes < block_bytes(group)) {
      throw Invalid(format("window_bytes must be at least %lld (one block of one layer), got %lld",
                           static_cast<long long>(block_bytes(group)), static_cast<long long>(request.window_bytes)));
    }
    if (request.form == LM_FORM_BLOCK &&
        (request.chunk_tokens % g.block_tokens || request.num_tokens % g.block_tokens ||
         request.skip_tokens % g.block_tokens)) {
      throw Invalid(format("in block form chunk, num_tokens and skip_tokens must be multiples of %d", g.block_tokens));
    }
    const std::int64_t needed =
        request.skip_tokens == request.num_tokens ? 0 : blocks_for(group, request.num_tokens);
    if (g.num_block_ids < needed) {
      throw Invalid(format("%lld tokens need %lld blocks of %d, got %d block ids",
                           static_cast<long long>(request.num_tokens), static_cast<long long>(needed), g.block_tokens,
                           g.num_block_ids));
    }
  }
}

// Produces windows in order. The request and all it points to must outlive the planner.
class Planner {
 public:
  explicit Planner(const lm_request& request) : request_(request), groups_((check_plan(request), groups_of(request))) {
    enter_slice();
  }

  const std::vector<Group>& groups() const { return groups_; }

  // Replaces `pieces` by the next window's; false when there is none. `window.first_piece` counts over the whole plan.
  bool next(std::vector<Piece>& pieces, lm_window& window) {
    pieces.clear();
    if (slice_ == request_.num_slices) return false;
    window = {planned_, 0, 0, -1};
    for (Piece part{}; next_part(part);) {
      const std::int64_t bytes = piece_bytes(groups_[part.group], part);
      if (window.num_bytes + bytes > request_.window_bytes) {
        kept_ = part;  // opens the next window
        has_kept_ = true;
        break;
      }
      part.staging_offset = window.num_bytes;
      window.num_bytes += bytes;
      pieces.push_back(part);
    }
    if (!has_kept_) {
      window.completes_slice = slice_++;
      enter_slice();
    }
    window.num_pieces = static_cast<std::int64_t>(pieces.size());
    planned_ += window.num_pieces;
    return true;
  }

 private:
  // Own layers [first, first + count) of a group that lie in the present slice.
  struct Span {
    std::int32_t first;
    std::int32_t count;
  };

  Span span_of(std::int32_t group) const {
    const lm_group& source = request_.groups[group];
    const lm_slice& slice = request_.slices[slice_];
    const std::int32_t* end = source.layers + source.num_layers;
    const std::int32_t* first = std::lower_bound(source.layers, end, slice.first_layer);
    const std::int32_t* last = std::lower_bound(first, end, slice.first_layer + slice.num_layers);
    return {static_cast<std::int32_t>(first - source.layers), static_cast<std::int32_t>(last - first)};
  }

  void enter_slice() {
    if (slice_ == request_.num_slices) return;
    chunk_ = request_.skip_tokens / request_.chunk_tokens;
    group_ = -1;
    token_ = chunk_end_ = 0;
    layers_left_ = tokens_left_ = 0;
    enter_group();
  }

  // Moves on to the next (chunk, group) with layers in this slice; chunk_ == num_chunks() when there is none.
  void enter_group() {
    while (chunk_ < num_chunks()) {
      if (++group_ == request_.num_groups) {
        group_ = -1;
        ++chunk_;
        continue;
      }
      span_ = span_of(group_);
      if (span_.count == 0) continue;
      token_ = std::max<std::int64_t>(request_.skip_tokens, chunk_ * request_.chunk_tokens);
      chunk_end_ = std::min<std::int64_t>(request_.num_tokens, (chunk_ + 1) * request_.chunk_tokens);
      return;
    }
  }

  std::int64_t num_chunks() const {
    return (request_.num_tokens + request_.chunk_tokens - 1) / request_.chunk_tokens;
  }

  bool mapped(std::int64_t token) const {
    const std::int64_t block = block_of(request_.groups[group_].block_ids, block_index(groups_[group_], token));
    return is_mapped(block, request_.has_null_block != 0, request_.null_block);
  }

  std::int64_t next_block_start(std::int64_t token) const {
    const Group& g = groups_[group_];
    return token - token_in_block(g, token) + g.block_tokens;
  }

  // The slice's next rectangle, uncut: one for each longest run of tokens whose blocks are there.
  bool next_rectangle() {
    while (chunk_ < num_chunks()) {
      while (token_ < chunk_end_ && !mapped(token_)) token_ = next_block_start(token_);
      if (token_ >= chunk_end_) {
        enter_group();
        continue;
      }
      const std::int64_t start = token_;
      while (token_ < chunk_end_ && mapped(token_)) token_ = next_block_start(token_);
      const std::int64_t origin = chunk_ * request_.chunk_tokens;
      rectangle_ = {static_cast<std::int32_t>(chunk_),
                    group_,
                    span_.first,
                    span_.count,
                    static_cast<std::int32_t>(start - origin),
                    static_cast<std::int32_t>(std::min(token_, chunk_end_) - start),
                    0};
      layers_left_ = rectangle_.num_layers;
      tokens_left_ = rectangle_.num_tokens;
      return true;
    }
    return false;
  }

  // The next part that fits a window: whole layers while one fits, else block-aligned runs of tokens.
  bool next_part(Piece& part) {
    if (has_kept_) {
      has_kept_ = false;
      part = kept_;
      return true;
    }
    if (layers_left_ == 0 && !next_rectangle()) return false;
    const Group& g = groups_[rectangle_.group];
    const std::int64_t layer_bytes = rectangle_.num_tokens * token_layer_bytes(g);
    part = rectangle_;
    part.first_layer += rectangle_.num_layers - layers_left_;
    if (layer_bytes <= request_.window_bytes) {
      part.num_layers =
          static_cast<std::int32_t>(std::min<std::int64_t>(layers_left_, request_.window_bytes / layer_bytes));
      layers_left_ -= part.num_layers;
      return true;
    }
    const std::int64_t origin = sequence_token(g, rectangle_.object_index, 0);
    const std::int64_t end = origin + rectangle_.first_token + rectangle_.num_tokens;
    const std::int64_t token = end - tokens_left_;
    const std::int64_t blocks = request_.window_bytes / block_bytes(g);
    const std::int64_t stop = std::min(end, (block_index(g, token) + blocks) * g.block_tokens);
    part.num_layers = 1;
    part.first_token = static_cast<std::int32_t>(token - origin);
    part.num_tokens = static_cast<std::int32_t>(stop - token);
    tokens_left_ = static_cast<std::int32_t>(end - stop);
    if (tokens_left_ == 0) {
      --layers_left_;
      tokens_left_ = rectangle_.num_tokens;
    }
    return true;
  }

  const lm_request& request_;
  std::vector<Group> groups_;
  std::int32_t slice_ = 0;
  std::int64_t planned_ = 0;
  // Where the slice's walk stands.
  std::int64_t chunk_ = 0;
  std::int32_t group_ = -1;
  Span span_{};
  std::int64_t token_ = 0;  // of the sequence
  std::int64_t chunk_end_ = 0;
  // The rectangle being cut.
  Piece rectangle_{};
  std::int32_t layers_left_ = 0;
  std::int32_t tokens_left_ = 0;
  Piece kept_{};
  bool has_kept_ = false;
};

}  // namespace lamella
