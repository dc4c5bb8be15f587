// The CUDA channel on a runtime that is made up here: streams are queues that run only when told to.
//
//   channel_driver direct|staged|store|leftover
//
// A window fails in the middle of being issued. Prints one line that says what then holds; see test_channel.py.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <string>

#include "cuda_channel.hpp"

namespace {

struct Stream {
  std::deque<std::function<bool()>> work;  // false: it has to wait
};
struct Event {
  int recorded = 0;
  int reached = 0;
};
constexpr int kMany = 1000;
int copies_left = kMany;    // until the runtime refuses one
int scatters_left = kMany;  // as well
std::deque<Stream*> streams;

Stream* of(cudaStream_t stream) { return reinterpret_cast<Stream*>(stream); }
Event* of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

void run(Stream& stream) {
  while (!stream.work.empty() && stream.work.front()()) stream.work.pop_front();
}

CUresult unused() { return CUDA_SUCCESS; }

cudaError_t enqueue_copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  if (copies_left-- == 0) return cudaErrorInvalidValue;
  of(stream)->work.push_back([=] { return std::memcpy(to, from, bytes) != nullptr; });
  return cudaSuccess;
}

}  // namespace

extern "C" {
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "refused"; }
const char* cudaGetErrorName(cudaError_t) { return "refused"; }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** found, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *found = reinterpret_cast<void*>(&unused);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int*, int*) { return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  streams.push_back(new Stream());
  *stream = reinterpret_cast<cudaStream_t>(streams.back());
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  run(*of(stream));
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event());
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const int record = ++of(event)->recorded;
  of(stream)->work.push_back([=] { return of(event)->reached = record, true; });
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const int record = of(event)->recorded;
  of(stream)->work.push_back([=] { return of(event)->reached >= record; });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return of(event)->reached == of(event)->recorded ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { return *ms = 0, cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return enqueue_copy(to, from, bytes, stream);
}
cudaError_t cudaMemcpy2DAsync(void*, std::size_t, const void*, std::size_t, std::size_t, std::size_t, cudaMemcpyKind,
                              cudaStream_t) {
  return cudaErrorInvalidValue;
}
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const std::size_t* bytes, std::size_t count,
                                 cudaMemcpyAttributes*, std::size_t*, std::size_t, cudaStream_t stream) {
  cudaError_t code = cudaSuccess;
  for (std::size_t i = 0; i < count && code == cudaSuccess; ++i) code = enqueue_copy(to[i], from[i], bytes[i], stream);
  return code;
}
cudaError_t cudaMalloc(void** memory, std::size_t bytes) { return *memory = std::malloc(bytes), cudaSuccess; }
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  return *memory = std::malloc(bytes), cudaSuccess;
}
cudaError_t cudaFreeHost(void*) { return cudaSuccess; }
cudaError_t cudaFree(void*) { return cudaSuccess; }
}

namespace lamella {
void scatter_staged(const KernelGroup&, const Piece*, std::int64_t, std::uint64_t, lm_direction, std::int32_t,
                    CUstream_st* stream) {
  if (scatters_left-- == 0) throw CudaError("refused");
  of(stream)->work.push_back([] { return true; });
}
void load_kernels(CUstream_st*) {}
void move_mapped(const KernelGroup&, const Piece*, std::int64_t, const std::uint64_t*, std::uint64_t, lm_direction,
                 std::int32_t, CUstream_st*) {}
}  // namespace lamella

namespace {

using namespace lamella;

// One layer of one-byte tokens, a token a block.
std::shared_ptr<Transfer> transfer_of(lm_direction direction) {
  static const std::int32_t layers[] = {0};
  static const std::uint64_t bases[] = {4096};
  static const std::int32_t blocks[] = {0};
  static const std::uint64_t objects[] = {8192};
  static const lm_slice slice{0, 1};
  static const std::int64_t key = 0;
  const std::int32_t* tables[] = {blocks};
  const std::int32_t num_blocks = 1;
  auto cache = std::make_shared<Cache>();
  cache->form = LM_FORM_TOKEN;
  cache->chunk_tokens = cache->num_layers = 1;
  cache->sources = {lm_group{1, 1, 1, 1, 1, 1, 1, 0, 0, layers, nullptr, bases, 1, 1, 1, 1}};
  lm_submission submission{};
  submission.direction = direction;
  submission.num_slices = submission.num_groups = 1;
  submission.slices = &slice;
  submission.keys = &key;
  submission.num_tokens = 1;
  submission.block_ids = tables;
  submission.num_block_ids = &num_blocks;
  submission.objects = {objects, 1, 0, 0};
  auto transfer = std::make_shared<Transfer>(cache, submission, 64, 0);
  transfer->tables = std::make_unique<Tables>();
  transfer->tables->groups.resize(2);
  return transfer;
}

char from[8] = "sources";
char to[8] = "-------";

Copy copy_of(int index, std::int64_t rows = 1) {
  return {address(to + index), address(from + index), 1, rows, 2, 2};
}

std::shared_ptr<Window> window_of(lm_direction direction, std::int32_t method, std::vector<Copy> copies) {
  auto window = std::make_shared<Window>();
  window->transfer = transfer_of(direction);
  window->pieces = {Piece{0, 0, 0, 1, 0, 1, 0}, Piece{0, 1, 0, 1, 0, 1, 0}};
  window->copies = std::move(copies);
  window->num_bytes = 1;
  window->method = method;
  return window;
}

// Streams of a channel, in the order in which it makes them: two for copies, one for kernels.
enum { kCopies = 0, kKernels = 2 };

// A window fails; then only the stream runs that its mark was recorded on. Whether the mark waits for the other.
const char* partly_issued(lm_direction direction, std::int32_t method, int busy, int idle, int copies, int scatters) {
  lm_engine_options options{};
  options.batch_entries = 1;
  CudaChannel channel(std::make_shared<Context>(0), direction, options);
  copies_left = copies;
  scatters_left = scatters;
  try {
    channel.issue(window_of(direction, method, {copy_of(0), copy_of(1), copy_of(2)}));
    return "not refused";
  } catch (const DeviceFailure&) {
  }
  const auto mark = channel.mark();
  run(*streams[idle]);
  if (mark->reached()) return "drained too early";
  run(*streams[busy]);
  run(*streams[idle]);
  return mark->reached() ? "behind all" : "never drained";
}

// A window fails between two of its copies, and another one follows.
const char* leftover() {
  lm_engine_options options{};
  options.batch_entries = 64;
  CudaChannel channel(std::make_shared<Context>(0), LM_RETRIEVE, options);
  try {
    channel.issue(window_of(LM_RETRIEVE, LM_COPY_DIRECT_BATCH, {copy_of(0), copy_of(1, 4)}));
    return "not refused";
  } catch (const DeviceFailure&) {
  }
  channel.issue(window_of(LM_RETRIEVE, LM_COPY_DIRECT_BATCH, {copy_of(3)}));
  for (Stream* stream : streams) run(*stream);
  return std::strcmp(to, "---r---") == 0 ? "its own" : to;
}

}  // namespace

int main(int, char** argv) {
  const std::string which = argv[1];
  if (which == "leftover") {
    std::puts(leftover());
  } else if (which == "store") {
    std::puts(partly_issued(LM_STORE, LM_COPY_STAGED_BATCH, kKernels, kCopies, kMany, 1));
  } else {
    const std::int32_t method = which == "direct" ? LM_COPY_DIRECT_BATCH : LM_COPY_STAGED_BATCH;
    std::puts(partly_issued(LM_RETRIEVE, method, kCopies, kKernels, 2, kMany));
  }
}
