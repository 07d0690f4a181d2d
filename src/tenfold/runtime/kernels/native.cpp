// The kernels of the CPU backend, behind a plain C interface. `native.py` compiles this file and calls it.
//
// Conventions
//   * Every length, stride and count is int64_t and in elements; `bf16` flags say which of two types a pointer has.
//   * Sums, exponentials and softmax are float32 whatever the element type.
//   * A `Vec` is as wide as the machine's registers; GCC and Clang turn its operators into instructions.
//   * Threads are OpenMP's, as many as the caller says: torch's own pool, since both share one runtime.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int MOST_ROWS = 4;  // rows of queries that share the loads of a value row, by the number of registers
#else
constexpr int LANES = 8;
constexpr int MOST_ROWS = 2;
#endif
#if defined(__AVX512BF16__) && defined(__AVX512F__)
constexpr bool PAIRS = true;  // an instruction multiplies pairs of bfloat16 and adds both products to a float
#else
constexpr bool PAIRS = false;
#endif
constexpr int TILE = 32;        // tokens of keys and values that are scored together
constexpr int TILE_VECS = TILE / LANES;
constexpr int QUERY_ROWS = 96;  // query rows (tokens times heads of a group) that share a tile in a prefill
constexpr int ROW_BLOCK = 8;    // query rows whose scores are summed in registers at once
constexpr int64_t SMALL = 16384;  // elements for which waking other threads takes longer than the work
constexpr float LOWEST = -1e30f;  // a maximum over nothing: finite, so that differences of it are too

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));
typedef uint32_t BitVec __attribute__((vector_size(4 * LANES)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * LANES)));

struct Bf16 {
    uint16_t bits;
};

// ---- elements and vectors

inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline Vec splat(float x) { return Vec{} + x; }

inline Vec load(const float *p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline Vec load(const Bf16 *p) {
    HalfVec h;
    std::memcpy(&h, p, sizeof h);
    return (Vec)(__builtin_convertvector(h, BitVec) << 16);
}
inline void store(float *p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline void store(Bf16 *p, Vec v) {  // rounds to nearest, ties to even; NaN stays NaN
    BitVec bits = (BitVec)v;
    BitVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    BitVec nan = (BitVec)(v != v);
    HalfVec h = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), HalfVec);
    std::memcpy(p, &h, sizeof h);
}
// The first `count` elements, in a loop's last turn fewer than LANES; the others read as zero.
template <class T> inline Vec load(const T *p, int64_t count) {
    if (count >= LANES) return load(p);
    T part[LANES] = {};
    std::memcpy(part, p, count * sizeof(T));
    return load(part);
}
template <class T> inline void store(T *p, Vec v, int64_t count) {
    if (count >= LANES) return store(p, v);
    T part[LANES];
    store(part, v);
    std::memcpy(p, part, count * sizeof(T));
}
template <class T> inline Vec rounded_to(Vec v) {
    T part[LANES];
    store(part, v);
    return load(part);
}

inline float sum(Vec v) {
    float s = 0;
    for (int i = 0; i < LANES; i++) s += v[i];
    return s;
}
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }
inline float largest(Vec v) {
    float m = v[0];
    for (int i = 1; i < LANES; i++) m = std::max(m, v[i]);
    return m;
}

// e^x within 2 units in the last place, zero below -87, infinite above 88; NaN stays NaN.
inline Vec exponential(Vec x) {
    const float magic = 12582912.0f;  // adding 1.5 * 2^23 leaves the nearest integer in the low bits
    Vec clamped = x < -87.0f ? splat(-87.0f) : x;
    clamped = clamped > 88.0f ? splat(88.0f) : clamped;
    Vec shifted = clamped * 1.44269504f + magic;
    Vec n = shifted - magic;
    Vec r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    Vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    BitVec power = ((BitVec)shifted + 127u) << 23;
    Vec y = p * (Vec)power;
    y = x < -87.0f ? Vec{} : y;
    return x > 88.0f ? splat(INFINITY) : y;
}
inline float exponential(float x) { return std::exp(x); }
inline Vec silu(Vec x) { return x / (1.0f + exponential(-x)); }

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Memory of one thread that keeps its size from call to call; 64-byte aligned.
class Scratch {
  public:
    ~Scratch() { std::free(data_); }
    template <class T> T *take(int64_t count) {
        int64_t begin = used_;
        used_ = round_up(used_ + count * int64_t(sizeof(T)), 64);
        return reinterpret_cast<T *>(data_ + begin);
    }
    void reset(int64_t bytes) {
        used_ = 0;
        bytes = round_up(bytes, 4096);
        if (bytes <= size_) return;
        std::free(data_);
        size_ = 0;
        data_ = static_cast<char *>(std::aligned_alloc(4096, bytes));
        if (!data_) throw std::bad_alloc();
        size_ = bytes;
    }

  private:
    char *data_ = nullptr;
    int64_t size_ = 0, used_ = 0;
};
thread_local Scratch scratch;

// ---- paged attention

// Where keys and values are: views [pages, block_size, kv_heads, head_dim] that share their strides.
struct Cache {
    const void *keys, *values;
    int64_t page_stride, token_stride, head_stride;
    int64_t block_size, kv_heads, head_dim;
};

struct Problem {
    Cache cache;
    const void *query;
    void *output;  // both [tokens, heads, head_dim]; tokens of `query` are `query_stride` apart, `output` is dense
    int64_t query_stride, heads, group;
    const int32_t *tables;
    int64_t table_stride;
    const int64_t *starts, *bounds;
    float scale;
};

