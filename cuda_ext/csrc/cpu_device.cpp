// The CPU as the engine's device: a thread a lane stands for its streams, host memory for both sides.
//
// It is asynchronous like the real one: issue() only enqueues, marks are reached later and in order. So the whole of
// the engine, its cancels, fences, failures and time-outs, runs and is tested on a machine without a GPU.
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <thread>

#include "engine_device.hpp"
#include "engine_transfer.hpp"
#include "lamella/copy.hpp"
#include "lamella/errors.hpp"

namespace lamella {
namespace {

class CpuPoint final : public Point {
 public:
  bool reached() override { return reached_.load(std::memory_order_acquire); }
  void reach() { reached_.store(true, std::memory_order_release); }

 private:
  std::atomic<bool> reached_{false};
};

class CpuMark final : public Mark {
 public:
  bool reached() override { return reached_ns_.load(std::memory_order_acquire) != 0; }
  Moment moment() override { return {nullptr, reached_ns_.load(std::memory_order_acquire)}; }
  void hold_back(std::uint64_t) override { throw DeviceFailure("the CPU device has no streams to hold back", false); }
  bool is_on_host() const override { return true; }
  void reach() { reached_ns_.store(now_ns(), std::memory_order_release); }

 private:
  std::atomic<std::int64_t> reached_ns_{0};
};

// ---- bytes

void copy_rows(const Copy& copy) {
  for (std::int64_t row = 0; row < copy.height; ++row) {
    std::memcpy(at(advanced(copy.to, row * copy.to_pitch)), at(advanced(copy.from, row * copy.from_pitch)),
                static_cast<std::size_t>(copy.width));
  }
}

std::int64_t block_at(const Transfer& transfer, const Piece& p, std::int64_t place) {
  const Group& g = transfer.planner->groups()[static_cast<std::size_t>(p.group)];
  return block_of(transfer.owned.request.groups[p.group].block_ids, block_index(g, place));
}

// Between the blocks and the dense side: a staging image at `staging`, or the object itself where staging is 0.
void move_tokens(const Transfer& transfer, const Piece& p, std::uint64_t staging) {
  const Group& g = transfer.planner->groups()[static_cast<std::size_t>(p.group)];
  const BlockShape shape(g);
  const LayerSelector selector = selector_of(p);
  const bool to_engine = transfer.direction == LM_RETRIEVE;
  for (std::int32_t kv = 0; kv < g.kv; ++kv) {
    for (std::int32_t slot = 0; slot < p.num_layers; ++slot) {
      const std::int32_t layer = engine_layer(selector, slot);
      for (std::int64_t token = 0; token < p.num_tokens;) {
        const std::int64_t place = sequence_token(g, p.object_index, p.first_token + token);
        const std::int64_t count =
            std::min<std::int64_t>(g.block_tokens - token_in_block(g, place), p.num_tokens - token);
        const std::uint64_t engine = advanced(
            engine_address(g, layer, kv, block_at(transfer, p, place), token_in_block(g, place)), shape.origin());
        const std::uint64_t dense =
            staging != 0
                ? advanced(staging, p.staging_offset + staged_token(g, selector, p.num_tokens, kv, slot, token))
                : advanced(transfer.objects[static_cast<std::size_t>(p.object_index)],
                           object_token(g, kv, layer, p.first_token + token));
        shape.copy(engine, dense, count, to_engine);
        token += count;
      }
    }
  }
}

void move_blocks(const Transfer& transfer, const Piece& p, std::uint64_t staging) {
  const Group& g = transfer.planner->groups()[static_cast<std::size_t>(p.group)];
  const bool to_engine = transfer.direction == LM_RETRIEVE;
  for (std::int32_t slot = 0; slot < p.num_layers; ++slot) {
    const std::int32_t layer = engine_layer(selector_of(p), slot);
    for (std::int64_t token = 0; token < p.num_tokens; token += g.block_tokens) {
      const std::int64_t chunk_token = p.first_token + token;
      const std::int64_t block = block_at(transfer, p, sequence_token(g, p.object_index, chunk_token));
      const std::uint64_t dense =
          staging != 0
              ? advanced(staging, p.staging_offset + staged_block(g, p.num_tokens, slot, block_index(g, token)))
              : advanced(transfer.objects[static_cast<std::size_t>(p.object_index)],
                         object_block(g, layer, block_index(g, chunk_token)));
      for (std::int32_t kv = 0; kv < g.kv; ++kv) {
        unsigned char* engine = at(engine_address(g, layer, kv, block, 0));
        unsigned char* plane = at(advanced(dense, kv * plane_bytes(g)));
        std::memcpy(to_engine ? engine : plane, to_engine ? plane : engine, static_cast<std::size_t>(plane_bytes(g)));
      }
    }
  }
}

void move_pieces(const Transfer& transfer, const Window& window, std::uint64_t staging) {
  for (const Piece& p : window.pieces) {
    if (transfer.planner->groups()[static_cast<std::size_t>(p.group)].form == Form::kToken) {
      move_tokens(transfer, p, staging);
    } else {
      move_blocks(transfer, p, staging);
    }
  }
}

void copy_window(const Window& window) {
  for (const Copy& copy : window.copies) copy_rows(copy);
}

// All of it, or of one whose bytes have left the wire the rest.
void move_window(const Window& window, bool has_left) {
  const Transfer& transfer = *window.transfer;
  const bool staged = is_staged(window.method);
  if (staged) move_pieces(transfer, window, window.staging);
  if (!has_left) copy_window(window);
  if (window.method == LM_COPY_GATHER) move_pieces(transfer, window, 0);
}

// ---- the queue

class CpuChannel;

// Where a device finds its channels, as long as they live.
struct Openings {
  std::mutex mutex;
  CpuChannel* channels[2] = {nullptr, nullptr};
};

class CpuChannel final : public Channel {
 public:
  CpuChannel(std::shared_ptr<Openings> openings, lm_direction direction, bool paced, Listener& listener)
      : openings_(std::move(openings)),
        direction_(direction),
        paced_(paced),
        listener_(listener),
        thread_([this] { run(); }) {
    const std::lock_guard<std::mutex> lock(openings_->mutex);
    openings_->channels[direction_] = this;
  }

