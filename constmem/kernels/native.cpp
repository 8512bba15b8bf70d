// Observing on a CPU in one pass: points -> embedding -> normalisation -> keys, values -> online softmax.
//
// A tile of 64 points goes through everything before the next one is looked at (native_tile.h), so nothing the
// size of the data is ever written. Here: which worker sees which tiles, and how what they saw is joined.

#include <mutex>

#include "native_checksum.h"
#include "native_events.h"
#include "native_layers.h"
#include "native_merge.h"
#include "native_one.h"
#include "native_threads.h"
#include "native_tile.h"

constexpr int TILES = 4;  // tiles a head sees before the next head's turn

// Partials in use by one call. Fresh memory of this size costs more than clearing what another call left.
namespace {  // so that two builds of this library in one process do not share them
class Borrowed {
    static inline std::mutex lock;
    static inline std::vector<Partial> spare;
    static constexpr size_t KEPT = 16;

  public:
    std::vector<Partial> parts;
    Borrowed(const Plan& p, long count) : parts(count) {
        {
            const std::lock_guard<std::mutex> held(lock);
            spare.reserve(KEPT);  // so that the destructor needs no memory
            for (long i = 0; i < count && !spare.empty(); i++) parts[i] = std::move(spare.back()), spare.pop_back();
        }
        for (Partial& part : parts) part.clear(p);
    }
    ~Borrowed() {
        const std::lock_guard<std::mutex> held(lock);
        while (!parts.empty() && spare.size() < KEPT) spare.push_back(std::move(parts.back())), parts.pop_back();
    }
};
}  // namespace

// All points of one task from `start` to `stop` that count at all.
template <class How>
static void see(const Plan& p, const float* data, const float* log_weight, long start, long stop, Scratch& s, Partial& into) {
    const long in = p.widths[0], width = p.widths[p.layers];
    for (long at = start; at < stop;) {
        int counts[TILES] = {}, tiles = 0;
        for (; tiles < TILES && at < stop; tiles++) {
            const float* points[TILE];
            float* bias = s.bias.data() + tiles * TILE;
            int count = 0;
            for (; at < stop && count < TILE; at++) {
                const float weight = log_weight ? log_weight[at] : 0.0f;
                if (weight <= NOTHING) continue;
                bias[count] = weight * LOG2E;
                points[count++] = data + at * in;
            }
            if (count == 0) break;
            for (int t = count; t < TILE; t++) bias[t] = PADDING;
            embed(p, points, count, s, s.tokens.data() + tiles * width * TILE);
            counts[tiles] = count;
        }
        for (long head = 0; head < p.heads; head++)
            for (int i = 0; i < tiles; i++)
                see_tile<How>(p, head, s.tokens.data() + i * width * TILE, s.bias.data() + i * TILE, counts[i], s, into);
    }
}

// What the workers saw of one slot, joined. Only the first channels were multiplied by rounded shares.
static double join(const Plan& p, const Partial* parts, long count, long at, bool coarse, double* __restrict__ out) {
    const long c = p.channels, head = at / padded_slots(p);
    float m = UNSEEN;
    for (long i = 0; i < count; i++) m = std::max(m, parts[i].m[at]);
    double all = 0, rounded = 0;
    std::fill(out, out + c, 0.0);
    for (long i = 0; i < count; i++) {
        const Partial& part = parts[i];
        if (part.sum[at] == 0) continue;
        const double scale = part.m[at] == m ? 1.0 : std::exp2(part.m[at] - m);
        const float* __restrict__ acc = &part.acc[at / LANES * c * LANES + at % LANES];
        all += scale * part.sum[at];
        rounded += scale * part.rounded[at];
        for (long k = 0; k < c; k++) out[k] += scale * acc[k * LANES];
    }
    if (all == 0) return EMPTY;  // what is not a number stays none
    const double first = 1 / (coarse ? rounded : all), others = 1 / all;
    for (long k = 0; k < c; k++) out[k] = out[k] * (k < SUMS ? first : others) + p.value_shift[head * c + k];
    return (m + std::log2(all)) * LN2;
}

static void finish(const Plan& p, const Partial* parts, long count, bool coarse, double* value, double* lse) {
    for (long head = 0; head < p.heads; head++)
        for (long slot = 0; slot < p.slots; slot++) {
            const long at = head * p.slots + slot;
            lse[at] = join(p, parts, count, head * padded_slots(p) + slot, coarse, value + at * p.channels);
        }
}

