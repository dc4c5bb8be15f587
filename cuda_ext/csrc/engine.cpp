#include "engine.hpp"

#include "engine_copies.hpp"
#include "lamella/request.hpp"

#include <algorithm>
#include <iterator>

namespace lamella {
namespace {

constexpr std::int32_t kCountSlotsAtOnce = 1024;  // 64 KiB

std::chrono::steady_clock::time_point at_ns(std::int64_t ns) {
  return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(ns));
}

void check_options(const lm_engine_options& o) {
  const auto refuse_unless = [](bool holds, const char* text, long long value) {
    if (!holds) throw Invalid(format("%s, got %lld", text, value));
  };
  refuse_unless(o.device == LM_DEVICE_CPU || o.device == LM_DEVICE_CUDA, "device must be the CPU or CUDA", o.device);
  refuse_unless(o.carrier == LM_CARRIER_EVENT || o.carrier == LM_CARRIER_VALUE, "carrier must be event or value",
                o.carrier);
  refuse_unless(o.num_layers >= 1, "num_layers must be at least 1", o.num_layers);
  refuse_unless(o.window_bytes >= 1, "window_bytes must be at least 1", o.window_bytes);
  refuse_unless(o.staging_bytes / 4 >= o.window_bytes, "staging_bytes must hold 4 windows, 2 for each direction",
                o.staging_bytes);
  refuse_unless(o.in_flight_bytes >= 1, "in_flight_bytes must be at least 1", o.in_flight_bytes);
  refuse_unless(o.turn_bytes >= 0, "turn_bytes must not be negative", o.turn_bytes);
  refuse_unless(o.batch_entries >= 1, "batch_entries must be at least 1", o.batch_entries);
  refuse_unless(o.kernel_ctas >= 1, "kernel_ctas must be at least 1", o.kernel_ctas);
  refuse_unless(o.rates.num_points >= 1, "rates need at least 1 point", o.rates.num_points);
  for (std::int64_t i = 0; i < o.rates.num_points; ++i) {
    refuse_unless(o.rates.run_bytes[i] > (i == 0 ? 0 : o.rates.run_bytes[i - 1]), "run_bytes must ascend from 1",
                  o.rates.run_bytes[i]);
    refuse_unless(o.rates.batch_bytes_per_s[i] > 0, "batch_bytes_per_s must be positive at point", i);
    refuse_unless(o.rates.strided_bytes_per_s[i] > 0, "strided_bytes_per_s must be positive at point", i);
  }
  refuse_unless(o.rates.wire_bytes_per_s > 0 && o.rates.gather_bytes_per_s > 0, "rates must be positive", 0);
}

}  // namespace

Engine::Engine(const lm_engine_options& options) : options_(options) {
  check_options(options);
  run_bytes_.assign(options.rates.run_bytes, options.rates.run_bytes + options.rates.num_points);
  batch_rates_.assign(options.rates.batch_bytes_per_s, options.rates.batch_bytes_per_s + options.rates.num_points);
  options_.rates.run_bytes = run_bytes_.data();
  options_.rates.batch_bytes_per_s = batch_rates_.data();
  strided_rates_.assign(options.rates.strided_bytes_per_s,
                        options.rates.strided_bytes_per_s + options.rates.num_points);
  options_.rates.strided_bytes_per_s = strided_rates_.data();
#ifdef LAMELLA_WITH_CUDA
  device_ = options_.device == LM_DEVICE_CUDA ? make_cuda_device(options_) : make_cpu_device(options_);
#else
  if (options_.device == LM_DEVICE_CUDA) {
    throw Invalid("this library was built without CUDA; build it where nvcc is, or use the CPU device");
  }
  device_ = make_cpu_device(options_);
#endif
  if (options_.carrier == LM_CARRIER_VALUE && !device_->has_word_waits()) {
    throw Invalid("this device cannot wait for a value on a stream; use the event carrier");
  }
  if (options_.carrier == LM_CARRIER_VALUE) make_count_slots();
  const auto num_slots = static_cast<std::int32_t>(options_.staging_bytes / options_.window_bytes);
  slots_ = std::make_unique<Slots>(device_->take_staging(num_slots * options_.window_bytes), num_slots,
                                   options_.window_bytes);
  retrieve_ = std::make_unique<Lane>(LM_RETRIEVE, *device_, *slots_, *this, options_);
  store_ = std::make_unique<Lane>(LM_STORE, *device_, *slots_, *this, options_);
  watchdog_ = std::thread([this] { watch(); });
}

