// Faults that tests plant, so that what follows a failure is tested on every device.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "engine_device.hpp"

namespace lamella {

// A planted fault: the device says, when it comes to the mark, that something has gone wrong, or never comes there.
class FaultyMark final : public Mark {
 public:
  FaultyMark(std::shared_ptr<Mark> inner, lm_fault fault) : inner_(std::move(inner)), fault_(fault) {}
  bool reached() override {
    if (fault_ != LM_FAULT_STUCK && inner_->reached()) throw DeviceFailure("planted: the window failed when it completed", false);
    return false;
  }
  Moment moment() override { return inner_->moment(); }
  void hold_back(std::uint64_t stream) override { inner_->hold_back(stream); }
  bool is_on_host() const override { return inner_->is_on_host(); }

 private:
  std::shared_ptr<Mark> inner_;
  const lm_fault fault_;
};

// The mark as it is where the fault is none of an issued window's (-1).
inline std::shared_ptr<Mark> with_fault(std::int32_t fault, std::shared_ptr<Mark> mark) {
  if (fault < 0) return mark;
  return std::make_shared<FaultyMark>(std::move(mark), static_cast<lm_fault>(fault));
}

}  // namespace lamella
