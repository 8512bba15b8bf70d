// A tile of points through everything: embedding, normalisation, keys, values, shares of a running softmax.
//
// Up to keys and values, points lie side by side in the lanes of a vector, so that layers and normalisation need
// no sum across lanes. In the softmax slots do: the shares of a few points for a vector of slots come out of one
// product and go into the next without ever leaving their registers.
//
// Each slot has a reference m that scores are measured against. It need not be the maximum: while no score
// exceeds m + 64 (to base two), nothing overflows and nothing has to be rescaled.

#pragma once

#include "native_lanes.h"

constexpr int TILE = 64;              // points of a tile
constexpr int WIDE = LANES == 16 ? 4 : 2, ROWS = 4;  // vectors and rows of a layer multiplied at once
template <class T>  // a weight that has to be widened first had better meet many vectors
constexpr int WIDE_OF = sizeof(T) == 4 ? WIDE : 4;
template <class T>
constexpr int ROWS_OF = sizeof(T) == 4 || LANES == 16 ? ROWS : 2;
constexpr int POINTS = 4;             // points whose scores are in registers at once
constexpr int SUMS = LANES == 16 ? 16 : 8;   // channels whose sums are
constexpr int WHOLE = 16;             // channels and slots are padded to a multiple of this
constexpr float ABOVE = 64.0f, LOG2E = 1.44269504089f;
constexpr float EMPTY = -0x1p100f, NOTHING = -0x1p99f, PADDING = -3e38f;  // as state.py has them
constexpr float UNSEEN = -0x1p120f;  // the reference of a slot that has seen nothing: any score is above it

constexpr float NONE[ROWS] = {};     // no shift

typedef uint16_t Half;  // a bfloat16: the upper half of a float

extern "C" {
struct Plan {
    int64_t layers;            // of the embedding; 0: data are tokens already
    const float* const* weight;  // (out, in) each
    const float* const* bias;
    const int64_t* widths;     // layers + 1 of them; the last is that of a token
    int64_t heads, slots, channels;  // heads of all blocks together; channels in whole vectors
    const float* queries;      // (heads, channels, slots), times log2(e)
    const float* key;          // (heads, width, channels)
    const float* key_shift;    // (heads * channels)
    const float* value;        // (heads, width, channels)
    const float* value_shift;  // (heads * channels)
};
}

static inline long padded_slots(const Plan& p) { return (p.slots + WHOLE - 1) / WHOLE * WHOLE; }

struct Partial {  // the running softmax of one worker
    Memory<float> m, sum, rounded;  // (heads, slots); rounded: the sum of shares as they multiplied the values
    Memory<float> acc;              // (heads, vectors of slots, channels, LANES)
    void clear(const Plan& p) {
        const size_t slots = p.heads * padded_slots(p);
        m.assign(slots, UNSEEN);
        sum.assign(slots, 0.0f);
        rounded.assign(slots, 0.0f);
        acc.assign(slots * p.channels, 0.0f);
    }
};

// out[r, :] = act(weight[r, :] in + bias[r]) for the first `count` points of a tile, which lie side by side.
template <int R, class T>
static inline void layer_rows(const float* w, long row, long step, const float* bias, const T* in, long k, int count, T* out,
                              bool relu) {
    constexpr int lanes = LANES_OF<T>, wide = WIDE_OF<T>;
    for (int part = 0; part < count; part += wide * lanes) {
        VecOf<T> sums[R][wide];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < wide; v++) sums[r][v] = splat((T)bias[r]);
        multiply<R, wide>(w, row, step, in + part, TILE, k, sums);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < wide; v++)
                store(out + r * TILE + part + v * lanes, relu ? larger(VecOf<T>{}, sums[r][v]) : sums[r][v]);
    }
}

template <class T>
static void layer(const float* w, const float* bias, const T* in, long k, long n, int count, T* out, bool relu) {
    long r = 0;
    constexpr int rows = ROWS_OF<T>;
    for (; r + rows <= n; r += rows) layer_rows<rows>(w + r * k, k, 1, bias + r, in, k, count, out + r * TILE, relu);
    for (; r < n; r++) layer_rows<1>(w + r * k, k, 1, bias + r, in, k, count, out + r * TILE, relu);
}

