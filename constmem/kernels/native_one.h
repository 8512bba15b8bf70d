// One point of one task: no softmax, since the share of an only point is one.

#pragma once

#include "native_merge.h"
#include "native_tile.h"

constexpr int CHAINS_OF_ONE = 4;  // sums that go on side by side, to hide the latency of a multiply-add

// out = start + (sum over k of a[k] b[k, :]) for several vectors of a row of `channels` numbers. Not inlined: among
// all else a point needs, compilers run out of registers in this loop.
__attribute__((noinline)) static void vectors_by(const float* a, const float* b, long k, const float* start, float* out,
                                                 long channels) {
    Vec sums[1][CHAINS_OF_ONE] = {};
    multiply<1, CHAINS_OF_ONE>(a, 0, 1, b, channels, k, sums);
    for (int v = 0; v < CHAINS_OF_ONE; v++)
        store(out + v * LANES, start ? load(start + v * LANES) + sums[0][v] : sums[0][v]);
}

// The same for one vector, whose sum has parts.
__attribute__((noinline)) static void vector_by(const float* a, const float* b, long k, const float* start, float* out,
                                                long channels) {
    Vec parts[CHAINS_OF_ONE] = {};
    long i = 0;
    for (; i + CHAINS_OF_ONE <= k; i += CHAINS_OF_ONE)
        for (int j = 0; j < CHAINS_OF_ONE; j++) parts[j] += a[i + j] * load(b + (i + j) * channels);
    for (; i < k; i++) parts[0] += a[i] * load(b + i * channels);
    const Vec sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    store(out, start ? load(start) + sum : sum);
}

static void row_by(const float* a, const float* b, long k, const float* start, float* out, long channels) {
    constexpr long SEVERAL = CHAINS_OF_ONE * LANES;
    for (long c = 0; c < channels;) {
        const bool several = c + SEVERAL <= channels;
        (several ? vectors_by : vector_by)(a, b + c, k, start ? start + c : nullptr, out + c, channels);
        c += several ? SEVERAL : LANES;
    }
}

class Single {  // memory for one point after another
    const Plan& p;
    std::vector<double> now, out;
    std::vector<float> token, keys, values, scores;

    void embed(const float* point) {
        now.assign(point, point + p.widths[0]);
        for (long l = 0; l < p.layers; l++) {
            out.resize(p.widths[l + 1]);
            for (long r = 0; r < p.widths[l + 1]; r++) {
                const double x = dot(p.weight[l] + r * p.widths[l], now.data(), p.widths[l]) + p.bias[l][r];
                out[r] = l + 1 < p.layers ? std::max(x, 0.0) : x;
            }
            now.swap(out);
        }
        double mean = 0, square = 0;
        for (double x : now) mean += x / now.size();
        for (double x : now) square += (x - mean) * (x - mean) / now.size();
        const double scale = 1 / std::sqrt(square + 1e-5);
        token.resize(now.size());
        for (size_t d = 0; d < now.size(); d++) token[d] = (float)((now[d] - mean) * scale);
    }

  public:
    explicit Single(const Plan& plan) : p(plan), keys(p.channels), values(p.channels), scores(padded_slots(p)) {}

    // Its values (heads, channels), which are every slot's, and its scores (heads, slots), which are the lse.
    void see(const float* point, double* value, double* lse) {
        const long c = p.channels, padded = padded_slots(p);
        embed(point);
        const long width = token.size();
        for (long head = 0; head < p.heads; head++) {
            row_by(token.data(), p.key + head * width * c, width, p.key_shift + head * c, keys.data(), c);
            row_by(token.data(), p.value + head * width * c, width, p.value_shift + head * c, values.data(), c);
            row_by(keys.data(), p.queries + head * c * padded, c, nullptr, scores.data(), padded);
            for (long i = 0; i < c; i++) value[head * c + i] = values[i];
            for (long i = 0; i < p.slots; i++) lse[head * p.slots + i] = scores[i] * LN2;
        }
    }
};
