#include "engine_lane.hpp"

#include <algorithm>
#include <ctime>

#include <pthread.h>

#include "engine_copies.hpp"

#ifdef __linux__
#include <sys/prctl.h>
#endif

namespace lamella {
namespace {

constexpr std::int64_t kIdleNs = 3'600'000'000'000;  // nothing in flight: until woken
constexpr std::int64_t kFirstLookNs = 10'000;        // after an expectation that was too early
constexpr double kWorthComparing = 1.05;             // staged copies that take so many times the wire's time
constexpr std::int64_t kLastLookNs = 500'000;        // a stuck fence must not cost a core

// A planted fault: the device says, when it comes to the mark, that something has gone wrong.
class FailingMark final : public Mark {
 public:
  explicit FailingMark(std::shared_ptr<Mark> inner) : inner_(std::move(inner)) {}
  bool reached() override {
    if (inner_->reached()) throw DeviceFailure("planted: the window failed when it completed", false);
    return false;
  }
  Moment moment() override { return inner_->moment(); }
  void hold_back(std::uint64_t stream) override { inner_->hold_back(stream); }
  bool is_on_host() const override { return inner_->is_on_host(); }

 private:
  std::shared_ptr<Mark> inner_;
};

std::int64_t read_ns(clockid_t clock) {
  timespec t{};
  return clock_gettime(clock, &t) == 0 ? std::int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec : 0;
}

}  // namespace

Lane::Lane(lm_direction direction, Device& device, Slots& slots, LaneOwner& owner, const lm_engine_options& options)
    : direction_(direction),
      slots_(slots),
      owner_(owner),
      options_(options),
      ns_per_byte_(1e9 / options.rates.wire_bytes_per_s) {
  channel_ = device.open(direction, *this);
  pending_.set_words(device.host_words(options.num_layers));
  slots_.introduce(direction, this);
  thread_ = std::thread([this] { run(); });
}

Lane::~Lane() {
  if (thread_.joinable()) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
      if (close_reason_.empty()) close_reason_ = "the engine was destroyed";
    }
    wake_.notify_all();
    thread_.join();
  }
  slots_.introduce(direction_, nullptr);
  channel_.reset();  // its threads may still call wake()
}

void Lane::submit(std::shared_ptr<Transfer> transfer) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) throw Stopped("the engine is closed; create another");
    if (!lost_reason_.empty()) throw Stopped("the device is lost: " + lost_reason_);
    inbox_.push_back(std::move(transfer));
    ++status_.live;
  }
  wake_.notify_one();
}

void Lane::wake() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    looked_ = true;
  }
  wake_.notify_one();
}

void Lane::run_between_windows(const std::shared_ptr<std::function<void()>>& body, std::int64_t deadline_ns) {
  const auto command = std::make_shared<Command>();
  command->body = body;
  std::unique_lock<std::mutex> lock(mutex_);
  if (ended_) throw Stopped("the engine is closed");
  commands_.push_back(command);
  wake_.notify_one();
  const auto until = std::chrono::steady_clock::time_point(std::chrono::nanoseconds(deadline_ns));
  if (!answered_.wait_until(lock, until, [&] { return command->done; })) {
    command->dropped = true;
    throw TimedOut("the engine's thread did not answer within the bound");
  }
  if (command->failed) throw Stopped(command->error);
}

bool Lane::close(const std::string& reason, std::int64_t deadline_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  closing_ = true;
  if (close_reason_.empty()) close_reason_ = reason;
  wake_.notify_all();
  const auto until = std::chrono::steady_clock::time_point(std::chrono::nanoseconds(deadline_ns));
  if (!answered_.wait_until(lock, until, [this] { return ended_; })) return false;
  lock.unlock();
  if (thread_.joinable()) thread_.join();
  channel_.reset();  // and with it the staging ring
  return true;
}

void Lane::plant_fault(std::int64_t window, std::int32_t when) {
  const std::lock_guard<std::mutex> lock(mutex_);
  fault_window_ = window;
  fault_when_ = when;
}

lm_lane_status Lane::status() {
  const std::lock_guard<std::mutex> lock(mutex_);
  clockid_t clock{};
  if (!ended_ && pthread_getcpuclockid(thread_.native_handle(), &clock) == 0) status_.thread_cpu_ns = read_ns(clock);
  return status_;
}