static void normalise(float* tile, long width, int count) {
    constexpr int lanes = LANES_OF<double>;
    for (int part = 0; part < count; part += WIDE * lanes) {
        Doubles mean[WIDE] = {}, square[WIDE] = {};
        for (long d = 0; d < width; d++)
            for (int v = 0; v < WIDE; v++) mean[v] += widened(tile + d * TILE + part + v * lanes);
        for (int v = 0; v < WIDE; v++) mean[v] /= (double)width;
        for (long d = 0; d < width; d++)
            for (int v = 0; v < WIDE; v++) {
                const Doubles x = widened(tile + d * TILE + part + v * lanes) - mean[v];
                square[v] += x * x;
            }
        for (int v = 0; v < WIDE; v++) {
            Doubles scale = square[v] / (double)width + 1e-5;
            for (int i = 0; i < lanes; i++) scale[i] = 1 / std::sqrt(scale[i]);
            for (long d = 0; d < width; d++) {
                float* x = tile + d * TILE + part + v * lanes;
                store_narrowed(x, (widened(x) - mean[v]) * scale);
            }
        }
    }
}

struct Scratch {
    Memory<double> now, next;  // of an embedding's layers
    Memory<float> last, tokens, keys, values, bias, shares;
    Memory<Half> halves;
    Scratch(const Plan& p, int tiles) {
        const int64_t widest = *std::max_element(p.widths, p.widths + p.layers + 1);
        now.resize(widest * TILE);
        next.resize(widest * TILE);
        last.resize(widest * TILE);
        tokens.resize(tiles * p.widths[p.layers] * TILE);
        keys.resize(p.channels * TILE);
        values.resize(p.channels * TILE);
        halves.resize(p.channels * TILE);
        bias.resize(tiles * TILE);
        shares.resize(LANES * TILE);
    }
};

// A tile's points, turned, through the embedding and the normalisation. What a layer rounds, those after it amplify,
// dozens of times where weights are trained: so all layers but the last compute in float64.
static void embed(const Plan& p, const float* const* points, int count, Scratch& s, float* tokens) {
    for (long d = 0; d < p.widths[0]; d++)
        for (int t = 0; t < TILE; t++) s.now[d * TILE + t] = t < count ? points[t][d] : 0.0f;
    const long end = std::max<long>(p.layers - 1, 0), before = p.widths[end], width = p.widths[p.layers];
    for (long l = 0; l < end; l++) {
        layer(p.weight[l], p.bias[l], s.now.data(), p.widths[l], p.widths[l + 1], count, s.next.data(), true);
        s.now.swap(s.next);
    }
    float* last = p.layers ? s.last.data() : tokens;
    for (long i = 0; i < before * TILE; i += LANES_OF<double>) store_narrowed(last + i, load(s.now.data() + i));
    if (p.layers) layer(p.weight[end], p.bias[end], last, before, width, count, tokens, false);
    normalise(tokens, width, count);
}

struct Tile {  // what a head sees of some points
    const float *keys, *values;  // (channels, points), values but for their shift
    const Half* halves;          // values rounded, where they are wanted
    const float* bias;           // (points)
    int count;
};

