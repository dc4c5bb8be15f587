// What both libraries share of the raw copies: the checks.
#pragma once

#include <cstdint>

#include "lamella/errors.hpp"

namespace lamella {

inline void check_probes(const lm_probe* probes, std::int32_t num_probes, const lm_probe_time* times) {
  if (num_probes < 1 || !probes || !times) throw Invalid("a probe run needs at least one probe and room for its time");
  for (std::int32_t i = 0; i < num_probes; ++i) {
    const lm_probe& probe = probes[i];
    if (probe.num_runs < 1 || probe.run_bytes < 1) {
      throw Invalid(format("probe %d must move at least one run of one byte, got %lld runs of %lld bytes", i,
                           (long long)probe.num_runs, (long long)probe.run_bytes));
    }
    if (probe.method < LM_PROBE_WHOLE || probe.method > LM_PROBE_STRIDED) {
      throw Invalid(format("probe %d has method %d, known are 0 .. 2", i, probe.method));
    }
    if (probe.method == LM_PROBE_BATCH && (!probe.host_offsets || !probe.device_offsets || probe.batch_entries < 1)) {
      throw Invalid(format("probe %d is batched and needs offsets on both sides and batch_entries of at least 1", i));
    }
    if (probe.method == LM_PROBE_STRIDED &&
        (probe.host_pitch < probe.run_bytes || probe.device_pitch < probe.run_bytes)) {
      throw Invalid(format("probe %d has pitches %lld and %lld below its run of %lld bytes", i,
                           (long long)probe.host_pitch, (long long)probe.device_pitch, (long long)probe.run_bytes));
    }
  }
}

}  // namespace lamella
