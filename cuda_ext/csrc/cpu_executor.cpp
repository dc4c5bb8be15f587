// Executes a transfer on host memory: the CPU is a device like any other (DESIGN D9).
//
//   LM_DIRECT   object <-> blocks, runs as long as both sides keep them contiguous
//   LM_STAGED   object <-> staging window <-> blocks: what the CUDA engine does, with memcpy for the copy engine and
//               threads for the kernel
//
// Windows go one after another; inside one, units of about kUnitBytes are shared among the crew's threads. In the
// dense side's order a unit's bytes are contiguous, so two units never write the same byte.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "lamella/address.cuh"
#include "lamella/copy.hpp"
#include "lamella/crew.hpp"
#include "lamella/errors.hpp"
#include "lamella/lamella.h"
#include "lamella/plan.hpp"
#include "lamella/request.hpp"

namespace lamella {
namespace {

constexpr std::int64_t kUnitBytes = 256 << 10;  // fits a core's L2 twice, and hides the cost of taking it
constexpr std::int64_t kShareBytes = 512 << 10; // below this, waking a thread costs more than it saves

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Copies one contiguous run, split where the pool's registration pieces meet.
class RunCopy {
 public:
  RunCopy(const lm_host_objects& objects, bool to_engine, bool dense_is_object)
      : base_(objects.registered_base),
        piece_bytes_(dense_is_object ? objects.registered_piece_bytes : 0),
        to_engine_(to_engine) {}

  void operator()(std::uint64_t engine, std::uint64_t dense, std::int64_t bytes) const {
    while (bytes > 0) {
      const std::int64_t now = bytes_this_copy(dense, bytes, base_, piece_bytes_);
      if (to_engine_) {
        std::memcpy(at(engine), at(dense), static_cast<std::size_t>(now));
      } else {
        std::memcpy(at(dense), at(engine), static_cast<std::size_t>(now));
      }
      dense = advanced(dense, now);
      engine += static_cast<std::uint64_t>(now);
      bytes -= now;
    }
  }

 private:
  std::uint64_t base_;
  std::int64_t piece_bytes_;
  bool to_engine_;
};

// Joins runs that follow one another on both sides, whatever they are: tokens, blocks, kv planes or layers.
class Joiner {
 public:
  explicit Joiner(const RunCopy& copy) : copy_(copy) {}
  ~Joiner() { flush(); }
  Joiner(const Joiner&) = delete;
  Joiner& operator=(const Joiner&) = delete;

  void add(std::uint64_t engine, std::uint64_t dense, std::int64_t bytes) {
    const std::uint64_t length = static_cast<std::uint64_t>(bytes_);
    if (engine == engine_ + length && dense == dense_ + length) {
      bytes_ += bytes;
      return;
    }
    flush();
    engine_ = engine;
    dense_ = dense;
    bytes_ = bytes;
  }

  void flush() {
    copy_(engine_, dense_, bytes_);
    bytes_ = 0;
  }

 private:
  const RunCopy& copy_;
  std::uint64_t engine_ = 0;
  std::uint64_t dense_ = 0;
  std::int64_t bytes_ = 0;
};

// How a piece is cut into units: some rows each, or some tokens of one row. A row is one layer of the dense side
// (token form: of one kv).
struct Units {
  std::int64_t rows_a_unit;
  std::int64_t tokens_a_unit;
  std::int64_t units_a_row;  // 1 unless a row is cut by tokens
  std::int64_t count;

  static Units of(const Group& g, const Piece& p) {
    const std::int64_t rows = std::int64_t{planes_of(g)} * p.num_layers;
    const std::int64_t row = piece_bytes(g, p) / rows;
    if (row <= kUnitBytes) {
      const std::int64_t joined = kUnitBytes / row;
      return {joined, p.num_tokens, 1, ceil_div(rows, joined)};
    }
    const std::int64_t blocks = blocks_for(g, ceil_div(p.num_tokens, ceil_div(row, kUnitBytes)));
    const std::int64_t tokens = blocks * g.block_tokens;
    return {1, tokens, ceil_div(p.num_tokens, tokens), rows * ceil_div(p.num_tokens, tokens)};
  }
};

class CpuTransfer {
 public:
  CpuTransfer(const lm_request& request, const lm_host_objects& objects, const lm_cpu_options& options)
      : request_(request),
        objects_(objects),
        options_(options),
        planner_(request),
        staged_(options.method == LM_STAGED),
        to_engine_(request.direction == LM_RETRIEVE),
        crew_(options.threads) {
    for (const Group& g : planner_.groups()) shapes_.emplace_back(g);
    if (!staged_) return;
    staging_ = options.staging;
    if (staging_ == 0) {
      own_staging_.reset(new unsigned char[static_cast<std::size_t>(staging_bytes(request))]);
      staging_ = reinterpret_cast<std::uintptr_t>(own_staging_.get());
    }
  }

