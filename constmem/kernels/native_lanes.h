// Vectors of floats and doubles, whatever the machine's width: loads, sums over lanes, powers of two, aligned memory.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <vector>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Int __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));  // anywhere in memory
typedef double Doubles __attribute__((vector_size(4 * LANES)));  // half as many
typedef double LooseDoubles __attribute__((vector_size(4 * LANES), aligned(8), may_alias));

// A load that straddles two lines of the cache takes twice as long, so that all of ours start on one.
constexpr size_t LINE = 64;

template <class T>
struct Aligned {
    using value_type = T;
    Aligned() = default;
    template <class U>
    Aligned(const Aligned<U>&) {}
    T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(LINE))); }
    void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(LINE)); }
    template <class U>
    bool operator==(const Aligned<U>&) const { return true; }
    template <class U>
    bool operator!=(const Aligned<U>&) const { return false; }
};

template <class T>
using Memory = std::vector<T, Aligned<T>>;

static inline Vec load(const float* p) { return *reinterpret_cast<const Loose*>(p); }
static inline Doubles load(const double* p) { return *reinterpret_cast<const LooseDoubles*>(p); }
static inline void store(float* p, Vec v) { *reinterpret_cast<Loose*>(p) = v; }
static inline void store(double* p, Doubles v) { *reinterpret_cast<LooseDoubles*>(p) = v; }
static inline Vec splat(float x) { return x - Vec{}; }  // not x + 0, which would have to be computed
static inline Doubles splat(double x) { return x - Doubles{}; }

template <class T>
constexpr int LANES_OF = sizeof(Vec) / sizeof(T);

static inline Doubles widened(const float* p) {
#if defined(__AVX512F__)
    return (Doubles)_mm512_cvtps_pd(_mm256_loadu_ps(p));
#elif defined(__AVX__)
    return (Doubles)_mm256_cvtps_pd(_mm_loadu_ps(p));
#endif
    Doubles v{};
    for (int i = 0; i < LANES_OF<double>; i++) v[i] = p[i];
    return v;
}

static inline void store_narrowed(float* p, Doubles v) {
#if defined(__AVX512F__)
    return _mm256_storeu_ps(p, _mm512_cvtpd_ps((__m512d)v));
#elif defined(__AVX__)
    return _mm_storeu_ps(p, _mm256_cvtpd_ps((__m256d)v));
#endif
    for (int i = 0; i < LANES_OF<double>; i++) p[i] = (float)v[i];
}

template <class T>  // float or double
using VecOf = decltype(load((const T*)nullptr));

// Keeps a vector in a register: compilers like to read it from memory again for every product, and a
// machine can load half as many whole vectors as it can multiply.
template <class V>
static inline V held(V v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(__SSE2__)
    asm("" : "+x"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#endif
    return v;
}

// The second, where one is not a number.
static inline Vec larger(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}
static inline Doubles larger(Doubles a, Doubles b) { return a > b ? a : b; }

// 2^x for x up to 127, to a relative error of 2e-7. The units that multiply are the ones in demand: so the wider
// machine takes most of its work to the others, by a table of the 32nds that leaves a series of two terms, whose
// square is completed: 2^f = scale ((f + middle)^2 + rest) multiplies once, and the scale is in the table.
#if defined(__AVX512F__)
struct Powers {
    alignas(LINE) float of[32];  // 2^(j / 32) times the scale
    float shift = 393216.0f;     // 1.5 * 2^18: leaves whole 32nds in the lowest bits
    float middle = 1.4427057505f, rest = 2.0813074112f;
    Powers() {
        for (int j = 0; j < 32; j++) of[j] = (float)(0.24022827525568907 * std::exp2(j / 32.0));
    }
};
static const Powers POWERS;

static inline Vec power_of_two(Vec x) {
    const Powers* p = &POWERS;
    asm("" : "+r"(p));  // registers are wanted for sums: let these be read from memory
    const Vec shifted = x + p->shift, whole = shifted - p->shift, t = (x - whole) + p->middle;
    const __m512 low = _mm512_load_ps(p->of), high = _mm512_load_ps(p->of + 16);
    const Vec power = (Vec)_mm512_permutex2var_ps(low, (__m512i)shifted, high);
    return (Vec)_mm512_scalef_ps((__m512)(power * (t * t + p->rest)), (__m512)whole);
}
#else
static inline Vec power_of_two(Vec x) {
    constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: leaves a whole number in the lowest bits
    x = larger(Vec{} - 126.0f, x);
    const Vec shifted = x + SHIFT, f = x - (shifted - SHIFT);
    Vec p = f * 0.001327647199f + 0.009675541334f;
    p = p * f + 0.05550713273f;
    p = p * f + 0.2402211972f;
    p = p * f + 0.6931469671f;
    p = p * f + 1.000000072f;
    return (Vec)((Int)p + ((Int)shifted << 23));
}
#endif

static inline bool any_above(Vec x, float limit) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#elif defined(__AVX__)
    return _mm256_movemask_ps((__m256)(x > limit)) != 0;
#endif
    const Int found = x > limit;
    int32_t any = 0;
    for (int i = 0; i < LANES; i++) any |= found[i];
    return any != 0;
}

static inline double total(Doubles x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_pd((__m512d)x);
#endif
    double sum = 0;
    for (int i = 0; i < LANES_OF<double>; i++) sum += x[i];
    return sum;
}

static inline float total(Vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#endif
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

// sums[r][v] += sum over k of a[r, k] * b[k, v], all sums in registers.
template <int R, int N, class T>
static inline void multiply(const float* a, long row, long step, const T* b, long next, long count, VecOf<T> (&sums)[R][N]) {
    for (long k = 0; k < count; k++) {
        VecOf<T> right[N];
        for (int v = 0; v < N; v++) right[v] = N > 1 ? held(load(b + k * next + v * LANES_OF<T>)) : load(b + k * next);
        for (int r = 0; r < R; r++) {
            const T left = a[r * row + k * step];
            for (int v = 0; v < N; v++) sums[r][v] += left * right[v];
        }
    }
}

static inline double dot(const float* a, const double* b, long count) {
    Doubles sums{};
    long k = 0;
    for (; k + LANES_OF<double> <= count; k += LANES_OF<double>) sums += widened(a + k) * load(b + k);
    double sum = total(sums);
    for (; k < count; k++) sum += a[k] * b[k];
    return sum;
}
