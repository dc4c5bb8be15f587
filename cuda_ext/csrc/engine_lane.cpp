#include "engine_lane.hpp"

#include <pthread.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <ctime>

#include "engine_faults.hpp"

namespace lamella {
namespace {

constexpr std::int64_t kIdleNs = 3'600'000'000'000;  // nothing in flight: until woken

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
      pace_(options.rates.wire_bytes_per_s) {
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
    const std::int64_t now = now_ns();
    const std::int64_t look_ns = in_flight_.empty() ? now + kIdleNs : pace_.next_look_ns(awaited_bytes(), now);
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

// Bytes up to the window to look for: when all that is to come is enqueued, the next; otherwise the one in the middle
// of what is in flight, so that a look refills several.
std::int64_t Lane::awaited_bytes() const {
  if (in_flight_.empty()) return 0;
  const bool more = std::any_of(live_.begin(), live_.end(), [](const auto& t) { return !t->all_issued; });
  const std::size_t last = more ? (in_flight_.size() - 1) / 2 : 0;
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i <= last; ++i) bytes += in_flight_[i]->num_bytes;
  return bytes;
}

void Lane::give_slot(Window& window) {
  if (window.slot >= 0) slots_.give(direction_, window.slot);
  window.slot = -1;
}

void Lane::reap() {
  if (in_flight_.empty()) return;
  std::int64_t bytes = 0;
  bool reached = false;
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
    reached = true;
    bytes += window->num_bytes;
    give_slot(*window);
    --transfer.windows_in_flight;
    flying_bytes_ -= window->num_bytes;
    in_flight_.pop_front();
  }
  if (reached) {
    pace_.hit(bytes, !in_flight_.empty(), now_ns());
  } else {
    pace_.miss(awaited_bytes(), now_ns());
  }
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

CopyJob Lane::copy_job(const Transfer& transfer, const Window& window) {
  return {transfer.planner->groups(), window.pieces,           transfer.owned.request,
          transfer.objects,           transfer.registered_base, transfer.registered_piece_bytes};
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
  if (transfer.method == LM_COPY_AUTO && window->num_bytes > 0) {
    transfer.method = choose_method(copy_job(transfer, *window), transfer.cache->direct, window->staging, options_);
  }
  window->method = transfer.method == LM_COPY_AUTO ? static_cast<std::int32_t>(LM_COPY_STAGED_BATCH) : transfer.method;
  if (!is_staged(window->method)) give_slot(*window);
  if (window->num_bytes > 0) window->copies = copies_of(copy_job(transfer, *window), window->method, window->staging);
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
  if (window->alone) pace_.restart(window->issued_ns);
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
