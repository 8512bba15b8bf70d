// The arithmetic of the page: layers in float32, states and regressions in float64, and a checksum.
//
// Built by benchmarks/page_kernels.py to kernels.wasm. Matrices are row-major; lda, ldb, ldc are the distances of rows.
// model.js says what is computed from what; here is only how.

#include <stdint.h>
#include <wasm_simd128.h>

#define EMPTY -1267650600228229401496703205376.0 /* -(2^100): the lse of nothing, as in the library */

double host_exp(double) __attribute__((import_module("math"), import_name("exp")));
double host_log1p(double) __attribute__((import_module("math"), import_name("log1p")));
double host_log(double) __attribute__((import_module("math"), import_name("log")));

typedef v128_t f4;

static inline f4 exp4(f4 x) {  // 2^n e^r with |r| <= log(2) / 2, and a polynomial of e^r
  x = wasm_f32x4_pmax(x, wasm_f32x4_splat(-87.0f));
  x = wasm_f32x4_pmin(x, wasm_f32x4_splat(88.0f));
  f4 n = wasm_f32x4_nearest(wasm_f32x4_mul(x, wasm_f32x4_splat(1.44269504088896341f)));
  f4 r = wasm_f32x4_sub(x, wasm_f32x4_mul(n, wasm_f32x4_splat(0.693145751953125f)));
  r = wasm_f32x4_sub(r, wasm_f32x4_mul(n, wasm_f32x4_splat(1.42860682030941723e-6f)));
  f4 p = wasm_f32x4_splat(1.0f / 5040);
  const float terms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  for (int i = 0; i < 7; i++) p = wasm_f32x4_add(wasm_f32x4_mul(p, r), wasm_f32x4_splat(terms[i]));
  f4 power = wasm_i32x4_shl(wasm_i32x4_add(wasm_i32x4_trunc_sat_f32x4(n), wasm_i32x4_splat(127)), 23);
  return wasm_f32x4_mul(p, power);
}

static inline float sum4(f4 x) {
  return wasm_f32x4_extract_lane(x, 0) + wasm_f32x4_extract_lane(x, 1) + wasm_f32x4_extract_lane(x, 2) +
         wasm_f32x4_extract_lane(x, 3);
}

// c = a b (+ bias): a tile of ROWS rows and 4 VECS columns at a time

#define TILE(NAME, ROWS, VECS)                                                                          \
  static inline void NAME(const float *a, int lda, const float *b, int ldb, float *c, int ldc, int k,   \
                          const float *bias) {                                                          \
    f4 sum[ROWS][VECS];                                                                                 \
    for (int i = 0; i < ROWS; i++)                                                                      \
      for (int j = 0; j < VECS; j++)                                                                    \
        sum[i][j] = bias ? wasm_v128_load(bias + 4 * j) : wasm_f32x4_splat(0.0f);                       \
    for (int t = 0; t < k; t++) {                                                                       \
      f4 right[VECS];                                                                                   \
      for (int j = 0; j < VECS; j++) right[j] = wasm_v128_load(b + t * ldb + 4 * j);                    \
      for (int i = 0; i < ROWS; i++) {                                                                  \
        f4 left = wasm_v128_load32_splat(a + i * lda + t);                                              \
        for (int j = 0; j < VECS; j++) sum[i][j] = wasm_f32x4_add(sum[i][j], wasm_f32x4_mul(left, right[j])); \
      }                                                                                                 \
    }                                                                                                   \
    for (int i = 0; i < ROWS; i++)                                                                      \
      for (int j = 0; j < VECS; j++) wasm_v128_store(c + i * ldc + 4 * j, sum[i][j]);                   \
  }

TILE(tile42, 4, 2)
TILE(tile41, 4, 1)
TILE(tile12, 1, 2)
TILE(tile11, 1, 1)

