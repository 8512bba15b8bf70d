// One point of one task: no softmax, since the share of an only point is one.

#pragma once

#include "native_merge.h"
#include "native_tile.h"

// out = start + (sum over k of a[k] b[k, :]) for a row of `channels` numbers. Not inlined: among all else a point
// needs, compilers run out of registers in this loop.
__attribute__((noinline)) static void row_by(const float* a, const float* b, long k, const float* start, float* out,
                                             long channels) {
    for (long c = 0; c < channels; c += LANES) {
        Vec sums[1][1] = {};
        multiply<1, 1>(a, 0, 1, b + c, channels, k, sums);
        store(out + c, start ? load(start + c) + sums[0][0] : sums[0][0]);
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
