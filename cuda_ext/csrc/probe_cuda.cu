// Raw copies on a CUDA device: the yardstick of the benchmarks, and the copies that the calibration measures.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda_check.hpp"
#include "lamella/probe.hpp"

namespace lamella {
namespace {

using Clock = std::chrono::steady_clock;

class Event {
 public:
  Event() { LM_CUDA_CHECK(cudaEventCreate(&event_)); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

struct Batch {
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<std::size_t> sizes;
};

Batch batch_of(const lm_probe& probe) {
  Batch batch;
  if (probe.method != LM_PROBE_BATCH) return batch;
  for (std::int64_t i = 0; i < probe.num_runs; ++i) {
    auto* host = reinterpret_cast<void*>(probe.host + probe.host_offsets[i]);
    auto* device = reinterpret_cast<void*>(probe.device + probe.device_offsets[i]);
    batch.to.push_back(probe.direction == LM_RETRIEVE ? device : host);
    batch.from.push_back(probe.direction == LM_RETRIEVE ? host : device);
  }
  batch.sizes.assign(probe.num_runs, probe.run_bytes);
  return batch;
}

void enqueue(const lm_probe& probe, Batch& batch, cudaStream_t stream) {
  const bool retrieve = probe.direction == LM_RETRIEVE;
  auto* to = reinterpret_cast<void*>(retrieve ? probe.device : probe.host);
  const auto* from = reinterpret_cast<const void*>(retrieve ? probe.host : probe.device);
  const cudaMemcpyKind kind = retrieve ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
  if (probe.method == LM_PROBE_WHOLE) {
    LM_CUDA_CHECK(cudaMemcpyAsync(to, from, probe.num_runs * probe.run_bytes, kind, stream));
  } else if (probe.method == LM_PROBE_STRIDED) {
    LM_CUDA_CHECK(cudaMemcpy2DAsync(to, retrieve ? probe.device_pitch : probe.host_pitch, from,
                                    retrieve ? probe.host_pitch : probe.device_pitch, probe.run_bytes, probe.num_runs,
                                    kind, stream));
  } else {
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = probe.batch_flags;
    std::size_t first = 0;
    for (std::int64_t i = 0; i < probe.num_runs; i += probe.batch_entries) {
      const std::size_t count = std::min<std::int64_t>(probe.batch_entries, probe.num_runs - i);
      LM_CUDA_CHECK(cudaMemcpyBatchAsync(batch.to.data() + i, batch.from.data() + i, batch.sizes.data() + i, count,
                                         &attributes, &first, 1, stream));
    }
  }
}

}  // namespace
}  // namespace lamella

lm_status lm_probe_run(std::int32_t ordinal, const lm_probe* probes, std::int32_t num_probes, lm_probe_time* times) {
  return lamella::guarded([&] {
    lamella::check_probes(probes, num_probes, times);
    lamella::use_device(ordinal);
    std::vector<std::unique_ptr<lamella::OwnStream>> streams;
    std::vector<std::unique_ptr<lamella::Event>> ends;
    std::vector<lamella::Batch> batches;
    for (std::int32_t i = 0; i < num_probes; ++i) {
      streams.push_back(std::make_unique<lamella::OwnStream>(ordinal));
      ends.push_back(std::make_unique<lamella::Event>());
      batches.push_back(lamella::batch_of(probes[i]));
    }
    lamella::Event start;
    LM_CUDA_CHECK(cudaEventRecord(start.get(), streams[0]->get()));
    for (std::int32_t i = 1; i < num_probes; ++i) LM_CUDA_CHECK(cudaStreamWaitEvent(streams[i]->get(), start.get()));
    for (std::int32_t i = 0; i < num_probes; ++i) {
      const auto before = lamella::Clock::now();
      lamella::enqueue(probes[i], batches[i], streams[i]->get());
      times[i].issue_ns = std::chrono::nanoseconds(lamella::Clock::now() - before).count();
      LM_CUDA_CHECK(cudaEventRecord(ends[i]->get(), streams[i]->get()));
    }
    for (std::int32_t i = 0; i < num_probes; ++i) {
      streams[i]->wait();
      float milliseconds = 0;
      LM_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start.get(), ends[i]->get()));
      times[i].copy_ns = static_cast<std::int64_t>(milliseconds * 1e6);
    }
  });
}
