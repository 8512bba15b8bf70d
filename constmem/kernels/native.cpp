// Observing on a CPU in one pass: points -> embedding -> normalisation -> keys, values -> online softmax.
//
// A tile of 64 points goes through everything before the next one is looked at, so nothing the size of
// the data is ever written. In the tile, points lie side by side in the lanes of a vector: layers,
// normalisation and scores need no sum across lanes. Only the values are turned (channels side by side),
// because the shares multiply them point by point. All products are one small routine, `multiply`.
//
// The softmax keeps, for each slot, a reference m that scores are measured against. It need not be the
// maximum: while no score exceeds m + 64 (to base two), nothing overflows and nothing has to be rescaled.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <thread>
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

constexpr int WHOLE = 16;             // channels, and slots of query_turned, are padded to a multiple of this
constexpr int TILE = 64;             // points of a tile
constexpr int ACROSS = TILE / LANES; // vectors of a tile
constexpr int WIDE = LANES == 16 ? 4 : 2;
constexpr int ROWS = 4, GROUP = 16;  // rows multiplied at once; slots whose shares are held at once
constexpr int TILES = 4;             // tiles a head sees before the next head's turn
constexpr float ABOVE = 64.0f, LOG2E = 1.44269504089f;
constexpr float EMPTY = -0x1p100f, NOTHING = -0x1p99f, PADDING = -3e38f;  // as state.py has them
constexpr double LN2 = 0x1.62e42fefa39efp-1;

static inline Vec load(const float* p) { return *reinterpret_cast<const Loose*>(p); }
static inline void store(float* p, Vec v) { *reinterpret_cast<Loose*>(p) = v; }

static inline Vec power_of_two(Vec x) {
#if defined(__AVX512F__)
    const Vec whole = (Vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    x = x > -126.0f ? x : Vec{} - 126.0f;
    const Vec shifted = x + 12582912.0f;  // 1.5 * 2^23: rounds to a whole number in the lowest bits
    const Vec whole = shifted - 12582912.0f;
#endif
    const Vec f = x - whole;
    Vec p = f * 0.001327647152f + 0.009675541331f;
    p = p * f + 0.05550713275f;
    p = p * f + 0.2402211972f;
    p = p * f + 0.6931469671f;
    p = p * f + 1.000000072f;
#if defined(__AVX512F__)
    return (Vec)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    return (Vec)((Int)p + ((Int)shifted << 23));
#endif
}

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

static inline float largest(Vec x) {
    float top = x[0];
    for (int i = 1; i < LANES; i++) top = std::max(top, x[i]);
    return top;
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
template <int R, int N>
static inline void multiply(const float* a, long row, long step, const float* b, long next, long count, Vec (&sums)[R][N]) {
    for (long k = 0; k < count; k++) {
        Vec right[N];
        for (int v = 0; v < N; v++) right[v] = load(b + k * next + v * LANES);
        for (int r = 0; r < R; r++) {
            const float left = a[r * row + k * step];
            for (int v = 0; v < N; v++) sums[r][v] += left * right[v];
        }
    }
}

// out[r, :] = act(weight[r, :] in + bias[r]) for a tile whose points lie side by side.
template <int R>
static inline void layer_rows(const float* w, const float* bias, const float* in, long k, float* out, bool relu) {
    for (int part = 0; part < ACROSS; part += WIDE) {
        Vec sums[R][WIDE];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < WIDE; v++) sums[r][v] = Vec{} + bias[r];
        multiply<R, WIDE>(w, k, 1, in + part * LANES, TILE, k, sums);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < WIDE; v++) {
                const Vec x = sums[r][v];
                store(out + r * TILE + (part + v) * LANES, relu ? (x > 0.0f ? x : Vec{}) : x);
            }
    }
}

static void layer(const float* w, const float* bias, const float* in, long k, long n, float* out, bool relu) {
    long r = 0;
    for (; r + ROWS <= n; r += ROWS) layer_rows<ROWS>(w + r * k, bias + r, in, k, out + r * TILE, relu);
    for (; r < n; r++) layer_rows<1>(w + r * k, bias + r, in, k, out + r * TILE, relu);
}

static void normalise(float* tile, long width) {
    for (int part = 0; part < ACROSS; part++) {
        float* column = tile + part * LANES;
        Vec mean{}, square{};
        for (long d = 0; d < width; d++) mean += load(column + d * TILE);
        mean /= (float)width;
        for (long d = 0; d < width; d++) {
            const Vec x = load(column + d * TILE) - mean;
            square += x * x;
        }
        Vec scale = square / (float)width + 1e-5f;
        for (int i = 0; i < LANES; i++) scale[i] = 1.0f / std::sqrt(scale[i]);
        for (long d = 0; d < width; d++) store(column + d * TILE, (load(column + d * TILE) - mean) * scale);
    }
}

