// A CUDA device for the engine: two high-priority streams a lane, one for copy engines and one for kernels.
//
//   retrieve   copy stream: object -> slot, event ─► kernel stream: slot -> blocks, count, mark
//   store      kernel stream: blocks -> slot, event ─► copy stream: slot -> object, count, mark
//   direct     copy stream alone: object <-> blocks, count, mark. Nothing touches the kernel stream, because another
//              process's kernels would hold it up by a time slice (EVIDENCE §5)
//
// A slot is used again only after its window's mark was reached, so copies need not wait for scatters.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_context.hpp"
#include "engine_device.hpp"
#include "engine_transfer.hpp"
#include "scatter.hpp"

namespace lamella {
namespace {

constexpr std::int64_t kClockNs = 100'000'000;
constexpr std::size_t kSmallestTable = 256 << 10;  // 65,536 block ids: a million tokens of 16-token blocks
constexpr std::size_t kTablesAtOnce = 8;

cudaStream_t stream_of(std::uint64_t handle) {
  return reinterpret_cast<cudaStream_t>(static_cast<std::uintptr_t>(handle));
}
cudaEvent_t event_of(std::uint64_t handle) {
  return reinterpret_cast<cudaEvent_t>(static_cast<std::uintptr_t>(handle));
}
void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)); }
std::uint64_t address(const void* p) { return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(p)); }

// Events, made once and used again.
class Events {
 public:
  Events(std::shared_ptr<const Context> context, unsigned flags) : context_(std::move(context)), flags_(flags) {}
  ~Events() {
    for (const cudaEvent_t event : free_) cudaEventDestroy(event);
  }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;

  cudaEvent_t take() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        const cudaEvent_t event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    cudaEvent_t event = nullptr;
    LM_REQUIRE(cudaEventCreateWithFlags(&event, flags_));
    return event;
  }
  void give(cudaEvent_t event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(event);
  }
  const Context& context() const { return *context_; }

 private:
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

 private:
  std::shared_ptr<Events> events_;
  cudaEvent_t event_;
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
    const Context::Scope scope(event_->context());
    const cudaError_t code = cudaEventQuery(event_->get());
    if (code == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    require(code, "cudaEventQuery");
    const std::int64_t seen_ns = now_ns();
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

// ---- tables

// A pinned table and its copy on the device.
struct TablePair {
  std::size_t capacity = 0;
  unsigned char* host = nullptr;
  unsigned char* device = nullptr;
};

class TablePool {
 public:
  explicit TablePool(std::shared_ptr<const Context> context) : context_(std::move(context)) {
    for (std::size_t i = 0; i < kTablesAtOnce; ++i) free_.push_back(make(kSmallestTable));
  }
  ~TablePool() {
    for (const TablePair& pair : free_) {
      cudaFreeHost(pair.host);
      cudaFree(pair.device);
    }
  }
  TablePool(const TablePool&) = delete;
  TablePool& operator=(const TablePool&) = delete;

  TablePair take(std::size_t bytes) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (std::size_t i = 0; i < free_.size(); ++i) {
        if (free_[i].capacity >= bytes) {
          const TablePair pair = free_[i];
          free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
          return pair;
        }
      }
    }
    std::size_t capacity = kSmallestTable;
    while (capacity < bytes) capacity *= 2;
    const Context::Scope scope(*context_);
    return make(capacity);
  }
  void give(const TablePair& pair) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(pair);
  }

 private:
  static TablePair make(std::size_t capacity) {
    TablePair pair;
    pair.capacity = capacity;
    LM_REQUIRE(cudaHostAlloc(reinterpret_cast<void**>(&pair.host), capacity, cudaHostAllocPortable));
    LM_REQUIRE(cudaMalloc(reinterpret_cast<void**>(&pair.device), capacity));
    return pair;
  }

  std::shared_ptr<const Context> context_;
  std::mutex mutex_;
  std::vector<TablePair> free_;
};

