// Block tables and object addresses of a transfer, in pinned memory and on the device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda_context.hpp"
#include "engine_device.hpp"

namespace lamella {

constexpr std::size_t kSmallestTable = 256 << 10;  // 65,536 block ids: a million tokens of 16-token blocks
constexpr std::size_t kTablesAtOnce = 8;

// A pinned table and its copy on the device.
struct TablePair {
  std::size_t capacity = 0;
  unsigned char* host = nullptr;
  unsigned char* device = nullptr;
};

class TablePool {
 public:
  explicit TablePool(std::shared_ptr<const Context> context) : context_(std::move(context)) {
    for (std::size_t i = 0; i < kTablesAtOnce; ++i) free_.push_back(make(kSmallestTable));
  }
  ~TablePool() {
    for (const TablePair& pair : free_) {
      cudaFreeHost(pair.host);
      cudaFree(pair.device);
    }
  }
  TablePool(const TablePool&) = delete;
  TablePool& operator=(const TablePool&) = delete;

  TablePair take(std::size_t bytes) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (std::size_t i = 0; i < free_.size(); ++i) {
        if (free_[i].capacity >= bytes) {
          const TablePair pair = free_[i];
          free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
          return pair;
        }
      }
    }
    std::size_t capacity = kSmallestTable;
    while (capacity < bytes) capacity *= 2;
    const Context::Scope scope(*context_);
    return make(capacity);
  }
  void give(const TablePair& pair) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(pair);
  }

 private:
  static TablePair make(std::size_t capacity) {
    TablePair pair;
    pair.capacity = capacity;
    LM_REQUIRE(cudaHostAlloc(reinterpret_cast<void**>(&pair.host), capacity, cudaHostAllocPortable));
    LM_REQUIRE(cudaMalloc(reinterpret_cast<void**>(&pair.device), capacity));
    return pair;
  }

  std::shared_ptr<const Context> context_;
  std::mutex mutex_;
  std::vector<TablePair> free_;
};

// Block ids of every group and the objects' addresses, one after another.
class CudaTables final : public Tables {
 public:
  CudaTables(std::shared_ptr<TablePool> pool, const std::vector<KernelGroup>& cache_groups, const lm_request& request,
             const std::vector<std::uint64_t>& chunk_objects)
      : pool_(std::move(pool)) {
    std::size_t bytes = chunk_objects.size() * sizeof(std::uint64_t);
    for (std::int32_t i = 0; i < request.num_groups; ++i) bytes += ids_bytes(request.groups[i]);
    pair_ = pool_->take(bytes);
    std::memcpy(pair_.host, chunk_objects.data(), chunk_objects.size() * sizeof(std::uint64_t));
    objects = reinterpret_cast<const std::uint64_t*>(pair_.device);
    for (const std::uint64_t object : chunk_objects) object_bits |= object;
    used_ = chunk_objects.size() * sizeof(std::uint64_t);
    groups = cache_groups;
    for (std::int32_t i = 0; i < request.num_groups; ++i) {
      std::memcpy(pair_.host + used_, request.groups[i].block_ids,
                  static_cast<std::size_t>(request.groups[i].num_block_ids) * sizeof(std::int32_t));
      groups[static_cast<std::size_t>(i)].block_ids = reinterpret_cast<const std::int32_t*>(pair_.device + used_);
      used_ += ids_bytes(request.groups[i]);
    }
  }
  ~CudaTables() override { pool_->give(pair_); }

  void upload(cudaStream_t stream) const {
    if (used_ == 0) return;
    LM_REQUIRE(cudaMemcpyAsync(pair_.device, pair_.host, used_, cudaMemcpyHostToDevice, stream));
  }

 private:
  static std::size_t ids_bytes(const lm_group& group) {
    const std::size_t bytes = static_cast<std::size_t>(group.num_block_ids) * sizeof(std::int32_t);
    return (bytes + 15) / 16 * 16;
  }

  std::shared_ptr<TablePool> pool_;
  TablePair pair_;
  std::size_t used_ = 0;
};

}  // namespace lamella