// out[r, :] = start[r, :] + (sum over k of a[r, k] b[k, :]) for rows of `channels` numbers.
template <int R>
static inline void rows_by(const float* a, long row, long step, const float* b, long k, const float* start, long start_row, float* out, long channels) {
    for (long c = 0; c < channels; c += LANES) {
        Vec sums[R][1] = {};  // the tile's own sum first: what was there may be far larger
        multiply<R, 1>(a, row, step, b + c, channels, k, sums);
        for (int r = 0; r < R; r++) store(out + r * channels + c, load(start + r * start_row + c) + sums[r][0]);
    }
}

extern "C" {
struct Plan {
    int64_t layers;            // of the embedding; 0: data are tokens already
    const float* const* weight;  // (out, in) each
    const float* const* bias;
    const int64_t* widths;     // layers + 1 of them; the last is that of a token
    int64_t heads, slots, channels;  // heads of all blocks together; channels in whole vectors
    const float* queries;      // (heads, slots, channels), times log2(e)
    const float* key;          // (heads * channels, width)
    const float* key_shift;    // (heads * channels)
    const float* value;        // (heads, width, channels)
    const float* value_shift;  // (heads * channels)
    const float* key_turned;   // (heads, width, channels)
    const float* query_turned; // (heads, channels, slots in whole vectors)
};
}

struct Partial {  // the running softmax of one worker
    std::vector<float> m, sum, acc;
    void clear(const Plan& p) {
        m.assign(p.heads * p.slots, -std::numeric_limits<float>::infinity());
        sum.assign(p.heads * p.slots * LANES, 0.0f);
        acc.assign(p.heads * p.slots * p.channels, 0.0f);
    }
};

// Partials in use by one call. Fresh memory of this size costs more than clearing what another call left.
class Borrowed {
    static inline std::mutex lock;
    static inline std::vector<Partial> spare;

  public:
    std::vector<Partial> parts;
    Borrowed(const Plan& p, long count) : parts(count) {
        {
            const std::lock_guard<std::mutex> held(lock);
            for (long i = 0; i < count && !spare.empty(); i++) parts[i] = std::move(spare.back()), spare.pop_back();
        }
        for (Partial& part : parts) part.clear(p);
    }
    ~Borrowed() {
        const std::lock_guard<std::mutex> held(lock);
        while (!parts.empty() && spare.size() < 16) spare.push_back(std::move(parts.back())), parts.pop_back();
    }
};

struct Scratch {
    std::vector<float> first, second, tokens, keys, values, shares, bias;
    explicit Scratch(const Plan& p) {
        int64_t widest = *std::max_element(p.widths, p.widths + p.layers + 1);
        first.resize(widest * TILE);
        second.resize(widest * TILE);
        tokens.resize(TILES * p.widths[p.layers] * TILE);
        keys.resize(p.channels * TILE);
        values.resize(p.channels * TILE);
        shares.resize(GROUP * TILE);
        bias.resize(TILES * TILE);
    }
};

// A tile's points, turned, through the embedding and the normalisation.
static void embed(const Plan& p, const float* const* points, int count, Scratch& s, float* tokens) {
    const long in = p.widths[0], width = p.widths[p.layers];
    float* now = p.layers ? s.first.data() : tokens;
    for (long d = 0; d < in; d++)
        for (int t = 0; t < TILE; t++) now[d * TILE + t] = t < count ? points[t][d] : 0.0f;
    float* other = s.second.data();
    for (long l = 0; l < p.layers; l++) {
        float* out = l + 1 == p.layers ? tokens : other;
        layer(p.weight[l], p.bias[l], now, p.widths[l], p.widths[l + 1], out, l + 1 < p.layers);
        other = now;
        now = out;
    }
    normalise(tokens, width);
}