// Block ids of every group and the objects' addresses, one after another.
class CudaTables final : public Tables {
 public:
  CudaTables(std::shared_ptr<TablePool> pool, const std::vector<KernelGroup>& cache_groups, const lm_request& request,
             const std::vector<std::uint64_t>& chunk_objects)
      : pool_(std::move(pool)) {
    std::size_t bytes = chunk_objects.size() * sizeof(std::uint64_t);
    for (std::int32_t i = 0; i < request.num_groups; ++i) bytes += ids_bytes(request.groups[i]);
    pair_ = pool_->take(bytes);
    std::memcpy(pair_.host, chunk_objects.data(), chunk_objects.size() * sizeof(std::uint64_t));
    objects = reinterpret_cast<const std::uint64_t*>(pair_.device);
    for (const std::uint64_t object : chunk_objects) object_bits |= object;
    used_ = chunk_objects.size() * sizeof(std::uint64_t);
    groups = cache_groups;
    for (std::int32_t i = 0; i < request.num_groups; ++i) {
      std::memcpy(pair_.host + used_, request.groups[i].block_ids,
                  static_cast<std::size_t>(request.groups[i].num_block_ids) * sizeof(std::int32_t));
      groups[static_cast<std::size_t>(i)].block_ids = reinterpret_cast<const std::int32_t*>(pair_.device + used_);
      used_ += ids_bytes(request.groups[i]);
    }
  }
  ~CudaTables() override { pool_->give(pair_); }

  void upload(cudaStream_t stream) const {
    if (used_ == 0) return;
    LM_REQUIRE(cudaMemcpyAsync(pair_.device, pair_.host, used_, cudaMemcpyHostToDevice, stream));
  }

 private:
  static std::size_t ids_bytes(const lm_group& group) {
    const std::size_t bytes = static_cast<std::size_t>(group.num_block_ids) * sizeof(std::int32_t);
    return (bytes + 15) / 16 * 16;
  }

  std::shared_ptr<TablePool> pool_;
  TablePair pair_;
  std::size_t used_ = 0;
};

// ---- the queue

