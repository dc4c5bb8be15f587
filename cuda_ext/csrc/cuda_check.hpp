// CUDA calls that throw CudaError with the runtime's own text, and a stream that ends with its scope.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "lamella/errors.hpp"

namespace lamella {

inline void check_cuda(cudaError_t code, const char* call) {
  if (code != cudaSuccess) {
    cudaGetLastError();  // a failed call must not be found again by an unrelated one
    throw CudaError(format("%s: %s (%s)", call, cudaGetErrorString(code), cudaGetErrorName(code)));
  }
}

#define LM_CUDA_CHECK(call) ::lamella::check_cuda((call), #call)

inline void use_device(std::int32_t ordinal) { LM_CUDA_CHECK(cudaSetDevice(ordinal)); }

// Non-blocking: neither waits for the legacy default stream nor holds it up.
class OwnStream {
 public:
  explicit OwnStream(std::int32_t ordinal) {
    use_device(ordinal);
    LM_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~OwnStream() { cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  cudaStream_t get() const { return stream_; }
  void wait() const { LM_CUDA_CHECK(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace lamella