// Scores of R slots against a tile, as shares of the running softmax.
template <int R>
static inline void share(const float* q, long channels, const float* keys, const float* bias, float* m, float* sum, float* acc, float* shares) {
    for (int part = 0; part < ACROSS; part += WIDE) {
        Vec scores[R][WIDE];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < WIDE; v++) scores[r][v] = load(bias + (part + v) * LANES);
        multiply<R, WIDE>(q, channels, 1, keys + part * LANES, TILE, channels, scores);
        for (int r = 0; r < R; r++) {
            Vec top = scores[r][0];
            for (int v = 1; v < WIDE; v++) top = top > scores[r][v] ? top : scores[r][v];
            if (__builtin_expect(any_above(top, m[r] + ABOVE), 0)) {
                const float renewed = largest(top), shrink = std::exp2(m[r] - renewed);
                m[r] = renewed;
                for (int i = 0; i < LANES; i++) sum[r * LANES + i] *= shrink;
                for (long c = 0; c < channels; c++) acc[r * channels + c] *= shrink;
                for (int t = 0; t < part * LANES; t++) shares[r * TILE + t] *= shrink;
            }
            Vec added{};
            for (int v = 0; v < WIDE; v++) {
                const Vec x = power_of_two(scores[r][v] - m[r]);
                store(shares + r * TILE + (part + v) * LANES, x);
                added += x;
            }
            store(sum + r * LANES, load(sum + r * LANES) + added);
        }
    }
}

static void see_tile(const Plan& p, long head, const float* tokens, const float* bias, int count, Scratch& s, Partial& into) {
    const long width = p.widths[p.layers], c = p.channels;
    float *keys = s.keys.data(), *values = s.values.data(), *shares = s.shares.data();
    layer(p.key + head * c * width, p.key_shift + head * c, tokens, width, c, keys, false);
    for (int t = 0; t < TILE; t += GROUP)
        rows_by<GROUP>(tokens + t, 1, TILE, p.value + head * width * c, width, p.value_shift + head * c, 0, values + t * c, c);
    for (long slot = 0; slot < p.slots; slot += GROUP) {
        const long at = head * p.slots + slot, here = std::min<long>(GROUP, p.slots - slot);
        const float* q = p.queries + at * c;
        float *m = &into.m[at], *sum = &into.sum[at * LANES], *acc = &into.acc[at * c];
        long r = 0;
        for (; r + ROWS <= here; r += ROWS)
            share<ROWS>(q + r * c, c, keys, bias, m + r, sum + r * LANES, acc + r * c, shares + r * TILE);
        for (; r < here; r++) share<1>(q + r * c, c, keys, bias, m + r, sum + r * LANES, acc + r * c, shares + r * TILE);
        if (here == GROUP) {
            rows_by<GROUP>(shares, TILE, 1, values, count, acc, c, acc, c);
        } else {
            for (r = 0; r < here; r++) rows_by<1>(shares + r * TILE, TILE, 1, values, count, acc + r * c, c, acc + r * c, c);
        }
    }
}

// All points of one task from `start` to `stop` that count at all.
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
                see_tile(p, head, s.tokens.data() + i * width * TILE, s.bias.data() + i * TILE, counts[i], s, into);
    }
}

// Join what the workers saw of one task.
static void finish(const Plan& p, const Partial* parts, long count, double* value, double* lse) {
    const long c = p.channels;
    for (long at = 0; at < p.heads * p.slots; at++) {
        float m = parts[0].m[at];
        for (long i = 1; i < count; i++) m = std::max(m, parts[i].m[at]);
        double all = 0;
        double* __restrict__ out = value + at * c;
        std::fill(out, out + c, 0.0);
        for (long i = 0; i < count; i++) {
            const float own = parts[i].m[at];
            if (own == -std::numeric_limits<float>::infinity()) continue;
            const double scale = own == m ? 1.0 : std::exp2(own - m);
            const float* __restrict__ acc = &parts[i].acc[at * c];
            all += scale * total(load(&parts[i].sum[at * LANES]));
            for (long k = 0; k < c; k++) out[k] += scale * acc[k];
        }
        const double inverse = all > 0 ? 1.0 / all : 0.0;
        for (long k = 0; k < c; k++) out[k] *= inverse;
        lse[at] = all > 0 ? (m + std::log2(all)) * LN2 : EMPTY;
    }
}

// Work on pieces 0 to count in several threads. Which thread has which is fixed, so that sums come out the
// same every time.
template <class Work>
static void in_threads(long count, long threads, Work work) {
    const auto run = [&](long worker) {
        for (long i = count * worker / threads; i < count * (worker + 1) / threads; i++) work(i, worker);
    };
    std::vector<std::thread> started;
    for (long i = 1; i < threads; i++) started.emplace_back(run, i);
    run(0);
    for (auto& thread : started) thread.join();
}

static inline float dot(const float* a, const float* b, long count) {
    Vec sums{};
    long k = 0;
    for (; k + LANES <= count; k += LANES) sums += load(a + k) * load(b + k);
    float sum = total(sums);
    for (; k < count; k++) sum += a[k] * b[k];
    return sum;
}

typedef double Double __attribute__((vector_size(64)));
typedef double LooseDouble __attribute__((vector_size(64), aligned(8), may_alias));
typedef int64_t Long __attribute__((vector_size(64)));
constexpr int MANY = 4;  // vectors that go through the series together, to hide the latency of a step