  ~CpuChannel() override {
    {
      const std::lock_guard<std::mutex> lock(openings_->mutex);
      openings_->channels[direction_] = nullptr;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void issue(const std::shared_ptr<Window>& window) override {
    const auto mark = std::make_shared<CpuMark>();
    window->mark = mark;
    const bool scattered = is_staged(window->method) && direction_ == LM_RETRIEVE;
    const auto left = scattered ? std::make_shared<CpuPoint>() : nullptr;
    window->left = left;
    // The window owns the mark, and the queue the window only until it has run.
    enqueue({[this, window, left] {
               if (left != nullptr) {  // staging may fill before the fence; blocks are touched behind it (XFER-3)
                 copy_window(*window);
                 left->reach();
                 listener_.on_progress();
               }
               if (window->first) wait_for_fence(*window->transfer);
               if (!window->transfer->fence_missed.load()) move_window(*window, left != nullptr);
               if (window->count_address != 0) store_word(window->count_address, window->count_value);
             },
             mark, window->num_bytes > 0});
  }

  std::shared_ptr<Mark> mark() override {
    const auto mark = std::make_shared<CpuMark>();
    enqueue({[] {}, mark, false});
    return mark;
  }

  void write_words(const std::vector<std::uint64_t>& addresses, std::uint64_t value) override {
    enqueue({[addresses, value] {
               for (const std::uint64_t address : addresses) store_word(address, value);
             },
             nullptr, false});
  }

  void grant(std::int64_t windows) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      granted_ += windows;
    }
    changed_.notify_all();
  }

  void abandon() {
    std::shared_ptr<Fence> fence;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      abandoned_ = true;
      fence = fence_;
    }
    changed_.notify_all();
    if (fence != nullptr) fence->nudge();
  }

 private:
  struct Item {
    std::function<void()> body;
    std::shared_ptr<CpuMark> mark;  // may be null
    bool needs_grant;
  };