void matmul(const float *a, int lda, const float *b, int ldb, float *c, int ldc, int m, int k, int n,
            const float *bias) {
  int j = 0;
  for (int width = 8; width >= 4; width -= 4)
    for (; j + width <= n; j += width) {
      const float *shift = bias ? bias + j : 0;
      int i = 0;
      for (; i + 4 <= m; i += 4)
        (width == 8 ? tile42 : tile41)(a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc, k, shift);
      for (; i < m; i++)
        (width == 8 ? tile12 : tile11)(a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc, k, shift);
    }
  for (; j < n; j++)
    for (int i = 0; i < m; i++) {
      float sum = bias ? bias[j] : 0.0f;
      for (int t = 0; t < k; t++) sum += a[i * lda + t] * b[t * ldb + j];
      c[i * ldc + j] = sum;
    }
}

void transpose(const float *a, int lda, float *out, int rows, int columns) {
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < columns; j++) out[j * rows + i] = a[i * lda + j];
}

void relu(float *x, int n) {
  for (int i = 0; i < n; i++) x[i] = x[i] > 0.0f ? x[i] : 0.0f;
}

void add(float *x, const float *other, int n) {
  for (int i = 0; i < n; i++) x[i] += other[i];
}

void layer_norm(const float *x, float *out, int m, int d, const float *gain, const float *shift) {
  for (int i = 0; i < m; i++, x += d, out += d) {
    float mean = 0.0f, variance = 0.0f;
    for (int j = 0; j < d; j++) mean += x[j];
    mean /= d;
    for (int j = 0; j < d; j++) variance += (x[j] - mean) * (x[j] - mean);
    float scale = 1.0f / __builtin_sqrtf(variance / d + 1e-5f);
    for (int j = 0; j < d; j++) {
      float normed = (x[j] - mean) * scale;
      out[j] = gain ? normed * gain[j] + shift[j] : normed;
    }
  }
}

void softmax(float *x, int m, int n) {
  for (int i = 0; i < m; i++, x += n) {
    float top = x[0], total = 0.0f;
    for (int j = 1; j < n; j++) top = x[j] > top ? x[j] : top;
    f4 tops = wasm_f32x4_splat(top), sums = wasm_f32x4_splat(0.0f);
    int j = 0;
    for (; j + 4 <= n; j += 4) {
      f4 e = exp4(wasm_f32x4_sub(wasm_v128_load(x + j), tops));
      wasm_v128_store(x + j, e);
      sums = wasm_f32x4_add(sums, e);
    }
    for (; j < n; j++) total += x[j] = wasm_f32x4_extract_lane(exp4(wasm_f32x4_splat(x[j] - top)), 0);
    float scale = 1.0f / (total + sum4(sums));
    for (j = 0; j < n; j++) x[j] *= scale;
  }
}

