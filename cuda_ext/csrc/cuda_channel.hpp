// A lane's streams on a CUDA device: for copy engines two that take turns, and one for kernels.
//
//   retrieve   copy stream: object -> slot, event ─► kernel stream: slot -> blocks, count, mark
//   store      kernel stream: blocks -> slot, event ─► copy stream: slot -> object, count, mark
//   direct     copy stream alone: object <-> blocks, count, mark. Nothing touches the kernel stream, because another
//              process's kernels would hold it up by a time slice
//
// A slot is used again only after its window's mark was reached, so copies need not wait for scatters.
//
// A copy engine stays with a stream as long as that has work. A lane that always has some would keep the inference
// engine's own small copies, and with them its whole step, back until the last slice. So after `turn_bytes` the other
// copy stream goes on, behind the first one's last copy, and the copy engine looks around meanwhile.
//
// All have the highest priority, so that they do not share hardware queues with the engine's streams: a copy queued
// behind a stream that waits for a word never comes if the word follows it.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "cuda_context.hpp"
#include "cuda_marks.hpp"
#include "cuda_tables.hpp"
#include "engine_device.hpp"
#include "engine_transfer.hpp"
#include "scatter.hpp"

namespace lamella {

constexpr std::size_t kWordBytes = sizeof(std::uint64_t);
constexpr std::size_t kMarksAtOnce = 256;  // of loads under way; more are made when they are needed
constexpr std::int64_t kClockNs = 100'000'000;  // a clock at least so old is replaced when nothing is in flight

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
    for (cudaStream_t& stream : copies_) {
      LM_REQUIRE(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
    }
    copy_ = copies_[0];
    LM_REQUIRE(cudaStreamCreateWithPriority(&kernel_, cudaStreamNonBlocking, greatest));
    LM_REQUIRE(cudaEventCreateWithFlags(&joint_, cudaEventDisableTiming));
    use_once();
  }

  ~CudaChannel() override {
    try {
      const Context::Scope scope(*context_);
      for (const cudaStream_t stream : copies_) cudaStreamDestroy(stream);
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
      apart_ = true;   // a part of the window may be on either stream
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
    take_turns(window.num_bytes);
    auto mark = new_mark(window.alone);
    const bool direct = window.method == LM_COPY_DIRECT_BATCH;
    const bool staged = is_staged(window.method);
    const bool retrieve = direction_ == LM_RETRIEVE;
    if (direct) {
      if (window.first) wait_for_fence(transfer, copy_);
      copy(window);
    } else if (staged && retrieve) {
      copy(window);  // staging may fill before the fence; blocks are touched behind it (XFER-3)
      const auto left = std::make_shared<CudaPoint>(std::make_shared<Event>(marks_));
      LM_REQUIRE(cudaEventRecord(left->event(), copy_));
      if (window.first) prepare_kernels(transfer);
      LM_REQUIRE(cudaStreamWaitEvent(kernel_, left->event(), 0));
      scatter(window);
      window.left = left;
    } else {
      if (window.first) prepare_kernels(transfer);
      staged ? scatter(window) : gather(window);
      if (!retrieve) join(kernel_, copy_);
      if (staged) copy(window);
    }
    const cudaStream_t last = direct || !retrieve ? copy_ : kernel_;
    apart_ = apart_ || (direct && retrieve);
    if (window.count_address != 0) write_word(last, window.count_address, window.count_value);
    LM_REQUIRE(cudaEventRecord(mark->event(), last));
    window.mark = mark;
  }

  // All that CUDA sets up at a first use is used here once: queues, kernels, buffers for commands, events. Later one of
  // the inference engine's streams may wait for a word, and what is set up meanwhile can be made to wait with it.
  void use_once() {
    struct Word {
      std::uint64_t* host = nullptr;
      std::uint64_t* device = nullptr;
      ~Word() {
        cudaFreeHost(host);
        cudaFree(device);
      }
    } word;
    LM_REQUIRE(cudaHostAlloc(reinterpret_cast<void**>(&word.host), 2 * kWordBytes, cudaHostAllocMapped));
    LM_REQUIRE(cudaMalloc(reinterpret_cast<void**>(&word.device), 2 * kWordBytes));
    marks_->reserve(kMarksAtOnce);
    load_kernels(kernel_);
    for (const cudaStream_t stream : {copies_[0], copies_[1], kernel_}) {
      copy_ = stream;
      for (const cudaMemcpyKind kind : {cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost}) {
        for (const std::size_t entries : {1, 2}) {
          for (std::size_t i = 0; i < entries; ++i) {
            const bool up = kind == cudaMemcpyHostToDevice;
            to_.push_back(up ? word.device + i : word.host + i);
            from_.push_back(up ? word.host + i : word.device + i);
            sizes_.push_back(kWordBytes);
          }
          flush(kind);
        }
      }
      if (options_.carrier == LM_CARRIER_VALUE) write_word(stream, address(word.host), 0);
      LM_REQUIRE(cudaEventRecord(joint_, stream));
      LM_REQUIRE(cudaStreamSynchronize(stream));
    }
    copy_ = copies_[0];
    if (options_.carrier == LM_CARRIER_VALUE) write_words({address(word.host)}, 0);
    LM_REQUIRE(cudaStreamSynchronize(tail()));
  }

  void take_turns(std::int64_t num_bytes) {
    if (options_.turn_bytes > 0 && carried_bytes_ >= options_.turn_bytes) {
      const cudaStream_t other = copies_[copy_ == copies_[0] ? 1 : 0];
      join(copy_, other);
      copy_ = other;
      carried_bytes_ = 0;
    }
    carried_bytes_ += num_bytes;
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

  // Direct retrieves end on the copy stream, and a window that failed on any; marks and words go behind both.
  void join_tails() {
    if (!apart_) return;
    join(direction_ == LM_RETRIEVE ? copy_ : kernel_, tail());
    apart_ = false;
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
    to_.clear();  // a window that failed may have left some
    from_.clear();
    sizes_.clear();
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
  cudaStream_t copies_[2] = {};
  cudaStream_t copy_ = nullptr;     // whose turn it is
  std::int64_t carried_bytes_ = 0;  // in this turn
  cudaStream_t kernel_ = nullptr;
  cudaEvent_t joint_ = nullptr;
  std::shared_ptr<DeviceClock> clock_;
  std::int64_t clock_made_ns_ = 0;
  bool apart_ = false;  // something was enqueued that tail() is not behind
  std::vector<void*> to_;
#if CUDART_VERSION >= 13000
  std::vector<const void*> from_;
#else
  std::vector<void*> from_;
#endif
  std::vector<std::size_t> sizes_;
};

}  // namespace lamella
