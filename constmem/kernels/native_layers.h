// Whole layers one after another: norm, attention or gated feed-forward, residual.
//
// Tokens lie side by side in the lanes of a vector, tiles of a few of them, (tiles, channels, side) in memory. So norms
// need no sum across lanes, weights are read where they are, and channels may be of any number. All layers are done
// with one tile after another, but for keys and values, which are of all tokens.

#pragma once

#include "native_threads.h"
#include "native_tile.h"

// A feed-forward layer; attention of tokens to themselves, to a context; START sets the tokens aside for those of a
// state, BACK has them attend to what the layers between made of it; MAP, by which points become tokens, is linear.
enum Kind : int64_t { FEED, OWN, OTHER, START, BACK, MAP };

extern "C" {
struct Layer {
    int64_t kind, heads, hidden, normed;  // normed: the residual is what the norm gave; of MAP, whether a ReLU follows
    const float *scale, *shift;           // of the norm
    const float *context_scale, *context_shift;
    const float* expand;        // (2 hidden, width), or the queries' (width, width)
    const float* expand_bias;   // or keys' and values' (2 width, width)
    const float* contract;      // (width, hidden), or (width, width) of what attention gives
    const float* contract_bias;
};  // START projects values by expand and expand_bias, and adds contract, (slots, width), perhaps normed; MAP has
    // expand, (hidden, channels before), and expand_bias

struct Met {  // what a layer attends to
    const float* context;  // (tasks, count, width); of START, the state's value (tasks, heads, slots, channels)
    int64_t stride;        // from one task to the next
    int64_t count;
    const uint8_t* mask;   // (tasks, count), or none
};
}

static inline Vec smaller(Vec a, Vec b) { return -larger(-a, -b); }

template <int N>  // how many rows are multiplied at once with so many vectors
constexpr int ROWS_BY = LANES == 16 ? (N == 4 ? 6 : 8) : (N == 1 ? 8 : 4);

// For each row r and each vector of tokens at t: put(r, t, start(r, t) + sum over k of w[r, k] in[k, t]).
template <int R, int N, class Put>
static inline void rows_by(const float* w, long row, long step, const float* in, long next, long k, long r, long t, const Put& put) {
    Vec sums[R][N] = {};
    multiply<R, N>(w + r * row, row, step, in + t, next, k, sums);
    for (int i = 0; i < R; i++)
        for (int v = 0; v < N; v++) put(r + i, t + v * LANES, sums[i][v]);
}

