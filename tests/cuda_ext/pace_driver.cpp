// One lane on a made-up wire: reads scenarios, prints how long each took and how often the lane looked.
//
//   pace_driver BYTES_A_SECOND WIRE_FACTOR HOLD_NS WINDOWS TRANSFERS
//
// The wire moves one window after another and takes WIRE_FACTOR times what the lane was told. The first window of the
// first transfer is held for HOLD_NS, as behind a fence. Prints a line a transfer: wire time, time taken, looks.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>

#include "engine_pace.hpp"

int main(int, char** argv) {
  const double bytes_per_s = std::atof(argv[1]);
  const double factor = std::atof(argv[2]);
  const std::int64_t hold_ns = std::atoll(argv[3]);
  const int windows = std::atoi(argv[4]);
  const int transfers = std::atoi(argv[5]);
  constexpr std::int64_t kWindow = 16 << 20;
  constexpr std::size_t kInFlight = 3;
  constexpr std::int64_t kLook = 5'000;
  const std::int64_t wire_ns = static_cast<std::int64_t>(kWindow * factor / bytes_per_s * 1e9);
  lamella::Pace pace(bytes_per_s);
  std::int64_t now = 1'000'000;
  for (int transfer = 0; transfer < transfers; ++transfer) {
    const std::int64_t begun = now;
    std::int64_t wire_free = now + (transfer == 0 ? hold_ns : 0);
    std::deque<std::int64_t> done;
    int issued = 0;
    int looks = 0;
    while (issued < windows || !done.empty()) {
      std::int64_t found = 0;
      while (!done.empty() && done.front() <= now) {
        done.pop_front();
        found += kWindow;
      }
      const bool more_to_come = issued < windows;
      if (issued > 0) {
        const std::size_t middle = more_to_come && !done.empty() ? (done.size() - 1) / 2 : 0;
        const std::int64_t awaited = static_cast<std::int64_t>(middle + 1) * kWindow;
        found > 0 ? pace.hit(found, !done.empty(), now) : pace.miss(awaited, now);
        ++looks;
      }
      while (issued < windows && done.size() < kInFlight) {
        if (done.empty()) pace.restart(now);
        wire_free = (wire_free > now ? wire_free : now) + wire_ns;
        done.push_back(wire_free);
        ++issued;
      }
      if (done.empty()) break;
      const std::size_t middle = issued < windows ? (done.size() - 1) / 2 : 0;
      now = pace.next_look_ns(static_cast<std::int64_t>(middle + 1) * kWindow, now) + kLook;
    }
    std::printf("%lld %lld %d\n", static_cast<long long>(windows * wire_ns), static_cast<long long>(now - begun), looks);
    now += 2'000'000;
  }
}
