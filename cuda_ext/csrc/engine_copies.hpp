// Which copies a window needs, coalesced: runs that touch become one, rows of one stride become a 2-D copy.
#pragma once

#include <cstdint>
#include <vector>

#include "engine_device.hpp"
#include "lamella/address.cuh"
#include "lamella/engine.h"

namespace lamella {

// What the copies are made for.
struct CopyJob {
  const std::vector<Group>& groups;
  const std::vector<Piece>& pieces;
  const lm_request& request;
  const std::vector<std::uint64_t>& objects;  // by chunk
  std::uint64_t registered_base;
  std::int64_t registered_piece_bytes;
};

// Joins runs as they are added. A joined run never crosses a seam of the host memory's registration.
class CopyList {
 public:
  CopyList(bool to_host, bool merge_rows, std::uint64_t registered_base, std::int64_t registered_piece_bytes)
      : to_host_(to_host), merge_rows_(merge_rows), base_(registered_base), piece_bytes_(registered_piece_bytes) {}

  void add(std::uint64_t host, std::uint64_t device, std::int64_t bytes);
  // The copies in order. Row groups too small to be worth a 2-D copy have become single runs again.
  std::vector<Copy> take();

 private:
  struct Rows {
    std::uint64_t host;
    std::uint64_t device;
    std::int64_t width;
    std::int64_t height;
    std::int64_t host_pitch;
    std::int64_t device_pitch;
  };

  void add_unseamed(std::uint64_t host, std::uint64_t device, std::int64_t bytes);
  bool extends(const Rows& rows, std::uint64_t host, std::uint64_t device, std::int64_t bytes) const;
  bool becomes_row(Rows& rows, std::uint64_t host, std::uint64_t device, std::int64_t bytes) const;
  bool same_piece(std::uint64_t a, std::uint64_t b) const;

  bool to_host_;
  bool merge_rows_;
  std::uint64_t base_;
  std::int64_t piece_bytes_;
  std::vector<Rows> rows_;
};

// Copies between the objects and the window's images in a staging slot.
std::vector<Copy> staged_copies(const CopyJob& job, std::uint64_t slot, bool merge_rows);

// Whether every group's runs match its engine's blocks, so that no kernel is needed.
bool can_go_direct(const std::vector<Group>& groups);

// Copies between the objects and the blocks; only where can_go_direct.
std::vector<Copy> direct_copies(const CopyJob& job, bool merge_rows);

// The copies of a window by that method; none where a kernel moves it.
std::vector<Copy> copies_of(const CopyJob& job, std::int32_t method, std::uint64_t slot);

// The fastest method by the calibrated rates; staging among equals, because its entries are fewer.
std::int32_t choose_method(const CopyJob& job, bool can_direct, std::uint64_t slot, const lm_engine_options& options);

// Time that the copies take: at the device or at the issuing thread, whichever is longer.
double estimated_ns(const std::vector<Copy>& copies, const lm_rates& rates);
// Rate at runs of that length, between the table's points on a logarithmic scale of lengths.
double rate_at(const lm_rates& rates, const double* bytes_per_s, std::int64_t run_bytes);

}  // namespace lamella
