// The transfer engine: two lanes over one device, the caches they know, and the watchdog that bounds every wait
// (SAFE-5).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine_device.hpp"
#include "engine_lane.hpp"
#include "engine_transfer.hpp"

namespace lamella {

class Engine final : public LaneOwner {
 public:
  explicit Engine(const lm_engine_options& options);
  ~Engine() override;

  std::int32_t register_cache(const lm_request& shape);
  std::shared_ptr<Transfer> submit(const lm_submission& submission, lm_progress& queued);
  void cancel(Transfer& transfer);
  std::int64_t wait_layer(Transfer& transfer, std::int32_t layer, std::uint64_t stream, std::int64_t deadline_ns);
  void gate(const std::shared_ptr<Transfer>& transfer, std::uint64_t stream, std::int64_t deadline_ns);
  // Throws TimedOut.
  std::uint64_t next_drained(std::int64_t deadline_ns);
  // False: not drained by the deadline.
  bool close(std::int64_t deadline_ns);

  Lane& lane(std::int32_t direction);
  Device& device() { return *device_; }
  std::uint64_t pending_word(std::int32_t layer);

  void on_final(const std::shared_ptr<Transfer>& transfer) override;

 private:
  void watch();
  void expire(Transfer& transfer);
  void force_count(const Transfer& transfer);
  void forget_deadline_locked(const std::shared_ptr<Transfer>& transfer);
  void make_count_slots();
  void take_count_slot(Transfer& transfer, std::uint32_t wanted_generation);
  void give_count_slot(const Transfer& transfer);

  lm_engine_options options_;
  std::vector<std::int64_t> run_bytes_;
  std::vector<double> batch_rates_;
  std::vector<double> strided_rates_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Slots> slots_;
  std::unique_ptr<Lane> retrieve_;
  std::unique_ptr<Lane> store_;

  std::mutex mutex_;
  std::condition_variable watch_;
  std::condition_variable drained_;
  std::vector<std::shared_ptr<const Cache>> caches_;
  std::uint64_t sequence_ = 0;
  // Of the transfer counted last: a word that is used again has a newer one (SAFE-2).
  std::uint32_t generation_ = 0;
  std::vector<std::uint64_t> count_slots_;  // free words of the value carrier
  std::multimap<std::int64_t, std::weak_ptr<Transfer>> deadlines_;
  std::deque<std::uint64_t> drained_tokens_;
  bool closing_ = false;
  bool drained_all_ = false;
  bool unwatched_ = false;  // no transfer is live, and none will be

  std::thread watchdog_;
};

}  // namespace lamella