Engine::~Engine() {
  constexpr std::int64_t kEverNs = 1'000'000'000'000'000'000;
  if (watchdog_.joinable()) close(now_ns() + kEverNs);
}

Lane& Engine::lane(std::int32_t direction) {
  if (direction != LM_RETRIEVE && direction != LM_STORE) throw Invalid(format("unknown direction %d", direction));
  return direction == LM_RETRIEVE ? *retrieve_ : *store_;
}

std::int32_t Engine::register_cache(const lm_request& shape) {
  auto cache = std::make_shared<Cache>();
  cache->form = shape.form;
  cache->chunk_tokens = shape.chunk_tokens;
  cache->num_layers = 0;
  if (shape.num_groups < 1) throw Invalid("a cache needs at least one kernel group");
  cache->sources.assign(shape.groups, shape.groups + shape.num_groups);
  for (lm_group& source : cache->sources) {
    if (source.bases == nullptr || source.layers == nullptr || source.num_layers < 1) {
      throw Invalid("a kernel group needs its layers and bases");
    }
    cache->layers.emplace_back(source.layers, source.layers + source.num_layers);
    cache->bases.emplace_back(source.bases, source.bases + std::ptrdiff_t{source.num_layers} * source.kv);
    cache->num_layers = std::max(cache->num_layers, cache->layers.back().back() + 1);
    source.block_ids = nullptr;
    source.num_block_ids = 0;
    KernelGroup kernel_group{group_of(shape, source), nullptr, 0};
    kernel_group.group.bases = device_->keep_words(cache->bases.back());
    for (const std::uint64_t base : cache->bases.back()) kernel_group.base_bits |= base;
    cache->device_groups.push_back(kernel_group);
  }
  for (std::size_t i = 0; i < cache->sources.size(); ++i) {
    cache->sources[i].layers = cache->layers[i].data();
    cache->sources[i].bases = cache->bases[i].data();
  }
  if (cache->num_layers > options_.num_layers) {
    throw Invalid(format("the engine was made for %d layers, the cache has %d", options_.num_layers,
                         cache->num_layers));
  }
  lm_request plan = shape;
  const lm_slice all{0, cache->num_layers};
  plan.groups = cache->sources.data();
  plan.direction = LM_RETRIEVE;
  plan.num_slices = 1;
  plan.slices = &all;
  plan.num_tokens = plan.skip_tokens = 0;
  plan.window_bytes = options_.window_bytes;
  check_plan(plan);
  check_engines(plan);
  std::vector<Group> groups = groups_of(plan);
  cache->direct = can_go_direct(groups);
  const std::lock_guard<std::mutex> lock(mutex_);
  caches_.push_back(cache);
  return static_cast<std::int32_t>(caches_.size()) - 1;
}

