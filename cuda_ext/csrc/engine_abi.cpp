// The engine's C ABI: handles, and exceptions turned into statuses.
#include <algorithm>
#include <cstring>
#include <memory>

#include "engine.hpp"
#include "lamella/engine.h"
#include "lamella/errors.hpp"

struct lm_engine {
  std::shared_ptr<lamella::Engine> engine;
  bool drained = true;  // close() succeeded, or was not called
};

// Keeps its engine alive, so that a handle outlives lm_engine_destroy harmlessly.
struct lm_transfer {
  std::shared_ptr<lamella::Engine> engine;
  std::shared_ptr<lamella::Transfer> transfer;
};

namespace {

// As lamella::guarded, with the statuses of waiting.
template <typename Body>
std::int32_t waited(Body&& body) noexcept {
  std::int32_t status = LM_OK;
  std::string message;
  const lm_status other = lamella::guarded([&] {
    try {
      body();
    } catch (const lamella::TimedOut& late) {
      status = LM_TIMEOUT;
      message = late.what();
    } catch (const lamella::Stopped& stopped) {
      status = LM_STOPPED;
      message = stopped.what();
    } catch (const lamella::DeviceFailure& failure) {
      throw lamella::CudaError(failure.what());
    }
  });
  if (status == LM_OK) return other;
  lamella::failed(LM_OK, message.c_str());
  return status;
}

std::int64_t deadline_after(std::int64_t timeout_ns) {
  constexpr std::int64_t kForever = std::int64_t{1} << 61;  // 73 years: a bound that no clock overflows
  return lamella::now_ns() + std::min(std::max<std::int64_t>(timeout_ns, 0), kForever);
}

}  // namespace

extern "C" {

lm_status lm_engine_create(const lm_engine_options* options, lm_engine** engine) {
  return static_cast<lm_status>(waited([&] {
    auto made = std::make_unique<lm_engine>();
    made->engine = std::make_shared<lamella::Engine>(*options);
    *engine = made.release();
  }));
}

int32_t lm_engine_close(lm_engine* engine, int64_t timeout_ns) {
  return waited([&] {
    engine->drained = engine->engine->close(deadline_after(timeout_ns));
    if (!engine->drained) throw lamella::TimedOut("the device did not drain within the bound");
  });
}

void lm_engine_destroy(lm_engine* engine) {
  if (!engine->drained) {
    // Its thread may never end; joining it could hang the caller, so thread and memory are left to it.
    new std::shared_ptr<lamella::Engine>(engine->engine);
  }
  delete engine;
}

lm_status lm_engine_register(lm_engine* engine, const lm_request* shape, int32_t* cache) {
  return static_cast<lm_status>(waited([&] { *cache = engine->engine->register_cache(*shape); }));
}

int32_t lm_engine_submit(lm_engine* engine, const lm_submission* submission, lm_transfer** transfer,
                         lm_progress* queued) {
  return waited([&] {
    auto handle = std::make_unique<lm_transfer>();
    handle->engine = engine->engine;
    handle->transfer = engine->engine->submit(*submission, *queued);
    *transfer = handle.release();
  });
}

int32_t lm_engine_next_drained(lm_engine* engine, int64_t timeout_ns, uint64_t* token) {
  return waited([&] { *token = engine->engine->next_drained(deadline_after(timeout_ns)); });
}

lm_status lm_engine_lane_status(lm_engine* engine, int32_t direction, lm_lane_status* status) {
  return static_cast<lm_status>(waited([&] { *status = engine->engine->lane(direction).status(); }));
}

lm_status lm_engine_pending_word(lm_engine* engine, int32_t layer, uint64_t* address) {
  return static_cast<lm_status>(waited([&] { *address = engine->engine->pending_word(layer); }));
}

lm_status lm_engine_wait_pending(lm_engine* engine, int32_t layer, uint64_t stream) {
  return static_cast<lm_status>(waited([&] {
    engine->engine->device().wait_word(stream, engine->engine->pending_word(layer), 0, false);
  }));
}

lm_status lm_engine_grant(lm_engine* engine, int32_t direction, int64_t windows) {
  return static_cast<lm_status>(waited([&] {
    engine->engine->lane(direction);
    engine->engine->device().grant(static_cast<lm_direction>(direction), windows);
  }));
}

lm_status lm_engine_plant_fault(lm_engine* engine, int32_t direction, int64_t window, int32_t when) {
  return static_cast<lm_status>(waited([&] { engine->engine->lane(direction).plant_fault(window, when); }));
}

lm_status lm_transfer_progress(lm_transfer* transfer, lm_progress* progress) {
  return static_cast<lm_status>(waited([&] { *progress = transfer->transfer->progress(); }));
}

int32_t lm_transfer_wait(lm_transfer* transfer, int64_t timeout_ns) {
  return waited([&] { transfer->transfer->wait_final(deadline_after(timeout_ns)); });
}

int32_t lm_transfer_wait_layer(lm_transfer* transfer, int32_t layer, uint64_t stream, int64_t timeout_ns,
                               int64_t* host_wait_ns) {
  return waited([&] {
    *host_wait_ns =
        transfer->engine->wait_layer(*transfer->transfer, layer, stream, deadline_after(timeout_ns));
  });
}

int32_t lm_transfer_wait_slices(lm_transfer* transfer, int32_t slices, int32_t landed, int64_t timeout_ns) {
  return waited([&] { transfer->transfer->wait_slices(slices, landed != 0, deadline_after(timeout_ns)); });
}

int32_t lm_transfer_gate(lm_transfer* transfer, uint64_t stream, int64_t timeout_ns) {
  return waited([&] { transfer->engine->gate(transfer->transfer, stream, deadline_after(timeout_ns)); });
}

lm_status lm_transfer_cancel(lm_transfer* transfer) {
  return static_cast<lm_status>(waited([&] { transfer->engine->cancel(*transfer->transfer); }));
}

lm_status lm_transfer_timestamps(lm_transfer* transfer, int64_t* recorded_ns, int64_t* landed_ns) {
  return static_cast<lm_status>(waited([&] { transfer->transfer->timestamps(recorded_ns, landed_ns); }));
}

lm_status lm_transfer_error(lm_transfer* transfer, char* text, int64_t capacity) {
  return static_cast<lm_status>(waited([&] {
    if (capacity < 1) throw lamella::Invalid("the text needs room for at least its end");
    const std::string reason = transfer->transfer->error();
    const auto length = std::min(reason.size(), static_cast<std::size_t>(capacity) - 1);
    std::memcpy(text, reason.data(), length);
    text[length] = '\0';
  }));
}

void lm_transfer_release(lm_transfer* transfer) { delete transfer; }

lm_status lm_fence_create(lm_fence** fence) {
  return lamella::guarded([&] { *fence = new lm_fence(); });
}

lm_status lm_fence_signal(lm_fence* fence) {
  return lamella::guarded([&] { fence->state->open(); });
}

void lm_fence_release(lm_fence* fence) { delete fence; }

}  // extern "C"