  void enqueue(Item item) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(item));
    }
    changed_.notify_all();
  }

  // Until the fence opens. A stopped transfer or the engine's end gives it up, and then nothing of the transfer moves:
  // its marks are reached all the same, but nothing of it has landed.
  void wait_for_fence(Transfer& transfer) {
    if (transfer.fence == nullptr) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      fence_ = transfer.fence;
    }
    const bool opened = transfer.fence->wait([&] {
      const std::lock_guard<std::mutex> lock(mutex_);
      return abandoned_ || transfer.stopping();
    });
    if (!opened) {
      transfer.fence_missed.store(true);
      transfer.stop(LM_CANCELLED, "the engine was closed");  // unless a stop is why it was given up
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    fence_ = nullptr;
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] {
        if (queue_.empty()) return ending_;
        return !paced_ || abandoned_ || ending_ || !queue_.front().needs_grant || granted_ > 0;
      });
      if (queue_.empty()) return;
      Item item = std::move(queue_.front());
      queue_.pop_front();
      if (item.needs_grant && granted_ > 0) --granted_;
      lock.unlock();
      item.body();
      item.body = nullptr;
      if (item.mark != nullptr) {
        item.mark->reach();
        listener_.on_progress();
      }
      lock.lock();
    }
  }

  std::shared_ptr<Openings> openings_;
  const lm_direction direction_;
  const bool paced_;
  Listener& listener_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> queue_;
  std::shared_ptr<Fence> fence_;  // being waited for
  std::int64_t granted_ = 0;
  bool abandoned_ = false;
  bool ending_ = false;
  std::thread thread_;
};

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(const lm_engine_options& options) : paced_(options.paced != 0) {}

  std::unique_ptr<Channel> open(lm_direction direction, Listener& listener) override {
    return std::make_unique<CpuChannel>(openings_, direction, paced_, listener);
  }

  std::uint64_t take_staging(std::int64_t bytes) override {
    staging_.reset(new unsigned char[static_cast<std::size_t>(bytes)]);  // not zeroed: memory that is used alone
    return reinterpret_cast<std::uintptr_t>(staging_.get());
  }
  void release_staging() override { staging_.reset(); }

  const std::uint64_t* keep_words(const std::vector<std::uint64_t>& words) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    kept_.push_back(words);
    return kept_.back().data();
  }

  std::unique_ptr<Tables> tables(const std::vector<KernelGroup>&, const lm_request&,
                                 const std::vector<std::uint64_t>&) override {
    return nullptr;  // the host reads the transfer's own
  }

  std::vector<std::uint64_t> host_words(std::int32_t count) override {
    constexpr std::size_t kWordsALine = 8;
    const std::lock_guard<std::mutex> lock(mutex_);
    kept_.emplace_back(static_cast<std::size_t>(count) * kWordsALine, 0);
    std::vector<std::uint64_t> addresses;
    for (std::int32_t i = 0; i < count; ++i) {
      addresses.push_back(
          reinterpret_cast<std::uintptr_t>(kept_.back().data() + static_cast<std::size_t>(i) * kWordsALine));
    }
    return addresses;
  }

  // The caller is its own stream, so it waits itself; the watchdog's forced value ends every wait.
  void wait_word(std::uint64_t, std::uint64_t address, std::uint64_t value, bool reaches) override {
    const auto* word = reinterpret_cast<const std::uint64_t*>(static_cast<std::uintptr_t>(address));
    while (true) {
      const std::uint64_t now = __atomic_load_n(word, __ATOMIC_ACQUIRE);
      if (reaches ? static_cast<std::int64_t>(now - value) >= 0 : now == value) return;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  bool has_word_waits() const override { return true; }
  std::uint64_t event_behind(std::uint64_t) override {
    throw Invalid("the CPU device has no streams; give a fence");
  }
  void release_event(std::uint64_t) override {}
  void grant(lm_direction direction, std::int64_t windows) override {
    const std::lock_guard<std::mutex> lock(openings_->mutex);
    if (openings_->channels[direction] != nullptr) openings_->channels[direction]->grant(windows);
  }
  void abandon() override {
    const std::lock_guard<std::mutex> lock(openings_->mutex);
    for (CpuChannel* channel : openings_->channels) {
      if (channel != nullptr) channel->abandon();
    }
  }

 private:
  const bool paced_;
  std::unique_ptr<unsigned char[]> staging_;
  const std::shared_ptr<Openings> openings_ = std::make_shared<Openings>();
  std::mutex mutex_;
  std::deque<std::vector<std::uint64_t>> kept_;
};

}  // namespace

std::unique_ptr<Device> make_cpu_device(const lm_engine_options& options) {
  return std::make_unique<CpuDevice>(options);
}

}  // namespace lamella
