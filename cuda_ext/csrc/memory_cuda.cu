// Device memory, registration of host memory and facts of a CUDA device. cudaSetDevice comes first everywhere, so that
// no call leaves a context on device 0 when another one is meant.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

#include "cuda_check.hpp"

using lamella::guarded;
using lamella::use_device;

lm_status lm_host_register(std::int32_t ordinal, std::uint64_t address, std::int64_t num_bytes) {
  return guarded([&] {
    use_device(ordinal);
    // Portable: every context of this process may copy from it. Mapped: kernels may read it.
    LM_CUDA_CHECK(cudaHostRegister(reinterpret_cast<void*>(address), num_bytes,
                                   cudaHostRegisterPortable | cudaHostRegisterMapped));
  });
}

lm_status lm_host_unregister(std::int32_t ordinal, std::uint64_t address) {
  return guarded([&] {
    use_device(ordinal);
    LM_CUDA_CHECK(cudaHostUnregister(reinterpret_cast<void*>(address)));
  });
}

lm_status lm_device_facts_of(std::int32_t ordinal, lm_device_facts* facts) {
  return guarded([&] {
    use_device(ordinal);
    *facts = lm_device_facts{};
    cudaDeviceProp properties;
    LM_CUDA_CHECK(cudaGetDeviceProperties(&properties, ordinal));
    std::snprintf(facts->name, sizeof facts->name, "%s", properties.name);
    LM_CUDA_CHECK(cudaDeviceGetPCIBusId(facts->pci_bus_id, sizeof facts->pci_bus_id, ordinal));
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    LM_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    facts->free_bytes = free_bytes;
    facts->total_bytes = total_bytes;
    LM_CUDA_CHECK(cudaDriverGetVersion(&facts->driver_version));
    facts->multiprocessors = properties.multiProcessorCount;
  });
}

lm_status lm_memory_allocate(std::int32_t ordinal, std::int64_t num_bytes, std::uint64_t* address) {
  return guarded([&] {
    use_device(ordinal);
    void* memory = nullptr;
    LM_CUDA_CHECK(cudaMalloc(&memory, num_bytes));
    *address = reinterpret_cast<std::uint64_t>(memory);
  });
}

lm_status lm_memory_free(std::int32_t ordinal, std::uint64_t address) {
  return guarded([&] {
    use_device(ordinal);
    LM_CUDA_CHECK(cudaFree(reinterpret_cast<void*>(address)));
  });
}

lm_status lm_memory_fill(std::int32_t ordinal, std::uint64_t address, std::int32_t byte, std::int64_t num_bytes) {
  return guarded([&] {
    lamella::OwnStream stream(ordinal);
    LM_CUDA_CHECK(cudaMemsetAsync(reinterpret_cast<void*>(address), byte, num_bytes, stream.get()));
    stream.wait();
  });
}

lm_status lm_memory_copy(std::int32_t ordinal, std::uint64_t to, std::uint64_t from, std::int64_t num_bytes) {
  return guarded([&] {
    lamella::OwnStream stream(ordinal);
    LM_CUDA_CHECK(cudaMemcpyAsync(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), num_bytes,
                                  cudaMemcpyDefault, stream.get()));
    stream.wait();
  });
}
