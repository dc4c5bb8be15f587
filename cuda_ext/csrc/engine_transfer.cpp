#include "engine_transfer.hpp"

#include <algorithm>

#include "lamella/request.hpp"

namespace lamella {
namespace {

using Time = std::chrono::steady_clock::time_point;

Time at_ns(std::int64_t ns) { return Time(std::chrono::duration_cast<Time::duration>(std::chrono::nanoseconds(ns))); }

// Bytes of the tokens whose blocks are there, in the slices' layers.
std::int64_t mapped_bytes(const lm_request& request) {
  std::int64_t bytes = 0;
  if (request.skip_tokens == request.num_tokens) return 0;
  const lm_slice& last = request.slices[request.num_slices - 1];
  for (std::int32_t index = 0; index < request.num_groups; ++index) {
    const Group g = group_of(request, request.groups[index]);
    const std::int32_t* layers = request.groups[index].layers;
    const auto own = std::count_if(layers, layers + g.num_layers, [&](std::int32_t layer) {
      return request.slices[0].first_layer <= layer && layer < last.first_layer + last.num_layers;
    });
    for (std::int64_t i = block_index(g, request.skip_tokens); i < blocks_for(g, request.num_tokens); ++i) {
      if (!is_mapped(block_of(request.groups[index].block_ids, i), request.has_null_block != 0, request.null_block)) {
        continue;
      }
      const std::int64_t first = std::max(request.skip_tokens, i * g.block_tokens);
      const std::int64_t end = std::min(request.num_tokens, (i + 1) * g.block_tokens);
      bytes += (end - first) * token_layer_bytes(g) * own;
    }
  }
  return bytes;
}

// The slices may leave out leading and trailing layers, but none between.
void check_slices(const lm_submission& submission, std::int32_t num_layers) {
  if (submission.num_slices < 1) throw Invalid("a transfer needs at least one slice, got none");
  std::int32_t layer = submission.slices[0].first_layer;
  if (layer < 0) throw Invalid(format("slice 0 must start at a layer from 0 on, got %d", layer));
  for (std::int32_t i = 0; i < submission.num_slices; ++i) {
    const lm_slice& slice = submission.slices[i];
    if (slice.first_layer != layer || slice.num_layers < 1) {
      throw Invalid(format("slice %d must start at layer %d and hold at least 1 layer, got %d layers from %d", i, layer,
                           slice.num_layers, slice.first_layer));
    }
    if (slice.num_layers > num_layers - layer) {
      throw Invalid(format("slice %d ends at layer %lld, the stage at %d", i,
                           static_cast<long long>(layer) + slice.num_layers, num_layers));
    }
    layer += slice.num_layers;
  }
}

OwnedRequest own(const Cache& cache, const lm_submission& submission, std::int64_t window_bytes) {
  if (submission.num_groups != static_cast<std::int32_t>(cache.sources.size())) {
    throw Invalid(format("the object has %d kernel groups, got %d block tables", static_cast<int>(cache.sources.size()),
                         submission.num_groups));
  }
  OwnedRequest owned;
  owned.slices.assign(submission.slices, submission.slices + submission.num_slices);
  owned.groups = cache.sources;
  owned.block_ids.resize(owned.groups.size());
  for (std::size_t i = 0; i < owned.groups.size(); ++i) {
    owned.block_ids[i].assign(submission.block_ids[i], submission.block_ids[i] + submission.num_block_ids[i]);
    owned.groups[i].block_ids = owned.block_ids[i].data();
    owned.groups[i].num_block_ids = submission.num_block_ids[i];
  }
  lm_request& r = owned.request;
  r.form = cache.form;
  r.direction = submission.direction;
  r.chunk_tokens = cache.chunk_tokens;
  r.num_groups = submission.num_groups;
  r.groups = owned.groups.data();
  r.num_slices = submission.num_slices;
  r.slices = owned.slices.data();
  r.has_null_block = submission.has_null_block;
  r.null_block = submission.null_block;
  r.num_tokens = submission.num_tokens;
  r.skip_tokens = submission.skip_tokens;
  r.window_bytes = window_bytes;
  if (r.skip_tokens < 0 || r.skip_tokens > r.num_tokens) {
    throw Invalid(format("skip_tokens must be between 0 and %lld, got %lld", static_cast<long long>(r.num_tokens),
                         static_cast<long long>(r.skip_tokens)));
  }
  check_slices(submission, cache.num_layers);
  check_plan(r);
  check_engines(r);
  check_objects(r, submission.objects);
  return owned;
}

}  // namespace

Transfer::Transfer(std::shared_ptr<const Cache> its_cache, const lm_submission& submission, std::int64_t window_bytes,
                   std::uint64_t its_sequence)
    : cache(std::move(its_cache)),
      sequence(its_sequence),
      direction(static_cast<lm_direction>(submission.direction)),
      owned(own(*cache, submission, window_bytes)),
      keys(submission.keys, submission.keys + submission.num_slices),
      objects(submission.objects.addresses, submission.objects.addresses + submission.objects.num_objects),
      registered_base(submission.objects.registered_base),
      registered_piece_bytes(submission.objects.registered_piece_bytes),
      num_bytes(mapped_bytes(owned.request)),
      deadline_ns(submission.deadline_ns),
      submitted_ns(now_ns()),
      token(submission.token),
      board(submission.board),
      on_drained(submission.on_drained),
      context(submission.context),
      method(submission.method) {
  // Moving vectors keeps their buffers, so the request's pointers into them still hold.
  planner = std::make_unique<Planner>(owned.request);
  recorded_ns_.assign(owned.slices.size(), 0);
  moments_.reserve(owned.slices.size());
  marks_.reserve(owned.slices.size());
}

std::int32_t Transfer::slice_of(std::int32_t layer) const {
  const std::int32_t first = owned.slices.front().first_layer;
  const std::int32_t end = owned.slices.back().first_layer + owned.slices.back().num_layers;
  if (layer < first || layer >= end) {
    throw Invalid(format("layer must be between %d and %d, got %d", first, end - 1, layer));
  }
  const auto after = std::upper_bound(owned.slices.begin(), owned.slices.end(), layer,
                                      [](std::int32_t l, const lm_slice& s) { return l < s.first_layer; });
  return static_cast<std::int32_t>(after - owned.slices.begin()) - 1;
}

void Transfer::start(std::int32_t chosen) {
  const std::lock_guard<std::mutex> lock(mutex_);
  state_ = LM_RUNNING;
  chosen_ = chosen;
  if (started_ns_ == 0) started_ns_ = now_ns();
}

void Transfer::record(std::shared_ptr<Mark> mark) {
  const std::lock_guard<std::mutex> lock(mutex_);
  recorded_ns_[marks_.size()] = now_ns();
  marks_.push_back(std::move(mark));
  if (board != 0) {
    __atomic_store_n(reinterpret_cast<std::uint64_t*>(static_cast<std::uintptr_t>(board)),
                     count_word(generation, static_cast<std::int32_t>(marks_.size())), __ATOMIC_RELEASE);
  }
  changed_.notify_all();
}

void Transfer::refresh_locked() {
  if (wanted_ == LM_FAILED) return;  // what lands behind a failure is not to be relied on
  if (fence_missed.load()) return;   // nothing has moved
  bool moved = false;
  while (static_cast<std::size_t>(landed_) < marks_.size() && marks_[static_cast<std::size_t>(landed_)]->reached()) {
    moments_.push_back(marks_[static_cast<std::size_t>(landed_)]->moment());
    marks_[static_cast<std::size_t>(landed_)].reset();
    ++landed_;
    moved = true;
  }
  if (moved) changed_.notify_all();
}

// For whoever only asks: a device that fails is the lane's to report.
void Transfer::look_locked() {
  if (state_ >= LM_LANDED) return;
  try {
    refresh_locked();
  } catch (const DeviceFailure&) {
  }
}

void Transfer::refresh() {
  const std::lock_guard<std::mutex> lock(mutex_);
  refresh_locked();
}

bool Transfer::stop(lm_state wanted, const std::string& reason) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (wanted_ != LM_LANDED || state_ >= LM_LANDED) return false;
    wanted_ = wanted;
    reason_ = reason;
    stopping_.store(true, std::memory_order_release);
    changed_.notify_all();
  }
  if (fence != nullptr) fence->nudge();
  return true;
}