class CudaChannel final : public Channel {
 public:
  CudaChannel(std::shared_ptr<const Context> context, lm_direction direction, const lm_engine_options& options)
      : context_(std::move(context)),
        direction_(direction),
        options_(options),
        marks_(std::make_shared<Events>(context_, cudaEventDefault)) {
    int least = 0;
    int greatest = 0;
    LM_REQUIRE(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    LM_REQUIRE(cudaStreamCreateWithPriority(&copy_, cudaStreamNonBlocking, greatest));
    LM_REQUIRE(cudaStreamCreateWithPriority(&kernel_, cudaStreamNonBlocking, greatest));
    LM_REQUIRE(cudaEventCreateWithFlags(&joint_, cudaEventDisableTiming));
  }

  ~CudaChannel() override {
    try {
      const Context::Scope scope(*context_);
      cudaStreamDestroy(copy_);
      cudaStreamDestroy(kernel_);
      cudaEventDestroy(joint_);
      clock_.reset();
      marks_.reset();
    } catch (const DeviceFailure&) {
      // The context has gone, and with it what is freed here.
    }
  }

  void attach_thread() override {
    context_->attach_thread();
    // Another thread that captures a graph must not forbid this one its queries.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    LM_REQUIRE(cudaThreadExchangeStreamCaptureMode(&mode));
  }

  void issue(const std::shared_ptr<Window>& window) override {
    try {
      enqueue(*window);
    } catch (const DeviceFailure&) {
      clock_.reset();  // it may start with a mark that was never recorded
      throw;
    }
  }

  std::shared_ptr<Mark> mark() override {
    join_tails();
    auto mark = new_mark(false);
    LM_REQUIRE(cudaEventRecord(mark->event(), tail()));
    return mark;
  }

  void write_words(const std::vector<std::uint64_t>& addresses, std::uint64_t value) override {
    join_tails();
    constexpr std::size_t kMostOps = 128;
    std::vector<CUstreamBatchMemOpParams> ops(std::min(addresses.size(), kMostOps));
    for (std::size_t first = 0; first < addresses.size(); first += kMostOps) {
      const std::size_t count = std::min(kMostOps, addresses.size() - first);
      for (std::size_t i = 0; i < count; ++i) {
        std::memset(&ops[i], 0, sizeof ops[i]);
        ops[i].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
        ops[i].writeValue.address = addresses[first + i];
        ops[i].writeValue.value64 = value;
        ops[i].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
      }
      const Driver& driver = Driver::get();
      driver.require(driver.batch_mem_op(tail(), static_cast<unsigned>(count), ops.data(), 0), "cuStreamBatchMemOp");
    }
  }

 private:
  void enqueue(Window& window) {
    Transfer& transfer = *window.transfer;
    auto mark = new_mark(window.alone);
    const bool direct = window.method == LM_COPY_DIRECT_BATCH;
    const bool staged = is_staged(window.method);
    const bool retrieve = direction_ == LM_RETRIEVE;
    if (direct) {
      if (window.first) wait_for_fence(transfer, copy_);
      copy(window);
    } else if (staged && retrieve) {
      copy(window);  // staging may fill before the fence; blocks are touched behind it (XFER-3)
      if (window.first) prepare_kernels(transfer);
      join(copy_, kernel_);
      scatter(window);
    } else {
      if (window.first) prepare_kernels(transfer);
      staged ? scatter(window) : gather(window);
      if (!retrieve) join(kernel_, copy_);
      if (staged) copy(window);
    }
    const cudaStream_t last = direct || !retrieve ? copy_ : kernel_;
    copy_is_ahead_ = copy_is_ahead_ || (direct && retrieve);
    if (window.count_address != 0) write_word(last, window.count_address, window.count_value);
    LM_REQUIRE(cudaEventRecord(mark->event(), last));
    window.mark = mark;
  }

  static void wait_for_fence(const Transfer& transfer, cudaStream_t stream) {
    if (transfer.fence_event != 0) LM_REQUIRE(cudaStreamWaitEvent(stream, event_of(transfer.fence_event), 0));
  }

  // Before a transfer's first kernel: its tables are on the device, and its fence has passed.
  void prepare_kernels(const Transfer& transfer) const {
    static_cast<const CudaTables&>(*transfer.tables).upload(kernel_);
    wait_for_fence(transfer, kernel_);
  }

  // The stream that everything of this lane is behind, once tails are joined.
  cudaStream_t tail() const { return direction_ == LM_RETRIEVE ? kernel_ : copy_; }

  // Direct retrieves end on the copy stream; marks and words go behind both.
  void join_tails() {
    if (!copy_is_ahead_) return;
    join(copy_, kernel_);
    copy_is_ahead_ = false;
  }

  // `later` goes on behind what `earlier` was given so far. A wait means the event as recorded when it was enqueued, so
  // one event serves every joint.
  void join(cudaStream_t earlier, cudaStream_t later) {
    LM_REQUIRE(cudaEventRecord(joint_, earlier));
    LM_REQUIRE(cudaStreamWaitEvent(later, joint_, 0));
  }

  // The clock starts anew with a mark behind which nothing was in flight, so that its readings stay short and exact.
  std::shared_ptr<CudaMark> new_mark(bool alone) {
    auto event = std::make_shared<Event>(marks_);
    const std::int64_t now = now_ns();
    if (clock_ == nullptr || (alone && now - clock_made_ns_ > kClockNs)) {
      clock_ = std::make_shared<DeviceClock>(event);
      clock_made_ns_ = now;
    }
    return std::make_shared<CudaMark>(std::move(event), clock_);
  }

  static void write_word(cudaStream_t stream, std::uint64_t word, std::uint64_t value) {
    const Driver& driver = Driver::get();
    driver.require(driver.write_value(stream, word, value, CU_STREAM_WRITE_VALUE_DEFAULT), "cuStreamWriteValue64");
  }

  template <typename Move>
  void each_group(const Window& window, Move move) const {
    const auto& pieces = window.pieces;
    const auto& groups = window.transfer->tables->groups;
    for (std::size_t first = 0; first < pieces.size();) {
      std::size_t end = first + 1;
      while (end < pieces.size() && pieces[end].group == pieces[first].group) ++end;
      try {
        move(groups[static_cast<std::size_t>(pieces[first].group)], pieces.data() + first,
             static_cast<std::int64_t>(end - first));
      } catch (const CudaError& refused) {
        throw DeviceFailure(refused.what(), cudaStreamQuery(kernel_) != cudaErrorNotReady && cudaGetLastError() != 0);
      }
      first = end;
    }
  }

  void scatter(const Window& window) const {
    each_group(window, [&](const KernelGroup& group, const Piece* pieces, std::int64_t count) {
      scatter_staged(group, pieces, count, window.staging, direction_, options_.kernel_ctas, kernel_);
    });
  }

  void gather(const Window& window) const {
    const Tables& tables = *window.transfer->tables;
    each_group(window, [&](const KernelGroup& group, const Piece* pieces, std::int64_t count) {
      move_mapped(group, pieces, count, tables.objects, tables.object_bits, direction_, 0, kernel_);
    });
  }

  void copy(const Window& window) {
    const cudaMemcpyKind kind = direction_ == LM_RETRIEVE ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
    for (const Copy& c : window.copies) {
      if (c.height > 1) {
        LM_REQUIRE(cudaMemcpy2DAsync(pointer(c.to), static_cast<std::size_t>(c.to_pitch), pointer(c.from),
                                     static_cast<std::size_t>(c.from_pitch), static_cast<std::size_t>(c.width),
                                     static_cast<std::size_t>(c.height), kind, copy_));
        continue;
      }
      to_.push_back(pointer(c.to));
      from_.push_back(pointer(c.from));
      sizes_.push_back(static_cast<std::size_t>(c.width));
      if (to_.size() == static_cast<std::size_t>(options_.batch_entries)) flush(kind);
    }
    flush(kind);
  }

  // One call for all runs collected; entries of a call are in no order among themselves.
  void flush(cudaMemcpyKind kind) {
    if (to_.empty()) return;
    cudaError_t code = cudaSuccess;
    if (to_.size() == 1) {
      code = cudaMemcpyAsync(to_[0], from_[0], sizes_[0], kind, copy_);
    } else {
      cudaMemcpyAttributes attributes{};
      attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
      attributes.flags = static_cast<unsigned>(options_.batch_flags);
      std::size_t first = 0;
#if CUDART_VERSION >= 13000
      code = cudaMemcpyBatchAsync(to_.data(), from_.data(), sizes_.data(), to_.size(), &attributes, &first, 1, copy_);
#else
      std::size_t failed_entry = 0;
      code = cudaMemcpyBatchAsync(to_.data(), const_cast<void**>(from_.data()), sizes_.data(), to_.size(), &attributes,
                                  &first, 1, &failed_entry, copy_);
#endif
    }
    to_.clear();
    from_.clear();
    sizes_.clear();
    require(code, "copying a window's runs");
  }

  std::shared_ptr<const Context> context_;
  const lm_direction direction_;
  const lm_engine_options options_;
  std::shared_ptr<Events> marks_;
  cudaStream_t copy_ = nullptr;
  cudaStream_t kernel_ = nullptr;
  cudaEvent_t joint_ = nullptr;
  std::shared_ptr<DeviceClock> clock_;
  std::int64_t clock_made_ns_ = 0;
  bool copy_is_ahead_ = false;
  std::vector<void*> to_;
#if CUDART_VERSION >= 13000
  std::vector<const void*> from_;
#else
  std::vector<void*> from_;
#endif
  std::vector<std::size_t> sizes_;
};

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
