// A GPU of one thread for as much CUDA as our kernels use: each thread of a block is a coroutine that runs to the next
// __syncthreads(), so that sums over a block, shared memory and barriers are what they are, only slow.
#pragma once
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <vector>

#define __global__
#define __device__
#define __shared__ static

struct Three {
    unsigned x = 1, y = 1, z = 1;
};
inline Three threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
inline ucontext_t home;
inline std::vector<ucontext_t> threads;
inline std::vector<std::vector<char>> stacks;
inline std::vector<char> waiting;
inline unsigned now;
inline std::function<void()> body;

inline void thread() {
    body();
    waiting[now] = 0;
    swapcontext(&threads[now], &home);
}

// Whether every thread came to as many barriers: on a GPU anything else hangs, or worse.
inline bool block(unsigned count) {
    waiting.assign(count, 1);
    threads.resize(count);
    stacks.resize(count, std::vector<char>(1 << 16));
    for (unsigned i = 0; i < count; i++) {
        getcontext(&threads[i]);
        threads[i].uc_stack.ss_sp = stacks[i].data();
        threads[i].uc_stack.ss_size = stacks[i].size();
        threads[i].uc_link = nullptr;
        makecontext(&threads[i], thread, 0);
    }
    for (bool backwards = true;; backwards = !backwards) {  // no order of threads can be relied on
        unsigned left = 0;
        for (unsigned i = 0; i < count; i++) {
            now = backwards ? count - 1 - i : i;
            threadIdx.x = now;
            swapcontext(&home, &threads[now]);
            left += waiting[now];
        }
        if (left == 0) return true;
        if (left < count) return false;
    }
}

inline int launch(unsigned blocks, unsigned count, std::function<void()> kernel) {
    body = kernel;
    gridDim.x = blocks;
    blockDim.x = count;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        if (!block(count)) return 1;
    }
    return 0;
}
}  // namespace emulator

inline void __syncthreads() { swapcontext(&emulator::threads[emulator::now], &emulator::home); }

// A warp of few threads, so that blocks of few have several, and a last one that lacks some.
#define WARP 4

namespace emulator {
inline std::vector<unsigned> registers;
}

// All threads of a block come to it: a warp alone would be taken for one that a barrier waits for.
inline unsigned __shfl_xor_sync(unsigned mask, unsigned value, unsigned apart) {
    unsigned self = emulator::now, other = self ^ apart;
    if (mask != ~0u || apart >= WARP) abort();
    emulator::registers.resize(1024);
    emulator::registers[self] = value;
    __syncthreads();
    unsigned found = emulator::registers[other < blockDim.x ? other : self];
    __syncthreads();
    return found;
}

inline void __threadfence() {}
inline void __threadfence_system() {}

template <class V> V atomicAdd(V* at, V value) {
    V before = *at;
    *at += value;
    return before;
}

// By Newton's steps on erf, which the C library has.
inline double erfinv(double x) {
    if (fabs(x) >= 1) return fabs(x) == 1 ? x * INFINITY : NAN;
    double z = 0;
    for (int i = 0; i < 100; i++) z -= (erf(z) - x) * 0.88622692545275801 * exp(z * z);
    return z;
}