// One piece of work: some query tokens of one sequence, some heads, a part of the context.
//
// A token alone takes all kv heads in one job, so that a block's rows are read in the order they lie in memory. Tokens
// of a prefill chunk are cut into tiles, each with one kv head. Whatever costs more than a fair share is cut along the
// context: its pieces leave maxima, sums and sums of values in `parts`, and `merge` weighs them up.
struct Job {
    int64_t sequence, first, tokens;  // tokens [first, first + tokens) of the step
    int64_t head, heads;              // kv heads [head, head + heads)
    int64_t begin, end;               // positions of keys
    int64_t part;                     // where in `parts` its result goes, or -1: to the output
};
struct Merge {
    Job job;  // of the whole; `part` is the first piece's
    int64_t pieces;
};

// Pointers to the keys and values of TILE tokens, kv head 0. Beyond the end they repeat the last token: finite numbers
// that get no weight.
template <class T> struct Rows {
    const T *keys[TILE], *values[TILE];
    int64_t count;

    void find(const Problem &p, const int32_t *table, int64_t begin, int64_t end) {
        const Cache &c = p.cache;
        count = std::min<int64_t>(TILE, end - begin);
        int64_t block = begin / c.block_size, offset = begin % c.block_size;
        for (int64_t t = 0; t < TILE; t++) {
            int64_t place = table[block] * c.page_stride + offset * c.token_stride;
            keys[t] = static_cast<const T *>(c.keys) + place;
            values[t] = static_cast<const T *>(c.values) + place;
            if (t + 1 < count && ++offset == c.block_size) offset = 0, block++;
        }
    }
};

// What is read next, to be asked for piece by piece while something else is worked on: blocks are far apart, and the
// hardware does not guess them. All at once would be more than a core can have under way. Null if nothing is next.
template <class T> struct Ahead {
    const T *const *rows;
    int64_t offset;

    // `bytes` of row `t` from element `d` on; to the second level, since tiles of wide heads fill the first.
    inline void ask(int t, int64_t d, int64_t bytes) const {
        if (!rows) return;
        const char *at = reinterpret_cast<const char *>(rows[t] + offset + d);
        for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + b, 0, 2);
    }
};

#if defined(__AVX512F__)
// Sums of sixteen vectors, each in its lane: halves are added as they are interleaved.
inline Vec sums_of_sixteen(const Vec *v) {
    __m512 a[8], b[4], c[2];
    for (int i = 0; i < 8; i++) {
        __m512 x = (__m512)v[2 * i], y = (__m512)v[2 * i + 1];
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
    }
    for (int i = 0; i < 4; i++) {
        __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
        b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    for (int i = 0; i < 2; i++)
        c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
    return (Vec)_mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}
#endif

// The sum of each of TILE vectors.
inline void sums(const Vec *v, float *result) {
#if defined(__AVX512F__)
    for (int i = 0; i < TILE; i += LANES) store(result + i, sums_of_sixteen(v + i));
#else
    for (int i = 0; i < TILE; i++) result[i] = sum(v[i]);
#endif
}

// `total` plus products of queries and keys, a register full of keys; the lanes are summed later.
inline Vec add_products(Vec total, const float *query, const float *key) { return total + load(query) * load(key); }
inline Vec add_products(Vec total, const float *query, const Bf16 *key) { return total + load(query) * load(key); }
#if defined(__AVX512BF16__) && defined(__AVX512F__)
inline Vec add_products(Vec total, const Bf16 *query, const Bf16 *key) {
    return (Vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_loadu_si512(query), (__m512bh)_mm512_loadu_si512(key));
}
#endif

// How a query is kept while it is used: in pairs where an instruction takes them, else as float.
template <class Q, class T> struct Kept {
    typedef float type;
};
template <> struct Kept<Bf16, Bf16> {
    typedef std::conditional<PAIRS, Bf16, float>::type type;
};

// Scores of `G` query rows with the tile's keys: [G][TILE], not yet scaled.
template <int G, class K, class T>
inline void score(const K *query, int64_t dim, const T *const *keys, int64_t offset, float *scores, Ahead<T> ahead) {
    constexpr int STEP = LANES * 4 / sizeof(K);
    constexpr int TOGETHER = G <= 2 ? 4 : 2;
    Vec partial[G][TILE];
    for (int t = 0; t < TILE; t += TOGETHER) {
        Vec total[G][TOGETHER] = {};
        for (int i = 0; i < TOGETHER; i++) ahead.ask(t + i, 0, dim * sizeof(T));
        for (int64_t d = 0; d < dim; d += STEP)
            for (int i = 0; i < TOGETHER; i++)
                for (int g = 0; g < G; g++)
                    total[g][i] = add_products(total[g][i], query + g * dim + d, keys[t + i] + offset + d);
        for (int g = 0; g < G; g++)
            for (int i = 0; i < TOGETHER; i++) partial[g][t + i] = total[g][i];
    }
    for (int g = 0; g < G; g++) sums(partial[g], scores + g * TILE);
}

// One step of the online softmax of a row. Turns scores into weights, updates maximum and sum, returns the factor that
// brings what was summed before to the new maximum.
inline float soften(float *scores, float scale, int64_t count, float &maximum, float &total) {
    IntVec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    Vec s[TILE_VECS], most = splat(LOWEST);
    for (int i = 0; i < TILE_VECS; i++) {
        s[i] = load(scores + i * LANES) * scale;
        s[i] = lane + i * LANES < IntVec{} + int32_t(count) ? s[i] : splat(-INFINITY);
        most = larger(s[i], most);
    }
    float now = std::max(maximum, largest(most));
    Vec sum_of_weights = {};
    for (int i = 0; i < TILE_VECS; i++) {
        Vec weight = exponential(s[i] - now);
        store(scores + i * LANES, weight);
        sum_of_weights += weight;
    }
    float factor = now == maximum ? 1.0f : exponential(maximum - now);
    maximum = now;
    total = total * factor + sum(sum_of_weights);
    return factor;
}

// mixed[G][dim] = factor[G] * mixed + weights[G][TILE] times the tile's values, `N` vectors of it from `d` on.
template <int G, int N, class T>
inline void mix(const float *weights, const float *factor, const T *const *values, int64_t offset, float *mixed,
                int64_t dim, Ahead<T> ahead, int64_t ahead_from) {
    Vec total[G][N];
    for (int g = 0; g < G; g++)
        for (int n = 0; n < N; n++) total[g][n] = load(mixed + g * dim + n * LANES) * factor[g];
    for (int t = 0; t < TILE; t++) {
        Vec value[N];
        ahead.ask(t, ahead_from, N * LANES * sizeof(T));
        for (int n = 0; n < N; n++) value[n] = load(values[t] + offset + n * LANES);
        for (int g = 0; g < G; g++)
            for (int n = 0; n < N; n++) total[g][n] += weights[g * TILE + t] * value[n];
    }
    for (int g = 0; g < G; g++)
        for (int n = 0; n < N; n++) store(mixed + g * dim + n * LANES, total[g][n]);
}

// State of `rows` query rows: maximum and sum of weights [rows] each, then sums of values [rows][dim].
struct Running {
    float *maximum, *total, *mixed;

    static int64_t floats(int64_t rows, int64_t dim) { return rows * (dim + 2); }
    Running(float *at, int64_t rows) : maximum(at), total(at + rows), mixed(at + 2 * rows) {}
    void clear(int64_t rows, int64_t dim) {
        std::fill(maximum, maximum + rows, LOWEST);
        std::fill(total, total + rows, 0.0f);
        std::fill(mixed, mixed + rows * dim, 0.0f);
    }
    Running from(int64_t row, int64_t dim) const {
        Running r = *this;
        r.maximum += row, r.total += row, r.mixed += row * dim;
        return r;
    }
};

// A tile for `G` heads of one token, straight from the arena.
template <int G, class K, class T>
void attend_rows(const K *query, int64_t dim, const Rows<T> &rows, int64_t offset, float scale, Running state,
                 Ahead<T> keys, Ahead<T> values) {
    float scores[G * TILE], factor[G];
    score<G>(query, dim, rows.keys, offset, scores, keys);
    for (int g = 0; g < G; g++)
        factor[g] = soften(scores + g * TILE, scale, rows.count, state.maximum[g], state.total[g]);
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES)
        mix<G, 4>(scores, factor, rows.values, offset + d, state.mixed + d, dim, values, d);
    for (; d < dim; d += LANES)
        mix<G, 1>(scores, factor, rows.values, offset + d, state.mixed + d, dim, values, d);
}