  void run() {
    lm_window window{};
    while (planner_.next(pieces_, window)) {
      const bool share = window.num_bytes >= kShareBytes;
      if (staged_ && to_engine_) fill(share);
      scatter(share);
      if (staged_ && !to_engine_) fill(share);
      if (window.completes_slice >= 0 && options_.on_slice != nullptr) {
        options_.on_slice(options_.context, static_cast<std::int32_t>(window.completes_slice));
      }
    }
  }

 private:
  std::uint64_t object_of(const Piece& p) const { return objects_.addresses[p.object_index]; }

  // Between the objects' ranges and the window's images; in a store, from the images to the ranges.
  void fill(bool share) {
    number_units([](const Group& g, const Piece& p) { return ceil_div(piece_bytes(g, p), kUnitBytes); });
    crew_.run(first_unit_.back(), share, [this](std::int64_t unit) {
      const std::size_t index = piece_of(unit);
      const Piece& p = pieces_[index];
      const Group& g = planner_.groups()[static_cast<std::size_t>(p.group)];
      const RunCopy copy(objects_, to_engine_, true);
      const std::int64_t range = range_bytes(g, p);
      std::int64_t position = (unit - first_unit_[index]) * kUnitBytes;
      const std::int64_t end = std::min(position + kUnitBytes, piece_bytes(g, p));
      while (position < end) {
        const std::int64_t within = position % range;
        const std::int64_t bytes = std::min(range - within, end - position);
        copy(staging_ + static_cast<std::uint64_t>(p.staging_offset + position),
             object_of(p) + static_cast<std::uint64_t>(range_offset(g, p, position / range) + within), bytes);
        position += bytes;
      }
    });
  }

  // Between the engine's blocks and the dense side: the window's images, or the objects themselves.
  void scatter(bool share) {
    number_units([](const Group& g, const Piece& p) { return Units::of(g, p).count; });
    crew_.run(first_unit_.back(), share, [this](std::int64_t unit) {
      const std::size_t index = piece_of(unit);
      const Piece& p = pieces_[index];
      const Group& g = planner_.groups()[static_cast<std::size_t>(p.group)];
      const Units units = Units::of(g, p);
      const std::int64_t local = unit - first_unit_[index];
      const std::int64_t first_row = local / units.units_a_row * units.rows_a_unit;
      const std::int64_t rows = std::int64_t{planes_of(g)} * p.num_layers;
      const std::int64_t end_row = std::min(first_row + units.rows_a_unit, rows);
      const std::int64_t first_token = local % units.units_a_row * units.tokens_a_unit;
      const std::int64_t end_token = std::min<std::int64_t>(first_token + units.tokens_a_unit, p.num_tokens);
      const RunCopy copy(objects_, to_engine_, !staged_);
      Joiner joiner(copy);
      for (std::int64_t row = first_row; row < end_row; ++row) {
        if (g.form == Form::kToken) {
          move_tokens(g, p, row / p.num_layers, static_cast<std::int32_t>(row % p.num_layers), first_token, end_token,
                      joiner);
        } else {
          move_blocks(g, p, static_cast<std::int32_t>(row), first_token, end_token, joiner);
        }
      }
    });
  }

  std::int64_t block_at(const Piece& p, std::int64_t token) const {
    const Group& g = planner_.groups()[static_cast<std::size_t>(p.group)];
    return block_of(request_.groups[p.group].block_ids, block_index(g, token));
  }

  // Piece tokens [first, end) of one kv and one staged layer, block by block.
  void move_tokens(const Group& g, const Piece& p, std::int64_t kv, std::int32_t slot, std::int64_t first,
                   std::int64_t end, Joiner& joiner) const {
    const BlockShape& shape = shapes_[static_cast<std::size_t>(p.group)];
    const LayerSelector selector = selector_of(p);
    const std::int32_t layer = engine_layer(selector, slot);
    for (std::int64_t token = first; token < end;) {
      const std::int64_t place = sequence_token(g, p.object_index, p.first_token + token);
      const std::int64_t count = std::min(g.block_tokens - token_in_block(g, place), end - token);
      const std::uint64_t engine = engine_address(g, layer, kv, block_at(p, place), token_in_block(g, place)) +
                                   static_cast<std::uint64_t>(shape.origin());
      const std::uint64_t dense =
          staged_ ? staging_ + static_cast<std::uint64_t>(p.staging_offset +
                                                          staged_token(g, selector, p.num_tokens, kv, slot, token))
                  : object_of(p) + static_cast<std::uint64_t>(object_token(g, kv, layer, p.first_token + token));
      if (shape.is_run(count)) {
        joiner.add(engine, dense, count * hidden_bytes(g));
      } else {
        shape.copy(engine, dense, count, to_engine_);
      }
      token += count;
    }
  }

