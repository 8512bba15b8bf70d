// Whole layers one after another: norm, attention or gated feed-forward, residual.
//
// A layer is done with one tile of tokens after another, but for keys and values, which are of all of them.

#pragma once

#include "native_threads.h"
#include "native_tokens.h"

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

class Work : Tiles {  // with one worker's memory
    Memory<float> x, aside, normed, context, keys, inner, query, shares;

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
            const long some = tokens_of(tokens, tile);
            product(l.expand, &x[tile * channels * side], channels, l.hidden, some, [&](long r, long t, Vec sum) {
                sum += l.expand_bias[r];
                store(out + r * side + t, l.normed ? larger(Vec{}, sum) : sum);
            });
        }
        x.swap(aside);
    }

    // Keys and values of all tokens of a tile, (2 width, side).
    void look(const Layer& l, const float* in, long tile, long count) {
        float* out = &keys[tile * 2 * width * side];
        const auto put = [&](long r, long t, Vec sum) { store(out + r * side + t, sum); };
        product(l.expand_bias, in, width, 2 * width, count, put);
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
    void attend_few(const Layer& l, const float* in, long tokens, long count, const uint8_t* mask, float scale,
                    float* out) {
        const long channels = width / l.heads;
        const float *key = l.expand_bias, *value = key + width * width;
        const auto lane = [&](long h, long t) { return h * tokens + t; };
        shares.assign((count + width) * LANES + width, 0.0f);
        float *score = shares.data(), *asked = score + count * LANES, *row = asked + width * LANES;
        const auto ask = [&](long r, long t, Vec sum) { store(&query[r * side + t], sum * scale); };
        product(l.expand, in, width, width, tokens, ask);
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
        const auto answer = [&](long d, long, Vec x) { store(asked + d * LANES, x * sum); };
        all_rows<1>(context.data(), 1, width, score, LANES, count, width, 0, answer);
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
            float* to = context.data();
            few ? norm_rows(from, l.context_scale, l.context_shift, count, to) : to_tiles(from, count, width, to);
            for (long j = 0; j < count && few && mask; j++)  // what nobody sees may be anything, 0 times it as well
                if (!mask[j]) std::fill_n(to + j * width, width, 0.0f);
        }
        for (long tile = 0; tile < tiles_of(count) && !few; tile++) {
            const long some = tokens_of(count, tile);
            float* in = own ? nullptr : &context[tile * width * side];
            if (!own) norm_tile(in, l.context_scale, l.context_shift, some, in);
            for (long t = 0; t < some && mask && !own; t++)
                for (long d = 0; d < width && !mask[tile * side + t]; d++) in[d * side + t] = 0.0f;
            look(l, own ? normed_tile(l, tile, some) : in, tile, some);
        }
        for (long tile = 0; tile < tiles_of(tokens); tile++) {
            const long some = tokens_of(tokens, tile);
            const float* in = own ? &normed[tile * width * side] : normed_tile(l, tile, some);
            float *q = query.data(), *out = inner.data();
            if (few && !nothing) attend_few(l, in, tokens, count, mask, scale, out);
            if (!few && !nothing) {
                const auto ask = [&](long r, long t, Vec sum) { store(q + r * side + t, sum * scale); };
                product(l.expand, in, width, width, some, ask);
                for (long at = 0; at < width; at += channels) {
                    const float* from = q + at * side;
                    float* to = out + at * side;
                    long t = 0;
                    for (; t + LANES < some; t += 2 * LANES) head<2>(from + t, at, channels, count, mask, to + t);
                    if (t < some) head<1>(from + t, at, channels, count, mask, to + t);
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
    Work(long width, long side, float eps) : Tiles(width, side, eps) {}

    // Tokens after all layers; those of every level, each from a START to the next, behind each other.
    void run(const Layer* layers, const Met* met, long count, const float* in, long tokens, long channels, long task,
             float* out) {
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

static void run_layers(const Layer* layers, const Met* met, long count, long tasks, long tokens, long channels,
                       long width, double eps, const float* in, long stride, long threads, float* out) {
    bool apart = true;  // tokens do not see each other
    long levels = 0;
    for (long i = 0; i < count; i++) {
        apart = apart && layers[i].kind != OWN && layers[i].kind != START;
        levels += layers[i].kind == START;
    }
    levels = std::max<long>(1, levels);
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
        const float* from = in + task * stride + start * channels;
        if (some > 0) works[worker].run(layers, met, count, from, some, channels, task, own);
    });
}
