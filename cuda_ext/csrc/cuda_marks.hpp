// Events, made once and used again, and marks made of them.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda_context.hpp"
#include "engine_device.hpp"

namespace lamella {

inline cudaStream_t stream_of(std::uint64_t handle) {
  return reinterpret_cast<cudaStream_t>(static_cast<std::uintptr_t>(handle));
}
inline cudaEvent_t event_of(std::uint64_t handle) {
  return reinterpret_cast<cudaEvent_t>(static_cast<std::uintptr_t>(handle));
}
inline void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)); }
inline std::uint64_t address(const void* p) {
  return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(p));
}

// Events, made once and used again.
class Events {
 public:
  Events(std::shared_ptr<const Context> context, unsigned flags) : context_(std::move(context)), flags_(flags) {}
  ~Events() {
    for (const cudaEvent_t event : free_) cudaEventDestroy(event);
  }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;

  // So many are there to be taken.
  void reserve(std::size_t count) {
    while (free_.size() < count) free_.push_back(make());
  }

  cudaEvent_t take() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        const cudaEvent_t event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    return make();
  }
  void give(cudaEvent_t event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(event);
  }
  const Context& context() const { return *context_; }

 private:
  cudaEvent_t make() const {
    cudaEvent_t event = nullptr;
    LM_REQUIRE(cudaEventCreateWithFlags(&event, flags_));
    return event;
  }

  std::shared_ptr<const Context> context_;
  unsigned flags_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

// An event that goes back to its pool.
class Event {
 public:
  explicit Event(std::shared_ptr<Events> events) : events_(std::move(events)), event_(events_->take()) {}
  ~Event() { events_->give(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }
  const Context& context() const { return events_->context(); }
  bool happened() const {
    const Context::Scope scope(context());
    const cudaError_t code = cudaEventQuery(event_);
    if (code == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    require(code, "cudaEventQuery");
    return true;
  }

 private:
  std::shared_ptr<Events> events_;
  cudaEvent_t event_;
};

class CudaPoint final : public Point {
 public:
  explicit CudaPoint(std::shared_ptr<Event> event) : event_(std::move(event)) {}
  cudaEvent_t event() const { return event_->get(); }
  bool reached() override { return event_->happened(); }

 private:
  std::shared_ptr<Event> event_;
};

// The device's clock since an event.
class DeviceClock final : public Clock {
 public:
  explicit DeviceClock(std::shared_ptr<Event> start) : start_(std::move(start)) {}
  std::int64_t since_start_ns(cudaEvent_t event) const {
    float ms = 0;
    LM_REQUIRE(cudaEventElapsedTime(&ms, start_->get(), event));
    return static_cast<std::int64_t>(static_cast<double>(ms) * 1e6);
  }

 private:
  std::shared_ptr<Event> start_;
};

class CudaMark final : public Mark {
 public:
  CudaMark(std::shared_ptr<Event> event, std::shared_ptr<DeviceClock> clock)
      : event_(std::move(event)), clock_(std::move(clock)) {}

  cudaEvent_t event() const { return event_->get(); }

  bool reached() override {
    if (reached_.load(std::memory_order_acquire)) return true;
    if (!event_->happened()) return false;
    const std::int64_t seen_ns = now_ns();
    const Context::Scope scope(event_->context());
    const std::int64_t ns = clock_->since_start_ns(event_->get());
    clock_->see(ns, seen_ns);
    ns_.store(ns, std::memory_order_relaxed);
    reached_.store(true, std::memory_order_release);
    return true;
  }

  Moment moment() override { return {clock_, ns_.load(std::memory_order_relaxed)}; }

  void hold_back(std::uint64_t stream) override {
    const Context::Scope scope(event_->context());
    LM_REQUIRE(cudaStreamWaitEvent(stream_of(stream), event_->get(), 0));
  }

 private:
  std::shared_ptr<Event> event_;
  std::shared_ptr<DeviceClock> clock_;
  std::atomic<std::int64_t> ns_{0};
  std::atomic<bool> reached_{false};
};

}  // namespace lamella
