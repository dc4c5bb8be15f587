// How native code reports: it throws inside, and every C function ends in guarded().
#pragma once

#include <cstdarg>
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#include "lamella/lamella.h"

namespace lamella {

// The caller's mistake: LM_INVALID.
struct Invalid : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// The CUDA runtime refused: LM_CUDA.
struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A message of at most 511 bytes, so that reporting needs no stream and no locale.
__attribute__((format(printf, 1, 2))) inline std::string format(const char* pattern, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(text, sizeof text, pattern, arguments);
  va_end(arguments);
  return text;
}

inline std::string& last_error() {
  thread_local std::string message;
  return message;
}

inline lm_status failed(lm_status status, const char* message) noexcept {
  try {
    last_error() = message;
  } catch (...) {
    last_error().clear();
  }
  return status;
}

// Runs `body` and turns whatever it throws into a status and lm_last_error().
template <typename Body>
lm_status guarded(Body&& body) noexcept {
  try {
    body();
    return LM_OK;
  } catch (const Invalid& error) {
    return failed(LM_INVALID, error.what());
  } catch (const CudaError& error) {
    return failed(LM_CUDA, error.what());
  } catch (const std::bad_alloc&) {
    return failed(LM_NO_MEMORY, "out of host memory");
  } catch (const std::system_error& error) {
    return failed(LM_NO_MEMORY, error.what());
  } catch (const std::exception& error) {
    return failed(LM_INVALID, error.what());
  }
}

}  // namespace lamella
