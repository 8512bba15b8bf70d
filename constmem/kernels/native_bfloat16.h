// Shares multiply values as bfloat16, two points at a time; sums are float32. Included by native_tile.h.

struct Order {  // 0, 16, 1, 17, ...: two halves of a vector side by side
    alignas(LINE) int16_t of[2 * LANES];
    constexpr Order() : of{} {
        for (int i = 0; i < 2 * LANES; i++) of[i] = (int16_t)(i / 2 + i % 2 * LANES);
    }
};
static constexpr Order ORDER;

struct Coarse {
    static constexpr bool COARSE = true;
    typedef Half Value;

    // The same memory, with every float rounded to its upper half.
    static const Value* values(float* values, long channels) {
        Half* out = reinterpret_cast<Half*>(values);
        for (long i = 0; i < channels * TILE; i += 2 * LANES) {
            const __m512bh both = _mm512_cvtne2ps_pbh((__m512)load(values + i + LANES), (__m512)load(values + i));
            _mm512_storeu_si512(out + i, (__m512i)both);
        }
        return out;
    }

    // Shares of two points for each slot, side by side.
    static inline __m512bh pair(Vec first, Vec second) {
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
        return (__m512bh)_mm512_permutexvar_epi16(_mm512_load_si512(&ORDER), both);
    }

    // Values are divided by the sum of the shares as rounded, so that an only share is one.
    static inline void add(const Vec (&shares)[POINTS], const Value* values, Vec (&sums)[SUMS], Vec& rounded) {
        const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
#pragma GCC unroll 8
        for (int t = 0; t < POINTS; t += 2) {
            const __m512bh left = pair(shares[t], shares[t + 1]);
            rounded = (Vec)_mm512_dpbf16_ps((__m512)rounded, left, ones);
#pragma GCC unroll 16
            for (int c = 0; c < SUMS; c++) {
                int32_t right;
                std::memcpy(&right, values + c * TILE + t, sizeof right);
                sums[c] = (Vec)_mm512_dpbf16_ps((__m512)sums[c], left, (__m512bh)_mm512_set1_epi32(right));
            }
        }
    }
};