template <int N, class Put>
static void all_rows(const float* w, long row, long step, const float* in, long next, long k, long rows, long t, const Put& put) {
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

class Work {  // one worker's memory
    const long width, side;  // of tokens: their channels, and how many a tile holds
    const float eps;
    Memory<float> x, aside, normed, context, keys, inner, query, shares;

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
            mean += rest;
            for (long d = 0; d < width; d++)
                store(out + d * side + t, (load(in + d * side + t) - mean) * inverse * scale[d] + shift[d]);
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
            mean += rest;
            for (long d = 0; d < whole; d += LANES)
                store(out + d, (load(in + d) - mean) * inverse * load(scale + d) + load(shift + d));
            for (long d = whole; d < width; d++) out[d] = (in[d] - mean) * inverse * scale[d] + shift[d];
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

    const float* normed_tile(const Layer& l, long tile, long count) {
        norm_tile(&x[tile * width * side], l.scale, l.shift, count, &normed[tile * width * side]);
        return &normed[tile * width * side];
    }

    // The last matrix of a layer, its bias and the residual.
    void finish(const Layer& l, const float* in, long k, long tile, long count) {
        float* own = &x[tile * width * side];
        const float* add = l.normed ? &normed[tile * width * side] : own;
        product(l.contract, in, k, width, count, [&](long r, long t, Vec sum) {
            store(own + r * side + t, sum + (l.contract_bias[r] + load(add + r * side + t)));
        });
    }

    void feed(const Layer& l, long tokens) {
        inner.resize(l.hidden * side);
        for (long tile = 0; tile < tiles_of(tokens); tile++) {
            const long count = tokens_of(tokens, tile);
            const float* in = normed_tile(l, tile, count);
            float* hidden = inner.data();
            product(l.expand + l.hidden * width, in, width, l.hidden, count, [&](long r, long t, Vec sum) {
                store(hidden + r * side + t, gelu(sum + l.expand_bias[l.hidden + r]));
            });
            product(l.expand, in, width, l.hidden, count, [&](long r, long t, Vec sum) {
                store(hidden + r * side + t, (sum + l.expand_bias[r]) * load(hidden + r * side + t));
            });
            finish(l, hidden, l.hidden, tile, count);
        }
    }

    void map(const Layer& l, long tokens, long channels) {
        aside.resize(tiles_of(tokens) * l.hidden * side);
        for (long tile = 0; tile < tiles_of(tokens); tile++) {
            float* out = &aside[tile * l.hidden * side];
            product(l.expand, &x[tile * channels * side], channels, l.hidden, tokens_of(tokens, tile), [&](long r, long t, Vec sum) {
                sum += l.expand_bias[r];
                store(out + r * side + t, l.normed ? larger(Vec{}, sum) : sum);
            });
        }
        x.swap(aside);
    }

    // Keys and values of all tokens of a tile, (2 width, side).
    void look(const Layer& l, const float* in, long tile, long count) {
        float* out = &keys[tile * 2 * width * side];
        product(l.expand_bias, in, width, 2 * width, count, [&](long r, long t, Vec sum) { store(out + r * side + t, sum); });
    }

    // What N vectors of a head's queries, (channels, side) each, read; shares: (keys, N vectors).
    template <int N>
    void head(const float* q, long at, long channels, long count, const uint8_t* mask, float* out) {
        constexpr long wide = N * LANES;
        Vec top[N], sum[N] = {};
        for (int v = 0; v < N; v++) top[v] = splat(PADDING);
        for (long tile = 0; tile < tiles_of(count); tile++) {
            float* own = &shares[tile * side * wide];
            const float* k = &keys[(tile * 2 * width + at) * side];
            const uint8_t* seen = mask ? mask + tile * side : nullptr;
            all_rows<N>(k, 1, side, q, side, channels, tokens_of(count, tile), 0, [&](long j, long t, Vec score) {
                if (seen && !seen[j]) score = splat(PADDING);
                top[t / LANES] = larger(top[t / LANES], score);
                store(own + j * wide + t, score);
            });
        }
        for (long j = 0; j < count; j++)
            for (int v = 0; v < N; v++) {
                float* own = &shares[j * wide + v * LANES];
                const Vec share = mask && !mask[j] ? Vec{} : power_of_two(load(own) - top[v]);
                store(own, share);
                sum[v] += share;
            }
        for (int v = 0; v < N; v++) sum[v] = 1.0f / sum[v];
        constexpr int rows = ROWS_BY<N>;
        long c = 0;
        for (; c + rows <= channels; c += rows) read<rows, N>(at + c, count, sum, out + c * side);
        for (; c < channels; c++) read<1, N>(at + c, count, sum, out + c * side);
    }

    template <int R, int N>
    void read(long channel, long count, const Vec (&scale)[N], float* out) {
        constexpr long wide = N * LANES;
        Vec sums[R][N] = {};
        for (long tile = 0; tile < tiles_of(count); tile++)
            multiply<R, N>(&keys[((2 * tile + 1) * width + channel) * side], side, 1, &shares[tile * side * wide], wide,
                           tokens_of(count, tile), sums);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < N; v++) store(out + r * side + v * LANES, sums[r][v] * scale[v]);
    }

    // Few queries of all heads in the lanes of one vector: each is taken to where keys come from, and what it reads from
    // there to values, so that nobody needs keys and values of all tokens. The context is (count, width), normed.
    void attend_few(const Layer& l, const float* in, long tokens, long count, const uint8_t* mask, float scale, float* out) {
        const long channels = width / l.heads;
        const float *key = l.expand_bias, *value = key + width * width;
        const auto lane = [&](long h, long t) { return h * tokens + t; };
        shares.assign((count + width) * LANES + width, 0.0f);
        float *score = shares.data(), *asked = score + count * LANES, *row = asked + width * LANES;
        product(l.expand, in, width, width, tokens, [&](long r, long t, Vec sum) { store(&query[r * side + t], sum * scale); });
        for (long h = 0; h < l.heads; h++)
            for (long t = 0; t < tokens; t++) {
                std::fill(row, row + width, 0.0f);
                for (long c = h * channels; c < (h + 1) * channels; c++)
                    for (long d = 0; d < width; d++) row[d] += key[c * width + d] * query[c * side + t];
                for (long d = 0; d < width; d++) asked[d * LANES + lane(h, t)] = row[d];
            }
        Vec top = splat(PADDING), sum{};
        all_rows<1>(context.data(), width, 1, asked, LANES, width, count, 0, [&](long j, long, Vec x) {
            if (mask && !mask[j]) x = splat(PADDING);
            top = larger(top, x);
            store(score + j * LANES, x);
        });
        for (long j = 0; j < count; j++) {
            const Vec share = mask && !mask[j] ? Vec{} : power_of_two(load(score + j * LANES) - top);
            store(score + j * LANES, share);
            sum += share;
        }
        sum = 1.0f / sum;
        all_rows<1>(context.data(), 1, width, score, LANES, count, width, 0, [&](long d, long, Vec x) { store(asked + d * LANES, x * sum); });
        all_rows<1>(value, width, 1, asked, LANES, width, width, 0, [&](long r, long, Vec x) {
            for (long t = 0; t < tokens; t++) out[r * side + t] = x[lane(r / channels, t)];
        });
    }

    void attend(const Layer& l, const Met& met, long tokens, long count, long task) {
        const bool own = l.kind == OWN;
        const long channels = width / l.heads;
        const uint8_t* mask = met.mask ? met.mask + task * count : nullptr;
        const bool nothing = mask ? std::find(mask, mask + count, 1) == mask + count : count == 0;
        const bool few = l.kind == OTHER && l.heads * tokens <= LANES && count >= 2 * LANES;
        const float scale = LOG2E / std::sqrt((float)channels);
        if (!few) keys.resize(tiles_of(count) * 2 * width * side);
        shares.resize(tiles_of(count) * side * 2 * LANES);
        query.resize(width * side);
        inner.assign(width * side, 0.0f);
        if (l.kind == OTHER) {
            const float* from = met.context + task * met.stride;
            context.resize(tiles_of(count) * width * side);
            few ? norm_rows(from, l.context_scale, l.context_shift, count, context.data()) : to_tiles(from, count, width, context.data());
        }
        for (long tile = 0; tile < tiles_of(count) && !few; tile++) {
            const long some = tokens_of(count, tile);
            float* in = own ? nullptr : &context[tile * width * side];
            if (!own) norm_tile(in, l.context_scale, l.context_shift, some, in);
            look(l, own ? normed_tile(l, tile, some) : in, tile, some);
        }
        for (long tile = 0; tile < tiles_of(tokens); tile++) {
            const long some = tokens_of(tokens, tile);
            const float* in = own ? &normed[tile * width * side] : normed_tile(l, tile, some);
            float *q = query.data(), *out = inner.data();
            if (few && !nothing) attend_few(l, in, tokens, count, mask, scale, out);
            if (!few && !nothing) {
                product(l.expand, in, width, width, some, [&](long r, long t, Vec sum) { store(q + r * side + t, sum * scale); });
                for (long h = 0; h < l.heads; h++) {
                    const long at = h * channels;
                    long t = 0;
                    for (; t + LANES < some; t += 2 * LANES) head<2>(q + at * side + t, at, channels, count, mask, out + at * side + t);
                    if (t < some) head<1>(q + at * side + t, at, channels, count, mask, out + at * side + t);
                }
            }
            finish(l, out, width, tile, some);
        }
    }

    // Tokens of what a state's slots hold, in place of those set aside.
    void start(const Layer& l, const Met& met, long task) {
        const long slots = met.count, channels = width / l.heads;
        const float* value = met.context + task * met.stride;
        aside.swap(x);
        x.resize(tiles_of(slots) * width * side);
        normed.resize(std::max(normed.size(), x.size()));
        inner.resize(width * side);
        to_tiles(l.contract, slots, width, x.data());
        for (long tile = 0; tile < tiles_of(slots); tile++) {
            const long some = tokens_of(slots, tile);
            float *own = &x[tile * width * side], *in = inner.data();
            if (l.scale) norm_tile(own, l.scale, l.shift, some, own);
            std::fill(inner.begin(), inner.end(), 0.0f);
            for (long r = 0; r < width; r++) {
                const float* from = value + (r / channels * slots + tile * side) * channels + r % channels;
                for (long t = 0; t < some; t++) in[r * side + t] = from[t * channels];
            }
            product(l.expand, in, width, width, some, [&](long r, long t, Vec sum) {
                store(own + r * side + t, sum + l.expand_bias[r] + load(own + r * side + t));
            });
        }
    }

  public:
    Work(long width, long side, float eps) : width(width), side(side), eps(eps) {}

    // Tokens after all layers; those of every level, each from a START to the next, behind each other.
    void run(const Layer* layers, const Met* met, long count, const float* in, long tokens, long channels, long task, float* out) {
        long here = tokens;  // how many tokens are at hand
        bool begun = false;
        x.resize(tiles_of(tokens) * channels * side);
        normed.resize(tiles_of(tokens) * width * side);
        to_tiles(in, tokens, channels, x.data());
        for (long i = 0; i < count; i++) {
            const Layer& l = layers[i];
            if (l.kind == MAP) map(l, here, channels), channels = l.hidden;
            if (l.kind == FEED) feed(l, here);
            if (l.kind == OWN) attend(l, met[i], here, here, task);
            if (l.kind == OTHER) attend(l, met[i], here, met[i].count, task);
            if (l.kind == START) {
                if (begun) from_tiles(x.data(), tokens, width, out), out += tokens * width;
                begun = true;
                start(l, met[i], task);
                here = met[i].count;
            }
            if (l.kind == BACK) {
                context.swap(x);
                x.swap(aside);
                attend(l, met[i], tokens, here, task);
                here = tokens;
            }
        }
        from_tiles(x.data(), tokens, width, out);
    }
};