static inline f4 gelu4(f4 x) {  // x (1 + erf(x / sqrt 2)) / 2, by Abramowitz and Stegun's 7.1.26
  f4 z = wasm_f32x4_mul(wasm_f32x4_abs(x), wasm_f32x4_splat(0.70710678118654752f));
  f4 one = wasm_f32x4_splat(1.0f);
  f4 t = wasm_f32x4_div(one, wasm_f32x4_add(one, wasm_f32x4_mul(z, wasm_f32x4_splat(0.3275911f))));
  f4 p = wasm_f32x4_splat(1.061405429f);
  const float terms[] = {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
  for (int i = 0; i < 4; i++) p = wasm_f32x4_add(wasm_f32x4_mul(p, t), wasm_f32x4_splat(terms[i]));
  f4 rest = wasm_f32x4_mul(wasm_f32x4_mul(p, t), exp4(wasm_f32x4_neg(wasm_f32x4_mul(z, z))));
  f4 half = wasm_f32x4_mul(rest, wasm_f32x4_splat(0.5f));  // erfc(|x| / sqrt 2) / 2
  f4 below = wasm_f32x4_lt(x, wasm_f32x4_splat(0.0f));
  return wasm_f32x4_mul(x, wasm_v128_bitselect(half, wasm_f32x4_sub(one, half), below));
}

void gate(const float *x, float *out, int m, int h) {  // content * gelu(gate), both beside each other in x
  for (int i = 0; i < m; i++, x += 2 * h, out += h) {
    int j = 0;
    for (; j + 4 <= h; j += 4)
      wasm_v128_store(out + j, wasm_f32x4_mul(wasm_v128_load(x + j), gelu4(wasm_v128_load(x + h + j))));
    for (; j < h; j++) out[j] = x[j] * wasm_f32x4_extract_lane(gelu4(wasm_f32x4_splat(x[h + j])), 0);
  }
}

// What s slots of each of `groups` heads read from n points, whose scores (groups s) and values (groups c)
// lie side by side in x: the softmax's value and the logarithm of its normaliser.
void observe(const float *x, int n, int groups, int s, int c, double *value, double *lse, float *scratch) {
  int width = groups * (s + c);
  float *top = scratch, *total = top + s + 4, *share = total + s + 4, *sum = share + s + 4;
  for (int g = 0; g < groups; g++, value += s * c, lse += s) {
    const float *scores = x + g * s, *values = x + groups * s + g * c;
    for (int j = 0; j < s; j++) top[j] = scores[j], total[j] = 0.0f;
    for (int i = 1; i < n; i++)
      for (int j = 0; j < s; j++) top[j] = scores[i * width + j] > top[j] ? scores[i * width + j] : top[j];
    for (int j = 0; j < s * c; j++) sum[j] = 0.0f;
    for (int i = 0; i < n; i++, scores += width, values += width) {
      int j = 0;
      for (; j + 4 <= s; j += 4)
        wasm_v128_store(share + j, exp4(wasm_f32x4_sub(wasm_v128_load(scores + j), wasm_v128_load(top + j))));
      for (; j < s; j++) share[j] = wasm_f32x4_extract_lane(exp4(wasm_f32x4_splat(scores[j] - top[j])), 0);
      for (j = 0; j < s; j++) {
        total[j] += share[j];
        f4 mine = wasm_f32x4_splat(share[j]);
        int t = 0;
        for (; t + 4 <= c; t += 4) {
          float *to = sum + j * c + t;
          wasm_v128_store(to, wasm_f32x4_add(wasm_v128_load(to), wasm_f32x4_mul(mine, wasm_v128_load(values + t))));
        }
        for (; t < c; t++) sum[j * c + t] += share[j] * values[t];
      }
    }
    for (int j = 0; j < s; j++) {
      lse[j] = (double)top[j] + (n > 1 ? host_log((double)total[j]) : 0.0);
      for (int t = 0; t < c; t++) value[j * c + t] = (double)sum[j * c + t] / (double)total[j];
    }
  }
}

static inline int nothing(double lse) { return lse <= EMPTY / 2; }

static inline f4 exp2d(f4 x) {  // of two numbers at most 0, as exp4, to the last digits of float64
  x = wasm_f64x2_pmax(x, wasm_f64x2_splat(-708.0));
  f4 n = wasm_f64x2_nearest(wasm_f64x2_mul(x, wasm_f64x2_splat(1.4426950408889634)));
  f4 r = wasm_f64x2_sub(x, wasm_f64x2_mul(n, wasm_f64x2_splat(0.693147180369123816490)));
  r = wasm_f64x2_sub(r, wasm_f64x2_mul(n, wasm_f64x2_splat(1.90821492927058770002e-10)));
  f4 p = wasm_f64x2_splat(1.0 / 13);
  for (int i = 12; i; i--)  // 1 + r / 1 (1 + r / 2 (1 + ...
    p = wasm_f64x2_add(wasm_f64x2_splat(1.0), wasm_f64x2_mul(wasm_f64x2_mul(p, r), wasm_f64x2_splat(1.0 / i)));
  f4 whole = wasm_i64x2_extend_low_i32x4(wasm_i32x4_trunc_sat_f64x2_zero(n));
  return wasm_f64x2_mul(p, wasm_i64x2_shl(wasm_i64x2_add(whole, wasm_i64x2_splat(1023)), 52));
}

static inline f4 log1p2d(f4 e) {  // of two numbers in [0, 1]: 2 artanh(z) = 2 (z + z^3 / 3 + ...), z = e / (2 + e)
  f4 z = wasm_f64x2_div(e, wasm_f64x2_add(e, wasm_f64x2_splat(2.0))), square = wasm_f64x2_mul(z, z);
  f4 p = wasm_f64x2_splat(1.0 / 33);
  for (int i = 31; i > 0; i -= 2) p = wasm_f64x2_add(wasm_f64x2_mul(p, square), wasm_f64x2_splat(1.0 / i));
  return wasm_f64x2_mul(wasm_f64x2_add(z, z), p);
}

// Two log-normalisers with two others added to them, and the shares that the others have of the sums
static inline f4 joined(double *lse, f4 other, int both) {
  f4 mine = wasm_f64x2_make(lse[0], lse[both]), gap = wasm_f64x2_sub(other, mine);
  f4 e = exp2d(wasm_f64x2_neg(wasm_f64x2_abs(gap))), above = wasm_f64x2_gt(gap, wasm_f64x2_splat(0.0));
  f4 total = wasm_f64x2_add(wasm_v128_bitselect(other, mine, above), log1p2d(e)), one = wasm_f64x2_splat(1.0);
  lse[0] = wasm_f64x2_extract_lane(total, 0);
  if (both) lse[1] = wasm_f64x2_extract_lane(total, 1);
  return wasm_f64x2_div(wasm_v128_bitselect(one, e, above), wasm_f64x2_add(one, e));
}

static inline void lerp(double *value, const double *other, double share, int c) {
  f4 part = wasm_f64x2_splat(share);
  int t = 0;
  for (; t + 2 <= c; t += 2) {
    f4 mine = wasm_v128_load(value + t), step = wasm_f64x2_sub(wasm_v128_load(other + t), mine);
    wasm_v128_store(value + t, wasm_f64x2_add(mine, wasm_f64x2_mul(step, part)));
  }
  if (t < c) value[t] += (other[t] - value[t]) * share;
}

// The state of both sets of points, where those of the other weigh exp(shift) times as much
void merge(double *value, double *lse, const double *other, const double *other_lse, int slots, int c,
           double shift) {
  for (int j = 0; j < slots; j += 2) {
    int both = j + 1 < slots;
    double one = other_lse[j], two = other_lse[j + both];
    f4 shares = joined(lse + j, wasm_f64x2_make(nothing(one) ? one : one + shift, nothing(two) ? two : two + shift), both);
    lerp(value + j * c, other + j * c, wasm_f64x2_extract_lane(shares, 0), c);
    if (both) lerp(value + (j + 1) * c, other + (j + 1) * c, wasm_f64x2_extract_lane(shares, 1), c);
  }
}

// The state with one point more, whose scores and values lie in x as `observe` takes them
void extend(double *value, double *lse, const float *x, int groups, int s, int c, double *scratch) {
  for (int g = 0; g < groups; g++, value += s * c, lse += s) {
    const float *scores = x + g * s, *values = x + groups * s + g * c;
    for (int t = 0; t < c; t++) scratch[t] = (double)values[t];
    for (int j = 0; j < s; j += 2) {
      int both = j + 1 < s;
      f4 shares = joined(lse + j, wasm_f64x2_make((double)scores[j], (double)scores[j + both]), both);
      lerp(value + j * c, scratch, wasm_f64x2_extract_lane(shares, 0), c);
      if (both) lerp(value + (j + 1) * c, scratch, wasm_f64x2_extract_lane(shares, 1), c);
    }
  }
}

// Whether all numbers are finite
int finite(const float *x, int n) {
  for (int i = 0; i < n; i++)
    if (!(x[i] - x[i] == 0.0f)) return 0;
  return 1;
}

// sums += weight phi phi', all p rows
void outer(double *sums, const double *phi, int p, double weight) {
  for (int i = 0; i < p; i++)
    for (int j = 0; j < p; j++) sums[i * p + j] += weight * phi[i] * phi[j];
}

// The largest share of a slot's normaliser that the other state holds, which `subtract` would take away
double largest_share(const double *lse, const double *other_lse, int slots, double shift) {
  double most = -1e300;
  for (int j = 0; j < slots; j++)
    if (!nothing(other_lse[j]) && other_lse[j] + shift - lse[j] > most) most = other_lse[j] + shift - lse[j];
  return host_exp(most);
}

void subtract(double *value, double *lse, const double *other, const double *other_lse, int slots, int c,
              double shift) {
  for (int j = 0; j < slots; j++, value += c, other += c) {
    if (nothing(other_lse[j])) continue;
    double share = host_exp(other_lse[j] + shift - lse[j]), grow = share / (1.0 - share);
    lse[j] += host_log1p(-share);
    for (int t = 0; t < c; t++) value[t] += (value[t] - other[t]) * grow;
  }
}

void decay(double *lse, int slots, double shift) {
  for (int j = 0; j < slots; j++) lse[j] = nothing(lse[j]) ? EMPTY : lse[j] + shift;
}

// a = l l' in place (the lower triangle); gives log det a
double cholesky(double *a, int p) {
  double log_det = 0.0;
  for (int i = 0; i < p; i++)
    for (int j = 0; j <= i; j++) {
      const double *left = a + i * p, *right = a + j * p;
      f4 sums = wasm_f64x2_splat(0.0);
      int t = 0;
      for (; t + 2 <= j; t += 2)
        sums = wasm_f64x2_add(sums, wasm_f64x2_mul(wasm_v128_load(left + t), wasm_v128_load(right + t)));
      double sum = wasm_f64x2_extract_lane(sums, 0) + wasm_f64x2_extract_lane(sums, 1);
      if (t < j) sum += left[t] * right[t];
      if (i == j) {
        a[i * p + i] = __builtin_sqrt(a[i * p + i] - sum);
        log_det += 2.0 * host_log(a[i * p + i]);
      } else {
        a[i * p + j] = (a[i * p + j] - sum) / a[j * p + j];
      }
    }
  return log_det;
}

// l z = b in place: b has p rows of m columns, m even
void solve(const double *l, int p, double *b, int m) {
  for (int i = 0; i < p; i++) {
    double *mine = b + i * m;
    for (int t = 0; t < i; t++) {
      f4 factor = wasm_f64x2_splat(l[i * p + t]);
      const double *its = b + t * m;
      for (int j = 0; j < m; j += 2)
        wasm_v128_store(mine + j, wasm_f64x2_sub(wasm_v128_load(mine + j), wasm_f64x2_mul(factor, wasm_v128_load(its + j))));
    }
    double scale = 1.0 / l[i * p + i];
    for (int j = 0; j < m; j++) mine[j] *= scale;
  }
}

void halves(const uint16_t *from, float *to, int n) {  // float16 to float32
  for (int i = 0; i < n; i++) {
    uint32_t sign = (uint32_t)(from[i] & 0x8000) << 16, exponent = from[i] >> 10 & 31, part = from[i] & 1023;
    union { uint32_t bits; float number; } out;
    if (exponent == 0) {
      out.number = (float)part * 5.9604644775390625e-8f;  // 2^-24
      out.bits |= sign;
    } else {
      out.bits = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | part << 13;
    }
    to[i] = out.number;
  }
}

// SHA-256 of n bytes, padded to whole blocks by the caller, into eight words that begin as the standard says

static inline uint32_t turn(uint32_t x, int by) { return x >> by | x << (32 - by); }

void sha256(uint32_t *state, const uint32_t *constants, const uint8_t *bytes, int blocks) {
  for (; blocks--; bytes += 64) {
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++) w[i] = __builtin_bswap32(((const uint32_t *)bytes)[i]);
    for (int i = 16; i < 64; i++)
      w[i] = w[i - 16] + w[i - 7] + (turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ w[i - 15] >> 3) +
             (turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ w[i - 2] >> 10);
    for (int i = 0; i < 8; i++) s[i] = state[i];
    for (int i = 0; i < 64; i++) {
      uint32_t one = s[7] + (turn(s[4], 6) ^ turn(s[4], 11) ^ turn(s[4], 25)) + ((s[4] & s[5]) ^ (~s[4] & s[6])) +
                     constants[i] + w[i];
      uint32_t two = (turn(s[0], 2) ^ turn(s[0], 13) ^ turn(s[0], 22)) + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      for (int j = 7; j; j--) s[j] = s[j - 1];
      s[4] += one;
      s[0] = one + two;
    }
    for (int i = 0; i < 8; i++) state[i] += s[i];
  }
}
