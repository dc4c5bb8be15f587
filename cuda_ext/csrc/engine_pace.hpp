// When a lane's windows are expected to have left the wire, learned from looking.
//
// Asking the device costs a few microseconds, and so does waking up; looking late costs the wire. So a lane sleeps
// until the window it waits for should have left it, and aims a little early. What has left it and waits for a kernel
// can take any time: then looks are ever further apart.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace lamella {

class Pace {
 public:
  explicit Pace(double bytes_per_s) : wire_ns_a_byte_(1e9 / bytes_per_s), ns_a_byte_(wire_ns_a_byte_) {}

  // A window starts to move now, and nothing else does.
  void restart(std::int64_t now_ns) { moving_since_ns_ = missed_ns_ = now_ns; }

  // When so many bytes, counted from the oldest window's first, are expected to have moved.
  std::int64_t expected_ns(std::int64_t bytes) const {
    return moving_since_ns_ + static_cast<std::int64_t>(static_cast<double>(bytes) * ns_a_byte_);
  }

  // A look found that windows of `bytes` had left the wire; `more` are still on it.
  void hit(std::int64_t bytes, bool more, std::int64_t now_ns) {
    // They were done between the last look in vain and now, most likely when they were expected.
    moving_since_ns_ = std::min(now_ns, std::max(expected_ns(bytes), missed_ns_));
    const double faster = more ? kFaster : kMuchFaster;
    ns_a_byte_ = std::max(kFastest * wire_ns_a_byte_, ns_a_byte_ * faster);
    look_again_ns_ = 0;
    slowed_ = false;
    if (more) missed_ns_ = now_ns;
  }

  // A look found that a window had been scattered, and no more.
  void scattered() { look_again_ns_ = 0; }

  // A look found nothing; `awaited_bytes` as for expected_ns, 0 where the wire is empty.
  void miss(std::int64_t awaited_bytes, std::int64_t now_ns) {
    // Only the first of a row says that the wire is slower: behind a fence any number of looks are in vain.
    if (awaited_bytes > 0 && !slowed_ && now_ns >= expected_ns(awaited_bytes)) {
      ns_a_byte_ = std::min(kSlowest * wire_ns_a_byte_, ns_a_byte_ * kSlower);
      slowed_ = true;
    }
    look_again_ns_ = std::min(std::max(look_again_ns_ * 2, kFirstLookNs), kLastLookNs);
    missed_ns_ = now_ns;
  }

  // When to look for those bytes.
  std::int64_t next_look_ns(std::int64_t awaited_bytes, std::int64_t now_ns) const {
    return std::max(expected_ns(awaited_bytes), now_ns + std::max(look_again_ns_, kFirstLookNs));
  }

 private:
  static constexpr std::int64_t kFirstLookNs = 10'000;  // after an expectation that was too early
  static constexpr std::int64_t kLastLookNs = 500'000;  // a stuck fence must not cost a core
  static constexpr double kFaster = 0.99;               // after a hit; three of four looks should be one
  static constexpr double kMuchFaster = 0.7;            // after a hit that left the wire idle: it may have come late
  static constexpr double kSlower = 1.03;               // after the first miss
  static constexpr double kFastest = 0.9;               // of the wire's time a byte
  static constexpr double kSlowest = 20;

  double wire_ns_a_byte_;
  double ns_a_byte_;                  // of late
  std::int64_t moving_since_ns_ = 0;  // the oldest window, as far as is known
  std::int64_t missed_ns_ = 0;        // when it was last seen not to be done
  std::int64_t look_again_ns_ = 0;
  bool slowed_ = false;  // since the last hit
};

}  // namespace lamella
