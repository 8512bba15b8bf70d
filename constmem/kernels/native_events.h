// Events: the token of one, what its time does to what slots see of it, and quantiles of mixtures of log-normals.

#pragma once

#include <cmath>
#include <limits>

#include "native_tile.h"

extern "C" {
struct Event {  // one of each task
    const int64_t* mark;  // negative: kinds of none, behind the marks
    const double *gap, *time, *start;
    const float* table;         // (marks + 2, width)
    const float* project;       // (width, 2 + 2 waves) of a gap's features, or none
    const float* project_bias;  // (width)
    const float *mean, *std, *tick;  // of log gaps; the shortest gap
    const float* waves;
    const float* log_rates;  // (heads, slots), or none
    const double* turns;     // angles a typical gap, of pairs of channels
    int64_t marks, wave_count, pairs;
    int64_t longest;  // typical gaps since a start
};
}

static double clock_of(const Event& e, long task) {
    return std::min((e.time[task] - e.start[task]) * std::exp(-(double)*e.mean), (double)e.longest);
}

// out += weight (width, 2 + 2 waves) times 1, z and waves of it, of a standardised log gap z; not a number: no gap.
static void add_gap(const float* weight, long width, const float* waves, long count, double z, float* out) {
    if (std::isnan(z)) return;
    const long columns = 2 + 2 * count;
    std::vector<double> features(columns);
    features[0] = 1, features[1] = z = std::max(-8.0, std::min(8.0, z));
    for (long i = 0; i < count; i++) {
        features[2 + i] = std::sin(z * waves[i]);
        features[2 + count + i] = std::cos(z * waves[i]);
    }
    for (long d = 0; d < width; d++) {
        double sum = 0;
        for (long c = 0; c < columns; c++) sum += weight[d * columns + c] * features[c];
        out[d] += (float)sum;
    }
}

// The vector of the mark, and of the gap before it.
static void token_of(const Event& e, long task, long width, std::vector<float>& token) {
    const int64_t mark = e.mark[task];
    const float* row = e.table + (mark < 0 ? e.marks - 1 - mark : mark) * width;
    token.assign(row, row + width);
    if (!e.project) return;
    for (long d = 0; d < width; d++) token[d] += e.project_bias[d];
    const double log_gap = std::log(std::max(e.gap[task], (double)*e.tick)), none = std::nan("");
    add_gap(e.project, width, e.waves, e.wave_count, e.gap[task] > 0 ? (log_gap - *e.mean) / *e.std : none, token.data());
}

// Values (heads, channels) turned by the clock, pairs of channels as complex numbers; lse (heads, slots) by its rates.
static void turn(const Event& e, double clock, const Plan& p, double* value, double* lse) {
    for (long i = 0; i < e.pairs; i++) {
        const double cos = std::cos(clock * e.turns[i]), sin = std::sin(clock * e.turns[i]);
        for (long head = 0; head < p.heads; head++) {
            double *a = value + head * p.channels + i, *b = a + e.pairs;
            const double real = *a * cos - *b * sin;
            *b = *a * sin + *b * cos;
            *a = real;
        }
    }
    if (e.log_rates)
        for (long i = 0; i < p.heads * p.slots; i++) lse[i] += std::exp((double)e.log_rates[i]) * clock;
}

// x between `low` and `high` at which P(log gap < x) is p: Newton's steps for the logarithm of the smaller tail, halves
// where one leads out of the interval.
static double solved(long components, const double* weight, const double* loc, const double* scale, double p, double low,
                     double high, double x) {
    const double side = p < 0.5 ? 1 : -1, wanted = std::log(p < 0.5 ? p : 1 - p);
    for (int step = 0; step < 100; step++) {
        double tail = 0, density = 0;
        for (long k = 0; k < components; k++) {
            const double u = (x - loc[k]) / scale[k];
            tail += 0.5 * weight[k] * std::erfc(-side * u * 0.70710678118654752);
            density += weight[k] / scale[k] * std::exp(-0.5 * u * u);
        }
        const double off = side * (std::log(tail) - wanted);  // negative: x is too small
        (off < 0 ? low : high) = x;
        double next = x - off * tail / density * 2.5066282746310002;  // sqrt(2 pi)
        const bool inside = next > low && next < high;
        if (!inside) next = 0.5 * (low + high);
        const double moved = std::abs(next - x) / (1 + std::abs(x));
        x = next;
        if (moved <= (inside ? 1e-9 : 4e-16)) break;  // what a step leaves is in the order of its square
    }
    return x;
}

// The gap that is not exceeded with probability p. The mixture's quantile is between its components' own.
static double quantile(long components, const double* weight, const double* loc, const double* scale, double p) {
    constexpr double one = 1, zero = 0, infinity = std::numeric_limits<double>::infinity();
    if (!(p >= 0 && p <= 1)) return std::nan("");
    if (p == 0 || p == 1) return p == 0 ? 0 : infinity;
    p = std::max(p, std::numeric_limits<double>::min());
    const double z = solved(1, &one, &zero, &one, p, -40, 40, 0);
    double low = infinity, high = -infinity, x = 0;
    for (long k = 0; k < components; k++) {
        const double each = loc[k] + scale[k] * z;
        low = std::min(low, each), high = std::max(high, each), x += weight[k] * each;
    }
    if (std::isnan(x)) return x;
    return std::exp(solved(components, weight, loc, scale, p, low, high, std::max(low, std::min(high, x))));
}