void Transfer::finish() {
  const std::lock_guard<std::mutex> lock(mutex_);
  // A cancel that came after the last slice was issued stopped nothing.
  const bool whole = landed_ == num_slices();
  state_ = whole && wanted_ != LM_FAILED ? LM_LANDED : wanted_;
  if (state_ == LM_LANDED) reason_.clear();
  marks_.clear();
  marks_.shrink_to_fit();
  prepared.reset();
  final_.store(true, std::memory_order_release);
  changed_.notify_all();
}

lm_progress Transfer::progress() {
  const std::lock_guard<std::mutex> lock(mutex_);
  look_locked();
  lm_progress p{};
  p.state = state_;
  p.num_slices = num_slices();
  p.landed = landed_;
  p.recorded = state_ < LM_LANDED ? static_cast<std::int32_t>(marks_.size())
                                  : static_cast<std::int32_t>(std::count_if(recorded_ns_.begin(), recorded_ns_.end(),
                                                                            [](std::int64_t ns) { return ns != 0; }));
  p.generation = generation;
  p.method = chosen_;
  p.num_bytes = num_bytes;
  p.submitted_ns = submitted_ns;
  p.started_ns = started_ns_;
  p.num_copies = num_copies_.load(std::memory_order_relaxed);
  return p;
}