// All heads of a group, at most MOST_ROWS at a time; later ones find the tile in the nearest cache.
template <class K, class T>
void attend_group(const K *query, int64_t group, int64_t dim, const Rows<T> &rows, int64_t offset, float scale,
                  Running state, Ahead<T> keys, Ahead<T> values) {
    int64_t turns = (group + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t turn = 0, g = 0; turn < turns; turn++) {
        int64_t count = (group - g + turns - turn - 1) / (turns - turn);
        const K *q = query + g * dim;
        Running r = state.from(g, dim);
        switch (count) {
        case 1: attend_rows<1>(q, dim, rows, offset, scale, r, keys, values); break;
        case 2: attend_rows<2>(q, dim, rows, offset, scale, r, keys, values); break;
        case 3: attend_rows<3>(q, dim, rows, offset, scale, r, keys, values); break;
        default: attend_rows<4>(q, dim, rows, offset, scale, r, keys, values); break;
        }
        g += count;
        keys.rows = values.rows = nullptr;
    }
}

template <class Q> inline void keep(const Q *from, float *to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = to_float(from[i]);
}
inline void keep(const Bf16 *from, Bf16 *to, int64_t n) { std::memcpy(to, from, n * sizeof(Bf16)); }

// One token over part of its context: tile by tile, all kv heads of a tile after each other.
template <class Q, class T> void attend_token(const Problem &p, const Job &job, Running state) {
    typedef typename Kept<Q, T>::type K;
    const Cache &c = p.cache;
    int64_t dim = c.head_dim, rows_of_job = job.heads * p.group;
    K *query = scratch.take<K>(rows_of_job * dim);
    keep(static_cast<const Q *>(p.query) + job.first * p.query_stride + job.head * p.group * dim, query,
         rows_of_job * dim);
    const int32_t *table = p.tables + job.sequence * p.table_stride;
    Rows<T> tiles[2];
    tiles[0].find(p, table, job.begin, job.end);
    for (int64_t begin = job.begin, i = 0; begin < job.end; begin += TILE, i ^= 1) {
        Rows<T> &now = tiles[i], &next = tiles[i ^ 1];
        bool last = begin + TILE >= job.end;
        if (!last) next.find(p, table, begin + TILE, job.end);
        for (int64_t h = 0; h < job.heads; h++) {
            int64_t offset = (job.head + h) * c.head_stride;
            bool same = h + 1 < job.heads;
            const Rows<T> *rows = same ? &now : last ? nullptr : &next;
            int64_t there = same ? offset + c.head_stride : job.head * c.head_stride;
            attend_group(query + h * p.group * dim, p.group, dim, now, offset, p.scale, state.from(h * p.group, dim),
                         Ahead<T>{rows ? rows->keys : nullptr, there}, Ahead<T>{rows ? rows->values : nullptr, there});
        }
    }
}

// ---- tiles of query tokens, for prefills and for head sizes that do not fill registers
//
// Keys of a tile are copied once, transposed so that a register holds one feature (or a pair of them) of LANES tokens,
// and the values converted to float; both are padded with zeros. A `Unit` is a float or a pair of bfloat16.

