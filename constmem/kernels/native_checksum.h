// All bits of several pieces of memory as one number, at the speed of reading them.

#pragma once

#include <cstdint>
#include <cstring>

typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint32_t LooseWords __attribute__((vector_size(64), aligned(1), may_alias));
constexpr int CHAINS = 8;  // that go on side by side, to hide the latency of a product
constexpr long ROUND = CHAINS * sizeof(Words);

// Every step is one to one in what was before and in the word that is new, so that no single word can change
// unseen; the rotation carries highest bits, in which signs are, to where products spread them.
static inline void digest(const unsigned char* at, Words (&chains)[CHAINS]) {
    for (int i = 0; i < CHAINS; i++) {
        const Words x = chains[i] ^ *(const LooseWords*)(at + i * sizeof(Words));
        chains[i] = (x << 13 | x >> 19) * 2654435761u;
    }
}

static uint64_t checksum_of(long pieces, const unsigned char* const* piece, const int64_t* bytes) {
    Words chains[CHAINS];
    for (int i = 0; i < CHAINS; i++) chains[i] = Words{} + 0x9e3779b9u * (i + 1);
    for (long p = 0; p < pieces; p++) {
        const unsigned char* at = piece[p];
        long left = bytes[p];
        for (; left >= ROUND; left -= ROUND, at += ROUND) digest(at, chains);
        unsigned char rest[ROUND] = {};
        std::memcpy(rest, at, left);
        digest(rest, chains);
    }
    uint64_t sum = 0;
    for (long p = 0; p < pieces; p++) sum = (sum ^ bytes[p]) * 0x9e3779b97f4a7c15u;  // where each ends
    for (int i = 0; i < CHAINS; i++)
        for (size_t j = 0; j < sizeof(Words) / 4; j++) {
            sum = (sum ^ chains[i][j]) * 0x9e3779b97f4a7c15u;
            sum ^= sum >> 29;
        }
    return sum;
}
