// What a core takes in of scattered pieces, as attention over a paged cache reads them.
//
//     g++ -O3 -march=native -pthread -o scattered benchmarks/kernels/scattered_reads.cpp
//     ./scattered                 # needs AVX-512 with BF16
//
// Memory holds blocks of 12 kB, those of 16 tokens with three heads of 64 numbers in bf16: for each
// head 2 kB of keys, then 2 kB of values. Chunks of eight blocks are read in the order of attention,
// a head at a time, keys before values. Each line of 64 bytes is added up ("read"), or multiplied
// with three rows ("products"), or that with a pause of some 100 dependent operations after each
// half of a chunk, where a softmax would stand ("softmax"). "by block" takes the heads of a block
// one behind the other instead, "ahead 8" prefetches eight pieces ahead instead of four, "none"
// leaves it to the hardware; "runs" has 16 blocks in a row in memory. Best of three, GB/s, with one
// thread and with two, each kept on a core of its own.
#include <immintrin.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr size_t kBytes = size_t{384} << 20, kBlock = 12288, kChunk = 8;
enum Work { kRead, kProducts, kSoftmax };

char* memory;
std::vector<size_t> blocks;  // offsets, in the order in which they are read

double now() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// The piece at a place of a chunk's 48, or of the next chunk's.
template <bool kByBlock>
const char* piece(const size_t* chunk, int place) {
  if (place >= 48) chunk += kChunk, place -= 48;
  const int part = kByBlock ? place / 24 : place / 8 % 2;
  const int head = kByBlock ? place % 3 : place / 16;
  const int group = kByBlock ? place % 24 / 3 : place % 8;
  return memory + chunk[group] + 4096 * head + 2048 * part;
}

template <Work kWork, int kAhead, bool kByBlock>
float read_chunks(size_t begin, size_t end) {
  __m512 sums[12];
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  const auto row = (__m512bh)_mm512_set1_epi32(0x3f803f80);
  __m512 pause = _mm512_set1_ps(0.1f);
  for (size_t index = begin; index < end; ++index) {
    const size_t* chunk = &blocks[kChunk * index];
    for (int place = 0; place < 48; ++place) {
      const char* here = piece<kByBlock>(chunk, place);
      const char* next = piece<kByBlock>(chunk, place + kAhead);
      for (int line = 0; line < 32; line += 4)
        for (int k = 0; k < 4; ++k) {
          if (kAhead > 0) _mm_prefetch(next + 64 * (line + k), _MM_HINT_T0);
          const __m512i data = _mm512_load_si512(here + 64 * (line + k));
          if (kWork == kRead) {
            sums[k] = (__m512)_mm512_add_epi32((__m512i)sums[k], data);
          } else {
            for (int r = 0; r < 3; ++r)
              sums[3 * k + r] = _mm512_dpbf16_ps(sums[3 * k + r], (__m512bh)data, row);
          }
        }
      if (kWork == kSoftmax && place % 8 == 7)
        for (int i = 0; i < 100; ++i) pause = _mm512_fmadd_ps(pause, pause, pause);
    }
  }
  for (auto& sum : sums) pause = _mm512_add_ps(pause, sum);
  return _mm512_reduce_add_ps(pause);
}

template <Work kWork, int kAhead, bool kByBlock>
double rate(int threads) {
  const size_t each = (blocks.size() / kChunk - 1) / 2;
  double best = 1e9;
  for (int repeat = 0; repeat < 3; ++repeat) {
    std::atomic<int> ready{0};
    std::vector<double> seconds(static_cast<size_t>(threads));
    std::vector<std::thread> running;
    for (int t = 0; t < threads; ++t)
      running.emplace_back([&, t] {
        cpu_set_t cpu;
        CPU_ZERO(&cpu);
        CPU_SET(static_cast<size_t>(t), &cpu);
        pthread_setaffinity_np(pthread_self(), sizeof cpu, &cpu);
        ++ready;
        while (ready < threads) {
        }
        const double start = now();
        volatile float sink =
            read_chunks<kWork, kAhead, kByBlock>(each * static_cast<size_t>(t),
                                                 each * static_cast<size_t>(t + 1));
        (void)sink;
        seconds[static_cast<size_t>(t)] = now() - start;
      });
    for (auto& thread : running) thread.join();
    best = std::min(best, *std::max_element(seconds.begin(), seconds.end()));
  }
  return static_cast<double>(each * kChunk * kBlock) * threads / best / 1e9;
}

void show(const char* name) {
  for (int threads = 1; threads <= 2; ++threads)
    std::printf(
        "%-10s %d thread%s  read %.1f  products %.1f  softmax %.1f  by block %.1f  ahead 8 %.1f  "
        "none %.1f\n",
        name, threads, threads > 1 ? "s" : " ", rate<kRead, 4, false>(threads),
        rate<kProducts, 4, false>(threads), rate<kSoftmax, 4, false>(threads),
        rate<kSoftmax, 4, true>(threads), rate<kSoftmax, 8, false>(threads),
        rate<kSoftmax, 0, false>(threads));
}

void show_machine() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("model name", 0) == 0) {
      std::printf("machine    %s, %u CPUs; GCC or Clang %s\n", line.substr(line.find(':') + 2).c_str(),
                  std::thread::hardware_concurrency(), __VERSION__);
      return;
    }
}

}  // namespace

int main() {
  show_machine();
  void* base = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return std::perror("mmap"), 1;
  memory = static_cast<char*>(base);
  madvise(memory, kBytes, MADV_HUGEPAGE);
  std::memset(memory, 1, kBytes);
  std::mt19937 random(1);
  const size_t count = kBytes / kBlock / 16 * 16;
  std::vector<size_t> runs(count / 16);
  for (size_t i = 0; i < runs.size(); ++i) runs[i] = 16 * i;
  std::shuffle(runs.begin(), runs.end(), random);
  for (size_t i = 0; i < count; ++i) blocks.push_back((runs[i / 16] + i % 16) * kBlock);
  show("runs");
  std::shuffle(blocks.begin(), blocks.end(), random);
  show("scattered");
  return 0;
}
