// The primary context of one device, its driver entry points, and what CUDA errors mean to the engine.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "engine_device.hpp"
#include "lamella/errors.hpp"

namespace lamella {

// Throws DeviceFailure with CUDA's own text. An error that stays is one after which nothing can be enqueued any more.
inline void require(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();
  const bool lost = cudaGetLastError() != cudaSuccess || code == cudaErrorIllegalAddress ||
                    code == cudaErrorLaunchFailure || code == cudaErrorECCUncorrectable ||
                    code == cudaErrorDevicesUnavailable || code == cudaErrorContextIsDestroyed;
  throw DeviceFailure(format("%s: %s (%s)", what, cudaGetErrorString(code), cudaGetErrorName(code)), lost);
}

#define LM_REQUIRE(call) ::lamella::require((call), #call)

// Driver functions, found through the runtime, so that the library loads where there is no driver.
class Driver {
 public:
  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

  CUresult (*retain_primary)(CUcontext*, CUdevice) = nullptr;
  CUresult (*release_primary)(CUdevice) = nullptr;
  CUresult (*push)(CUcontext) = nullptr;
  CUresult (*pop)(CUcontext*) = nullptr;
  CUresult (*attribute)(int*, CUdevice_attribute, CUdevice) = nullptr;
  CUresult (*error_name)(CUresult, const char**) = nullptr;
  CUresult (*wait_value)(CUstream, CUdeviceptr, cuuint64_t, unsigned) = nullptr;
  CUresult (*write_value)(CUstream, CUdeviceptr, cuuint64_t, unsigned) = nullptr;
  CUresult (*batch_mem_op)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned) = nullptr;

  void require(CUresult code, const char* what) const {
    if (code == CUDA_SUCCESS) return;
    const char* name = "an unknown error";
    error_name(code, &name);
    throw DeviceFailure(format("%s: %s", what, name), code == CUDA_ERROR_CONTEXT_IS_DESTROYED ||
                                                          code == CUDA_ERROR_ILLEGAL_ADDRESS ||
                                                          code == CUDA_ERROR_LAUNCH_FAILED);
  }

 private:
  Driver() {
    find("cuDevicePrimaryCtxRetain", retain_primary);
    find("cuDevicePrimaryCtxRelease", release_primary);
    find("cuCtxPushCurrent", push);
    find("cuCtxPopCurrent", pop);
    find("cuDeviceGetAttribute", attribute);
    find("cuGetErrorName", error_name);
    find("cuStreamWaitValue64", wait_value);
    find("cuStreamWriteValue64", write_value);
    find("cuStreamBatchMemOp", batch_mem_op);
  }

  template <typename Function>
  static void find(const char* name, Function& function) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    constexpr unsigned kVersion = 12000;
    if (cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess || found == nullptr) {
      cudaGetLastError();
      throw DeviceFailure(format("the CUDA driver has no %s; driver 525 or newer is needed", name), true);
    }
    function = reinterpret_cast<Function>(found);
  }
};

// Keeps the device's primary context, and makes it the calling thread's for a scope. Neither creates a context on any
// other device (fault 49).
class Context {
 public:
  explicit Context(std::int32_t ordinal) : ordinal_(ordinal) {
    int count = 0;
    LM_REQUIRE(cudaGetDeviceCount(&count));
    if (ordinal < 0 || ordinal >= count) {
      throw Invalid(format("there is no device cuda:%d, only %d of them", ordinal, count));
    }
    Driver::get().require(Driver::get().retain_primary(&context_, ordinal), "cuDevicePrimaryCtxRetain");
  }
  ~Context() { Driver::get().release_primary(ordinal_); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // For the thread's whole life; scopes on it cost nothing then.
  void attach_thread() const {
    Driver::get().require(Driver::get().push(context_), "cuCtxPushCurrent");
    attached() = this;
  }

  bool has(CUdevice_attribute attribute) const {
    int value = 0;
    Driver::get().require(Driver::get().attribute(&value, attribute, ordinal_), "cuDeviceGetAttribute");
    return value != 0;
  }

  class Scope {
   public:
    explicit Scope(const Context& context) : pushed_(attached() != &context) {
      if (pushed_) Driver::get().require(Driver::get().push(context.context_), "cuCtxPushCurrent");
    }
    ~Scope() {
      CUcontext popped = nullptr;
      if (pushed_) Driver::get().pop(&popped);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const bool pushed_;
  };

 private:
  static const Context*& attached() {
    thread_local const Context* context = nullptr;
    return context;
  }

  std::int32_t ordinal_;
  CUcontext context_ = nullptr;
};

}  // namespace lamella