std::shared_ptr<Transfer> Engine::submit(const lm_submission& submission, lm_progress& queued) {
  Lane& its_lane = lane(submission.direction);
  std::shared_ptr<const Cache> cache;
  std::uint64_t sequence = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) throw Stopped("the engine is closed; create another");
    if (submission.cache < 0 || static_cast<std::size_t>(submission.cache) >= caches_.size()) {
      throw Invalid(format("cache %d is not registered", submission.cache));
    }
    cache = caches_[static_cast<std::size_t>(submission.cache)];
    sequence = sequence_++;
  }
  if (submission.method < LM_COPY_AUTO || submission.method > LM_COPY_GATHER) {
    throw Invalid(format("unknown copy method %d", submission.method));
  }
  if (submission.method == LM_COPY_DIRECT_BATCH && !cache->direct) {
    throw Invalid("runs do not match this cache's blocks, so they cannot go there directly; use a staged method");
  }
  auto transfer = std::make_shared<Transfer>(std::move(cache), submission, options_.window_bytes, sequence);
  transfer->tables = device_->tables(transfer->cache->device_groups, transfer->owned.request, transfer->objects);
  if (submission.fence != nullptr) transfer->fence = submission.fence->state;
  take_count_slot(*transfer, submission.generation);
  try {
    if (submission.has_fence_stream != 0) {
      transfer->fence_event = device_->event_behind(submission.fence_stream);
      transfer->owns_fence_event = true;
    } else {
      transfer->fence_event = submission.fence_event;
    }
    if (transfer->deadline_ns != 0) {
      bool is_first = false;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto entered = deadlines_.emplace(transfer->deadline_ns, transfer);
        is_first = entered == deadlines_.begin();
      }
      if (is_first) watch_.notify_one();  // later ones are found when the first is due
    }
    queued = transfer->progress();
    its_lane.submit(transfer);
  } catch (...) {
    if (transfer->owns_fence_event) device_->release_event(transfer->fence_event);
    give_count_slot(*transfer);
    throw;
  }
  return transfer;
}

void Engine::take_count_slot(Transfer& transfer, std::uint32_t wanted_generation) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (options_.carrier != LM_CARRIER_VALUE) {
    transfer.generation = wanted_generation != 0 ? wanted_generation : ++generation_;
    return;
  }
  if (wanted_generation != 0) {
    throw Invalid("the value carrier counts generations itself; leave generation out");
  }
  if (count_slots_.empty()) make_count_slots();
  const std::uint64_t slot = count_slots_.back();
  count_slots_.pop_back();
  transfer.count_address = slot;
  transfer.generation = ++generation_;
  store_word(slot, count_word(transfer.generation, 0));
}

// Of the device's memory: streams that wait for words must not be waiting meanwhile, so most engines never come here
// after their creation.
void Engine::make_count_slots() {
  for (const std::uint64_t address : device_->host_words(kCountSlotsAtOnce)) count_slots_.push_back(address);
}

void Engine::give_count_slot(const Transfer& transfer) {
  if (transfer.count_address == 0) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  count_slots_.push_back(transfer.count_address);
}

void Engine::force_count(const Transfer& transfer) {
  if (transfer.count_address != 0) {
    store_word(transfer.count_address, count_word(transfer.generation, transfer.num_slices()));
  }
}

void Engine::cancel(Transfer& transfer) {
  if (transfer.stop(LM_CANCELLED, "")) lane(transfer.direction).wake();
}

std::int64_t Engine::wait_layer(Transfer& transfer, std::int32_t layer, std::uint64_t stream,
                                std::int64_t deadline_ns) {
  const std::int32_t slice = transfer.slice_of(layer);
  if (transfer.count_address == 0) return transfer.hold_back(slice, stream, deadline_ns);
  if (transfer.must_wait(slice)) {
    device_->wait_word(stream, transfer.count_address, count_word(transfer.generation, slice + 1), true);
  }
  return 0;
}