// Shares multiply values as they are: sums[c] += sum over points of share * values[c, point].
struct Exact {
    static constexpr bool COARSE = false;
    static void round(const float*, long, Half*) {}
    static inline void add(const Vec (&shares)[POINTS], const float* values, const Half*, Vec, Vec (&sums)[SUMS], Vec&) {
#pragma GCC unroll 4
        for (int t = 0; t < POINTS; t++)
#pragma GCC unroll 16
            for (int c = 0; c < SUMS; c++) sums[c] += values[c * TILE + t] * shares[t];
    }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_BFLOAT16
#include "native_bfloat16.h"
#endif

struct Slots {  // a vector of them: their queries and their running softmax
    const float* queries;
    long next;  // from one channel to the next
    float *m, *sum, *rounded, *acc;
};

static inline void scores(const Slots& s, const float* keys, const float* bias, long channels, Vec (&x)[POINTS]) {
#pragma GCC unroll 8
    for (int i = 0; i < POINTS; i++) x[i] = splat(bias[i]);
    for (long c = 0; c < channels; c++) {
        const Vec q = load(s.queries + c * s.next);
#pragma GCC unroll 8
        for (int i = 0; i < POINTS; i++) x[i] += keys[c * TILE + i] * q;
    }
}

// One vector of slots sees a tile. Sums of the tile are its own until the end: what was there before may be far
// larger. Shares wait for the scores of the points that follow before they meet their values: neither has to wait
// for the exponentials of the other. Where there are more channels than registers, shares are written down.
template <class How>
static inline void see_slots(const Slots& s, const Tile& tile, long channels, float* shares) {
    Vec m = load(s.m), before = load(s.sum), sum{}, rounded{}, sums[SUMS] = {}, x[POINTS] = {};
    int t = 0;
    for (; t < tile.count; t += POINTS) {
        Vec next[POINTS];
        scores(s, tile.keys + t, tile.bias + t, channels, next);
        if (t) How::add(x, tile.values + t - POINTS, tile.halves + t - POINTS, before + sum, sums, rounded);
        Vec top = next[0];
#pragma GCC unroll 4
        for (int i = 1; i < POINTS; i++) top = larger(top, next[i]);
        if (__builtin_expect(any_above(top - m, ABOVE), 0)) {
            const Vec risen = top - m > ABOVE ? top : m, shrink = power_of_two(m - risen);
            m = risen;
            before *= shrink, sum *= shrink, rounded *= shrink;
#pragma GCC unroll 16
            for (int c = 0; c < SUMS; c++) sums[c] *= shrink;
            store(s.rounded, load(s.rounded) * shrink);
            for (long c = 0; c < channels; c++) store(s.acc + c * LANES, load(s.acc + c * LANES) * shrink);
            for (int i = 0; i < t; i++) store(shares + i * LANES, load(shares + i * LANES) * shrink);
        }
        Vec added{};
#pragma GCC unroll 4
        for (int i = 0; i < POINTS; i++) added += x[i] = power_of_two(next[i] - m);
        sum += added;
        if (channels > SUMS)
            for (int i = 0; i < POINTS; i++) store(shares + (t + i) * LANES, x[i]);
    }
    How::add(x, tile.values + t - POINTS, tile.halves + t - POINTS, before + sum, sums, rounded);
    store(s.m, m);
    store(s.sum, before + sum);
    store(s.rounded, load(s.rounded) + rounded);
    for (int c = 0; c < SUMS; c++) store(s.acc + c * LANES, load(s.acc + c * LANES) + sums[c]);
}

// What further channels make of shares that were written down.
static inline void see_more(const float* shares, const float* values, int count, float* acc) {
    Vec sums[SUMS] = {}, none{};
    for (int t = 0; t < count; t += POINTS) {
        Vec x[POINTS];
        for (int i = 0; i < POINTS; i++) x[i] = load(shares + (t + i) * LANES);
        Exact::add(x, values + t, nullptr, none, sums, none);
    }
    for (int c = 0; c < SUMS; c++) store(acc + c * LANES, load(acc + c * LANES) + sums[c]);
}

// out[r, :] = weight[:, r] tokens + shift[r] for the channels of a head.
static void project(const float* weight, const float* shift, const float* tokens, long width, long channels, int count,
                    float* out) {
    for (long r = 0; r < channels; r += ROWS)
        layer_rows<ROWS>(weight + r, 1, channels, shift ? shift + r : NONE, tokens, width, count, out + r * TILE, false);
}

// What one head makes of a tile.
template <class How>
static void see_tile(const Plan& p, long head, const float* tokens, const float* bias, int count, Scratch& s, Partial& into) {
    const long width = p.widths[p.layers], c = p.channels, slots = padded_slots(p);
    project(p.key + head * width * c, p.key_shift + head * c, tokens, width, c, count, s.keys.data());
    project(p.value + head * width * c, nullptr, tokens, width, c, count, s.values.data());
    How::round(s.values.data(), c, s.halves.data());
    const Tile tile{s.keys.data(), s.values.data(), s.halves.data(), bias, count};
    for (long slot = 0; slot < p.slots; slot += LANES) {
        const long at = head * slots + slot;
        const Slots here{p.queries + head * c * slots + slot, slots, &into.m[at], &into.sum[at], &into.rounded[at],
                         &into.acc[at * c]};
        see_slots<How>(here, tile, c, s.shares.data());
        for (long more = SUMS; more < c; more += SUMS)
            see_more(s.shares.data(), tile.values + more * TILE, count, here.acc + more * LANES);
    }
}