#if defined(__AVX512F__)
// 16 by 16 words of 4 bytes.
inline void transpose_block(const uint32_t *from, int64_t from_stride, uint32_t *to, int64_t to_stride) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from + i * from_stride);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        _mm512_storeu_si512(to + i * to_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
        _mm512_storeu_si512(to + (i + 8) * to_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    }
}
#endif

// `units` [TILE][width] to [width][TILE], `width` a multiple of 16.
inline void transpose(const uint32_t *units, int64_t width, uint32_t *result) {
#if defined(__AVX512F__)
    for (int t = 0; t < TILE; t += 16)
        for (int64_t d = 0; d < width; d += 16)
            transpose_block(units + t * width + d, width, result + d * TILE + t, TILE);
#else
    for (int64_t d = 0; d < width; d++)
        for (int t = 0; t < TILE; t++) result[d * TILE + t] = units[t * width + d];
#endif
}

inline Vec add_unit(Vec total, float query, Vec keys, float) { return total + query * keys; }
inline Vec add_unit(Vec total, float query, Vec keys, Bf16) {
#if defined(__AVX512BF16__) && defined(__AVX512F__)
    return (Vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)splat(query), (__m512bh)keys);
#else
    return total;  // never instantiated where PAIRS is false
#endif
}

// Scores of ROW_BLOCK query rows [ROW_BLOCK][width] with transposed keys [width][TILE].
template <class K> void score_block(const float *query, int64_t width, const float *keys, float *scores) {
    constexpr int HALF = LANES == 16 ? ROW_BLOCK : ROW_BLOCK / 4;  // rows whose totals fit the registers
    for (int r0 = 0; r0 < ROW_BLOCK; r0 += HALF) {
        Vec total[HALF][TILE_VECS] = {};
        for (int64_t d = 0; d < width; d++) {
            Vec key[TILE_VECS];
            for (int i = 0; i < TILE_VECS; i++) key[i] = load(keys + d * TILE + i * LANES);
            for (int r = 0; r < HALF; r++)
                for (int i = 0; i < TILE_VECS; i++)
                    total[r][i] = add_unit(total[r][i], query[(r0 + r) * width + d], key[i], K());
        }
        for (int r = 0; r < HALF; r++)
            for (int i = 0; i < TILE_VECS; i++) store(scores + (r0 + r) * TILE + i * LANES, total[r][i]);
    }
}

template <class T> inline void copy_row(const T *from, int64_t n, float *to) {
    for (int64_t d = 0; d < n; d += LANES) store(to + d, load(from + d, n - d));
}
inline void copy_row(const Bf16 *from, int64_t n, Bf16 *to) { std::memcpy(to, from, n * sizeof(Bf16)); }

template <class Q, class T> void attend_tile(const Problem &p, const Job &job, Running state) {
    typedef typename Kept<Q, T>::type K;
    const Cache &c = p.cache;
    int64_t dim = c.head_dim, group = p.group, rows = job.tokens * group;
    int64_t padded = round_up(dim, 16 * 4 / sizeof(K)), width = padded * sizeof(K) / 4;
    int64_t blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK * ROW_BLOCK, wide = round_up(dim, 16);
    K *query = scratch.take<K>(blocks * padded);
    K *staged = scratch.take<K>(TILE * padded);
    float *keys = scratch.take<float>(width * TILE);
    float *values = scratch.take<float>(TILE * wide);
    float *scores = scratch.take<float>(blocks * TILE);
    float *factors = scratch.take<float>(blocks);
    // The sums of values are padded too, and moved to their place at the end.
    float *mixed = scratch.take<float>(blocks * wide);
    std::memset(query, 0, blocks * padded * sizeof(K));
    std::memset(staged, 0, TILE * padded * sizeof(K));
    std::memset(mixed, 0, blocks * wide * sizeof(float));
    std::memset(values, 0, TILE * wide * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        int64_t token = job.first + r / group, head = job.head * group + r % group;
        keep(static_cast<const Q *>(p.query) + token * p.query_stride + head * dim, query + r * padded, dim);
    }
    const float *value_rows[TILE];
    for (int t = 0; t < TILE; t++) value_rows[t] = values + t * wide;
    const int32_t *table = p.tables + job.sequence * p.table_stride;
    int64_t start = p.starts[job.sequence] + job.first - p.bounds[job.sequence];
    int64_t offset = job.head * c.head_stride;
    for (int64_t begin = job.begin; begin < job.end; begin += TILE) {
        Rows<T> tile;
        tile.find(p, table, begin, job.end);
        for (int t = 0; t < TILE; t++) {
            copy_row(tile.keys[t] + offset, dim, staged + t * padded);
            copy_row(tile.values[t] + offset, dim, values + t * wide);
        }
        transpose(reinterpret_cast<const uint32_t *>(staged), width, reinterpret_cast<uint32_t *>(keys));
        for (int64_t r = 0; r < blocks; r += ROW_BLOCK)
            score_block<K>(reinterpret_cast<const float *>(query) + r * width, width, keys, scores + r * TILE);
        for (int64_t r = 0; r < rows; r++) {
            // Causal: a row sees keys up to its own position.
            int64_t visible = std::clamp<int64_t>(start + r / group + 1 - begin, 0, tile.count);
            factors[r] = soften(scores + r * TILE, p.scale, visible, state.maximum[r], state.total[r]);
        }
        constexpr int R = MOST_ROWS;
        constexpr Ahead<float> nothing{nullptr, 0};
        for (int64_t r = rows; r < blocks; r++) {
            factors[r] = 0;
            std::memset(scores + r * TILE, 0, TILE * sizeof(float));
        }
        int64_t d = 0;
        for (; d + 4 * LANES <= wide; d += 4 * LANES)
            for (int64_t r = 0; r < blocks; r += R)
                mix<R, 4>(scores + r * TILE, factors + r, value_rows, d, mixed + r * wide + d, wide, nothing, 0);
        for (; d < wide; d += LANES)
            for (int64_t r = 0; r < blocks; r += R)
                mix<R, 1>(scores + r * TILE, factors + r, value_rows, d, mixed + r * wide + d, wide, nothing, 0);
    }
    for (int64_t r = 0; r < rows; r++) std::memcpy(state.mixed + r * dim, mixed + r * wide, dim * sizeof(float));
}

