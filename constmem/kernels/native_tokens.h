// Tokens in tiles: their products with matrices, their norms, the way there and back.
//
// They lie side by side in the lanes of a vector, (tiles, channels, side) in memory. So norms need no sum across lanes,
// weights are read where they are, and channels may be of any number.

#pragma once

#include "native_tile.h"

static inline Vec smaller(Vec a, Vec b) { return -larger(-a, -b); }

template <int N>  // how many rows are multiplied at once with so many vectors
constexpr int ROWS_BY = LANES == 16 ? (N == 4 ? 6 : 8) : (N == 1 ? 8 : 4);

// For each row r and each vector of tokens at t: put(r, t, sum over k of w[r, k] in[k, t]).
template <int R, int N, class Put>
static inline void rows_by(const float* w, long row, long step, const float* in, long next, long k, long r, long t,
                           const Put& put) {
    Vec sums[R][N] = {};
    multiply<R, N>(w + r * row, row, step, in + t, next, k, sums);
    for (int i = 0; i < R; i++)
        for (int v = 0; v < N; v++) put(r + i, t + v * LANES, sums[i][v]);
}

template <int N, class Put>
static void all_rows(const float* w, long row, long step, const float* in, long next, long k, long rows, long t,
                     const Put& put) {
    constexpr int most = ROWS_BY<N>;
    long r = 0;
    for (; r + most <= rows; r += most) rows_by<most, N>(w, row, step, in, next, k, r, t, put);
    for (; r + 4 <= rows; r += 4) rows_by<4, N>(w, row, step, in, next, k, r, t, put);
    for (; r < rows; r++) rows_by<1, N>(w, row, step, in, next, k, r, t, put);
}

// One token by itself would leave most lanes empty: here they are along k.
template <int R, class Put>
static inline void rows_by_one(const float* w, const float* token, long k, long r, const Put& put) {
    Vec sums[R] = {};
    long at = 0;
    for (; at + LANES <= k; at += LANES)
        for (int i = 0; i < R; i++) sums[i] += load(w + (r + i) * k + at) * load(token + at);
    for (int i = 0; i < R; i++) {
        Vec found{};
        found[0] = total(sums[i]);
        for (long rest = at; rest < k; rest++) found[0] += w[(r + i) * k + rest] * token[rest];
        put(r + i, 0, found);
    }
}

// x (1 + erf(x / sqrt 2)) / 2 as max(x, 0) - |x| P(beyond |x|): neither side cancels. The probability is a density
// times a function that changes slowly, here a polynomial in 1 / (1 + 0.33 |x|), off by 5e-8.
static inline Vec gelu(Vec x) {
    const Vec a = smaller(larger(x, -x), splat(20.0f));
    const Vec t = 1.0f / (1.0f + 0.33f * a);
    Vec p = 0.050228651685f * t - 0.243334677882f;
    p = p * t + 0.377738231248f;
    p = p * t - 0.141036709850f;
    p = p * t + 0.214786246745f;
    p = p * t + 0.106582472635f;
    p = p * t + 0.135259369420f;
    p = p * t - 0.000223561801f;
    return larger(Vec{}, x) - a * (p * power_of_two(-0.72134752044f * (a * a)));
}

class Tiles {
  protected:
    const long width, side;  // of tokens: their channels, and how many a tile holds
    const float eps;

    Tiles(long width, long side, float eps) : width(width), side(side), eps(eps) {}

    long tiles_of(long tokens) const { return (tokens + side - 1) / side; }
    long tokens_of(long tokens, long tile) const { return std::min(side, tokens - tile * side); }

    // The product of a matrix (rows, k) and a tile (k, side) of `count` tokens.
    template <class Put>
    void product(const float* w, const float* in, long k, long rows, long count, const Put& put) {
        if (count == 1) {
            Memory<float> token(k);
            for (long i = 0; i < k; i++) token[i] = in[i * side];
            long r = 0;
            for (; r + 4 <= rows; r += 4) rows_by_one<4>(w, token.data(), k, r, put);
            for (; r < rows; r++) rows_by_one<1>(w, token.data(), k, r, put);
            return;
        }
        const long end = (count + LANES - 1) / LANES * LANES;
        long t = 0;
        for (; t + WIDE * LANES <= end; t += WIDE * LANES) all_rows<WIDE>(w, k, 1, in, side, k, rows, t, put);
        for (; t + 2 * LANES <= end; t += 2 * LANES) all_rows<2>(w, k, 1, in, side, k, rows, t, put);
        for (; t < end; t += LANES) all_rows<1>(w, k, 1, in, side, k, rows, t, put);
    }

    // Both sums of the second pass are of what is left after the first mean, whose rounding they make up for.
    void norm_tile(const float* in, const float* scale, const float* shift, long count, float* out) {
        for (long t = 0; t < count; t += LANES) {
            Vec mean{}, rest{}, square{};
            for (long d = 0; d < width; d++) mean += load(in + d * side + t);
            mean /= (float)width;
            for (long d = 0; d < width; d++) {
                const Vec x = load(in + d * side + t) - mean;
                rest += x;
                square += x * x;
            }
            rest /= (float)width;
            const Vec variance = square / (float)width - rest * rest + eps;
            Vec inverse;
            for (int i = 0; i < LANES; i++) inverse[i] = 1 / std::sqrt(variance[i]);
            for (long d = 0; d < width; d++)
                store(out + d * side + t, (load(in + d * side + t) - mean - rest) * inverse * scale[d] + shift[d]);
        }
    }

    // The same of (tokens, width), with channels in lanes.
    void norm_rows(const float* in, const float* scale, const float* shift, long tokens, float* out) {
        const long whole = width / LANES * LANES;
        for (long t = 0; t < tokens; t++, in += width, out += width) {
            Vec sums{}, rests{}, squares{};
            float mean = 0, rest = 0, square = 0;
            for (long d = 0; d < whole; d += LANES) sums += load(in + d);
            for (long d = whole; d < width; d++) mean += in[d];
            mean = (mean + total(sums)) / width;
            for (long d = 0; d < whole; d += LANES) {
                const Vec x = load(in + d) - mean;
                rests += x;
                squares += x * x;
            }
            for (long d = whole; d < width; d++) rest += in[d] - mean, square += (in[d] - mean) * (in[d] - mean);
            rest = (rest + total(rests)) / width;
            const float inverse = 1 / std::sqrt((square + total(squares)) / width - rest * rest + eps);
            for (long d = 0; d < whole; d += LANES)
                store(out + d, (load(in + d) - mean - rest) * inverse * load(scale + d) + load(shift + d));
            for (long d = whole; d < width; d++) out[d] = (in[d] - mean - rest) * inverse * scale[d] + shift[d];
        }
    }

    // From (tokens, channels) to tiles, and back; lanes without a token hold zeros.
    void to_tiles(const float* in, long tokens, long channels, float* out) {
        for (long tile = 0; tile < tiles_of(tokens); tile++, in += side * channels, out += side * channels) {
            const long count = tokens_of(tokens, tile), end = (count + LANES - 1) / LANES * LANES;
            for (long d = 0; d < channels; d++)
                for (long t = 0; t < end; t++) out[d * side + t] = t < count ? in[t * channels + d] : 0.0f;
        }
    }

    void from_tiles(const float* in, long tokens, long channels, float* out) {
        for (long tile = 0; tile < tiles_of(tokens); tile++, in += side * channels, out += side * channels)
            for (long t = 0; t < tokens_of(tokens, tile); t++)
                for (long d = 0; d < channels; d++) out[t * channels + d] = in[d * side + t];
    }
};
