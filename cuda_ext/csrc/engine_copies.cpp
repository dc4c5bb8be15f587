#include "engine_copies.hpp"

#include <algorithm>
#include <cmath>

namespace lamella {
namespace {

constexpr std::int64_t kMostPitch = std::int64_t{1} << 30;  // CUDA's limit is 2^31 - 1
constexpr std::int64_t kFewestRows = 4;                     // any two rows have one stride; that alone saves nothing

// Tokens of a block are one dense run on the engine's side, in the object's order.
bool tokens_are_dense(const Group& g) {
  std::int64_t expected = g.element_bytes;
  if (g.head_dim > 1 && g.dim_stride != expected) return false;
  expected *= g.head_dim;
  if (g.num_heads > 1 && g.head_stride != expected) return false;
  expected *= g.num_heads;
  return g.block_tokens == 1 || g.token_stride == expected;
}

std::int64_t block_at(const CopyJob& job, const Piece& p, std::int64_t place) {
  const Group& g = job.groups[static_cast<std::size_t>(p.group)];
  return block_of(job.request.groups[p.group].block_ids, block_index(g, place));
}

std::uint64_t object_of(const CopyJob& job, const Piece& p) {
  return job.objects[static_cast<std::size_t>(p.object_index)];
}

bool same_shape(const Piece& a, const Piece& b) {
  return a.group == b.group && a.first_layer == b.first_layer && a.num_layers == b.num_layers &&
         a.first_token == b.first_token && a.num_tokens == b.num_tokens;
}

void add_direct_tokens(const CopyJob& job, const Piece& p, CopyList& list) {
  const Group& g = job.groups[static_cast<std::size_t>(p.group)];
  for (std::int32_t kv = 0; kv < g.kv; ++kv) {
    for (std::int32_t slot = 0; slot < p.num_layers; ++slot) {
      const std::int32_t layer = engine_layer(selector_of(p), slot);
      for (std::int64_t token = 0; token < p.num_tokens;) {
        const std::int64_t place = sequence_token(g, p.object_index, p.first_token + token);
        const std::int64_t count =
            std::min<std::int64_t>(g.block_tokens - token_in_block(g, place), p.num_tokens - token);
        list.add(object_of(job, p) + static_cast<std::uint64_t>(object_token(g, kv, layer, p.first_token + token)),
                 engine_address(g, layer, kv, block_at(job, p, place), token_in_block(g, place)),
                 count * hidden_bytes(g));
        token += count;
      }
    }
  }
}

void add_direct_blocks(const CopyJob& job, const Piece& p, CopyList& list) {
  const Group& g = job.groups[static_cast<std::size_t>(p.group)];
  for (std::int32_t slot = 0; slot < p.num_layers; ++slot) {
    const std::int32_t layer = engine_layer(selector_of(p), slot);
    for (std::int64_t token = p.first_token; token < p.first_token + p.num_tokens; token += g.block_tokens) {
      const std::int64_t block = block_at(job, p, sequence_token(g, p.object_index, token));
      const std::uint64_t host =
          object_of(job, p) + static_cast<std::uint64_t>(object_block(g, layer, block_index(g, token)));
      for (std::int32_t kv = 0; kv < g.kv; ++kv) {
        list.add(host + static_cast<std::uint64_t>(kv * plane_bytes(g)), engine_address(g, layer, kv, block, 0),
                 plane_bytes(g));
      }
    }
  }
}

}  // namespace

void CopyList::add(std::uint64_t host, std::uint64_t device, std::int64_t bytes) {
  while (bytes > 0) {
    const std::int64_t now = bytes_this_copy(host, bytes, base_, piece_bytes_);
    add_unseamed(host, device, now);
    host = advanced(host, now);
    device = advanced(device, now);
    bytes -= now;
  }
}

bool CopyList::same_piece(std::uint64_t a, std::uint64_t b) const {
  return piece_bytes_ == 0 || (a - base_) / static_cast<std::uint64_t>(piece_bytes_) ==
                                  (b - base_) / static_cast<std::uint64_t>(piece_bytes_);
}

bool CopyList::extends(const Rows& rows, std::uint64_t host, std::uint64_t device, std::int64_t bytes) const {
  return rows.height == 1 && host == advanced(rows.host, rows.width) &&
         device == advanced(rows.device, rows.width) &&
         same_piece(rows.host, advanced(host, bytes - 1));
}

bool CopyList::becomes_row(Rows& rows, std::uint64_t host, std::uint64_t device, std::int64_t bytes) const {
  if (!merge_rows_ || bytes != rows.width || !same_piece(rows.host, advanced(host, bytes - 1))) return false;
  const auto host_pitch = static_cast<std::int64_t>(host - rows.host);
  const auto device_pitch = static_cast<std::int64_t>(device - rows.device);
  if (rows.height == 1) {
    const auto fits = [bytes](std::int64_t pitch) { return bytes <= pitch && pitch <= kMostPitch; };
    if (!fits(host_pitch) || !fits(device_pitch)) return false;
    rows.host_pitch = host_pitch;
    rows.device_pitch = device_pitch;
  } else if (host_pitch != rows.height * rows.host_pitch || device_pitch != rows.height * rows.device_pitch) {
    return false;
  }
  ++rows.height;
  return true;
}

void CopyList::add_unseamed(std::uint64_t host, std::uint64_t device, std::int64_t bytes) {
  if (!rows_.empty()) {
    Rows& last = rows_.back();
    if (extends(last, host, device, bytes)) {
      last.width += bytes;
      return;
    }
    if (becomes_row(last, host, device, bytes)) return;
  }
  rows_.push_back({host, device, bytes, 1, 0, 0});
}

std::vector<Copy> CopyList::take() {
  std::vector<Copy> copies;
  copies.reserve(rows_.size());
  const auto emit = [&](const Rows& r, std::int64_t row, std::int64_t height) {
    const std::uint64_t host = advanced(r.host, row * r.host_pitch);
    const std::uint64_t device = advanced(r.device, row * r.device_pitch);
    if (to_host_) {
      copies.push_back({host, device, r.width, height, r.host_pitch, r.device_pitch});
    } else {
      copies.push_back({device, host, r.width, height, r.device_pitch, r.host_pitch});
    }
  };
  for (const Rows& r : rows_) {
    if (r.height == 1 || r.height >= kFewestRows) {
      emit(r, 0, r.height);
    } else {
      for (std::int64_t row = 0; row < r.height; ++row) emit(r, row, 1);
    }
  }
  rows_.clear();
  return copies;
}

std::vector<Copy> staged_copies(const CopyJob& job, std::uint64_t slot, bool merge_rows) {
  CopyList list(job.request.direction == LM_STORE, merge_rows, job.registered_base, job.registered_piece_bytes);
  // Ranges outside, pieces inside: the same range of neighbouring objects has one stride.
  for (std::size_t first = 0; first < job.pieces.size();) {
    std::size_t end = first + 1;
    while (end < job.pieces.size() && same_shape(job.pieces[first], job.pieces[end])) ++end;
    const Group& g = job.groups[static_cast<std::size_t>(job.pieces[first].group)];
    const std::int64_t ranges = range_count(g, job.pieces[first]);
    const std::int64_t bytes = range_bytes(g, job.pieces[first]);
    for (std::int64_t index = 0; index < ranges; ++index) {
      const std::int64_t offset = range_offset(g, job.pieces[first], index);
      for (std::size_t i = first; i < end; ++i) {
        list.add(advanced(object_of(job, job.pieces[i]), offset),
                 advanced(slot, job.pieces[i].staging_offset + index * bytes), bytes);
      }
    }
    first = end;
  }
  return list.take();
}

bool can_go_direct(const std::vector<Group>& groups) {
  return std::all_of(groups.begin(), groups.end(),
                     [](const Group& g) { return g.form == Form::kBlock || tokens_are_dense(g); });
}

std::vector<Copy> direct_copies(const CopyJob& job, bool merge_rows) {
  CopyList list(job.request.direction == LM_STORE, merge_rows, job.registered_base, job.registered_piece_bytes);
  for (const Piece& p : job.pieces) {
    if (job.groups[static_cast<std::size_t>(p.group)].form == Form::kToken) {
      add_direct_tokens(job, p, list);
    } else {
      add_direct_blocks(job, p, list);
    }
  }
  return list.take();
}

std::vector<Copy> copies_of(const CopyJob& job, std::int32_t method, std::uint64_t slot) {
  switch (method) {
    case LM_COPY_STAGED_BATCH:
    case LM_COPY_STAGED_2D:
      return staged_copies(job, slot, method == LM_COPY_STAGED_2D);
    case LM_COPY_DIRECT_BATCH:
      return direct_copies(job, true);
    default:
      return {};
  }
}

std::int32_t choose_method(const CopyJob& job, bool can_direct, std::uint64_t slot, const lm_engine_options& options) {
  constexpr double kWorthComparing = 1.05;  // listing the blocks of long runs would only delay the first byte
  if (options.device == LM_DEVICE_CPU) return LM_COPY_GATHER;
  if (can_direct && options.avoid_kernels != 0) return LM_COPY_DIRECT_BATCH;
  double bytes = 0;
  for (const Piece& p : job.pieces) {
    bytes += static_cast<double>(piece_bytes(job.groups[static_cast<std::size_t>(p.group)], p));
  }
  const double staged = estimated_ns(staged_copies(job, slot, true), options.rates);
  if (can_direct && staged > kWorthComparing * 1e9 * bytes / options.rates.wire_bytes_per_s &&
      estimated_ns(direct_copies(job, true), options.rates) < staged) {
    return LM_COPY_DIRECT_BATCH;
  }
  const double gather = 1e9 * bytes / options.rates.gather_bytes_per_s;
  const bool gathers = options.gather_factor_percent > 0 && options.avoid_kernels == 0 &&
                       staged * 100 > gather * options.gather_factor_percent;
  return gathers ? LM_COPY_GATHER : LM_COPY_STAGED_2D;
}

double rate_at(const lm_rates& rates, const double* rate, std::int64_t run_bytes) {
  const std::int64_t* end = rates.run_bytes + rates.num_points;
  const std::int64_t* above = std::upper_bound(rates.run_bytes, end, run_bytes);
  if (above == rates.run_bytes) {  // shorter than measured: a run costs what the shortest costs
    return rate[0] * static_cast<double>(run_bytes) / static_cast<double>(rates.run_bytes[0]);
  }
  if (above == end) return rate[rates.num_points - 1];
  const auto i = above - rates.run_bytes;
  const double low = std::log2(static_cast<double>(rates.run_bytes[i - 1]));
  const double high = std::log2(static_cast<double>(rates.run_bytes[i]));
  const double share = (std::log2(static_cast<double>(run_bytes)) - low) / (high - low);
  return rate[i - 1] + share * (rate[i] - rate[i - 1]);
}

double estimated_ns(const std::vector<Copy>& copies, const lm_rates& rates) {
  double total = 0;
  for (const Copy& copy : copies) {
    const auto bytes = static_cast<double>(copy.width * copy.height);
    if (copy.height == 1) {
      total += 1e9 * bytes / rate_at(rates, rates.batch_bytes_per_s, copy.width);
    } else {
      total += std::max(1e9 * bytes / rate_at(rates, rates.strided_bytes_per_s, copy.width),
                        static_cast<double>(rates.copy_2d_ns));
    }
  }
  return total;
}

}  // namespace lamella