// Where row `r` of a job goes in the output.
inline int64_t output_place(const Problem &p, const Job &job, int64_t r) {
    int64_t across = job.heads * p.group;
    return ((job.first + r / across) * p.heads + job.head * p.group + r % across) * p.cache.head_dim;
}

template <class Q> void write_row(const Problem &p, const Job &job, int64_t r, const float *mixed, float total) {
    Q *to = static_cast<Q *>(p.output) + output_place(p, job, r);
    int64_t dim = p.cache.head_dim;
    for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(mixed + d, dim - d) / total, dim - d);
}

template <class Q> void merge_row(const Problem &p, const Merge &m, int64_t r, const float *parts, float *sum_of_row) {
    int64_t dim = p.cache.head_dim, rows = m.job.tokens * m.job.heads * p.group, size = Running::floats(rows, dim);
    float maximum = LOWEST, total = 0;
    for (int64_t i = 0; i < m.pieces; i++) maximum = std::max(maximum, parts[m.job.part + i * size + r]);
    std::fill(sum_of_row, sum_of_row + dim, 0.0f);
    for (int64_t i = 0; i < m.pieces; i++) {
        Running piece(const_cast<float *>(parts) + m.job.part + i * size, rows);
        float weight = exponential(piece.maximum[r] - maximum);
        total += weight * piece.total[r];
        for (int64_t d = 0; d < dim; d += LANES)
            store(sum_of_row + d, load(sum_of_row + d, dim - d) + weight * load(piece.mixed + r * dim + d, dim - d),
                  dim - d);
    }
    write_row<Q>(p, m.job, r, sum_of_row, total);
}

struct Schedule {
    int64_t threads;
    std::vector<Job> jobs;
    std::vector<Merge> merges;
    int64_t parts = 0;  // floats
    int64_t most_rows = 0;
};

// What a job costs for every key of its context: the unit is one row of keys and values, read for one group.
inline int64_t weight(const Job &job) { return job.heads * (1 + (job.tokens - 1) / 4); }

// Every job over its whole context.
std::vector<Job> whole_jobs(const Problem &p, int64_t sequences, bool direct) {
    int64_t kv_heads = p.cache.kv_heads, tokens_of_tile = std::max<int64_t>(1, QUERY_ROWS / p.group);
    std::vector<Job> jobs;
    for (int64_t b = 0; b < sequences; b++) {
        int64_t first = p.bounds[b], length = p.bounds[b + 1] - first;
        if (length == 1 && direct) {
            jobs.push_back({b, first, 1, 0, kv_heads, 0, p.starts[b] + 1, -1});
            continue;
        }
        for (int64_t t = 0; t < length; t += tokens_of_tile) {
            int64_t tokens = std::min(tokens_of_tile, length - t);
            for (int64_t h = 0; h < kv_heads; h++)
                jobs.push_back({b, first + t, tokens, h, 1, 0, p.starts[b] + t + tokens, -1});
        }
    }
    return jobs;
}

// Cut the step into jobs of a fair share at most: every thread gets about eight where the work allows, and none is
// shorter than 128 tokens. What one thread has done before another wakes up is left to it alone.
Schedule divide(const Problem &p, int64_t sequences, int64_t threads, bool direct) {
    std::vector<Job> whole = whole_jobs(p, sequences, direct);
    int64_t cost = 0;
    for (const Job &job : whole) cost += job.end * weight(job);
    Schedule s;
    s.threads = cost * p.cache.head_dim <= 2 * SMALL ? 1 : threads;
    int64_t share = cost / (8 * s.threads) + 1;
    for (Job job : whole) {
        int64_t longest = std::max<int64_t>(128, round_up(share / weight(job) + 1, TILE));
        int64_t pieces = s.threads == 1 ? 1 : (job.end + longest - 1) / longest;
        int64_t rows = job.tokens * job.heads * p.group;
        s.most_rows = std::max(s.most_rows, rows);
        if (pieces == 1) {
            s.jobs.push_back(job);
            continue;
        }
        int64_t length = round_up((job.end + pieces - 1) / pieces, TILE), end = job.end;
        pieces = (end + length - 1) / length;
        job.part = s.parts;
        s.merges.push_back({job, pieces});
        for (int64_t i = 0; i < pieces; i++) {
            job.begin = i * length, job.end = std::min(end, job.begin + length), job.part = s.parts;
            s.jobs.push_back(job);
            s.parts += Running::floats(rows, p.cache.head_dim);
        }
    }
    return s;
}

