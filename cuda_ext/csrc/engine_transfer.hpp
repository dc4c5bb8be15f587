// One transfer's state.
//
//   queued --first window issued--> running --last slice landed--> LANDED
//      |                               |----cancel(), drained----> CANCELLED
//      '-------------------------------'----failure, drained-----> FAILED
//
// A slice is recorded once its last window is enqueued with its mark, and lands when the mark is reached. A final
// state is entered by the lane only when no window is in flight (SAFE-1); the caller's blocks and objects are its own
// again then (XFER-2). Invariants: landed <= recorded <= num_slices, and neither falls.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine_arrival.hpp"
#include "engine_device.hpp"
#include "lamella/engine.h"
#include "lamella/plan.hpp"

namespace lamella {

// A registered cache: groups as the host reads them, and as the device's kernels do.
struct Cache {
  std::int32_t form;
  std::int32_t chunk_tokens;
  std::int32_t num_layers;                        // of the stage
  std::vector<lm_group> sources;                  // layers and bases point into the vectors below
  std::vector<std::vector<std::int32_t>> layers;  // a group
  std::vector<std::vector<std::uint64_t>> bases;
  std::vector<KernelGroup> device_groups;  // bases as kernels read them, block_ids not yet there
  bool direct;                       // runs match the blocks
};

// An lm_request that owns all it points to.
struct OwnedRequest {
  lm_request request{};
  std::vector<lm_group> groups;
  std::vector<lm_slice> slices;
  std::vector<std::vector<std::int32_t>> block_ids;
};

// The transfer failed or was cancelled: LM_STOPPED.
struct Stopped : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// A bound has passed: LM_TIMEOUT.
struct TimedOut : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr std::uint64_t count_word(std::uint32_t generation, std::int32_t slices) {
  return (std::uint64_t{generation} << 32) | static_cast<std::uint32_t>(slices);
}

class Transfer {
 public:
  Transfer(std::shared_ptr<const Cache> cache, const lm_submission& submission, std::int64_t window_bytes,
           std::uint64_t sequence);

  // ---- fixed at submission
  const std::shared_ptr<const Cache> cache;
  const std::uint64_t sequence;
  const lm_direction direction;
  OwnedRequest owned;
  std::vector<std::int64_t> keys;
  std::vector<std::uint64_t> objects;
  std::uint64_t registered_base;
  std::int64_t registered_piece_bytes;
  std::int64_t num_bytes;
  std::int64_t deadline_ns;
  std::int64_t submitted_ns;
  std::uint64_t token;
  std::uint64_t board;
  void (*on_drained)(void*, std::uint64_t);
  void* context;
  std::uint32_t generation = 0;
  std::uint64_t count_address = 0;                // value carrier: host-visible word of slices landed; 0: none
  std::uint64_t fence_event = 0;                  // CUDA event; 0: none
  bool owns_fence_event = false;                  // released when the transfer is final
  std::shared_ptr<Fence> fence;                   // CPU device
  std::atomic<bool> fence_missed{false};          // CPU device: given up before it opened; nothing may move
  std::unique_ptr<Tables> tables;
  Gate gate;                                      // guarded by the lane's PendingLayers

  std::int32_t num_slices() const { return static_cast<std::int32_t>(owned.slices.size()); }
  // Of the stage's layer; throws Invalid outside the stage.
  std::int32_t slice_of(std::int32_t layer) const;

  // ---- the lane's thread only
  std::unique_ptr<Planner> planner;
  std::shared_ptr<Window> prepared;  // the next window, not yet issued
  std::int32_t method = LM_COPY_AUTO;
  std::int32_t slices_issued = 0;
  bool slice_begun = false;
  bool all_issued = false;
  std::int32_t windows_in_flight = 0;
  bool moves = false;  // a window that moves anything was prepared
  std::int32_t planted = -1;  // for tests: the lm_fault of its windows from here on

  // ---- any thread
  // The lane has enqueued the slice's last window. Publishes the count last.
  void record(std::shared_ptr<Mark> mark);
  // Takes note of marks that have been reached. Throws DeviceFailure.
  void refresh();
  // Nothing more will be issued, for this reason. The first reason stays. False if there is one, or the state is final.
  bool stop(lm_state wanted, const std::string& reason);
  bool stopping() const { return stopping_.load(std::memory_order_acquire); }
  bool is_final() const { return final_.load(std::memory_order_acquire); }
  // The lane: nothing is in flight any more.
  void finish();
  void start(std::int32_t chosen);
  void count_copies(std::int64_t copies) { num_copies_.fetch_add(copies, std::memory_order_relaxed); }

  lm_progress progress();
  std::int32_t recorded();
  std::int32_t landed();
  std::string error();
  void timestamps(std::int64_t* recorded_ns, std::int64_t* landed_ns);
  // Throws TimedOut.
  void wait_final(std::int64_t deadline_ns);
  // Throws TimedOut, Stopped.
  void wait_slices(std::int32_t slices, bool landed, std::int64_t deadline_ns);
  // Event carrier. Returns the time waited on the host.
  std::int64_t hold_back(std::int32_t slice, std::uint64_t stream, std::int64_t deadline_ns);
  // Value carrier: whether the stream still has to wait for the slice. Throws Stopped.
  bool must_wait(std::int32_t slice);
  // Tells whoever waits on the host to look again.
  void notify() { changed_.notify_all(); }

 private:
  void refresh_locked();
  void look_locked();
  void throw_if_stopped_locked() const;

  std::mutex mutex_;
  std::condition_variable changed_;
  lm_state state_ = LM_QUEUED;
  lm_state wanted_ = LM_LANDED;
  std::string reason_;
  std::vector<std::shared_ptr<Mark>> marks_;  // of recorded slices
  std::vector<std::int64_t> recorded_ns_;
  std::vector<Moment> moments_;  // of landed slices
  std::int32_t landed_ = 0;
  std::int32_t chosen_ = LM_COPY_AUTO;
  std::int64_t started_ns_ = 0;
  std::atomic<std::int64_t> num_copies_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> final_{false};
};

}  // namespace lamella