std::int32_t Transfer::recorded() { return progress().recorded; }
std::int32_t Transfer::landed() { return progress().landed; }

std::string Transfer::error() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reason_;
}

void Transfer::timestamps(std::int64_t* recorded_ns, std::int64_t* landed_ns) {
  const std::lock_guard<std::mutex> lock(mutex_);
  look_locked();
  std::copy(recorded_ns_.begin(), recorded_ns_.end(), recorded_ns);
  for (std::size_t i = 0; i < owned.slices.size(); ++i) landed_ns[i] = i < moments_.size() ? moments_[i].host_ns() : 0;
}

void Transfer::wait_final(std::int64_t until_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!changed_.wait_until(lock, at_ns(until_ns), [this] { return state_ >= LM_LANDED; })) {
    throw TimedOut(format("the transfer is not final: %d of %d slices landed", landed_, num_slices()));
  }
}

void Transfer::throw_if_stopped_locked() const {
  if (wanted_ == LM_LANDED) return;
  if (state_ == LM_LANDED) return;
  throw Stopped(wanted_ == LM_CANCELLED ? std::string("the transfer was cancelled") : reason_);
}

void Transfer::wait_slices(std::int32_t slices, bool landed_ones, std::int64_t until_ns) {
  if (slices < 0 || slices > num_slices()) {
    throw Invalid(format("slices must be between 0 and %d, got %d", num_slices(), slices));
  }
  std::unique_lock<std::mutex> lock(mutex_);
  const auto there = [&] {
    return landed_ >= slices || (!landed_ones && static_cast<std::int32_t>(marks_.size()) >= slices);
  };
  changed_.wait_until(lock, at_ns(until_ns), [&] { return there() || wanted_ != LM_LANDED; });
  if (there()) return;
  throw_if_stopped_locked();
  throw TimedOut(format("slice %d is not %s: %d of %d slices are", slices - 1, landed_ones ? "landed" : "recorded",
                        landed_ones ? landed_ : static_cast<std::int32_t>(marks_.size()), num_slices()));
}

std::int64_t Transfer::hold_back(std::int32_t slice, std::uint64_t stream, std::int64_t until_ns) {
  std::shared_ptr<Mark> mark;
  std::int64_t waited = 0;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto index = static_cast<std::size_t>(slice);
    if (landed_ > slice) return 0;
    if (marks_.size() <= index) {
      throw_if_stopped_locked();
      const std::int64_t start = now_ns();
      const bool there = changed_.wait_until(lock, at_ns(until_ns), [&] {
        return marks_.size() > index || landed_ > slice || wanted_ != LM_LANDED;
      });
      waited = now_ns() - start;
      if (landed_ > slice) return waited;
      if (marks_.size() <= index) {
        throw_if_stopped_locked();
        if (!there) throw TimedOut(format("slice %d is not recorded within the bound", slice));
      }
    }
    throw_if_stopped_locked();
    mark = marks_[index];
    if (mark->is_on_host()) {
      const std::int64_t start = now_ns();
      changed_.wait_until(lock, at_ns(until_ns), [&] { return landed_ > slice || wanted_ != LM_LANDED; });
      if (landed_ > slice) return waited + now_ns() - start;
      throw_if_stopped_locked();
      throw TimedOut(format("slice %d has not landed within the bound", slice));
    }
  }
  mark->hold_back(stream);
  return waited;
}

bool Transfer::must_wait(std::int32_t slice) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (landed_ > slice) return false;
  throw_if_stopped_locked();
  return true;
}

}  // namespace lamella
