// A CUDA device for the engine: what lanes share.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_channel.hpp"
#include "cuda_context.hpp"
#include "cuda_marks.hpp"
#include "cuda_tables.hpp"
#include "engine_device.hpp"
#include "scatter.hpp"

namespace lamella {
namespace {

constexpr std::size_t kFencesAtOnce = 64;  // of transfers under way; more are made when they are needed

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(const lm_engine_options& options)
      : options_(options), context_(std::make_shared<Context>(options.ordinal)) {
    const Context::Scope scope(*context_);
    if (!context_->has(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)) {
      throw Invalid("this device cannot read registered host memory at the host's addresses");
    }
    tables_ = std::make_shared<TablePool>(context_);
    fences_ = std::make_shared<Events>(context_, cudaEventDisableTiming);
    fences_->reserve(kFencesAtOnce);
  }

  ~CudaDevice() override {
    try {
      release_staging();
      const Context::Scope scope(*context_);
      for (const std::uint64_t* words : kept_) cudaFree(const_cast<std::uint64_t*>(words));
      for (void* words : host_words_) cudaFreeHost(words);
      tables_.reset();
      fences_.reset();
    } catch (const DeviceFailure&) {
      // The context has gone, and with it what is freed here.
    }
  }

  std::unique_ptr<Channel> open(lm_direction direction, Listener&) override {
    const Context::Scope scope(*context_);
    return std::make_unique<CudaChannel>(context_, direction, options_);
  }

  std::uint64_t take_staging(std::int64_t bytes) override {
    const Context::Scope scope(*context_);
    LM_REQUIRE(cudaMalloc(&staging_, static_cast<std::size_t>(bytes)));
    return address(staging_);
  }

  void release_staging() override {
    const Context::Scope scope(*context_);
    cudaFree(staging_);
    staging_ = nullptr;
  }

  const std::uint64_t* keep_words(const std::vector<std::uint64_t>& words) override {
    const Context::Scope scope(*context_);
    std::uint64_t* kept = nullptr;
    const std::size_t bytes = words.size() * sizeof(std::uint64_t);
    LM_REQUIRE(cudaMalloc(reinterpret_cast<void**>(&kept), bytes));
    const std::lock_guard<std::mutex> lock(mutex_);
    kept_.push_back(kept);
    cudaStream_t stream = nullptr;
    LM_REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const cudaError_t copied = cudaMemcpyAsync(kept, words.data(), bytes, cudaMemcpyHostToDevice, stream);
    const cudaError_t done = cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
    require(copied, "copying a cache's addresses");
    require(done, "copying a cache's addresses");
    return kept;
  }

  std::unique_ptr<Tables> tables(const std::vector<KernelGroup>& groups, const lm_request& request,
                                 const std::vector<std::uint64_t>& objects) override {
    return std::make_unique<CudaTables>(tables_, groups, request, objects);
  }

  std::vector<std::uint64_t> host_words(std::int32_t count) override {
    constexpr std::size_t kWordsALine = 8;
    const Context::Scope scope(*context_);
    const std::size_t bytes = static_cast<std::size_t>(count) * kWordsALine * sizeof(std::uint64_t);
    void* words = nullptr;
    LM_REQUIRE(cudaHostAlloc(&words, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
    std::memset(words, 0, bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    host_words_.push_back(words);
    std::vector<std::uint64_t> addresses;
    for (std::int32_t i = 0; i < count; ++i) {
      addresses.push_back(address(words) + static_cast<std::uint64_t>(i) * kWordsALine * sizeof(std::uint64_t));
    }
    return addresses;
  }

  void wait_word(std::uint64_t stream, std::uint64_t word, std::uint64_t value, bool reaches) override {
    const Context::Scope scope(*context_);
    const Driver& driver = Driver::get();
    driver.require(driver.wait_value(stream_of(stream), word, value,
                                     reaches ? CU_STREAM_WAIT_VALUE_GEQ : CU_STREAM_WAIT_VALUE_EQ),
                   "cuStreamWaitValue64");
  }

  bool has_word_waits() const override { return context_->has(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS); }

  std::uint64_t event_behind(std::uint64_t stream) override {
    const Context::Scope scope(*context_);
    const cudaEvent_t event = fences_->take();
    const cudaError_t code = cudaEventRecord(event, stream_of(stream));
    if (code != cudaSuccess) fences_->give(event);
    require(code, "recording a fence");
    return address(event);
  }

  void release_event(std::uint64_t event) override { fences_->give(event_of(event)); }

 private:
  const lm_engine_options options_;
  std::shared_ptr<Context> context_;
  std::shared_ptr<TablePool> tables_;
  std::shared_ptr<Events> fences_;
  void* staging_ = nullptr;
  std::mutex mutex_;
  std::vector<const std::uint64_t*> kept_;
  std::vector<void*> host_words_;
};

}  // namespace

std::unique_ptr<Device> make_cuda_device(const lm_engine_options& options) {
  return std::make_unique<CudaDevice>(options);
}

}  // namespace lamella
