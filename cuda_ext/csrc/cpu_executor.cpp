// Executes a transfer on host memory: the CPU is a device like any other.
//
//   LM_DIRECT   object <-> blocks, runs as long as both sides keep them contiguous
//   LM_STAGED   object <-> staging window <-> blocks: what the CUDA engine does, with memcpy for the copy engine and
//               threads for the kernel
//
// Windows go one after another; inside one, units of about kUnitBytes are shared among the crew's threads. Units cut
// the dense side, so no two of them write the same byte.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "lamella/address.cuh"
#include "lamella/crew.hpp"
#include "lamella/errors.hpp"
#include "lamella/lamella.h"
#include "lamella/piece_mover.hpp"
#include "lamella/plan.hpp"
#include "lamella/request.hpp"

namespace lamella {
namespace {

constexpr std::int64_t kUnitBytes = 256 << 10;   // stays in a core's L2 on both sides, and hides the cost of taking it
constexpr std::int64_t kShareBytes = 512 << 10;  // below this, waking a thread costs more than it saves
constexpr std::int64_t kCacheBytes = 32 << 20;   // what a last-level cache may keep for whoever reads the bytes next

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// How a piece's scatter is cut into units: several rows each, or some tokens of one row.
struct Units {
  std::int64_t rows_a_unit;
  std::int64_t tokens_a_unit;
  std::int64_t units_a_row;  // 1 unless a row is cut
  std::int64_t count;

  static Units of(const PieceMover& mover, const Piece& p) {
    const Group& g = mover.group_of(p);
    const std::int64_t rows = mover.rows_of(p);
    const std::int64_t row_bytes = piece_bytes(g, p) / rows;
    if (row_bytes <= kUnitBytes) {
      const std::int64_t joined = kUnitBytes / row_bytes;
      return {joined, p.num_tokens, 1, ceil_div(rows, joined)};
    }
    const std::int64_t tokens = blocks_for(g, ceil_div(p.num_tokens, ceil_div(row_bytes, kUnitBytes))) * g.block_tokens;
    return {1, tokens, ceil_div(p.num_tokens, tokens), rows * ceil_div(p.num_tokens, tokens)};
  }
};

class CpuTransfer {
 public:
  CpuTransfer(const lm_request& request, const lm_host_objects& objects, const lm_cpu_options& options)
      : options_(options),
        planner_(request),
        to_engine_(request.direction == LM_RETRIEVE),
        own_staging_(options.method == LM_STAGED && options.staging == 0
                         ? new unsigned char[static_cast<std::size_t>(staging_bytes(request))]
                         : nullptr),
        mover_(request, planner_.groups(), objects,
               own_staging_ ? reinterpret_cast<std::uintptr_t>(own_staging_.get())
                            : options.method == LM_STAGED ? options.staging : 0,
               request_bytes(request) > kCacheBytes),
        crew_(options.threads) {}

  void run() {
    const bool staged = options_.method == LM_STAGED;
    lm_window window{};
    while (planner_.next(pieces_, window)) {
      const bool share = window.num_bytes >= kShareBytes;
      if (staged && to_engine_) fill(share);
      scatter(share);
      if (staged && !to_engine_) fill(share);
      if (window.completes_slice >= 0 && options_.on_slice != nullptr) {
        options_.on_slice(options_.context, static_cast<std::int32_t>(window.completes_slice));
      }
    }
  }

 private:
  void fill(bool share) {
    number_units([this](const Piece& p) { return ceil_div(piece_bytes(mover_.group_of(p), p), kUnitBytes); });
    crew_.run(first_unit_.back(), share, [this](std::int64_t unit) {
      const std::size_t index = piece_of(unit);
      const Piece& p = pieces_[index];
      const std::int64_t position = (unit - first_unit_[index]) * kUnitBytes;
      mover_.fill(p, position, std::min(position + kUnitBytes, piece_bytes(mover_.group_of(p), p)));
    });
  }

  void scatter(bool share) {
    number_units([this](const Piece& p) { return Units::of(mover_, p).count; });
    crew_.run(first_unit_.back(), share, [this](std::int64_t unit) {
      const std::size_t index = piece_of(unit);
      const Piece& p = pieces_[index];
      const Units units = Units::of(mover_, p);
      const std::int64_t local = unit - first_unit_[index];
      const std::int64_t row = local / units.units_a_row * units.rows_a_unit;
      const std::int64_t token = local % units.units_a_row * units.tokens_a_unit;
      mover_.scatter(with_default_selector(mover_.group_of(p), p), row,
                     std::min(row + units.rows_a_unit, mover_.rows_of(p)), token,
                     std::min<std::int64_t>(token + units.tokens_a_unit, p.num_tokens));
    });
  }

  // first_unit_[i] = the first unit of piece i; its back is the number of units.
  template <typename Count>
  void number_units(Count count) {
    first_unit_.assign(1, 0);
    for (const Piece& p : pieces_) first_unit_.push_back(first_unit_.back() + count(p));
  }

  std::size_t piece_of(std::int64_t unit) const {
    const auto after = std::upper_bound(first_unit_.begin(), first_unit_.end(), unit);
    return static_cast<std::size_t>(after - first_unit_.begin()) - 1;
  }

  const lm_cpu_options& options_;
  Planner planner_;
  bool to_engine_;
  std::unique_ptr<unsigned char[]> own_staging_;
  PieceMover mover_;
  Crew crew_;
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
                         static_cast<long long>(staging_bytes(request)),
                         static_cast<long long>(options.staging_bytes)));
  }
}

}  // namespace
}  // namespace lamella

extern "C" {

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
