// Moves parts of pieces between the three places: a host object, a staging image, the engine's blocks.
//
// "Dense" is the side that holds a piece in the object's order: the object itself, or the piece's staging image. Rows
// are the dense side's: one layer (token form: of one kv).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lamella/address.cuh"
#include "lamella/copy.hpp"
#include "lamella/lamella.h"

namespace lamella {

// Copies one contiguous run, split where the pool's registration pieces meet if the dense side is the pool.
class RunCopy {
 public:
  RunCopy(const lm_host_objects& objects, bool to_engine, bool dense_is_object, bool around_cache)
      : base_(objects.registered_base),
        piece_bytes_(dense_is_object ? objects.registered_piece_bytes : 0),
        to_engine_(to_engine),
        around_cache_(around_cache) {}

  void operator()(std::uint64_t engine, std::uint64_t dense, std::int64_t bytes) const {
    while (bytes > 0) {
      const std::int64_t now = bytes_this_copy(dense, bytes, base_, piece_bytes_);
      copy_run(at(to_engine_ ? engine : dense), at(to_engine_ ? dense : engine), static_cast<std::size_t>(now),
               around_cache_);
      dense = advanced(dense, now);
      engine += static_cast<std::uint64_t>(now);
      bytes -= now;
    }
  }

 private:
  std::uint64_t base_;
  std::int64_t piece_bytes_;
  bool to_engine_;
  bool around_cache_;
};

// Joins runs that follow one another on both sides, whatever they are: tokens, blocks, kv planes or layers.
class Joiner {
 public:
  explicit Joiner(const RunCopy& copy) : copy_(copy) {}
  ~Joiner() { copy_(engine_, dense_, bytes_); }
  Joiner(const Joiner&) = delete;
  Joiner& operator=(const Joiner&) = delete;

  void add(std::uint64_t engine, std::uint64_t dense, std::int64_t bytes) {
    const std::uint64_t length = static_cast<std::uint64_t>(bytes_);
    if (engine == engine_ + length && dense == dense_ + length) {
      bytes_ += bytes;
      return;
    }
    copy_(engine_, dense_, bytes_);
    engine_ = engine;
    dense_ = dense;
    bytes_ = bytes;
  }

 private:
  const RunCopy& copy_;
  std::uint64_t engine_ = 0;
  std::uint64_t dense_ = 0;
  std::int64_t bytes_ = 0;
};

class PieceMover {
 public:
  // `staging`: address of the window's images, 0 to move straight. `around_cache`: the whole is too large for a cache
  // to keep what was written. All arguments must outlive the mover.
  PieceMover(const lm_request& request, const std::vector<Group>& groups, const lm_host_objects& objects,
             std::uint64_t staging, bool around_cache)
      : request_(request),
        groups_(groups),
        objects_(objects),
        staging_(staging),
        to_engine_(request.direction == LM_RETRIEVE),
        around_cache_(around_cache) {
    for (const Group& g : groups) shapes_.emplace_back(g);
  }

  const Group& group_of(const Piece& p) const { return groups_[static_cast<std::size_t>(p.group)]; }
  std::int64_t rows_of(const Piece& p) const {
    const Group& g = group_of(p);
    return std::int64_t{planes_of(g)} * staged_layers(g, selector_of(p));
  }

  // Between the object's ranges and bytes [position, end) of the staging image that they fill one after another.
  void fill(const Piece& p, std::int64_t position, std::int64_t end) const {
    const Group& g = group_of(p);
    const RunCopy copy(objects_, to_engine_, true, around_cache_ && !to_engine_);
    const std::int64_t range = range_bytes(g, p);
    while (position < end) {
      const std::int64_t within = position % range;
      const std::int64_t bytes = std::min(range - within, end - position);
      copy(staging_ + static_cast<std::uint64_t>(p.staging_offset + position),
           object_of(p) + static_cast<std::uint64_t>(range_offset(g, p, position / range) + within), bytes);
      position += bytes;
    }
  }

