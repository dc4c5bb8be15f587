// The launches on host memory: the kernels' own code, one thread standing for all of theirs.
#pragma once

#include <cstdint>

#include "lamella/items.cuh"
#include "lamella/lamella.h"

namespace lamella {

template <typename Dense>
void launch_on_host(const KernelGroup& target, const Piece* pieces, std::int64_t num_pieces, const Dense& dense,
                    std::uint64_t bits, lm_direction direction) {
  const Group& g = target.group;
  with_widest_vector(engine_bits(target) | bits, [&](auto width) {
    const Shape shape = shape_of(g, width, direction == LM_RETRIEVE);
    for (std::int64_t i = 0; i < num_pieces; ++i) {
      for (std::uint32_t item = 0; item < item_count(g, pieces[i]); ++item) {
        for (std::int32_t lane = 0; lane < shape.threads_an_item; ++lane) {
          move_item<width>(g, pieces[i], target.block_ids, dense, shape, item, lane);
        }
      }
    }
  });
}

}  // namespace lamella
