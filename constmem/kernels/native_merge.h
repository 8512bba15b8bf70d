// The algebra's `merge` in float64, with exponentials and logarithms to the last digits.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__AVX__)
#include <immintrin.h>
#endif

constexpr double LN2 = 0x1.62e42fefa39efp-1;

typedef double Double __attribute__((vector_size(64)));
typedef double LooseDouble __attribute__((vector_size(64), aligned(8), may_alias));
typedef int64_t Long __attribute__((vector_size(64)));
constexpr int MANY = 4;  // vectors that go through the series together, to hide the latency of a step

struct Series {  // 1 / k! and 1 / (2 k + 1)
    double factorial[15], odd[18];
    constexpr Series() : factorial{1}, odd{1} {
        for (int k = 1; k < 15; k++) factorial[k] = factorial[k - 1] / k;
        for (int k = 1; k < 18; k++) odd[k] = 1.0 / (2 * k + 1);
    }
};
constexpr Series SERIES;

// exp(x) for x <= 0, by its series on what remains of x beside a whole number of ln 2.
static inline void exp_of_negative(Double (&x)[MANY]) {
    Double shifted[MANY], r[MANY], p[MANY];
    for (int i = 0; i < MANY; i++) {
        x[i] = x[i] < -708.0 ? Double{} - 708.0 : x[i];  // what is not a number stays none
        shifted[i] = x[i] * (1 / LN2) + 0x1.8p52;  // rounds to a whole number in the lowest bits
        const Double n = shifted[i] - 0x1.8p52;
        r[i] = (x[i] - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
        p[i] = Double{} + SERIES.factorial[14];
    }
    for (int k = 13; k >= 0; k--)
        for (int i = 0; i < MANY; i++) p[i] = p[i] * r[i] + SERIES.factorial[k];
    for (int i = 0; i < MANY; i++) x[i] = (Double)((Long)p[i] + ((Long)shifted[i] << 52));
}

// log(1 + e) for 0 <= e <= 1: twice the artanh of e / (2 + e), whose series ends soon.
static inline void log_of_one_and(const Double (&e)[MANY], Double (&out)[MANY]) {
    Double s[MANY], p[MANY];
    for (int i = 0; i < MANY; i++) s[i] = e[i] / (2.0 + e[i]), p[i] = Double{} + SERIES.odd[17];
    for (int k = 16; k >= 0; k--)
        for (int i = 0; i < MANY; i++) p[i] = p[i] * (s[i] * s[i]) + SERIES.odd[k];
    for (int i = 0; i < MANY; i++) out[i] = 2.0 * s[i] * p[i];
}

// Past the caches where so much is written that they could not keep it anyway.
static inline void write(double* out, Double numbers, bool past) {
#if defined(__AVX512F__)
    if (past) return _mm512_stream_pd(out, (__m512d)numbers);
#endif
    (void)past;
    *(LooseDouble*)out = numbers;
}

// The union of two sets of points: the algebra's `merge`, for `states` slots of `channels` numbers each.
// Of `other`, `shared` slots that follow one another have one value in common.
static void merge_states(long states, long channels, const double* value, const double* lse, const double* other,
                         long shared, const double* other_lse, bool past, double* merged, double* merged_lse) {
    constexpr int ROUND = 8 * MANY;
    const double* new_one = other;
    long left = shared;
    for (long at = 0; at < states; at += ROUND) {
        const int count = (int)std::min<long>(ROUND, states - at);
        double mine[ROUND] = {}, theirs[ROUND] = {}, part[ROUND], grown[ROUND];
        std::memcpy(mine, lse + at, count * sizeof(double));
        std::memcpy(theirs, other_lse + at, count * sizeof(double));
        Double gap[MANY], added[MANY];
        for (int i = 0; i < MANY; i++) {
            gap[i] = *(LooseDouble*)(theirs + 8 * i) - *(LooseDouble*)(mine + 8 * i);
            gap[i] = gap[i] > 0.0 ? -gap[i] : gap[i];
        }
        exp_of_negative(gap);
        log_of_one_and(gap, added);
        for (int i = 0; i < MANY; i++) {
            const Double a = *(LooseDouble*)(mine + 8 * i), b = *(LooseDouble*)(theirs + 8 * i);
            *(LooseDouble*)(grown + 8 * i) = (a > b ? a : b) + added[i];
            *(LooseDouble*)(part + 8 * i) = gap[i] / (1.0 + gap[i]);
        }
        std::memcpy(merged_lse + at, grown, count * sizeof(double));
        for (int i = 0; i < count; i++) {  // the value with the larger share is moved towards the other
            const double* own = value + (at + i) * channels;
            const bool more = theirs[i] > mine[i];
            const double *from = more ? new_one : own, *to = more ? own : new_one;
            double* out = merged + (at + i) * channels;
            long c = 0;
            for (; c + 8 <= channels; c += 8) {
                const Double start = *(const LooseDouble*)(from + c), end = *(const LooseDouble*)(to + c);
                write(out + c, start + (end - start) * part[i], past);
            }
            for (; c < channels; c++) out[c] = from[c] + (to[c] - from[c]) * part[i];
            if (--left == 0) new_one += channels, left = shared;
        }
    }
}
