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
    if (!lost_reason_.empty()) throw Stopped(lost_reason_);
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
  if (lost_) stop_live(LM_FAILED, lost_reason_);  // what was submitted before that was known
  if (closing) stop_live(LM_CANCELLED, reason);
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
    while (issue_next()) {
      const std::lock_guard<std::mutex> guard(mutex_);
      if (!inbox_.empty() || !commands_.empty() || looked_) break;
    }
    drop_stopped();  // a device that was lost just now wakes nobody
    const std::int64_t now = now_ns();
    const std::int64_t look_ns = flight_.empty() ? now + kIdleNs : pace_.next_look_ns(awaited_bytes(), now);
    lock.lock();
    status_.in_flight_bytes = flight_.wire_bytes();
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

std::int64_t Lane::awaited_bytes() const {
  return flight_.awaited_bytes(std::any_of(live_.begin(), live_.end(), [](const auto& t) { return !t->all_issued; }));
}

void Lane::give_slot(Window& window) {
  if (window.slot >= 0) slots_.give(direction_, window.slot);
  window.slot = -1;
}

// Whether the window has come so far, or never will. A device that is lost takes all of the flight with it.
bool Lane::reached(Window& window, Point& point) {
  try {
    if (!point.reached()) return false;
    window.transfer->refresh();
  } catch (const DeviceFailure& failure) {
    if (failure.lost) {
      fail_all(failure.what());
      return false;
    }
    window.transfer->stop(LM_FAILED, failure.what());
  }
  return true;
}

void Lane::reap() {
  if (flight_.empty()) return;
  std::int64_t bytes = 0;
  while (const auto window = flight_.on_wire()) {
    if (!reached(*window, Flight::leaving(*window))) break;
    bytes += window->num_bytes;
    flight_.leave();
  }
  bool done = false;
  while (const auto window = flight_.off_wire()) {
    if (!reached(*window, *window->mark)) break;
    done = true;
    give_slot(*window);
    --window->transfer->windows_in_flight;
    flight_.remove();
  }
  if (lost_) return;
  if (bytes > 0) {
    pace_.hit(bytes, flight_.wire_bytes() > 0, now_ns());
  } else if (done) {
    pace_.scattered();
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
    status_.in_flight_bytes = flight_.wire_bytes();
  }
  transfer->tables.reset();
  transfer->finish();
  owner_.on_final(transfer);
}

void Lane::fail_all(const std::string& reason) {
  lost_ = true;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    lost_reason_ = "the device is lost: " + reason;
  }
  for (const auto& window : flight_.abandon()) {
    --window->transfer->windows_in_flight;
    give_slot(*window);
  }
  stop_live(LM_FAILED, lost_reason_);
}

void Lane::stop_live(lm_state wanted, const std::string& reason) {
  for (const auto& transfer : live_) transfer->stop(wanted, reason);
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
  window->first = planned.num_bytes > 0 && !transfer.moves;
  transfer.moves = transfer.moves || window->first;
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
  if (flight_.wire_bytes() > 0 && flight_.wire_bytes() + window->num_bytes > options_.in_flight_bytes) return false;
  if (window->slot < 0 && (transfer.method == LM_COPY_AUTO || is_staged(transfer.method)) && window->num_bytes > 0) {
    slots_.set_active(direction_, true);
    window->slot = slots_.take(direction_);
    if (window->slot < 0) return false;
    window->staging = slots_.address(window->slot);
  }
  if (transfer.method == LM_COPY_AUTO && window->num_bytes > 0) {
    transfer.method = choose_method(copy_job(transfer, *window), transfer.cache->direct, window->staging, options_);
  }
  window->method = transfer.method == LM_COPY_AUTO ? static_cast<std::int32_t>(LM_COPY_STAGED_BATCH) : transfer.method;
  if (!is_staged(window->method)) give_slot(*window);
  if (window->num_bytes > 0) window->copies = copies_of(copy_job(transfer, *window), window->method, window->staging);
  transfer.count_copies(static_cast<std::int64_t>(window->copies.size()));
  if (window->first || !transfer.moves) transfer.start(window->method);
  begun_ = &transfer;
  window->transfer = urgent;
  std::int32_t fault = -1;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (status_.windows == fault_window_) fault = fault_when_;
    if (fault == LM_FAULT_COMPLETED || fault == LM_FAULT_STUCK) transfer.planted = fault;
    ++status_.windows;
    status_.peak_in_flight_bytes = std::max(status_.peak_in_flight_bytes, flight_.wire_bytes() + window->num_bytes);
    status_.last_key = transfer.keys[static_cast<std::size_t>(window->slice)];
  }
  transfer.prepared.reset();
  if (window->completes_slice && transfer.count_address != 0) {
    window->count_address = transfer.count_address;
    window->count_value = count_word(transfer.generation, window->slice + 1);
  }
  window->alone = flight_.empty();
  window->issued_ns = now_ns();
  if (flight_.on_wire() == nullptr) pace_.restart(window->issued_ns);
  bool recorded = false;
  try {
    if (fault == LM_FAULT_LOST) throw DeviceFailure("planted: with the window", true);
    channel_->issue(window);
    if (fault == LM_FAULT_ISSUED) throw DeviceFailure("planted: the window failed when it was issued", false);
    window->mark = with_fault(transfer.planted, window->mark);
    recorded = true;
    if (window->completes_slice) {
      const std::vector<std::uint64_t> words = pending_.advance(
          transfer.gate, transfer.owned.slices[static_cast<std::size_t>(window->slice)].first_layer +
                          transfer.owned.slices[static_cast<std::size_t>(window->slice)].num_layers);
      if (!words.empty()) channel_->write_words(words, 0);
    }
  } catch (const DeviceFailure& failure) {
    begun_ = nullptr;
    try {
      if (failure.lost) throw;
      transfer.stop(LM_FAILED, failure.what());
      window->left.reset();
      window->mark = channel_->mark();  // what was enqueued of it must drain
    } catch (const DeviceFailure& worse) {
      fail_all(worse.what());
      give_slot(*window);
      return false;
    }
  }
  ++transfer.windows_in_flight;
  flight_.add(window);
  if (recorded && window->completes_slice) {
    ++transfer.slices_issued;
    begun_ = nullptr;
    transfer.all_issued = transfer.slices_issued == transfer.num_slices();
    transfer.record(window->mark);  // published last
  }
  return true;
}

}  // namespace lamella
