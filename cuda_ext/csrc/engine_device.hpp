// What a lane needs of a device. Implementations: cpu_device.cpp, cuda_device.cu.
//
// A lane's channel is a queue: windows complete in the order in which they were issued. All that is enqueued after a
// window's last copy is reached through the window's mark.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "lamella/address.cuh"
#include "lamella/engine.h"
#include "lamella/items.cuh"

namespace lamella {

// CLOCK_MONOTONIC, the clock of Python's time.monotonic_ns.
inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The device refused or failed. `lost`: nothing can be enqueued on it any more.
struct DeviceFailure : std::runtime_error {
  DeviceFailure(const std::string& what, bool is_lost) : std::runtime_error(what), lost(is_lost) {}
  bool lost;
};

// A fence of the CPU device: closed until it is opened. Shared by the caller's handle and transfers.
class Fence {
 public:
  void open() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      open_ = true;
    }
    changed_.notify_all();
  }
  // Whoever waits looks at its own condition again.
  void nudge() {
    { const std::lock_guard<std::mutex> lock(mutex_); }
    changed_.notify_all();
  }
  // Until open (true), or `given_up()` (false).
  template <typename Condition>
  bool wait(Condition given_up) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return open_ || given_up(); });
    return open_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

// A clock other than now_ns's, and what is known of where it began.
class Clock {
 public:
  // An event of this clock's `ns` was seen to have happened at `seen_ns`: the clock began no later than their
  // difference.
  void see(std::int64_t ns, std::int64_t seen_ns) {
    std::int64_t known = origin_ns_.load(std::memory_order_relaxed);
    while (seen_ns - ns < known && !origin_ns_.compare_exchange_weak(known, seen_ns - ns)) {
    }
  }
  // The latest moment at which it can have begun; it settles within a look or two.
  std::int64_t origin_ns() const { return origin_ns_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::int64_t> origin_ns_{INT64_MAX};
};

// A moment on its own clock; null: now_ns's.
struct Moment {
  std::shared_ptr<const Clock> clock;
  std::int64_t ns = 0;
  std::int64_t host_ns() const { return clock == nullptr ? ns : clock->origin_ns() + ns; }
};

// A point of a channel's queue.
class Point {
 public:
  virtual ~Point() = default;
  // Whether everything before it has happened. Throws DeviceFailure.
  virtual bool reached() = 0;
};

// One whose moment is known, and which other streams can wait for.
class Mark : public Point {
 public:
  // When it did; only after reached().
  virtual Moment moment() = 0;
  // Work that `stream` is given later starts after the mark.
  virtual void hold_back(std::uint64_t stream) = 0;
  // Whether the caller is its own stream, so that whoever holds back waits on the host instead.
  virtual bool is_on_host() const { return false; }
};

// `height` rows of `width` bytes. One row: the pitches do not matter.
struct Copy {
  std::uint64_t to;
  std::uint64_t from;
  std::int64_t width;
  std::int64_t height;
  std::int64_t to_pitch;
  std::int64_t from_pitch;
};

class Transfer;

// One window on its way: what the lane prepares and a channel carries out.
struct Window {
  std::shared_ptr<Transfer> transfer;
  std::vector<Piece> pieces;  // sorted by group where kernels move them
  std::vector<Copy> copies;   // none for LM_COPY_GATHER
  std::int64_t num_bytes = 0;
  std::int32_t slice = 0;
  bool completes_slice = false;
  bool first = false;  // of its transfer's that move anything: fences and tables come before it
  std::int32_t method = LM_COPY_STAGED_BATCH;
  std::int32_t slot = -1;     // of the staging ring, -1: none
  std::uint64_t staging = 0;  // the slot's address
  std::shared_ptr<Mark> mark;
  std::shared_ptr<Point> left;  // its bytes have left the wire and wait for a kernel; null: not before the mark
  std::int64_t issued_ns = 0;
  bool alone = false;  // nothing was in flight when it was issued
  std::uint64_t count_address = 0;  // value carrier: this word becomes count_value before the mark
  std::uint64_t count_value = 0;
};

inline bool is_staged(std::int32_t method) {
  return method == LM_COPY_STAGED_BATCH || method == LM_COPY_STAGED_2D;
}

// One lane's queue. Called by the lane's thread only.
class Channel {
 public:
  virtual ~Channel() = default;
  virtual void attach_thread() {}
  // Enqueues the window and sets window->mark, and window->left where that comes earlier; the window stays alive until
  // the mark is reached.
  // Throws DeviceFailure; a part may then be enqueued, and `mark()` still comes after it.
  virtual void issue(const std::shared_ptr<Window>& window) = 0;
  // A mark after all that was enqueued so far.
  virtual std::shared_ptr<Mark> mark() = 0;
  // Enqueues: each word becomes `value`, in the queue's order. Words are host-visible.
  virtual void write_words(const std::vector<std::uint64_t>& addresses, std::uint64_t value) = 0;
};

// What kernels need of one transfer, device-readable and alive as long as the transfer.
class Tables {
 public:
  virtual ~Tables() = default;
  std::vector<KernelGroup> groups;
  const std::uint64_t* objects = nullptr;  // addresses as kernels use them, by chunk
  std::uint64_t object_bits = 0;           // all of them OR-ed together
};

// Told by a channel that something happened that its lane may want to look at.
class Listener {
 public:
  virtual ~Listener() = default;
  virtual void on_progress() = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::unique_ptr<Channel> open(lm_direction direction, Listener& listener) = 0;
  // The staging ring, as copies and kernels see it; until release_staging, which is called when nothing uses it.
  virtual std::uint64_t take_staging(std::int64_t bytes) = 0;
  virtual void release_staging() = 0;
  // A copy of `words` that kernels can read, alive as long as the device.
  virtual const std::uint64_t* keep_words(const std::vector<std::uint64_t>& words) = 0;
  // `groups` are a registered cache's, their bases device-readable.
  virtual std::unique_ptr<Tables> tables(const std::vector<KernelGroup>& groups, const lm_request& request,
                                         const std::vector<std::uint64_t>& objects) = 0;
  // Zeroed 64-bit words, a cache line apart, that host and streams read and write; alive as long as the device.
  virtual std::vector<std::uint64_t> host_words(std::int32_t count) = 0;
  // `stream` goes on when the word, read as a count, has come to `value` (reaches), or equals it.
  virtual void wait_word(std::uint64_t stream, std::uint64_t address, std::uint64_t value, bool reaches) = 0;
  // Whether a stream can wait for a word at all.
  virtual bool has_word_waits() const = 0;
  // An event recorded behind the stream's work so far; opaque.
  virtual std::uint64_t event_behind(std::uint64_t stream) = 0;
  virtual void release_event(std::uint64_t event) = 0;
  // Paced CPU device: `windows` more windows of the direction may move.
  virtual void grant(lm_direction, std::int64_t) {}
  // Wakes whatever waits on the host for a fence or a grant, for good: the engine is closing.
  virtual void abandon() {}
};

std::unique_ptr<Device> make_cpu_device(const lm_engine_options& options);
// Defined by the CUDA library only.
std::unique_ptr<Device> make_cuda_device(const lm_engine_options& options);

}  // namespace lamella

// The C ABI's handle of a fence.
struct lm_fence {
  std::shared_ptr<lamella::Fence> state = std::make_shared<lamella::Fence>();
};