template <class How>
static void observe_as(const Plan& p, long tasks, long points, const float* data, const float* log_weight, long threads,
                       double* value, double* lse) {
    const long in = p.widths[0], states = p.heads * p.slots, piece = TILES * TILE;
    const long pieces = (points + piece - 1) / piece;
    const long products = p.heads * p.channels * 2 * (p.widths[p.layers] + padded_slots(p));  // of a point
    threads = threads_for(tasks * points * products, threads, 1 << 24);
    threads = std::max<long>(1, std::min<long>(threads, tasks < threads ? pieces : tasks));
    Borrowed borrowed(p, threads);
    std::vector<Scratch> scratch(threads, Scratch(p, TILES));
    const auto look = [&](long task, long i, long worker) {
        const float* weight = log_weight ? log_weight + task * points : nullptr;
        const long stop = std::min<long>(points, (i + 1) * piece);
        see<How>(p, data + task * points * in, weight, i * piece, stop, scratch[worker], borrowed.parts[worker]);
    };
    if (tasks < threads) {
        for (long task = 0; task < tasks; task++) {
            if (task) for (Partial& part : borrowed.parts) part.clear(p);
            in_threads(pieces, threads, [&](long i, long worker) { look(task, i, worker); });
            finish(p, borrowed.parts.data(), threads, How::COARSE, value + task * states * p.channels, lse + task * states);
        }
        return;
    }
    in_threads(tasks, threads, [&](long task, long worker) {
        borrowed.parts[worker].clear(p);
        for (long i = 0; i < pieces; i++) look(task, i, worker);
        finish(p, &borrowed.parts[worker], 1, How::COARSE, value + task * states * p.channels, lse + task * states);
    });
}

