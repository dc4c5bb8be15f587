// A crew of threads that works through numbered units together with the thread that owns it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace lamella {

// Lives for one call, so that nothing survives a fork or has to be shut down. Threads start with the first work that is
// worth sharing; between two works they spin briefly and then sleep.
class Crew {
 public:
  explicit Crew(int threads) : helpers_(threads - 1) {}
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  ~Crew() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      leaving_ = true;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // Returns once work(unit) has returned for each unit in [0, units). `work` must not throw.
  template <typename Work>
  void run(std::int64_t units, bool share, const Work& work) {
    if (!share || helpers_ == 0 || units < 2) {
      for (std::int64_t unit = 0; unit < units; ++unit) work(unit);
      return;
    }
    while (static_cast<int>(threads_.size()) < helpers_) threads_.emplace_back([this] { serve(); });
    work_ = &work;
    call_ = [](const void* body, std::int64_t unit) { (*static_cast<const Work*>(body))(unit); };
    units_ = units;
    next_.store(0, std::memory_order_relaxed);
    busy_.store(helpers_, std::memory_order_relaxed);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    take_units();
    for (int spins = 0; busy_.load(std::memory_order_acquire) != 0; ++spins) {
      if (spins < kSpins) continue;
      std::unique_lock<std::mutex> lock(mutex_);
      done_.wait(lock, [this] { return busy_.load(std::memory_order_acquire) == 0; });
    }
  }

 private:
  static constexpr int kSpins = 2000;  // some microseconds: less than a sleep and a wake-up cost

  void take_units() {
    for (;;) {
      const std::int64_t unit = next_.fetch_add(1, std::memory_order_relaxed);
      if (unit >= units_) return;
      call_(work_, unit);
    }
  }

  void serve() {
    for (std::uint64_t seen = 0;;) {
      for (int spins = 0; spins < kSpins && generation_.load(std::memory_order_acquire) == seen; ++spins) {
      }
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
        if (leaving_) return;
        ++seen;
      }
      take_units();
      if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        const std::lock_guard<std::mutex> lock(mutex_);
        done_.notify_one();
      }
    }
  }

  const int helpers_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::atomic<std::uint64_t> generation_{0};
  std::atomic<std::int64_t> next_{0};
  std::atomic<int> busy_{0};
  std::int64_t units_ = 0;
  const void* work_ = nullptr;
  void (*call_)(const void*, std::int64_t) = nullptr;
  bool leaving_ = false;
};

}  // namespace lamella
