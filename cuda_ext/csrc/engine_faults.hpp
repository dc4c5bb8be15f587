// Faults that tests plant, so that what follows a failure is tested on every device.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "engine_device.hpp"

namespace lamella {

// A planted fault: the device says, when it comes to the mark, that something has gone wrong.
class FailingMark final : public Mark {
 public:
  explicit FailingMark(std::shared_ptr<Mark> inner) : inner_(std::move(inner)) {}
  bool reached() override {
    if (inner_->reached()) throw DeviceFailure("planted: the window failed when it completed", false);
    return false;
  }
  Moment moment() override { return inner_->moment(); }
  void hold_back(std::uint64_t stream) override { inner_->hold_back(stream); }
  bool is_on_host() const override { return inner_->is_on_host(); }

 private:
  std::shared_ptr<Mark> inner_;
};

}  // namespace lamella
