"""Random numbers that follow from a key and a counter: nothing of what was drawn needs to be kept for backward."""

from __future__ import annotations

# key: two words in device memory, so that a replayed graph draws anew. Salmon et al. 2011.
PHILOX = """
// Philox4x32-10: four numbers of 32 bits for each counter.
struct Philox {
    unsigned word[4];

    __device__ Philox(const Index* key, Index counter) {
        unsigned long long offset = (unsigned long long)key[1];
        unsigned k0 = (unsigned)key[0], k1 = (unsigned)((unsigned long long)key[0] >> 32);
        word[0] = (unsigned)counter;
        word[1] = (unsigned)((unsigned long long)counter >> 32);
        word[2] = (unsigned)offset;
        word[3] = (unsigned)(offset >> 32);
#pragma unroll
        for (int round = 0; round < 10; round++) {
            unsigned long long one = 0xD2511F53ull * word[0], two = 0xCD9E8D57ull * word[2];
            unsigned next[4] = {
                (unsigned)(two >> 32) ^ word[1] ^ k0, (unsigned)two, (unsigned)(one >> 32) ^ word[3] ^ k1, (unsigned)one
            };
            for (int i = 0; i < 4; i++) word[i] = next[i];
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
    }

    // From [0, 1), of 24 bits.
    __device__ A uniform(int i) const { return A(word[i] >> 8) * A(1.0 / 16777216); }
};
"""