  // The blocks of piece tokens [first, end) of one staged layer, whole.
  void move_blocks(const Group& g, const Piece& p, std::int32_t slot, std::int64_t first, std::int64_t end,
                   Joiner& joiner) const {
    const std::int32_t layer = engine_layer(selector_of(p), slot);
    for (std::int64_t token = first; token < end; token += g.block_tokens) {
      const std::int64_t chunk_token = p.first_token + token;
      const std::int64_t block = block_at(p, sequence_token(g, p.object_index, chunk_token));
      const std::uint64_t dense =
          staged_ ? staging_ + static_cast<std::uint64_t>(p.staging_offset + staged_block(g, p.num_tokens, slot,
                                                                                          block_index(g, token)))
                  : object_of(p) + static_cast<std::uint64_t>(object_block(g, layer, block_index(g, chunk_token)));
      for (std::int32_t kv = 0; kv < g.kv; ++kv) {
        joiner.add(engine_address(g, layer, kv, block, 0), dense + static_cast<std::uint64_t>(kv * plane_bytes(g)),
                   plane_bytes(g));
      }
    }
  }

  // first_unit_[i] = the first unit of piece i; its back is the number of units.
  template <typename Count>
  void number_units(Count count) {
    first_unit_.assign(1, 0);
    for (const Piece& p : pieces_) {
      const Group& g = planner_.groups()[static_cast<std::size_t>(p.group)];
      first_unit_.push_back(first_unit_.back() + count(g, p));
    }
  }

  std::size_t piece_of(std::int64_t unit) const {
    const auto after = std::upper_bound(first_unit_.begin(), first_unit_.end(), unit);
    return static_cast<std::size_t>(after - first_unit_.begin()) - 1;
  }

  const lm_request& request_;
  const lm_host_objects& objects_;
  const lm_cpu_options& options_;
  Planner planner_;
  std::vector<BlockShape> shapes_;
  bool staged_;
  bool to_engine_;
  Crew crew_;
  std::unique_ptr<unsigned char[]> own_staging_;
  std::uint64_t staging_ = 0;
  std::vector<Piece> pieces_;
  std::vector<std::int64_t> first_unit_;
};

void check_options(const lm_request& request, const lm_cpu_options& options) {
  if (options.method != LM_DIRECT && options.method != LM_STAGED) {
    throw Invalid(format("method must be LM_DIRECT or LM_STAGED, got %d", options.method));
  }
  if (options.threads < 1 || options.threads > 1024) {
    throw Invalid(format("threads must be between 1 and 1024, got %d", options.threads));
  }
  if (options.method == LM_STAGED && options.staging != 0 && options.staging_bytes < staging_bytes(request)) {
    throw Invalid(format("staging must hold a window of %lld bytes, got %lld",
                         static_cast<long long>(staging_bytes(request)), static_cast<long long>(options.staging_bytes)));
  }
}

}  // namespace
}  // namespace lamella

extern "C" {

int32_t lm_abi_version(void) { return LM_ABI_VERSION; }

const char* lm_last_error(void) { return lamella::last_error().c_str(); }

lm_status lm_plan(const lm_request* request, lm_piece* pieces, int64_t piece_capacity, lm_window* windows,
                  int64_t window_capacity, int64_t* num_pieces, int64_t* num_windows) {
  return lamella::guarded([&] {
    lamella::Planner planner(*request);
    std::vector<lamella::Piece> found;
    lm_window window{};
    *num_pieces = *num_windows = 0;
    while (planner.next(found, window)) {
      if (*num_windows < window_capacity) windows[*num_windows] = window;
      ++*num_windows;
      for (const lamella::Piece& p : found) {
        if (*num_pieces < piece_capacity) {
          pieces[*num_pieces] = {p.object_index, p.group,      p.first_layer,   p.num_layers,
                                 p.first_token,  p.num_tokens, p.staging_offset};
        }
        ++*num_pieces;
      }
    }
  });
}

lm_status lm_cpu_execute(const lm_request* request, const lm_host_objects* objects, const lm_cpu_options* options) {
  return lamella::guarded([&] {
    lamella::check_plan(*request);
    lamella::check_engines(*request);
    lamella::check_objects(*request, *objects);
    lamella::check_options(*request, *options);
    lamella::CpuTransfer(*request, *objects, *options).run();
  });
}

}  // extern "C"