  // Between the engine's blocks and the dense side: rows [row, end_row), of each the piece's tokens [token, end_token).
  void scatter(const Piece& p, std::int64_t row, std::int64_t end_row, std::int64_t token,
               std::int64_t end_token) const {
    const Group& g = group_of(p);
    const std::int64_t layers = staged_layers(g, selector_of(p));
    const RunCopy copy(objects_, to_engine_, staging_ == 0, around_cache_ && (to_engine_ || staging_ == 0));
    Joiner joiner(copy);
    for (; row < end_row; ++row) {
      const std::int32_t slot = static_cast<std::int32_t>(row % layers);
      if (g.form == Form::kToken) {
        move_tokens(g, p, row / layers, slot, token, end_token, joiner);
      } else {
        move_blocks(g, p, slot, token, end_token, joiner);
      }
    }
  }

 private:
  std::uint64_t object_of(const Piece& p) const { return objects_.addresses[p.object_index]; }
  std::int64_t block_at(const Group& g, const Piece& p, std::int64_t token) const {
    return block_of(request_.groups[p.group].block_ids, block_index(g, token));
  }

  void move_tokens(const Group& g, const Piece& p, std::int64_t kv, std::int32_t slot, std::int64_t token,
                   std::int64_t end, Joiner& joiner) const {
    const BlockShape& shape = shapes_[static_cast<std::size_t>(p.group)];
    const std::int32_t layer = engine_layer(selector_of(p), slot);
    while (token < end) {
      const std::int64_t place = sequence_token(g, p.object_index, p.first_token + token);
      const std::int64_t within = token_in_block(g, place);
      const std::int64_t count = std::min(g.block_tokens - within, end - token);
      const std::uint64_t engine = engine_address(g, layer, kv, block_at(g, p, place), within) +
                                   static_cast<std::uint64_t>(shape.origin());
      const std::uint64_t dense = dense_token(g, p, kv, slot, layer, token);
      if (shape.is_run(count)) {
        joiner.add(engine, dense, count * hidden_bytes(g));
      } else {
        shape.copy(engine, dense, count, to_engine_);
      }
      token += count;
    }
  }

  void move_blocks(const Group& g, const Piece& p, std::int32_t slot, std::int64_t token, std::int64_t end,
                   Joiner& joiner) const {
    const std::int32_t layer = engine_layer(selector_of(p), slot);
    for (; token < end; token += g.block_tokens) {
      const std::int64_t block = block_at(g, p, sequence_token(g, p.object_index, p.first_token + token));
      const std::uint64_t dense = dense_block(g, p, slot, layer, token);
      for (std::int32_t kv = 0; kv < g.kv; ++kv) {
        joiner.add(engine_address(g, layer, kv, block, 0), dense + static_cast<std::uint64_t>(kv * plane_bytes(g)),
                   plane_bytes(g));
      }
    }
  }

  std::uint64_t dense_token(const Group& g, const Piece& p, std::int64_t kv, std::int32_t slot, std::int32_t layer,
                            std::int64_t token) const {
    if (staging_ == 0) {
      return object_of(p) + static_cast<std::uint64_t>(object_token(g, kv, layer, p.first_token + token));
    }
    return staging_ +
           static_cast<std::uint64_t>(p.staging_offset + staged_token(g, selector_of(p), p.num_tokens, kv, slot, token));
  }

  std::uint64_t dense_block(const Group& g, const Piece& p, std::int32_t slot, std::int32_t layer,
                            std::int64_t token) const {
    if (staging_ == 0) {
      return object_of(p) + static_cast<std::uint64_t>(object_block(g, layer, block_index(g, p.first_token + token)));
    }
    return staging_ +
           static_cast<std::uint64_t>(p.staging_offset + staged_block(g, p.num_tokens, slot, block_index(g, token)));
  }

  const lm_request& request_;
  const std::vector<Group>& groups_;
  const lm_host_objects& objects_;
  std::uint64_t staging_;
  bool to_engine_;
  bool around_cache_;  // never into staging, which is read next
  std::vector<BlockShape> shapes_;
};

}  // namespace lamella
