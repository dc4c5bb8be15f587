// Host copies: long runs, and grids of short ones.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "lamella/address.cuh"

namespace lamella {

inline unsigned char* at(std::uint64_t address) {
  return reinterpret_cast<unsigned char*>(static_cast<std::uintptr_t>(address));
}

// Around the cache: the destination's lines are not read first, and nothing is evicted for them. What follows is ordered
// behind it by the fence.
inline void stream_run(unsigned char* to, const unsigned char* from, std::size_t bytes) {
#ifdef __SSE2__
  constexpr std::size_t kLine = 64;
  const std::size_t before = std::min(bytes, (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine);
  std::memcpy(to, from, before);
  std::size_t done = before;
  for (; done + kLine <= bytes; done += kLine) {
    for (std::size_t part = 0; part < kLine; part += sizeof(__m128i)) {
      const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + done + part));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + done + part), value);
    }
  }
  std::memcpy(to + done, from + done, bytes - done);
  _mm_sfence();
#else
  std::memcpy(to, from, bytes);
#endif
}

constexpr std::size_t kShortestStream = 4 << 10;  // shorter runs lose more at their ends than they save

inline void copy_run(unsigned char* to, const unsigned char* from, std::size_t bytes, bool around_cache) {
  if (around_cache && bytes >= kShortestStream) {
    stream_run(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

// One axis of a grid of runs: how many, and how far apart on either side.
struct Axis {
  std::int64_t count;
  std::int64_t to_step;
  std::int64_t from_step;
};

template <std::size_t kBytes>
inline void copy_rows(unsigned char* to, const unsigned char* from, const Axis& outer, const Axis& inner,
                      std::size_t) {
  for (std::int64_t i = 0; i < outer.count; ++i) {
    unsigned char* t = to + i * outer.to_step;
    const unsigned char* f = from + i * outer.from_step;
    for (std::int64_t j = 0; j < inner.count; ++j, t += inner.to_step, f += inner.from_step) std::memcpy(t, f, kBytes);
  }
}

inline void copy_rows_any(unsigned char* to, const unsigned char* from, const Axis& outer, const Axis& inner,
                          std::size_t bytes) {
  for (std::int64_t i = 0; i < outer.count; ++i) {
    unsigned char* t = to + i * outer.to_step;
    const unsigned char* f = from + i * outer.from_step;
    for (std::int64_t j = 0; j < inner.count; ++j, t += inner.to_step, f += inner.from_step) std::memcpy(t, f, bytes);
  }
}

using RowCopy = void (*)(unsigned char*, const unsigned char*, const Axis&, const Axis&, std::size_t);

// A copy whose size the compiler knows needs no call and no size dispatch, which is what short runs are made of.
inline RowCopy row_copy(std::int64_t bytes) {
  switch (bytes) {
    case 1: return copy_rows<1>;
    case 2: return copy_rows<2>;
    case 4: return copy_rows<4>;
    case 8: return copy_rows<8>;
    case 16: return copy_rows<16>;
    case 32: return copy_rows<32>;
    case 64: return copy_rows<64>;
    case 128: return copy_rows<128>;
    case 256: return copy_rows<256>;
    case 512: return copy_rows<512>;
    case 1024: return copy_rows<1024>;
    default: return copy_rows_any;
  }
}

// How the tokens of one block lie on the engine side against the dense side (an object or a staging image).
class BlockShape {
 public:
  explicit BlockShape(const Group& g)
      : hidden_(hidden_bytes(g)),
        origin_(strided_element(g, 0, 0) - dense_element(g, 0, 0)),
        token_step_(static_cast<std::int64_t>(engine_address(g, 0, 0, 0, 1) - engine_address(g, 0, 0, 0, 0))),
        heads_{g.num_heads, strided_element(g, 1, 0) - strided_element(g, 0, 0),
               dense_element(g, 1, 0) - dense_element(g, 0, 0)},
        dims_{g.head_dim, strided_element(g, 0, 1) - strided_element(g, 0, 0),
              dense_element(g, 0, 1) - dense_element(g, 0, 0)},
        run_(g.element_bytes) {
    if (folds(dims_)) fold(dims_);
    if (dims_.count == 1 && folds(heads_)) fold(heads_);
    tokens_are_runs_ = run_ == hidden_;
    copy_ = row_copy(run_);
  }

  // Whether `count` tokens of a block are one run on both sides.
  bool is_run(std::int64_t count) const { return tokens_are_runs_ && (count == 1 || token_step_ == hidden_); }

  // Bytes between the engine's first element of a token and the address rule's.
  std::int64_t origin() const { return origin_; }

  // Copies `count` tokens that start at `engine` and at `dense`.
  void copy(std::uint64_t engine, std::uint64_t dense, std::int64_t count, bool to_engine) const {
    const auto axis = [to_engine](std::int64_t n, std::int64_t engine_step, std::int64_t dense_step) {
      return to_engine ? Axis{n, engine_step, dense_step} : Axis{n, dense_step, engine_step};
    };
    unsigned char* to = at(to_engine ? engine : dense);
    const unsigned char* from = at(to_engine ? dense : engine);
    Axis tokens = axis(count, token_step_, hidden_);
    Axis heads = axis(heads_.count, heads_.to_step, heads_.from_step);
    if (dims_.count > 1) {
      const Axis dims = axis(dims_.count, dims_.to_step, dims_.from_step);
      for (std::int64_t t = 0; t < count; ++t) {
        copy_(to + t * tokens.to_step, from + t * tokens.from_step, heads, dims, static_cast<std::size_t>(run_));
      }
      return;
    }
    // Writes go forward through the destination as far as the two sides allow.
    if (magnitude(heads.to_step) > magnitude(tokens.to_step)) std::swap(tokens, heads);
    copy_(to, from, tokens, heads, static_cast<std::size_t>(run_));
  }

 private:
  static std::int64_t magnitude(std::int64_t step) { return step < 0 ? -step : step; }
  bool folds(const Axis& axis) const { return axis.count == 1 || (axis.to_step == run_ && axis.from_step == run_); }
  void fold(Axis& axis) {
    run_ *= axis.count;
    axis.count = 1;
  }

  std::int64_t hidden_;
  std::int64_t origin_;
  std::int64_t token_step_;
  Axis heads_;  // to = engine, from = dense
  Axis dims_;
  std::int64_t run_;  // bytes that are contiguous on both sides, within a token
  bool tokens_are_runs_ = false;
  RowCopy copy_ = nullptr;
};

}  // namespace lamella
