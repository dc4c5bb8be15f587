// One direction's lane: a native thread that takes the most urgent slice, issues it window by window, and keeps a
// bounded number of bytes on the wire.
//
// Order: among transfers whose next slice has not begun, the smallest (key of that slice, sequence); a slice that began
// is finished first (ORD-2). A cancel takes effect between windows. The thread never blocks in the device: it sleeps
// until windows are expected to be done and looks then, so a fence that never opens stops neither cancel nor close.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine_copies.hpp"
#include "engine_device.hpp"
#include "engine_flight.hpp"
#include "engine_pace.hpp"
#include "engine_slots.hpp"
#include "engine_transfer.hpp"

namespace lamella {

// What lanes tell their engine.
class LaneOwner {
 public:
  virtual ~LaneOwner() = default;
  // The transfer is final.
  virtual void on_final(const std::shared_ptr<Transfer>& transfer) = 0;
};

class Lane final : public Listener, public SlotWaiter {
 public:
  Lane(lm_direction direction, Device& device, Slots& slots, LaneOwner& owner, const lm_engine_options& options);
  ~Lane() override;
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Throws Stopped when the lane is closing or its device is lost.
  void submit(std::shared_ptr<Transfer> transfer);
  // Something changed that the thread should look at: a cancel, progress, a deadline.
  void wake();
  void on_progress() override { wake(); }
  void on_slot() override { wake(); }
  // Runs on the lane's thread between windows; the caller waits for it. Throws what it threw, or TimedOut.
  void run_between_windows(const std::shared_ptr<std::function<void()>>& command, std::int64_t deadline_ns);
  // No more submissions; live transfers stop with this reason. False: not drained by the deadline, the thread goes on.
  bool close(const std::string& reason, std::int64_t deadline_ns);
  void plant_fault(std::int64_t window, std::int32_t when);
  lm_lane_status status();

  // The channel is the thread's own; the pending words lock for themselves.
  Channel& channel() { return *channel_; }
  PendingLayers& pending() { return pending_; }

 private:
  struct Command {
    std::shared_ptr<std::function<void()>> body;
    std::string error;
    bool done = false;
    bool failed = false;
    bool dropped = false;  // its caller has gone
  };

  void run();
  void take_inbox(std::unique_lock<std::mutex>& lock);
  void reap();
  bool reached(Window& window, Point& point);
  // When all that is to come is enqueued, the next window to leave the wire is looked for.
  std::int64_t awaited_bytes() const;
  void give_slot(Window& window);
  void drop_stopped();
  void finish(const std::shared_ptr<Transfer>& transfer);
  std::shared_ptr<Transfer> most_urgent() const;
  bool issue_next();
  bool prepare(Transfer& transfer);
  static CopyJob copy_job(const Transfer& transfer, const Window& window);
  void fail_all(const std::string& reason);
  void stop_live(lm_state wanted, const std::string& reason);

  const lm_direction direction_;
  Slots& slots_;
  LaneOwner& owner_;
  const lm_engine_options options_;
  std::unique_ptr<Channel> channel_;
  PendingLayers pending_;

  // the thread's own
  std::vector<std::shared_ptr<Transfer>> live_;
  Flight flight_;
  Transfer* begun_ = nullptr;  // whose slice is being issued
  bool lost_ = false;
  Pace pace_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable answered_;
  std::vector<std::shared_ptr<Transfer>> inbox_;
  std::deque<std::shared_ptr<Command>> commands_;
  bool looked_ = false;  // wake() was called
  bool closing_ = false;
  bool ended_ = false;
  std::string close_reason_;
  std::string lost_reason_;
  std::int64_t fault_window_ = -1;
  std::int32_t fault_when_ = 0;
  lm_lane_status status_{};

  std::thread thread_;
};

}  // namespace lamella
