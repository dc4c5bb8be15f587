// The kernels' launches on host memory, for tests and for a CPU that plays the device.
#include "lamella/host_launch.hpp"

#include <cstdint>
#include <vector>

#include "lamella/errors.hpp"
#include "lamella/lamella.h"
#include "lamella/plan.hpp"
#include "lamella/request.hpp"

namespace lamella {
namespace {

// Checks the pieces and calls launch(target, pieces) with those of each kernel group.
template <typename Launch>
void for_each_group(const lm_request& request, const lm_piece* pieces, std::int64_t num_pieces, const Launch& launch) {
  check_plan(request);
  check_engines(request);
  for (std::int64_t i = 0; i < num_pieces; ++i) check_piece(request, pieces[i]);
  for (std::int32_t index = 0; index < request.num_groups; ++index) {
    const lm_group& source = request.groups[index];
    std::vector<Piece> own;
    for (std::int64_t i = 0; i < num_pieces; ++i) {
      if (pieces[i].group == index) own.push_back(piece_of(pieces[i]));
    }
    const std::uint64_t base_bits = or_of(source.bases, std::int64_t{source.num_layers} * source.kv);
    launch(KernelGroup{group_of(request, source), source.block_ids, base_bits}, own);
  }
}

}  // namespace
}  // namespace lamella

extern "C" {

lm_status lm_cpu_scatter(const lm_request* request, const lm_piece* pieces, int64_t num_pieces, uint64_t staging) {
  return lamella::guarded([&] {
    lamella::for_each_group(*request, pieces, num_pieces, [&](const auto& target, const auto& own) {
      const lamella::Staged dense{staging};
      const std::int64_t count = static_cast<std::int64_t>(own.size());
      lamella::launch_on_host(target, own.data(), count, dense, lamella::dense_bits(dense, own.data(), count),
                              static_cast<lm_direction>(request->direction));
    });
  });
}

lm_status lm_cpu_move_mapped(const lm_request* request, const lm_piece* pieces, int64_t num_pieces,
                             const lm_host_objects* objects) {
  return lamella::guarded([&] {
    lamella::check_plan(*request);
    lamella::check_objects(*request, *objects);
    const std::uint64_t object_bits = lamella::or_of(objects->addresses, objects->num_objects);
    lamella::for_each_group(*request, pieces, num_pieces, [&](const auto& target, const auto& own) {
      const std::uint64_t bits = object_bits | static_cast<std::uint64_t>(target.group.object_offset);
      lamella::launch_on_host(target, own.data(), static_cast<std::int64_t>(own.size()),
                              lamella::Mapped{objects->addresses}, bits,
                              static_cast<lm_direction>(request->direction));
    });
  });
}

}  // extern "C"
