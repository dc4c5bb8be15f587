// The staging ring, shared by both lanes: slots of one window each.
//
// A lane alone uses as many as it likes. While both have something to move, each may hold half, so neither starves the
// other; the half is free again within the time of a window.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "lamella/engine.h"

namespace lamella {

// Told that a slot it could not have may be there now.
class SlotWaiter {
 public:
  virtual ~SlotWaiter() = default;
  virtual void on_slot() = 0;
};

class Slots {
 public:
  Slots(std::uint64_t base, std::int32_t count, std::int64_t window_bytes)
      : base_(base), window_bytes_(window_bytes), half_(count / 2) {
    for (std::int32_t slot = count; slot-- > 0;) free_.push_back(slot);
  }

  void introduce(lm_direction direction, SlotWaiter* waiter) {
    const std::lock_guard<std::mutex> lock(mutex_);
    users_[direction].waiter = waiter;
  }

  // Whether the direction has anything to move through staging.
  void set_active(lm_direction direction, bool active) {
    const std::lock_guard<std::mutex> lock(mutex_);
    users_[direction].active = active;
    if (!active) wake_locked(users_[1 - direction]);
  }

  // A slot, or -1; then on_slot() is called when it is worth asking again.
  std::int32_t take(lm_direction direction) {
    const std::lock_guard<std::mutex> lock(mutex_);
    User& user = users_[direction];
    const bool may = !users_[1 - direction].active || user.held < half_;
    if (!may || free_.empty()) {
      user.waits = true;
      return -1;
    }
    const std::int32_t slot = free_.back();
    free_.pop_back();
    ++user.held;
    return slot;
  }

  void give(lm_direction direction, std::int32_t slot) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(slot);
    --users_[direction].held;
    wake_locked(users_[1 - direction]);
  }

  std::uint64_t address(std::int32_t slot) const {
    return slot < 0 ? 0 : base_ + static_cast<std::uint64_t>(slot) * static_cast<std::uint64_t>(window_bytes_);
  }

 private:
  struct User {
    SlotWaiter* waiter = nullptr;
    std::int32_t held = 0;
    bool active = false;
    bool waits = false;
  };

  static void wake_locked(User& user) {
    if (user.waits && user.waiter != nullptr) user.waiter->on_slot();
    user.waits = false;
  }

  const std::uint64_t base_;
  const std::int64_t window_bytes_;
  const std::int32_t half_;
  std::mutex mutex_;
  std::vector<std::int32_t> free_;
  User users_[2];
};

}  // namespace lamella