template <class Q, class T> void attend(const Problem &p, int64_t sequences, int64_t threads) {
    int64_t dim = p.cache.head_dim;
    bool direct = dim % (2 * LANES) == 0;  // rows fill registers, of pairs as well
    Schedule s = divide(p, sequences, threads, direct);
    std::unique_ptr<float[]> parts(new float[s.parts]);
    int64_t rows = std::max<int64_t>(s.most_rows, p.group) + ROW_BLOCK;
    int64_t bytes = 4 * ((3 * rows + 3 * TILE) * (dim + 64) + rows * (TILE + 8)) + 16 * 64;
    int64_t jobs = s.jobs.size(), merges = s.merges.size();
#pragma omp parallel num_threads(int(s.threads))
    {
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t j = 0; j < jobs; j++) {
            const Job &job = s.jobs[j];
            int64_t count = job.tokens * job.heads * p.group;
            scratch.reset(bytes);
            float *at = job.part < 0 ? scratch.take<float>(Running::floats(count, dim)) : parts.get() + job.part;
            Running state(at, count);
            state.clear(count, dim);
            if (direct && job.tokens == 1 && job.heads == p.cache.kv_heads) attend_token<Q, T>(p, job, state);
            else attend_tile<Q, T>(p, job, state);
            if (job.part < 0)
                for (int64_t r = 0; r < count; r++)
                    write_row<Q>(p, job, r, state.mixed + r * dim, state.total[r]);
        }
        if (merges) {
#pragma omp barrier
        }
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < merges; i++) {
            scratch.reset(bytes);
            float *row = scratch.take<float>(dim);
            for (int64_t r = 0; r < s.merges[i].job.tokens * s.merges[i].job.heads * p.group; r++)
                merge_row<Q>(p, s.merges[i], r, parts.get(), row);
        }
    }
}

// ---- the gated delta rule

struct Recurrence {
    const void *query, *key, *value, *beta;
    const float *decay;
    void *output;  // [tokens, value_heads, value_dim]
    int64_t query_stride, key_stride, value_stride, beta_stride, decay_stride;  // from token to token
    float *states;
    int64_t slot_stride, key_heads, value_heads, key_dim, value_dim;
};

// The vector at length one times `length`, as float; `epsilon` is added to its square.
template <class T> void unit(const T *x, int64_t n, float length, float *result) {
    Vec squares = {};
    for (int64_t i = 0; i < n; i += LANES) {
        Vec v = load(x + i, n - i);
        squares += v * v;
        store(result + i, v);
    }
    Vec factor = splat(length / std::sqrt(sum(squares) + 1e-6f));
    for (int64_t i = 0; i < n; i += LANES) store(result + i, load(result + i) * factor);
}

// One token, `N` vectors of columns of one state: columns do not depend on each other. The first pass reads the state
// for key and query at once, the second, which finds it in the cache, writes it; the output follows from the old state,
// q S' = decay (q S) + (q k) u. `columns` are those that exist, fewer than a vector only where N is 1.
template <int N, class T>
void advance(float *state, int64_t stride, int64_t key_dim, const float *query, const float *key, float product,
             float decay, float beta, const T *value, T *output, int64_t columns) {
    Vec by_key[N] = {}, by_query[N] = {};
    for (int64_t i = 0; i < key_dim; i++)
        for (int n = 0; n < N; n++) {
            Vec row = load(state + i * stride + n * LANES, columns);
            by_key[n] += key[i] * row;
            by_query[n] += query[i] * row;
        }
    Vec written[N];
    for (int n = 0; n < N; n++) {
        written[n] = beta * (load(value + n * LANES, columns) - decay * by_key[n]);
        store(output + n * LANES, decay * by_query[n] + product * written[n], columns);
    }
    for (int64_t i = 0; i < key_dim; i++)
        for (int n = 0; n < N; n++) {
            float *at = state + i * stride + n * LANES;
            store(at, decay * load(at, columns) + key[i] * written[n], columns);
        }
}

// The tokens of one sequence after each other on the state of one head, which stays in the cache.
template <class T>
void recur(const Recurrence &r, int64_t begin, int64_t end, int64_t place, int64_t head, float *query, float *key) {
    int64_t K = r.key_dim, V = r.value_dim, key_head = head / (r.value_heads / r.key_heads);
    float *state = r.states + place * r.slot_stride + head * K * V;
    constexpr int N = LANES == 16 ? 8 : 4;
    for (int64_t t = begin; t < end; t++) {
        unit(static_cast<const T *>(r.query) + t * r.query_stride + key_head * K, K, 1 / std::sqrt(float(K)), query);
        unit(static_cast<const T *>(r.key) + t * r.key_stride + key_head * K, K, 1, key);
        Vec products = {};
        for (int64_t i = 0; i < K; i += LANES) products += load(query + i, K - i) * load(key + i, K - i);
        float product = sum(products), decay = std::exp(r.decay[t * r.decay_stride + head]);
        float beta = to_float(static_cast<const T *>(r.beta)[t * r.beta_stride + head]);
        const T *value = static_cast<const T *>(r.value) + t * r.value_stride + head * V;
        T *output = static_cast<T *>(r.output) + (t * r.value_heads + head) * V;
        int64_t v = 0;
        for (; v + N * LANES <= V; v += N * LANES)
            advance<N>(state + v, V, K, query, key, product, decay, beta, value + v, output + v, N * LANES);
        for (; v < V; v += LANES)
            advance<1>(state + v, V, K, query, key, product, decay, beta, value + v, output + v, V - v);
    }
}

template <class T>
void delta_rule(const Recurrence &r, const int64_t *bounds, const int64_t *places, int64_t sequences, int64_t threads) {
    int64_t items = sequences * r.value_heads, elements = bounds[sequences] * r.value_heads * r.key_dim * r.value_dim;
#pragma omp parallel for num_threads(int(threads)) schedule(dynamic, 1) if (elements > SMALL)
    for (int64_t i = 0; i < items; i++) {
        int64_t b = i / r.value_heads;
        scratch.reset(8 * (r.key_dim + 64));
        float *query = scratch.take<float>(r.key_dim + LANES), *key = scratch.take<float>(r.key_dim + LANES);
        recur<T>(r, bounds[b], bounds[b + 1], places[b], i % r.value_heads, query, key);
    }
}

// ---- causal convolution