void Engine::gate(const std::shared_ptr<Transfer>& transfer, std::uint64_t stream, std::int64_t deadline_ns) {
  Lane& its_lane = lane(transfer->direction);
  const auto behind = std::make_shared<std::shared_ptr<Mark>>();
  const auto body = std::make_shared<std::function<void()>>([&its_lane, transfer, behind] {
    if (transfer->is_final() || transfer->stopping()) {
      if (transfer->progress().state == LM_LANDED) return;
      throw Stopped("the transfer failed or was cancelled");
    }
    if (transfer->gate.open) throw Stopped("the transfer is gated already");
    if (!transfer->all_issued) {
      const auto& slices = transfer->owned.slices;
      const std::int32_t first = slices[static_cast<std::size_t>(transfer->slices_issued)].first_layer;
      const std::int32_t end = slices.back().first_layer + slices.back().num_layers;
      const std::vector<std::uint64_t> words = its_lane.pending().open(transfer->gate, first, end);
      if (!words.empty()) its_lane.channel().write_words(words, 1);
    }
    *behind = its_lane.channel().mark();  // behind the marks, and behind every slice enqueued so far
  });
  its_lane.run_between_windows(body, deadline_ns);
  if (*behind == nullptr) return;
  if (!(*behind)->is_on_host()) return (*behind)->hold_back(stream);
  while (!(*behind)->reached()) {
    if (now_ns() > deadline_ns) throw TimedOut("what is in flight has not landed within the bound");
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

std::uint64_t Engine::pending_word(std::int32_t layer) {
  if (layer < 0 || layer >= retrieve_->pending().num_layers()) {
    throw Invalid(format("layer must be between 0 and %d, got %d", retrieve_->pending().num_layers() - 1, layer));
  }
  return retrieve_->pending().word(layer);
}

void Engine::on_final(const std::shared_ptr<Transfer>& transfer) {
  force_count(*transfer);  // again: what drained after the first time may have written less
  if (transfer->owns_fence_event) device_->release_event(transfer->fence_event);
  if (transfer->on_drained != nullptr) transfer->on_drained(transfer->context, transfer->token);
  give_count_slot(*transfer);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    forget_deadline_locked(transfer);
    drained_tokens_.push_back(transfer->token);
  }
  drained_.notify_all();
}

// A weak pointer keeps the transfer's memory: one a transfer, until a deadline that may be years away.
void Engine::forget_deadline_locked(const std::shared_ptr<Transfer>& transfer) {
  auto entry = deadlines_.lower_bound(transfer->deadline_ns);
  while (entry != deadlines_.end() && entry->first == transfer->deadline_ns) {
    entry = entry->second.lock() == transfer ? deadlines_.erase(entry) : std::next(entry);
  }
}

std::uint64_t Engine::next_drained(std::int64_t deadline_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool there = drained_.wait_until(lock, at_ns(deadline_ns),
                                         [this] { return !drained_tokens_.empty() || drained_all_; });
  if (!there) throw TimedOut("no transfer drained within the bound");
  if (drained_tokens_.empty()) throw Stopped("the engine is closed and every transfer was reported");
  const std::uint64_t token = drained_tokens_.front();
  drained_tokens_.pop_front();
  return token;
}

void Engine::expire(Transfer& transfer) {
  const lm_progress p = transfer.progress();
  const double after_s = static_cast<double>(transfer.deadline_ns - transfer.submitted_ns) / 1e9;
  // One that was stopped before keeps its reason, but whoever waits on a stream is let go all the same.
  transfer.stop(LM_FAILED, format("the deadline has passed: %d of %d slices landed within %.3f s", p.landed,
                                  p.num_slices, after_s));
  {
    const std::lock_guard<std::mutex> lock(mutex_);  // a final transfer's word may be another's by now
    if (transfer.is_final()) return;
    force_count(transfer);
  }
  Lane& its_lane = lane(transfer.direction);
  for (const std::uint64_t word : its_lane.pending().abandon(transfer.gate)) store_word(word, 0);
  its_lane.wake();
}

void Engine::watch() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!unwatched_) {
    if (deadlines_.empty()) {
      watch_.wait(lock, [this] { return unwatched_ || !deadlines_.empty(); });
      continue;
    }
    const auto first = deadlines_.begin();
    const std::shared_ptr<Transfer> transfer = first->second.lock();
    if (transfer == nullptr || transfer->is_final()) {
      deadlines_.erase(first);
      continue;
    }
    if (now_ns() < first->first) {
      watch_.wait_until(lock, at_ns(first->first));
      continue;
    }
    deadlines_.erase(first);
    lock.unlock();
    expire(*transfer);
    lock.lock();
  }
}

// A lane that does not drain may be held up by a stream that waits for its words: the watchdog goes on, and lets that
// stream go at the transfer's deadline.
bool Engine::close(std::int64_t deadline_ns) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  device_->abandon();
  const bool retrieves = retrieve_->close("the engine was closed", deadline_ns);
  const bool stores = store_->close("the engine was closed", deadline_ns);
  const bool drained = retrieves && stores;
  if (drained) device_->release_staging();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    drained_all_ = true;
    unwatched_ = drained;
  }
  drained_.notify_all();
  watch_.notify_all();
  if (drained && watchdog_.joinable()) watchdog_.join();
  return drained;
}

}  // namespace lamella
