// A GPU of one thread for as much CUDA as our kernels use: each thread of a block is a coroutine that runs to the next
// __syncthreads(), so that sums over a block, shared memory and barriers are what they are, only slow.
#pragma once
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __shared__ static

struct Three {
    unsigned x = 1, y = 1, z = 1;
};
inline Three threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
// Of a block. No containers: what a kernel includes is compiled with each.
const unsigned most = 1024, room = 1 << 16;
inline ucontext_t home, threads[most];
inline void* stacks[most];
inline bool waiting[most];
inline unsigned now;
// A kernel, and where its arguments are.
inline void (*body)(void**);
inline void** arguments;

inline void thread() {
    body(arguments);
    waiting[now] = false;
    swapcontext(&threads[now], &home);
}

// Whether every thread came to as many barriers: on a GPU anything else hangs, or worse.
inline bool block(unsigned count) {
    if (count > most) abort();
    for (unsigned i = 0; i < count; i++) {
        waiting[i] = true;
        getcontext(&threads[i]);
        if (stacks[i] == nullptr) stacks[i] = malloc(room);
        threads[i].uc_stack.ss_sp = stacks[i];
        threads[i].uc_stack.ss_size = room;
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

inline int launch(unsigned blocks, unsigned count, void (*kernel)(void**), void** given) {
    body = kernel;
    arguments = given;
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
inline unsigned registers[most];
}

// All threads of a block come to it: a warp alone would be taken for one that a barrier waits for.
inline unsigned __shfl_xor_sync(unsigned mask, unsigned value, unsigned apart) {
    unsigned self = emulator::now, other = self ^ apart;
    if (mask != ~0u || apart >= WARP) abort();
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
