// Shares multiply values as bfloat16, two points at a time; sums are float32. Included by native_tile.h.
//
// A bfloat16 has 8 bits: the value of an only point would be off by up to 4e-3. Errors of many points cancel out.
// So points that make up more than an eighth of what their slot has seen are multiplied in float32, and the
// others, all but a few where there are many, as bfloat16. Where a value comes again and again, it must not be
// rounded the same way each time: each point of a tile has a threshold of its own for what is rounded up.

constexpr int reversed(int i, int bits) { return bits ? (i & 1) << (bits - 1) | reversed(i >> 1, bits - 1) : 0; }

struct Patterns {
    alignas(LINE) int16_t order[2 * LANES];  // 0, 16, 1, 17, ...: two halves of a vector side by side
    alignas(LINE) int32_t threshold[TILE];   // 0, 1/2, 1/4, 3/4, ... of the lower half of a float
    constexpr Patterns() : order{}, threshold{} {
        for (int i = 0; i < 2 * LANES; i++) order[i] = (int16_t)(i / 2 + i % 2 * LANES);
        for (int t = 0; t < TILE; t++) threshold[t] = (2 * reversed(t, 6) + 1) * (1 << 15) / TILE;
    }
};
static constexpr Patterns PATTERNS;

struct Coarse {
    static constexpr bool COARSE = true;
    static constexpr float MUCH = 1.0f / 8;

    static void round(const float* values, long channels, Half* out) {
        for (long i = 0; i < channels * TILE; i += LANES) {
            const __m512i bits = _mm512_add_epi32((__m512i)load(values + i), _mm512_load_si512(PATTERNS.threshold + i % TILE));
            _mm256_storeu_si256((__m256i*)(out + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
        }
    }

    // Shares of two points for each slot, side by side.
    static inline __m512bh pair(Vec first, Vec second) {
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
        return (__m512bh)_mm512_permutexvar_epi16(_mm512_load_si512(PATTERNS.order), both);
    }

    // `rounded` is what values are to be divided by: the sum of the shares as they multiplied them.
    static inline void add(const Vec (&shares)[POINTS], const float* values, const Half* halves, Vec seen,
                           Vec (&sums)[SUMS], Vec& rounded) {
        const Vec most = larger(larger(shares[0], shares[1]), larger(shares[2], shares[3]));
        if (__builtin_expect(any_above(most - MUCH * seen, 0.0f), 0)) {
            rounded += (shares[0] + shares[1]) + (shares[2] + shares[3]);
            return Exact::add(shares, values, halves, seen, sums, rounded);
        }
        const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
#pragma GCC unroll 2
        for (int t = 0; t < POINTS; t += 2) {
            const __m512bh left = pair(shares[t], shares[t + 1]);
            rounded = (Vec)_mm512_dpbf16_ps((__m512)rounded, left, ones);
#pragma GCC unroll 16
            for (int c = 0; c < SUMS; c++) {
                int32_t right;
                std::memcpy(&right, halves + c * TILE + t, sizeof right);
                sums[c] = (Vec)_mm512_dpbf16_ps((__m512)sums[c], left, (__m512bh)_mm512_set1_epi32(right));
            }
        }
    }
};
