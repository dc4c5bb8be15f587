// A lane's windows from their issue until they are done, in order.
//
// First their bytes are on the wire; then those that a kernel scatters wait in their slots for it. A kernel of the
// engine's that fills the device can keep a scatter waiting for milliseconds, and the wire must not wait with it: only
// what is on the wire counts as in flight, and what waits is bounded by the staging ring.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

#include "engine_device.hpp"

namespace lamella {

class Flight {
 public:
  bool empty() const { return windows_.empty(); }
  std::int64_t wire_bytes() const { return wire_bytes_; }

  void add(std::shared_ptr<Window> window) {
    wire_bytes_ += window->num_bytes;
    windows_.push_back(std::move(window));
  }

  // The oldest on the wire, or null; it leaves when `leaving` is reached.
  std::shared_ptr<Window> on_wire() const { return off_wire_ < windows_.size() ? windows_[off_wire_] : nullptr; }
  static Point& leaving(const Window& window) { return window.left != nullptr ? *window.left : *window.mark; }
  void leave() { wire_bytes_ -= windows_[off_wire_++]->num_bytes; }

  // The oldest that has left the wire, or null; it is done when its mark is reached.
  std::shared_ptr<Window> off_wire() const { return off_wire_ > 0 ? windows_.front() : nullptr; }
  void remove() {
    windows_.pop_front();
    --off_wire_;
  }

  // Bytes on the wire up to the window to look for: the next to leave it, or, so that a look refills several, the one
  // in the middle.
  std::int64_t awaited_bytes(bool refill) const {
    std::int64_t bytes = 0;
    const std::size_t end = refill ? (off_wire_ + windows_.size() + 1) / 2 : off_wire_ + 1;
    for (std::size_t i = off_wire_; i < windows_.size() && i < end; ++i) bytes += windows_[i]->num_bytes;
    return bytes;
  }

  // All of them, and none is left.
  std::deque<std::shared_ptr<Window>> abandon() {
    off_wire_ = 0;
    wire_bytes_ = 0;
    return std::exchange(windows_, {});
  }

 private:
  std::deque<std::shared_ptr<Window>> windows_;
  std::size_t off_wire_ = 0;     // so many of the oldest have left the wire
  std::int64_t wire_bytes_ = 0;  // of the others
};

}  // namespace lamella
