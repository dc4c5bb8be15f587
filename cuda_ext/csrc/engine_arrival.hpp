// The words that captured graphs wait on: one a layer, 0 when nothing that a step must wait for is outstanding.
//
// A wait inside a graph has a constant operand, so it cannot name a transfer; the word says "pending" for all of them
// together. Marks and clears are enqueued in one queue's order, because a clear from the host could
// overtake the mark of a younger transfer. Only the watchdog writes from the host, when that queue may be stuck.
//
// Invariant: a word whose layer is outstanding in some gate reads 1 from the gate's mark on; the queue's last write
// to any other word is 0.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

namespace lamella {

// A transfer's share of the pending words: layers [first, end) have not been enqueued yet.
struct Gate {
  std::int32_t first = 0;
  std::int32_t end = 0;
  std::int32_t opened = 0;  // first when it was opened
  bool open = false;
};

class PendingLayers {
 public:
  void set_words(std::vector<std::uint64_t> words) {
    words_ = std::move(words);
    outstanding_.assign(words_.size(), 0);
  }

  std::uint64_t word(std::int32_t layer) const { return words_[static_cast<std::size_t>(layer)]; }
  std::int32_t num_layers() const { return static_cast<std::int32_t>(words_.size()); }

  // Layers [first, end) become outstanding; returns the words to be marked.
  std::vector<std::uint64_t> open(Gate& gate, std::int32_t first, std::int32_t end) {
    const std::lock_guard<std::mutex> lock(mutex_);
    gate = {first, end, first, true};
    std::vector<std::uint64_t> marked;
    for (std::int32_t layer = first; layer < end; ++layer) {
      if (outstanding_[static_cast<std::size_t>(layer)]++ == 0) marked.push_back(word(layer));
    }
    return marked;
  }

  // Layers before `layer` are no longer outstanding in the gate; returns the words to be cleared.
  std::vector<std::uint64_t> advance(Gate& gate, std::int32_t layer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return advance_locked(gate, std::min(layer, gate.end));
  }

  // Nothing is outstanding in the gate; returns words for the host to clear at once.
  std::vector<std::uint64_t> abandon(Gate& gate) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return advance_locked(gate, gate.end);
  }

  // As abandon, and returns every word of the gate that nobody else holds, so that the queue's last write is 0.
  std::vector<std::uint64_t> close(Gate& gate) {
    const std::lock_guard<std::mutex> lock(mutex_);
    advance_locked(gate, gate.end);
    std::vector<std::uint64_t> cleared;
    for (std::int32_t layer = gate.opened; gate.open && layer < gate.end; ++layer) {
      if (outstanding_[static_cast<std::size_t>(layer)] == 0) cleared.push_back(word(layer));
    }
    gate.open = false;
    return cleared;
  }

 private:
  std::vector<std::uint64_t> advance_locked(Gate& gate, std::int32_t layer) {
    std::vector<std::uint64_t> cleared;
    if (!gate.open) return cleared;
    for (; gate.first < layer; ++gate.first) {
      if (--outstanding_[static_cast<std::size_t>(gate.first)] == 0) cleared.push_back(word(gate.first));
    }
    return cleared;
  }

  std::mutex mutex_;
  std::vector<std::uint64_t> words_;
  std::vector<std::int32_t> outstanding_;  // gates that hold the layer
};

inline void store_word(std::uint64_t address, std::uint64_t value) {
  __atomic_store_n(reinterpret_cast<std::uint64_t*>(static_cast<std::uintptr_t>(address)), value, __ATOMIC_RELEASE);
}

}  // namespace lamella