void Lane::take_inbox(std::unique_lock<std::mutex>& lock) {
  std::vector<std::shared_ptr<Transfer>> arrived;
  arrived.swap(inbox_);
  std::deque<std::shared_ptr<Command>> commands;
  commands.swap(commands_);
  looked_ = false;
  const bool closing = closing_;
  const std::string reason = close_reason_;
  lock.unlock();
  for (auto& transfer : arrived) live_.push_back(std::move(transfer));
  if (closing) {
    for (const auto& transfer : live_) transfer->stop(LM_CANCELLED, reason);
  }
  for (const auto& command : commands) {
    bool dropped = false;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      dropped = command->dropped;
    }
    std::string error;
    bool failed = false;
    if (!dropped) {
      try {
        (*command->body)();
      } catch (const std::exception& e) {
        failed = true;
        error = e.what();
      }
    }
    const std::lock_guard<std::mutex> guard(mutex_);
    command->failed = failed;
    command->error = error;
    command->done = true;
  }
  if (!commands.empty()) answered_.notify_all();
  lock.lock();
}

void Lane::run() {
#ifdef __linux__
  prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);  // the default, 50 µs, is a third of a window
  prctl(PR_SET_NAME, direction_ == LM_RETRIEVE ? "lamella-h2d" : "lamella-d2h", 0UL, 0UL, 0UL);
#endif
  try {
    channel_->attach_thread();
  } catch (const DeviceFailure& failure) {
    fail_all(failure.what());
  }
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    take_inbox(lock);
    const bool closing = closing_;
    lock.unlock();
    reap();
    drop_stopped();
    bool issued = false;
    while (issue_next()) {
      issued = true;
      const std::lock_guard<std::mutex> guard(mutex_);
      if (!inbox_.empty() || !commands_.empty() || looked_) break;
    }
    if (issued) drop_stopped();
    const std::int64_t look_ns = next_look_ns();
    lock.lock();
    status_.in_flight_bytes = flying_bytes_;
    if (closing && live_.empty() && inbox_.empty() && commands_.empty()) break;
    const auto until = std::chrono::steady_clock::time_point(std::chrono::nanoseconds(look_ns));
    wake_.wait_until(lock, until, [&] {
      return looked_ || !inbox_.empty() || !commands_.empty() || closing_ != closing;
    });
  }
  ended_ = true;
  status_.thread_cpu_ns = read_ns(CLOCK_THREAD_CPUTIME_ID);
  answered_.notify_all();
}

// The window to look for: when all that is to come is enqueued, each; otherwise when half of what is in flight has gone, so
// that a look refills several.
std::size_t Lane::watched() const {
  const bool more = std::any_of(live_.begin(), live_.end(), [](const auto& t) { return !t->all_issued; });
  return more ? (in_flight_.size() - 1) / 2 : 0;
}

std::int64_t Lane::expected_ns(std::size_t window) const {
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i <= window; ++i) bytes += in_flight_[i]->num_bytes;
  return moving_since_ns_ + static_cast<std::int64_t>(static_cast<double>(bytes) * ns_per_byte_);
}

// When something may have happened that nobody tells us.
std::int64_t Lane::next_look_ns() const {
  const std::int64_t now = now_ns();
  if (in_flight_.empty()) return now + kIdleNs;
  return std::max(expected_ns(watched()), now + std::max(look_backoff_ns_, kFirstLookNs));
}

// Learns from a look that found `reached` windows done. The pace aims a little early: a look in vain costs a few
// microseconds, one that comes late costs the wire.
void Lane::keep_pace(std::size_t reached, std::int64_t bytes) {
  constexpr double kSlower = 1.03;
  constexpr double kFaster = 0.99;
  const std::int64_t now = now_ns();
  const double wire = 1e9 / options_.rates.wire_bytes_per_s;
  if (reached > 0) {
    const auto likely = moving_since_ns_ + static_cast<std::int64_t>(static_cast<double>(bytes) * ns_per_byte_);
    moving_since_ns_ = std::min(now, std::max(likely, missed_ns_));
    ns_per_byte_ = std::max(0.9 * wire, ns_per_byte_ * kFaster);
  } else if (now >= expected_ns(watched())) {
    ns_per_byte_ = std::min(100 * wire, ns_per_byte_ * kSlower);
  }
  if (!in_flight_.empty()) missed_ns_ = now;
}

void Lane::give_slot(Window& window) {
  if (window.slot >= 0) slots_.give(direction_, window.slot);
  window.slot = -1;
}