static void run_layers(const Layer* layers, const Met* met, long count, long tasks, long tokens, long channels, long width, double eps,
                       const float* in, long stride, long threads, float* out) {
    const bool apart = std::none_of(layers, layers + count, [](const Layer& l) { return l.kind == OWN || l.kind == START; });
    const long levels = std::max<long>(1, std::count_if(layers, layers + count, [](const Layer& l) { return l.kind == START; }));
    const long products = count * 4 * width * width;  // of a token, at least
    threads = threads_for(tasks * tokens * products, threads, 1 << 24);
    const long pieces = apart ? std::max<long>(1, std::min<long>((threads + tasks - 1) / tasks, tokens / (4 * TILE))) : 1;
    const long piece = ((tokens + pieces - 1) / pieces + TILE - 1) / TILE * TILE;
    threads = std::min(threads, tasks * pieces);
    bool small = tokens <= LANES;  // tiles of many lanes that nobody fills would push all else out of the caches
    for (long i = 0; i < count; i++) small = small && met[i].count <= LANES;
    std::vector<Work> works(threads, Work(width, small ? LANES : TILE, (float)eps));
    in_threads(tasks * pieces, threads, [&](long i, long worker) {
        const long task = i / pieces, start = i % pieces * piece, some = std::min(piece, tokens - start);
        float* own = out + (task * levels * tokens + start) * width;
        if (some > 0) works[worker].run(layers, met, count, in + task * stride + start * channels, some, channels, task, own);
    });
}