// Channels in blocks, each for all sequences: its taps are converted once.
template <class T>
void convolve(const T *x, int64_t x_stride, const T *weight, T *tails, int64_t slot_stride, int64_t tap_stride,
              T *output, const int64_t *bounds, const int64_t *places, int64_t sequences, int64_t channels,
              int64_t width, bool activate, int64_t threads) {
    constexpr int64_t BLOCK = 128;
    int64_t reach = width - 1;
#pragma omp parallel for num_threads(int(threads)) schedule(static) if (bounds[sequences] * channels > SMALL)
    for (int64_t first = 0; first < channels; first += BLOCK) {
        int64_t count = std::min(BLOCK, channels - first);
        scratch.reset(4 * width * BLOCK);
        float *taps = scratch.take<float>(width * BLOCK);
        for (int64_t i = 0; i < width; i++)
            for (int64_t n = 0; n < count; n++) taps[i * BLOCK + n] = to_float(weight[(first + n) * width + i]);
        for (int64_t b = 0; b < sequences; b++) {
            T *tail = tails + places[b] * slot_stride + first;
            int64_t length = bounds[b + 1] - bounds[b];
            const T *inputs = x + bounds[b] * x_stride + first;
            auto input = [&](int64_t t) -> const T * {
                return t < 0 ? tail + (reach + t) * tap_stride : inputs + t * x_stride;
            };
            for (int64_t t = 0; t < length; t++) {
                T *to = output + (bounds[b] + t) * channels + first;
                for (int64_t n = 0; n < count; n += LANES) {
                    Vec total = {};
                    for (int64_t i = 0; i < width; i++)
                        total += load(taps + i * BLOCK + n) * load(input(t - reach + i) + n, count - n);
                    if (activate) total = silu(rounded_to<T>(total));
                    store(to + n, total, count - n);
                }
            }
            for (int64_t i = 0; i < reach; i++)
                std::memmove(tail + i * tap_stride, input(length - reach + i), count * sizeof(T));
        }
    }
}

// ---- element by element


// `between` rounds the normalised value to T before the weight meets it.
template <class T, class W>
void rms_norm(const T *x, int64_t x_stride, const T *residual, int64_t residual_stride, T *sums_out, const W *weight,
              T *output, int64_t rows, int64_t width, float epsilon, float offset, bool between, int64_t threads) {
#pragma omp parallel for num_threads(int(threads)) schedule(static) if (rows * width > SMALL)
    for (int64_t r = 0; r < rows; r++) {
        const T *from = x + r * x_stride;
        Vec squares = {};
        for (int64_t i = 0; i < width; i += LANES) {
            Vec v = load(from + i, width - i);
            if (residual) {
                v = rounded_to<T>(v + load(residual + r * residual_stride + i, width - i));
                store(sums_out + r * width + i, v, width - i);
            }
            squares += v * v;
        }
        if (residual) from = sums_out + r * width;
        Vec factor = splat(1 / std::sqrt(sum(squares) / float(width) + epsilon));
        for (int64_t i = 0; i < width; i += LANES) {
            Vec v = load(from + i, width - i) * factor;
            if (between) v = rounded_to<T>(v);
            store(output + r * width + i, v * (load(weight + i, width - i) + offset), width - i);
        }
    }
}

template <class T>
void rotate(const T *x, int64_t token_stride, int64_t head_stride, const T *cosines, const T *sines, T *output,
            int64_t tokens, int64_t heads, int64_t dim, int64_t rotary, int64_t threads) {
    int64_t half = rotary / 2;
#pragma omp parallel for num_threads(int(threads)) schedule(static) if (tokens * heads * dim > SMALL)
    for (int64_t t = 0; t < tokens; t++) {
        const T *c = cosines + t * rotary, *s = sines + t * rotary;
        for (int64_t h = 0; h < heads; h++) {
            const T *from = x + t * token_stride + h * head_stride;
            T *to = output + (t * heads + h) * dim;
            for (int64_t i = 0; i < half; i += LANES) {
                int64_t n = half - i;
                Vec a = load(from + i, n), b = load(from + half + i, n);
                store(to + i, a * load(c + i, n) - b * load(s + i, n), n);
                store(to + half + i, b * load(c + half + i, n) + a * load(s + half + i, n), n);
            }
            std::memcpy(to + rotary, from + rotary, (dim - rotary) * sizeof(T));
        }
    }
}

template <class T>
void silu_gate(const T *x, int64_t x_stride, T *output, int64_t rows, int64_t inner, int64_t threads) {
#pragma omp parallel for num_threads(int(threads)) schedule(static) if (rows * inner > SMALL) collapse(2)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t first = 0; first < inner; first += 1024)
            for (int64_t i = first; i < std::min(inner, first + 1024); i += LANES) {
                const T *gate = x + r * x_stride + i;
                Vec v = rounded_to<T>(silu(load(gate, inner - i))) * load(gate + inner, inner - i);
                store(output + r * inner + i, v, inner - i);
            }
}

}  // namespace