void Lane::reap() {
  if (in_flight_.empty()) return;
  std::int64_t bytes = 0;
  std::size_t reached = 0;
  while (!in_flight_.empty()) {
    const std::shared_ptr<Window> window = in_flight_.front();
    Transfer& transfer = *window->transfer;
    try {
      if (!window->mark->reached()) break;
      transfer.refresh();
    } catch (const DeviceFailure& failure) {
      transfer.stop(LM_FAILED, failure.what());
      if (failure.lost) {
        fail_all(failure.what());
        return;
      }
    }
    ++reached;
    bytes += window->num_bytes;
    give_slot(*window);
    --transfer.windows_in_flight;
    flying_bytes_ -= window->num_bytes;
    in_flight_.pop_front();
  }
  keep_pace(reached, bytes);
  const bool in_vain = reached == 0 && !in_flight_.empty();
  look_backoff_ns_ = in_vain ? std::min(std::max(look_backoff_ns_ * 2, kFirstLookNs), kLastLookNs) : 0;
}

// Lets go of transfers of which nothing is in flight and nothing will be.
void Lane::drop_stopped() {
  for (std::size_t i = 0; i < live_.size();) {
    const std::shared_ptr<Transfer> transfer = live_[i];
    if (!(transfer->all_issued || transfer->stopping()) || transfer->windows_in_flight != 0) {
      ++i;
      continue;
    }
    live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(i));
    finish(transfer);
  }
}

void Lane::finish(const std::shared_ptr<Transfer>& transfer) {
  if (begun_ == transfer.get()) begun_ = nullptr;
  if (transfer->prepared) give_slot(*transfer->prepared);
  if (live_.empty()) slots_.set_active(direction_, false);
  const std::vector<std::uint64_t> words = pending_.close(transfer->gate);
  if (!words.empty()) {
    try {
      if (lost_) throw DeviceFailure("", true);
      channel_->write_words(words, 0);
    } catch (const DeviceFailure&) {
      for (const std::uint64_t word : words) store_word(word, 0);  // nothing is enqueued that could overtake it
    }
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    --status_.live;
    status_.in_flight_bytes = flying_bytes_;
  }
  transfer->tables.reset();
  transfer->finish();
  owner_.on_final(transfer);
}

void Lane::fail_all(const std::string& reason) {
  lost_ = true;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    lost_reason_ = reason;
  }
  for (const auto& window : in_flight_) {
    --window->transfer->windows_in_flight;
    give_slot(*window);
  }
  in_flight_.clear();
  flying_bytes_ = 0;
  for (const auto& transfer : live_) transfer->stop(LM_FAILED, "the device is lost: " + reason);
}

std::shared_ptr<Transfer> Lane::most_urgent() const {
  std::shared_ptr<Transfer> best;
  for (const auto& t : live_) {
    if (t->all_issued || t->stopping()) continue;
    if (begun_ == t.get()) return t;
    const std::int64_t key = t->keys[static_cast<std::size_t>(t->slices_issued)];
    if (best != nullptr) {
      const std::int64_t best_key = best->keys[static_cast<std::size_t>(best->slices_issued)];
      if (key > best_key || (key == best_key && t->sequence > best->sequence)) continue;
    }
    best = t;
  }
  return best;
}

bool Lane::prepare(Transfer& transfer) {
  if (transfer.prepared) return true;
  auto window = std::make_shared<Window>();
  lm_window planned{};
  if (!transfer.planner->next(window->pieces, planned)) return false;
  window->num_bytes = planned.num_bytes;
  window->slice = transfer.slices_issued;
  window->completes_slice = planned.completes_slice >= 0;
  window->first = transfer.windows_issued == 0;
  transfer.prepared = std::move(window);
  return true;
}

std::vector<Copy> Lane::copies_for(Transfer& transfer, const Window& window, std::int32_t method) {
  const CopyJob job{transfer.planner->groups(), window.pieces,           transfer.owned.request,
                    transfer.objects,           transfer.registered_base, transfer.registered_piece_bytes};
  switch (method) {
    case LM_COPY_STAGED_BATCH:
    case LM_COPY_STAGED_2D:
      return staged_copies(job, window.staging, method == LM_COPY_STAGED_2D);
    case LM_COPY_DIRECT_BATCH:
      return direct_copies(job, true);
    default:
      return {};
  }
}

