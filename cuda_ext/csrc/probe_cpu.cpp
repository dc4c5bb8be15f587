// Raw copies on the CPU device: memcpy, one thread a probe, all started together.
// In the CUDA library these functions are the CUDA device's.
#ifndef LAMELLA_WITH_CUDA
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#include "lamella/probe.hpp"

namespace {

using Clock = std::chrono::steady_clock;

void copy(const lm_probe& probe, std::int64_t host_offset, std::int64_t device_offset, std::int64_t num_bytes) {
  auto* host = reinterpret_cast<char*>(probe.host) + host_offset;
  auto* device = reinterpret_cast<char*>(probe.device) + device_offset;
  if (probe.direction == LM_RETRIEVE) {
    std::memcpy(device, host, num_bytes);
  } else {
    std::memcpy(host, device, num_bytes);
  }
}

void run(const lm_probe& probe) {
  if (probe.method == LM_PROBE_WHOLE) {
    copy(probe, 0, 0, probe.num_runs * probe.run_bytes);
    return;
  }
  for (std::int64_t i = 0; i < probe.num_runs; ++i) {
    const bool batch = probe.method == LM_PROBE_BATCH;
    copy(probe, batch ? probe.host_offsets[i] : i * probe.host_pitch,
         batch ? probe.device_offsets[i] : i * probe.device_pitch, probe.run_bytes);
  }
}

}  // namespace

lm_status lm_probe_run(std::int32_t ordinal, const lm_probe* probes, std::int32_t num_probes, lm_probe_time* times) {
  return lamella::guarded([&] {
    if (ordinal != 0) throw lamella::Invalid(lamella::format("the CPU is device 0, got ordinal %d", ordinal));
    lamella::check_probes(probes, num_probes, times);
    std::atomic<bool> go{false};
    Clock::time_point start;
    std::vector<std::thread> others;
    const auto time = [&](std::int32_t i) {
      run(probes[i]);
      times[i].copy_ns = std::chrono::nanoseconds(Clock::now() - start).count();
      times[i].issue_ns = times[i].copy_ns;  // the caller's processor does the copying
    };
    std::exception_ptr refused;  // a thread
    try {
      for (std::int32_t i = 1; i < num_probes; ++i) {
        others.emplace_back([&, i] {
          while (!go.load(std::memory_order_acquire)) std::this_thread::yield();
          if (!refused) time(i);
        });
      }
    } catch (...) {  // those that have started would wait for ever
      refused = std::current_exception();
    }
    start = Clock::now();
    go.store(true, std::memory_order_release);
    if (!refused) time(0);
    for (auto& other : others) other.join();
    if (refused) std::rethrow_exception(refused);
  });
}

#endif  // LAMELLA_WITH_CUDA