struct Series {  // 1 / k! and 1 / (2 k + 1)
    double factorial[15], odd[18];
    constexpr Series() : factorial{1}, odd{1} {
        for (int k = 1; k < 15; k++) factorial[k] = factorial[k - 1] / k;
        for (int k = 1; k < 18; k++) odd[k] = 1.0 / (2 * k + 1);
    }
};
constexpr Series SERIES;

// exp(x) for x <= 0, by its series on what remains of x beside a whole number of ln 2.
static inline void exp_of_negative(Double (&x)[MANY]) {
    Double shifted[MANY], r[MANY], p[MANY];
    for (int i = 0; i < MANY; i++) {
        x[i] = x[i] > -708.0 ? x[i] : Double{} - 708.0;
        shifted[i] = x[i] * (1 / LN2) + 0x1.8p52;  // rounds to a whole number in the lowest bits
        const Double n = shifted[i] - 0x1.8p52;
        r[i] = (x[i] - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
        p[i] = Double{} + SERIES.factorial[14];
    }
    for (int k = 13; k >= 0; k--)
        for (int i = 0; i < MANY; i++) p[i] = p[i] * r[i] + SERIES.factorial[k];
    for (int i = 0; i < MANY; i++) x[i] = (Double)((Long)p[i] + ((Long)shifted[i] << 52));
}

// log(1 + e) for 0 <= e <= 1: twice the artanh of e / (2 + e), whose series ends soon.
static inline void log_of_one_and(const Double (&e)[MANY], Double (&out)[MANY]) {
    Double s[MANY], p[MANY];
    for (int i = 0; i < MANY; i++) s[i] = e[i] / (2.0 + e[i]), p[i] = Double{} + SERIES.odd[17];
    for (int k = 16; k >= 0; k--)
        for (int i = 0; i < MANY; i++) p[i] = p[i] * (s[i] * s[i]) + SERIES.odd[k];
    for (int i = 0; i < MANY; i++) out[i] = 2.0 * s[i] * p[i];
}

extern "C" {

// The state of each task's points: value (tasks, heads, slots, channels) and lse (tasks, heads, slots).
void observe(const Plan* plan, int64_t tasks, int64_t points, const float* data, const float* log_weight, int64_t threads, double* value, double* lse) {
    const Plan& p = *plan;
    const long in = p.widths[0], states = p.heads * p.slots, piece = TILES * TILE;
    const long pieces = (points + piece - 1) / piece;
    threads = std::max<long>(1, std::min<long>(threads, tasks < threads ? pieces : tasks));
    Borrowed borrowed(p, threads);
    std::vector<Scratch> scratch(threads, Scratch(p));
    const auto look = [&](long task, long i, long worker) {
        const float* weight = log_weight ? log_weight + task * points : nullptr;
        const long stop = std::min<long>(points, (i + 1) * piece);
        see(p, data + task * points * in, weight, i * piece, stop, scratch[worker], borrowed.parts[worker]);
    };
    if (tasks < threads) {
        for (long task = 0; task < tasks; task++) {
            if (task) for (Partial& part : borrowed.parts) part.clear(p);
            in_threads(pieces, threads, [&](long i, long worker) { look(task, i, worker); });
            finish(p, borrowed.parts.data(), threads, value + task * states * p.channels, lse + task * states);
        }
        return;
    }
    in_threads(tasks, threads, [&](long task, long worker) {
        borrowed.parts[worker].clear(p);
        for (long i = 0; i < pieces; i++) look(task, i, worker);
        finish(p, &borrowed.parts[worker], 1, value + task * states * p.channels, lse + task * states);
    });
}

// The state of one point for each task: its values (tasks, heads, channels) are every slot's.
void observe_one(const Plan* plan, int64_t tasks, const float* data, double* value, double* lse) {
    const Plan& p = *plan;
    const long in = p.widths[0], width = p.widths[p.layers], c = p.channels;
    const long padded = (p.slots + WHOLE - 1) / WHOLE * WHOLE;
    const std::vector<float> nothing(padded);
    std::vector<float> now, out, keys(c), values(c), scores(padded);
    for (long task = 0; task < tasks; task++) {
        now.assign(data + task * in, data + (task + 1) * in);
        for (long l = 0; l < p.layers; l++) {
            out.resize(p.widths[l + 1]);
            for (long r = 0; r < p.widths[l + 1]; r++) {
                const float x = dot(p.weight[l] + r * p.widths[l], now.data(), p.widths[l]) + p.bias[l][r];
                out[r] = l + 1 < p.layers ? std::max(x, 0.0f) : x;
            }
            now.swap(out);
        }
        float mean = 0, square = 0;
        for (float x : now) mean += x / width;
        for (float x : now) square += (x - mean) * (x - mean) / width;
        const float scale = 1.0f / std::sqrt(square + 1e-5f);
        for (float& x : now) x = (x - mean) * scale;
        for (long head = 0; head < p.heads; head++) {
            rows_by<1>(now.data(), 0, 1, p.key_turned + head * width * c, width, p.key_shift + head * c, 0, keys.data(), c);
            rows_by<1>(now.data(), 0, 1, p.value + head * width * c, width, p.value_shift + head * c, 0, values.data(), c);
            rows_by<1>(keys.data(), 0, 1, p.query_turned + head * c * padded, c, nothing.data(), 0, scores.data(), padded);
            const long at = task * p.heads + head;
            for (long i = 0; i < c; i++) value[at * c + i] = values[i];
            for (long i = 0; i < p.slots; i++) lse[at * p.slots + i] = scores[i] * LN2;
        }
    }
}

// Adds up every `step`-th word of each piece of memory: tells whether weights were written to.
uint64_t sum_of_bits(int64_t pieces, const uint32_t* const* piece, const int64_t* words, const int64_t* step) {
    uint64_t sum = 0;
    for (long i = 0; i < pieces; i++) {
        uint64_t own = 0;
        for (long at = 0; at < words[i]; at += step[i]) own += piece[i][at];
        sum = sum * 1000003 + own;
    }
    return sum;
}

// The union of two sets of points: the algebra's `merge`, for `states` slots of `channels` numbers each.
// Of `other`, `shared` slots that follow one another have one value in common.
void merge(int64_t states, int64_t channels, const double* value, const double* lse, const double* other,
           int64_t shared, const double* other_lse, double* merged, double* merged_lse) {
    constexpr int ROUND = 8 * MANY;
    const double* new_one = other;
    long left = shared;
    for (long at = 0; at < states; at += ROUND) {
        const int count = (int)std::min<long>(ROUND, states - at);
        double mine[ROUND] = {}, theirs[ROUND] = {}, part[ROUND], grown[ROUND];
        std::memcpy(mine, lse + at, count * sizeof(double));
        std::memcpy(theirs, other_lse + at, count * sizeof(double));
        Double gap[MANY], added[MANY];
        for (int i = 0; i < MANY; i++) {
            gap[i] = *(LooseDouble*)(theirs + 8 * i) - *(LooseDouble*)(mine + 8 * i);
            gap[i] = gap[i] > 0.0 ? -gap[i] : gap[i];
        }
        exp_of_negative(gap);
        log_of_one_and(gap, added);
        for (int i = 0; i < MANY; i++) {
            const Double a = *(LooseDouble*)(mine + 8 * i), b = *(LooseDouble*)(theirs + 8 * i);
            *(LooseDouble*)(grown + 8 * i) = (a > b ? a : b) + added[i];
            *(LooseDouble*)(part + 8 * i) = gap[i] / (1.0 + gap[i]);
        }
        std::memcpy(merged_lse + at, grown, count * sizeof(double));
        for (int i = 0; i < count; i++) {  // the value with the larger share is moved towards the other
            const double* own = value + (at + i) * channels;
            const bool more = theirs[i] > mine[i];
            const double *from = more ? new_one : own, *to = more ? own : new_one;
            double* out = merged + (at + i) * channels;
            long c = 0;
            for (; c + 8 <= channels; c += 8) {
                const Double start = *(const LooseDouble*)(from + c), end = *(const LooseDouble*)(to + c);
                *(LooseDouble*)(out + c) = start + (end - start) * part[i];
            }
            for (; c < channels; c++) out[c] = from[c] + (to[c] - from[c]) * part[i];
            if (--left == 0) new_one += channels, left = shared;
        }
    }
}

// Each task's state with one point more: `observe_one` and `merge` without anything between them.
void update(const Plan* plan, int64_t tasks, const float* data, const double* value, const double* lse,
            double* merged, double* merged_lse) {
    const Plan& p = *plan;
    const long states = p.heads * p.slots, numbers = states * p.channels;
    std::vector<double> new_value(p.heads * p.channels), new_lse(states);
    for (long task = 0; task < tasks; task++) {
        observe_one(plan, 1, data + task * p.widths[0], new_value.data(), new_lse.data());
        merge(states, p.channels, value + task * numbers, lse + task * states, new_value.data(), p.slots,
              new_lse.data(), merged + task * numbers, merged_lse + task * states);
    }
}
}
