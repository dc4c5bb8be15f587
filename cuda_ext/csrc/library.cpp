// What every build of the library answers: its version, its last error, and the plan of a request.
#include <vector>

#include "lamella/errors.hpp"
#include "lamella/lamella.h"
#include "lamella/plan.hpp"

extern "C" {

int32_t lm_abi_version(void) { return LM_ABI_VERSION; }

const char* lm_last_error(void) { return lamella::last_error().c_str(); }

lm_status lm_plan(const lm_request* request, lm_piece* pieces, int64_t piece_capacity, lm_window* windows,
                  int64_t window_capacity, int64_t* num_pieces, int64_t* num_windows) {
  return lamella::guarded([&] {
    lamella::Planner planner(*request);
    std::vector<lamella::Piece> found;
    lm_window window{};
    *num_pieces = *num_windows = 0;
    while (planner.next(found, window)) {
      if (*num_windows < window_capacity) windows[*num_windows] = window;
      ++*num_windows;
      for (const lamella::Piece& p : found) {
        if (*num_pieces < piece_capacity) {
          pieces[*num_pieces] = {p.object_index, p.group,      p.first_layer,   p.num_layers,
                                 p.first_token,  p.num_tokens, p.staging_offset};
        }
        ++*num_pieces;
      }
    }
  });
}

}  // extern "C"