extern "C" {

// Increased with every change of a signature below.
int64_t tenfold_interface() { return 1; }

// key and value [tokens, kv_heads, head_dim] to places[tokens], each page times block size plus offset. Rows are copied
// as bytes: `row` and all strides count them.
void tenfold_store(char *keys, char *values, int64_t page_stride, int64_t token_stride, int64_t block_size,
                   const char *key, const char *value, int64_t key_stride, int64_t value_stride, const int64_t *places,
                   int64_t tokens, int64_t row, int64_t threads) {
#pragma omp parallel for num_threads(int(threads)) schedule(static) if (tokens * row > 1 << 16)
    for (int64_t t = 0; t < tokens; t++) {
        int64_t at = places[t] / block_size * page_stride + places[t] % block_size * token_stride;
        std::memcpy(keys + at, key + t * key_stride, row);
        std::memcpy(values + at, value + t * value_stride, row);
    }
}

// Causal attention of every query token over its own sequence: see `Problem`.
void tenfold_attend(const void *query, int64_t query_bf16, int64_t query_stride, void *output, const void *keys,
                    const void *values, int64_t cache_bf16, int64_t page_stride, int64_t token_stride,
                    int64_t head_stride, int64_t block_size, int64_t heads, int64_t kv_heads, int64_t head_dim,
                    const int32_t *tables, int64_t table_stride, const int64_t *starts, const int64_t *bounds,
                    int64_t sequences, float scale, int64_t threads) {
    Problem p{{keys, values, page_stride, token_stride, head_stride, block_size, kv_heads, head_dim},
              query, output, query_stride, heads, heads / kv_heads, tables, table_stride, starts, bounds, scale};
    if (query_bf16) cache_bf16 ? attend<Bf16, Bf16>(p, sequences, threads) : attend<Bf16, float>(p, sequences, threads);
    else cache_bf16 ? attend<float, Bf16>(p, sequences, threads) : attend<float, float>(p, sequences, threads);
}

// The gated delta rule on the states at places[sequences], tokens bounds[b] to bounds[b + 1] after each other.
void tenfold_delta_rule(const void *query, const void *key, const void *value, const void *beta, const float *decay,
                        void *output, int64_t bf16, int64_t query_stride, int64_t key_stride, int64_t value_stride,
                        int64_t beta_stride, int64_t decay_stride, float *states, int64_t slot_stride,
                        int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim,
                        const int64_t *bounds, const int64_t *places, int64_t sequences, int64_t threads) {
    Recurrence r{query, key, value, beta, decay, output, query_stride, key_stride, value_stride, beta_stride,
                 decay_stride, states, slot_stride, key_heads, value_heads, key_dim, value_dim};
    bf16 ? delta_rule<Bf16>(r, bounds, places, sequences, threads)
         : delta_rule<float>(r, bounds, places, sequences, threads);
}

// Causal convolution of every channel, with tails [slots, width - 1, channels] that are read and then replaced.
void tenfold_convolve(const void *x, int64_t bf16, int64_t x_stride, const void *weight, void *tails,
                      int64_t slot_stride, int64_t tap_stride, void *output, const int64_t *bounds,
                      const int64_t *places, int64_t sequences, int64_t channels, int64_t width, int64_t activate,
                      int64_t threads) {
    if (bf16)
        convolve(static_cast<const Bf16 *>(x), x_stride, static_cast<const Bf16 *>(weight), static_cast<Bf16 *>(tails),
                 slot_stride, tap_stride, static_cast<Bf16 *>(output), bounds, places, sequences, channels, width,
                 activate, threads);
    else
        convolve(static_cast<const float *>(x), x_stride, static_cast<const float *>(weight),
                 static_cast<float *>(tails), slot_stride, tap_stride, static_cast<float *>(output), bounds, places,
                 sequences, channels, width, activate, threads);
}

// Root mean square norm of rows; with `residual`, of x + residual, which `sums` gets. The weight may be float for bf16.
void tenfold_rms_norm(const void *x, int64_t bf16, int64_t x_stride, const void *residual, int64_t residual_stride,
                      void *sums, const void *weight, int64_t weight_bf16, void *output, int64_t rows, int64_t width,
                      float epsilon, float offset, int64_t between, int64_t threads) {
    auto run = [&](auto *in, auto *scale) {
        typedef std::remove_const_t<std::remove_pointer_t<decltype(in)>> T;
        rms_norm(in, x_stride, static_cast<const T *>(residual), residual_stride, static_cast<T *>(sums), scale,
                 static_cast<T *>(output), rows, width, epsilon, offset, between, threads);
    };
    if (!bf16) run(static_cast<const float *>(x), static_cast<const float *>(weight));
    else if (weight_bf16) run(static_cast<const Bf16 *>(x), static_cast<const Bf16 *>(weight));
    else run(static_cast<const Bf16 *>(x), static_cast<const float *>(weight));
}

// Rotary positions on x [tokens, heads, dim]; cosines and sines are [tokens, rotary], what lies beyond is copied.
void tenfold_rotate(const void *x, int64_t bf16, int64_t token_stride, int64_t head_stride, const void *cosines,
                    const void *sines, void *output, int64_t tokens, int64_t heads, int64_t dim, int64_t rotary,
                    int64_t threads) {
    auto run = [&](auto *in) {
        typedef std::remove_const_t<std::remove_pointer_t<decltype(in)>> T;
        rotate(in, token_stride, head_stride, static_cast<const T *>(cosines), static_cast<const T *>(sines),
               static_cast<T *>(output), tokens, heads, dim, rotary, threads);
    };
    bf16 ? run(static_cast<const Bf16 *>(x)) : run(static_cast<const float *>(x));
}

// silu of the first half of each row [2 * inner] times the second.
void tenfold_silu_gate(const void *x, int64_t bf16, int64_t x_stride, void *output, int64_t rows, int64_t inner,
                       int64_t threads) {
    if (bf16) silu_gate(static_cast<const Bf16 *>(x), x_stride, static_cast<Bf16 *>(output), rows, inner, threads);
    else silu_gate(static_cast<const float *>(x), x_stride, static_cast<float *>(output), rows, inner, threads);
}

// What a benchmark holds kernels against: read memory once, in order, on all threads. Returns a sum of it.
int64_t tenfold_read(const int64_t *data, int64_t count, int64_t threads) {
    int64_t total = 0;
#pragma omp parallel for num_threads(int(threads)) schedule(static) reduction(+ : total)
    for (int64_t i = 0; i < count; i++) total += data[i];
    return total;
}
}