extern "C" {

// Whether products of bfloat16 were compiled in, and this machine has them.
int64_t has_bfloat16() {
#if defined(HAS_BFLOAT16)
    return __builtin_cpu_supports("avx512bf16") != 0;
#else
    return 0;
#endif
}

// The state of each task's points: value (tasks, heads, slots, channels) and lse (tasks, heads, slots). Where
// `coarse`, which asks for `has_bfloat16`, shares and values are multiplied as bfloat16.
int64_t observe(const Plan* plan, int64_t tasks, int64_t points, const float* data, const float* log_weight,
                int64_t threads, int64_t coarse, double* value, double* lse) {
    return guarded([&] {
#if defined(HAS_BFLOAT16)
        if (coarse) return observe_as<Coarse>(*plan, tasks, points, data, log_weight, threads, value, lse);
#endif
        (void)coarse;
        observe_as<Exact>(*plan, tasks, points, data, log_weight, threads, value, lse);
    });
}

// The state of one point for each task: its values (tasks, heads, channels) are every slot's.
int64_t observe_one(const Plan* plan, int64_t tasks, const float* data, int64_t threads, double* value, double* lse) {
    return guarded([&] {
        const Plan& p = *plan;
        const long states = p.heads * p.slots, several = threads_for(tasks * states * 4, threads);
        std::vector<Single> singles(several, Single(p));
        in_threads(tasks, several, [&](long task, long worker) {
            singles[worker].see(data + task * p.widths[0], value + task * p.heads * p.channels, lse + task * states);
        });
    });
}

// A number that changes when a bit of these pieces of memory does.
uint64_t checksum(int64_t pieces, const unsigned char* const* piece, const int64_t* bytes) {
    return checksum_of(pieces, piece, bytes);
}

// The union of two sets of points, by `merge_states`.
int64_t merge(int64_t states, int64_t channels, const double* value, const double* lse, const double* other,
              int64_t shared, const double* other_lse, int64_t threads, double* merged, double* merged_lse) {
    return guarded([&] {
        const long pieces = states / shared;
        const long several = std::min<long>(threads_for(states * channels, threads), std::max<long>(1, pieces));
        const bool past = too_large_to_keep(merged, states * channels) && channels % 8 == 0;
        in_threads(several, several, [&](long worker, long) {
            const long from = pieces * worker / several, at = from * shared;
            const long count = pieces * (worker + 1) / several * shared - at;
            merge_states(count, channels, value + at * channels, lse + at, other + from * channels, shared,
                         other_lse + at, past, merged + at * channels, merged_lse + at);
        });
    });
}

// Each task's state with one point more, or one event: `observe_one` and `merge` without anything between them.
// Answers 2 where a number of a point is beyond the limit, or is NaN.
int64_t update(const Plan* plan, int64_t tasks, const float* data, double limit, const Event* event,
               const double* value, const double* lse, int64_t threads, double* merged, double* merged_lse) {
    const Plan& p = *plan;
    for (long i = 0; data && i < tasks * p.widths[0]; i++)
        if (!(std::fabs(data[i]) <= limit)) return 2;
    return guarded([&] {
        const long states = p.heads * p.slots, numbers = states * p.channels;
        const long several = std::min<long>(threads_for(tasks * numbers, threads), std::max<long>(1, tasks));
        const bool past = too_large_to_keep(merged, tasks * numbers) && p.channels % 8 == 0;
        in_threads(several, several, [&](long worker, long) {
            Single single(p);
            std::vector<double> new_value(p.heads * p.channels), new_lse(states);
            std::vector<float> token;
            for (long task = tasks * worker / several; task < tasks * (worker + 1) / several; task++) {
                if (event) token_of(*event, task, p.widths[0], token);
                single.see(event ? token.data() : data + task * p.widths[0], new_value.data(), new_lse.data());
                if (event) turn(*event, clock_of(*event, task), p, new_value.data(), new_lse.data());
                merge_states(states, p.channels, value + task * numbers, lse + task * states, new_value.data(),
                             p.slots, new_lse.data(), past, merged + task * numbers, merged_lse + task * states);
            }
        });
    });
}

// Layers one after another: from (tasks, tokens, channels), `stride` from one task to the next, to (tasks, levels,
// tokens, width): a level for each START, or one.
int64_t layers(int64_t count, const Layer* layer, const Met* met, int64_t tasks, int64_t tokens, int64_t channels,
               int64_t width, double eps, const float* in, int64_t stride, int64_t threads, float* out) {
    return guarded([&] {
        run_layers(layer, met, count, tasks, tokens, channels, width, eps, in, stride, threads, out);
    });
}

// Quantiles of mixtures of log-normals: of mixture i modulo `mixtures` at p[i].
int64_t quantiles(int64_t count, int64_t mixtures, int64_t components, const double* weight, const double* loc,
                  const double* scale, const double* p, int64_t threads, double* out) {
    return guarded([&] {
        threads = std::min<long>(threads_for(count * components, threads, 1 << 12), std::max<long>(1, count));
        in_threads(count, threads, [&](long i, long) {
            const long at = i % mixtures * components;
            out[i] = quantile(components, weight + at, loc + at, scale + at, p[i]);
        });
    });
}

// Vectors (count, width) of standardised log gaps; not a number: no gap.
int64_t gap_vectors(int64_t count, int64_t width, int64_t wave_count, const float* z, const float* waves,
                    const float* weight, const float* bias, float* out) {
    return guarded([&] {
        for (long i = 0; i < count; i++) {
            std::copy(bias, bias + width, out + i * width);
            add_gap(weight, width, waves, wave_count, z[i], out + i * width);
        }
    });
}

// Values (tasks, rows, channels), whose pairs of channels are complex numbers, times exp(i turn clock).
int64_t turned(int64_t tasks, int64_t rows, int64_t channels, int64_t pairs, const double* value, const double* clock,
               const double* turns, float* out) {
    return guarded([&] {
        std::vector<double> cos(pairs), sin(pairs);
        for (long task = 0; task < tasks; task++) {
            for (long i = 0; i < pairs; i++) {
                cos[i] = std::cos(clock[task] * turns[i]);
                sin[i] = std::sin(clock[task] * turns[i]);
            }
            for (long row = 0; row < rows; row++, value += channels, out += channels) {
                for (long i = 0; i < pairs; i++) {
                    out[i] = (float)(value[i] * cos[i] - value[pairs + i] * sin[i]);
                    out[pairs + i] = (float)(value[i] * sin[i] + value[pairs + i] * cos[i]);
                }
                for (long i = 2 * pairs; i < channels; i++) out[i] = (float)value[i];
            }
        }
    });
}
}
