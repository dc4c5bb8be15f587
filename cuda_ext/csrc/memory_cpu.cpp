// Device memory on the CPU device: host memory, so that the pool, the benchmarks and their tests run anywhere.
// In the CUDA library these functions are the CUDA device's.
#ifndef LAMELLA_WITH_CUDA
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <new>

#include "lamella/errors.hpp"

namespace {

using lamella::Invalid;
using lamella::guarded;

void check_ordinal(std::int32_t ordinal) {
  if (ordinal != 0) throw Invalid(lamella::format("the CPU is device 0, got ordinal %d", ordinal));
}

void check_size(std::int64_t num_bytes) {
  if (num_bytes < 0) throw Invalid(lamella::format("num_bytes must not be negative, got %lld", (long long)num_bytes));
}

}  // namespace

lm_status lm_host_register(std::int32_t ordinal, std::uint64_t, std::int64_t num_bytes) {
  return guarded([&] {
    check_ordinal(ordinal);
    check_size(num_bytes);
  });
}

lm_status lm_host_unregister(std::int32_t ordinal, std::uint64_t) {
  return guarded([&] { check_ordinal(ordinal); });
}

lm_status lm_device_facts_of(std::int32_t ordinal, lm_device_facts* facts) {
  return guarded([&] {
    check_ordinal(ordinal);
    *facts = lm_device_facts{};
    std::strcpy(facts->name, "cpu");
    const std::int64_t page = sysconf(_SC_PAGESIZE);
    facts->total_bytes = page * sysconf(_SC_PHYS_PAGES);
    facts->free_bytes = page * sysconf(_SC_AVPHYS_PAGES);
  });
}

lm_status lm_memory_allocate(std::int32_t ordinal, std::int64_t num_bytes, std::uint64_t* address) {
  return guarded([&] {
    check_ordinal(ordinal);
    check_size(num_bytes);
    *address = reinterpret_cast<std::uint64_t>(::operator new(num_bytes, std::align_val_t{256}));
  });
}

lm_status lm_memory_free(std::int32_t ordinal, std::uint64_t address) {
  return guarded([&] {
    check_ordinal(ordinal);
    ::operator delete(reinterpret_cast<void*>(address), std::align_val_t{256});
  });
}

lm_status lm_memory_fill(std::int32_t ordinal, std::uint64_t address, std::int32_t byte, std::int64_t num_bytes) {
  return guarded([&] {
    check_ordinal(ordinal);
    check_size(num_bytes);
    std::memset(reinterpret_cast<void*>(address), byte, num_bytes);
  });
}

lm_status lm_memory_copy(std::int32_t ordinal, std::uint64_t to, std::uint64_t from, std::int64_t num_bytes) {
  return guarded([&] {
    check_ordinal(ordinal);
    check_size(num_bytes);
    std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), num_bytes);
  });
}

#endif  // LAMELLA_WITH_CUDA