// The fastest by the calibrated table; staging first among equals, because its entries are fewer.
void Lane::choose_method(Transfer& transfer, Window& window) {
  if (transfer.method == LM_COPY_AUTO && options_.device == LM_DEVICE_CPU) transfer.method = LM_COPY_GATHER;
  if (transfer.method != LM_COPY_AUTO) return;
  const double staged = estimated_ns(copies_for(transfer, window, LM_COPY_STAGED_2D), options_.rates);
  transfer.method = LM_COPY_STAGED_2D;
  // Nothing beats long runs, and listing the blocks for a comparison would delay the first byte.
  const double wire = 1e9 * static_cast<double>(window.num_bytes) / options_.rates.wire_bytes_per_s;
  if (transfer.cache->direct && (options_.avoid_kernels != 0 || staged > wire * kWorthComparing)) {
    const double direct = estimated_ns(copies_for(transfer, window, LM_COPY_DIRECT_BATCH), options_.rates);
    if (options_.avoid_kernels != 0 || direct < staged) {
      transfer.method = LM_COPY_DIRECT_BATCH;
      return;
    }
  }
  const double gather = 1e9 * static_cast<double>(window.num_bytes) / options_.rates.gather_bytes_per_s;
  if (options_.gather_factor_percent > 0 && options_.avoid_kernels == 0 &&
      staged * 100 > gather * options_.gather_factor_percent) {
    transfer.method = LM_COPY_GATHER;
  }
}

bool Lane::issue_next() {
  if (lost_) return false;
  const std::shared_ptr<Transfer> urgent = most_urgent();
  if (urgent == nullptr) return false;
  Transfer& transfer = *urgent;
  if (!prepare(transfer)) return false;
  const std::shared_ptr<Window> window = transfer.prepared;
  if (flying_bytes_ > 0 && flying_bytes_ + window->num_bytes > options_.in_flight_bytes) return false;
  if (window->slot < 0 && (transfer.method == LM_COPY_AUTO || is_staged(transfer.method)) && window->num_bytes > 0) {
    slots_.set_active(direction_, true);
    window->slot = slots_.take(direction_);
    if (window->slot < 0) return false;
    window->staging = slots_.address(window->slot);
  }
  const bool first = window->first;
  if (window->num_bytes > 0) choose_method(transfer, *window);
  window->method = transfer.method == LM_COPY_AUTO ? static_cast<std::int32_t>(LM_COPY_STAGED_BATCH) : transfer.method;
  if (!is_staged(window->method)) give_slot(*window);
  window->copies = window->num_bytes > 0 ? copies_for(transfer, *window, window->method) : std::vector<Copy>();
  transfer.count_copies(static_cast<std::int64_t>(window->copies.size()));
  if (first) transfer.start(window->method);
  begun_ = &transfer;
  window->transfer = urgent;
  bool plant_now = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool planted = status_.windows == fault_window_;
    plant_now = planted && fault_when_ == 0;
    transfer.planted = transfer.planted || (planted && fault_when_ == 1);
    ++status_.windows;
    status_.peak_in_flight_bytes = std::max(status_.peak_in_flight_bytes, flying_bytes_ + window->num_bytes);
    status_.last_key = transfer.keys[static_cast<std::size_t>(window->slice)];
  }
  transfer.prepared.reset();
  ++transfer.windows_issued;
  if (window->completes_slice && transfer.count_address != 0) {
    window->count_address = transfer.count_address;
    window->count_value = count_word(transfer.generation, window->slice + 1);
  }
  window->alone = in_flight_.empty();
  window->issued_ns = now_ns();
  if (window->alone) moving_since_ns_ = missed_ns_ = window->issued_ns;
  bool recorded = false;
  try {
    channel_->issue(window);
    if (plant_now) throw DeviceFailure("planted: the window failed when it was issued", false);
    if (transfer.planted) window->mark = std::make_shared<FailingMark>(window->mark);
    recorded = true;
    if (window->completes_slice) {
      const std::vector<std::uint64_t> words = pending_.advance(
          transfer.gate, transfer.owned.slices[static_cast<std::size_t>(window->slice)].first_layer +
                          transfer.owned.slices[static_cast<std::size_t>(window->slice)].num_layers);
      if (!words.empty()) channel_->write_words(words, 0);
    }
  } catch (const DeviceFailure& failure) {
    transfer.stop(LM_FAILED, failure.what());
    begun_ = nullptr;
    try {
      if (failure.lost) throw;
      window->mark = channel_->mark();  // what was enqueued of it must drain
    } catch (const DeviceFailure& worse) {
      fail_all(worse.what());
      give_slot(*window);
      return false;
    }
  }
  ++transfer.windows_in_flight;
  flying_bytes_ += window->num_bytes;
  in_flight_.push_back(window);
  if (!recorded) return true;
  if (window->completes_slice) {
    ++transfer.slices_issued;
    begun_ = nullptr;
    transfer.all_issued = transfer.slices_issued == transfer.num_slices();
    transfer.record(window->mark);  // published last
  }
  return true;
}

}  // namespace lamella
