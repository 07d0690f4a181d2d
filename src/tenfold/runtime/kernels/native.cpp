// The CPU backend: the operations of a forward pass, and the loop that runs a recorded program of them.
//
// `program.py` records a model once as an array of operations, each one of the structs below; `tenfold_run` executes all
// of them for one step inside one parallel region. Threads share the items of an operation and meet before the next one.
//
// Conventions
//   * Counts and strides are int64_t and in elements. Activations are rows, one for each token, of bfloat16 or float.
//   * Sums, exponentials and softmax are float32 whatever the element type; weights of norms and biases are float32.
//   * A `Vec` is as wide as the machine's registers; GCC and Clang turn its operators into instructions. Intrinsics are
//     used where a processor multiplies pairs of bfloat16, or quads of bytes, and adds the products to one number.
//   * Two bfloat16 that are multiplied by one such instruction lie side by side and make up a `Unit`; a float is one too.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>
#include <omp.h>
#include <sched.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int PANEL_ROWS = 12;     // rows of a product that are summed in registers at once
constexpr int BYTE_ROWS = 6;       // the same for quantised weights, which need more registers
constexpr int ATTENTION_ROWS = 6;  // rows of queries that are scored at once
#else
constexpr int LANES = 8;
constexpr int PANEL_ROWS = 4;
constexpr int BYTE_ROWS = 2;
constexpr int ATTENTION_ROWS = 2;
#endif
#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define TENFOLD_PAIRS 1
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#define TENFOLD_QUADS 1
#endif
constexpr int PANEL = 2 * LANES;       // columns of a weight that lie together
constexpr int SUB_BLOCK = 16;          // tokens whose keys lie side by side
constexpr int TILE = 4 * LANES;        // tokens that are scored together
constexpr int64_t CHUNK_ROWS = 96;     // rows of a product that make one piece of work
constexpr int64_t QUERY_ROWS = 96;     // rows of queries (tokens times heads of a group) that make one piece
constexpr int64_t GROUP = 32;          // inputs that share a scale in grouped weights and in quantised rows
constexpr float LOWEST = -1e30f;       // a maximum over nothing: finite, so that differences of it are too

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
#if defined(TENFOLD_PAIRS)
    __m256bh h = _mm512_cvtneps_pbh((__m512)v);
#else
    BitVec bits = (BitVec)v;
    BitVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    BitVec nan = (BitVec)(v != v);
    HalfVec h = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), HalfVec);
#endif
    std::memcpy(p, &h, sizeof h);
}
// Asks for `count` elements that will be read, or read and written, soon.
template <class T> inline void ask_for(const T *p, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(p + i);
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
template <> inline Vec rounded_to<float>(Vec v) { return v; }

inline float sum(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s = 0;
    for (int i = 0; i < LANES; i++) s += v[i];
    return s;
#endif
}
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }
inline float largest(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float m = v[0];
    for (int i = 1; i < LANES; i++) m = std::max(m, v[i]);
    return m;
#endif
}
inline IntVec lanes() {
    IntVec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return lane;
}

// 2^x for x of at most 126, nothing far below 0: within float32's precision, or 8e-5 where a bfloat16 is made of it.
template <bool EXACT> inline Vec power_of_two(Vec x) {
    x = larger(x, splat(-126.0f));
    const float magic = 12582912.0f;  // adding 1.5 * 2^23 leaves the nearest integer in the low bits
    Vec shifted = x + magic, r = x - (shifted - magic), p;
    if constexpr (EXACT) {
        p = splat(1.53458111e-4f);
        p = p * r + 1.33999315e-3f;
        p = p * r + 9.61848896e-3f;
        p = p * r + 5.55032878e-2f;
        p = p * r + 2.40226469e-1f;
        p = p * r + 6.93147206e-1f;
        p = p * r + 1.0f;
    } else {
        p = splat(5.51716601e-2f);
        p = p * r + 2.42611138e-1f;
        p = p * r + 6.93260989e-1f;
        p = p * r + 9.99928073e-1f;
    }
    return (Vec)((BitVec)p + ((BitVec)shifted << 23));
}
// e^x within 2 units in the last place, zero below -87, infinite above 88; NaN stays NaN.
inline Vec exponential(Vec x) {
    const float magic = 12582912.0f;
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
inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exponential(-x)); }
inline Vec tanh(Vec x) { return 1.0f - 2.0f / (1.0f + exponential(2.0f * x)); }

// x sigmoid(x), as exactly as a T holds it.
template <class T> inline Vec silu(Vec x) {
    if constexpr (std::is_same<T, float>::value) return x / (1.0f + exponential(-x));
    Vec power = x * -1.44269504f;
    power = power > 126.0f ? splat(126.0f) : power;
    Vec y = x / (1.0f + power_of_two<false>(power));
    return x < -87.0f ? Vec{} : y;
}

enum Activation { SILU, GELU_TANH, RELU };
template <class T> inline Vec activate(Vec x, int64_t kind) {
    if (kind == SILU) return silu<T>(x);
    if (kind == GELU_TANH) return 0.5f * x * (1.0f + tanh(0.79788456f * (x + 0.044715f * x * x * x)));
    return x < 0.0f ? Vec{} : x;
}

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline int64_t ceiling(int64_t n, int64_t of) { return (n + of - 1) / of; }

// Products of one unit of a row, the same for all lanes, with a unit in each lane; added to `total`.
inline Vec add_products(Vec total, const float *x, const float *weights) { return total + *x * load(weights); }
inline Vec add_products(Vec total, const Bf16 *x, const Bf16 *weights) {
#if defined(TENFOLD_PAIRS)
    uint32_t pair;
    std::memcpy(&pair, x, 4);
    return (Vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(pair),
                                 (__m512bh)_mm512_loadu_si512(weights));
#else
    BitVec w;
    std::memcpy(&w, weights, sizeof w);
    total += to_float(x[0]) * (Vec)(w << 16);
    return total + to_float(x[1]) * (Vec)(w & 0xffff0000u);
#endif
}
template <class T> constexpr int unit = 4 / sizeof(T);

// Memory of one thread that keeps its size from call to call; 64-byte aligned.
class Scratch {
  public:
    ~Scratch() { std::free(data_); }
    void restart() { used_ = 0; }
    template <class T> T *take(int64_t count) {
        int64_t begin = used_;
        used_ += round_up(count * int64_t(sizeof(T)), 64);
        return reinterpret_cast<T *>(data_ + begin);
    }
    bool reserve(int64_t bytes) {
        bytes = round_up(bytes, 4096);
        if (bytes <= size_) return true;
        std::free(data_);
        data_ = static_cast<char *>(std::aligned_alloc(4096, bytes));
        size_ = data_ ? bytes : 0;
        return data_ != nullptr;
    }

  private:
    char *data_ = nullptr;
    int64_t size_ = 0, used_ = 0;
};
thread_local Scratch scratch;

// ---- a step, and the threads that share it

struct Step {
    int64_t tokens, sampled, sequences;
    const int64_t *token_ids, *positions, *places, *samples;
    const int64_t *starts, *bounds, *slots;
    const int32_t *tables;
    int64_t table_stride;
};

// The threads of a step. Each begins with its own part of an operation's items, the same part of every operation of as
// many, and then takes what others have left. So a thread that is held up by something else on the machine leaves its
// work to the others, and otherwise finds in its cache what it wrote itself: threads may well share no cache.
class Team {
  public:
    explicit Team(int64_t threads) : threads_(threads), members_(threads) {}

    // How many there turned out to be, said by one of them before any other call.
    void set_threads(int64_t threads) { threads_ = threads; }
    // Where the part of the calling thread begins, of `items`.
    int64_t part(int64_t items) const { return items * omp_get_thread_num() / threads_; }

    // Calls `work(item, end)` for the items that the calling thread takes; those up to `end` are likely to be its next.
    // Between this and the next call all threads have to meet.
    template <class F> void share(int64_t items, F work) {
        int64_t me = omp_get_thread_num();
        int phase = members_[me].phase++ % 2;
        // Nobody uses the other counter: all have met since, and will before they do again.
        members_[me].taken[1 - phase].store(0, std::memory_order_relaxed);
        for (int64_t i = 0; i < threads_; i++) {
            int64_t whose = (me + i) % threads_, begin = items * whose / threads_, end = items * (whose + 1) / threads_;
            std::atomic<int64_t> &taken = members_[whose].taken[phase];
            for (;;) {
                if (begin + taken.load(std::memory_order_relaxed) >= end) break;
                int64_t item = begin + taken.fetch_add(1, std::memory_order_relaxed);
                if (item >= end) break;
                work(item, end);
            }
        }
    }
    // Returns once all threads are here; what each wrote before is then seen by all.
    void meet() {
        if (threads_ == 1) return;
        int64_t turn = turn_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_release);
            return;
        }
        for (int64_t spins = 0; turn_.load(std::memory_order_acquire) == turn; spins++) {
#if defined(__x86_64__)
            if (spins < 2000) __builtin_ia32_pause();
            else
#endif
                sched_yield();
        }
    }

  private:
    struct alignas(64) Member {
        std::atomic<int64_t> taken[2] = {};
        int64_t phase = 0;
    };
    int64_t threads_;
    std::vector<Member> members_;
    alignas(64) std::atomic<int64_t> arrived_{0};
    alignas(64) std::atomic<int64_t> turn_{0};
};

// Rows of activations: row `t` begins `t * stride` elements after `data`.
struct Rows {
    char *data;
    int64_t stride;
    template <class T> T *row(int64_t t) const { return reinterpret_cast<T *>(data) + t * stride; }
};

enum Kind { EMBED, ANGLES, NORM, SELECT, LINEAR, ATTENTION, CONVOLVE, DELTA_RULE, GATED_NORM, SIGMOID_GATE };
enum Format { FLOAT, BFLOAT16, INT8, INT8_GROUPS, INT4_GROUPS };

// ---- embedding, norms and gates

// out[t] = table[token_ids[t]]
struct Embed {
    int64_t kind;
    const void *table;
    int64_t width;
    Rows out;
};
template <class T> void run(const Embed &op, const Step &s, Team &team) {
    team.share(s.tokens, [&](int64_t t, int64_t) {
        std::memcpy(op.out.row<T>(t), static_cast<const T *>(op.table) + s.token_ids[t] * op.width,
                    op.width * sizeof(T));
    });
}

// Cosines and sines [tokens, half] of rotary positions, float32.
struct Angles {
    int64_t kind;
    const float *frequencies;
    int64_t half;
    float scaling;
    Rows cosines, sines;
};
template <class T> void run(const Angles &op, const Step &s, Team &team) {
    team.share(s.tokens, [&](int64_t t, int64_t) {
        for (int64_t i = 0; i < op.half; i++) {
            float angle = float(s.positions[t]) * op.frequencies[i];
            op.cosines.row<float>(t)[i] = std::cos(angle) * op.scaling;
            op.sines.row<float>(t)[i] = std::sin(angle) * op.scaling;
        }
    });
}

template <class T> inline Vec root_mean_square(const T *x, int64_t width, float epsilon) {
    Vec squares = {};
    for (int64_t i = 0; i < width; i += LANES) {
        Vec v = load(x + i, width - i);
        squares += v * v;
    }
    return splat(1 / std::sqrt(sum(squares) / float(width) + epsilon));
}
// `rounded` rounds the normalised value to T before the weight meets it.
template <class T, class O>
inline void normalise(const T *x, O *out, const float *weight, int64_t width, float epsilon, bool rounded) {
    Vec factor = root_mean_square(x, width, epsilon);
    for (int64_t i = 0; i < width; i += LANES) {
        Vec v = load(x + i, width - i) * factor;
        if (rounded) v = rounded_to<T>(v);
        store(out + i, v * load(weight + i, width - i), width - i);
    }
}

// Root mean square normalisation of every row, or of those that are sampled.
struct Norm {
    int64_t kind;
    Rows x, out;
    const float *weight;
    int64_t width;
    float epsilon;
    int64_t rounded, sampled;
};
template <class T> void run(const Norm &op, const Step &s, Team &team) {
    team.share(op.sampled ? s.sampled : s.tokens, [&](int64_t t, int64_t until) {
        if (t + 1 < until) ask_for(op.x.row<T>(t + 1), op.width);
        normalise(op.x.row<T>(t), op.out.row<T>(t), op.weight, op.width, op.epsilon, op.rounded);
    });
}

// out[i] = x[samples[i]]
struct Select {
    int64_t kind;
    Rows x, out;
    int64_t width;
};
template <class T> void run(const Select &op, const Step &s, Team &team) {
    team.share(s.sampled, [&](int64_t i, int64_t) {
        std::memcpy(op.out.row<T>(i), op.x.row<T>(s.samples[i]), op.width * sizeof(T));
    });
}

// Heads of x, dense within a row, normalised and multiplied by silu(gate); in place.
struct GatedNorm {
    int64_t kind;
    Rows x, gate;
    const float *weight;
    int64_t heads, dim;
    float epsilon;
};
template <class T> void run(const GatedNorm &op, const Step &s, Team &team) {
    team.share(s.tokens, [&](int64_t t, int64_t) {
        for (int64_t h = 0; h < op.heads; h++) {
            T *x = op.x.row<T>(t) + h * op.dim;
            const T *gate = op.gate.row<T>(t) + h * op.dim;
            Vec factor = root_mean_square(x, op.dim, op.epsilon);
            for (int64_t i = 0; i < op.dim; i += LANES) {
                int64_t n = op.dim - i;
                Vec v = rounded_to<T>(load(x + i, n) * factor) * load(op.weight + i, n);
                store(x + i, v * silu<T>(load(gate + i, n)), n);
            }
        }
    });
}

// Heads of x, dense within a row, times sigmoid(gate), whose heads are `gate_head_stride` apart; in place.
struct SigmoidGate {
    int64_t kind;
    Rows x, gate;
    int64_t gate_head_stride, heads, dim;
};
template <class T> void run(const SigmoidGate &op, const Step &s, Team &team) {
    team.share(s.tokens, [&](int64_t t, int64_t) {
        for (int64_t h = 0; h < op.heads; h++) {
            T *x = op.x.row<T>(t) + h * op.dim;
            const T *gate = op.gate.row<T>(t) + h * op.gate_head_stride;
            for (int64_t i = 0; i < op.dim; i += LANES) {
                int64_t n = op.dim - i;
                store(x + i, load(x + i, n) * rounded_to<T>(sigmoid(load(gate + i, n))), n);
            }
        }
    });
}

// ---- matrix products
//
// A weight [outputs, inputs] is packed into panels of PANEL columns (outputs), each with all its inputs: a unit of the
// first LANES columns, the same unit of the others, the next unit, and so on. Columns beyond the last are zero. A panel
// of a gated product has LANES columns of the gate and the same ones of what it gates.
//
// INT8 weights are bytes q of which w = scale (q - 128), one scale for a column; in groups, every GROUP inputs have their
// own, and INT4 ones are halves of bytes with w = scale q + least. Rows are quantised as they come, to signed bytes with
// a scale for every GROUP inputs whatever the weight's format: a few inputs are far larger than the others, which one
// scale for all would round to little or nothing. With the sums s of a group's bytes, x w = (q x) scale + s least. A word
// has four inputs; of INT4 weights eight, the first four in the low halves.

struct Linear {
    int64_t kind;
    Rows x, out, residual;  // residual.data may be null
    const void *weight;
    const float *bias, *scales, *least;  // bias may be null; least is for INT4_GROUPS
    int64_t format, inputs, outputs, gated, activation, sampled, float_out;
    // of a thread's team, for quantised weights: bytes [rows, inputs], scales and sums of bytes [rows, groups]; beside
    // INT8 weights a row's first sum is that of all its groups, each times its scale
    int8_t *bytes;
    float *row_scales, *row_sums;
};

inline int64_t panels_of(const Linear &op) { return ceiling(op.outputs, op.gated ? PANEL / 2 : PANEL); }

// The items of a product: CHUNK_ROWS rows with one panel after the other, then the rows that follow. So threads share
// many rows by rows, and a few by panels.
struct ProductItems {
    int64_t rows, panels;
    int64_t together;  // panels of an item: two gated ones make a cache line of a row, which only one thread writes then
    int64_t units;     // items of the same rows
    int64_t count;

    ProductItems(const Linear &op, const Step &s)
        : rows(op.sampled ? s.sampled : s.tokens), panels(panels_of(op)), together(op.gated ? 2 : 1),
          units(ceiling(panels, together)), count(units * ceiling(rows, CHUNK_ROWS)) {}
    int64_t panel_of(int64_t item) const { return item % units * together; }
    int64_t row_of(int64_t item) const { return item / units * CHUNK_ROWS; }
};

// Adds bias and residual, or gates, and stores one row of a panel.
template <class T> inline void finish(const Linear &op, int64_t row, int64_t panel, Vec a, Vec b) {
    if (op.gated) {
        int64_t column = panel * LANES, count = op.outputs - column;
        if (op.bias) {
            a += load(op.bias + column, count);
            b += load(op.bias + op.outputs + column, count);
        }
        Vec gate = rounded_to<T>(activate<T>(rounded_to<T>(a), op.activation));
        store(op.out.row<T>(row) + column, gate * rounded_to<T>(b), count);
        return;
    }
    for (int v = 0; v < 2; v++, a = b) {
        int64_t column = panel * PANEL + v * LANES, count = op.outputs - column;
        if (count <= 0) return;
        if (op.bias) a += load(op.bias + column, count);
        if (op.residual.data) a = rounded_to<T>(a) + load(op.residual.row<T>(row) + column, count);
        if (op.float_out) store(op.out.row<float>(row) + column, a, count);
        else store(op.out.row<T>(row) + column, a, count);
    }
}

// Where a panel of a weight begins, of any format.
inline const char *panel_at(const Linear &op, int64_t panel) {
    constexpr int64_t halves[] = {8, 4, 2, 2, 1};  // of bytes, of an input by its format
    return static_cast<const char *>(op.weight) + panel * PANEL * op.inputs * halves[op.format] / 2;
}

// Asks for as many bytes as PANEL units have.
inline void ask_ahead(const char *ahead) {
    for (int64_t b = 0; b < PANEL * 4; b += 64) __builtin_prefetch(ahead + b, 0, 2);
}

template <int M, class T> void multiply_tile(const Linear &op, int64_t row, int64_t panel, const char *ahead) {
    const T *weight = reinterpret_cast<const T *>(panel_at(op, panel));
    // A pointer serves three rows, by the modes of an address: more would not find a register.
    const T *x[(M + 2) / 3];
    for (int m = 0; m < M; m += 3) x[m / 3] = op.x.row<T>(row + m);
    const int64_t stride = op.x.stride;
    Vec total[M][2] = {};
    for (const T *end = weight + PANEL * op.inputs; weight < end; weight += PANEL * unit<T>) {
        if constexpr (M > 1) ask_ahead(ahead);  // a row alone keeps memory busy as it is
        ahead += PANEL * 4;
        for (int m = 0; m < M; m++) {
            const T *of_row = x[m / 3] + m % 3 * stride;
            total[m][0] = add_products(total[m][0], of_row, weight);
            total[m][1] = add_products(total[m][1], of_row, weight + LANES * unit<T>);
        }
        for (int i = 0; i < (M + 2) / 3; i++) x[i] += unit<T>;
    }
    for (int m = 0; m < M; m++) finish<T>(op, row + m, panel, total[m][0], total[m][1]);
}

#if defined(TENFOLD_QUADS)
typedef __m512i Quads;
inline Quads quads(const uint8_t *p) { return _mm512_loadu_si512(p); }
inline Quads low_halves(Quads q) { return _mm512_and_si512(q, _mm512_set1_epi8(15)); }
inline Quads high_halves(Quads q) { return _mm512_and_si512(_mm512_srli_epi16(q, 4), _mm512_set1_epi8(15)); }
inline IntVec add_quads(IntVec total, const int8_t *x, Quads weights) {
    int32_t quad;
    std::memcpy(&quad, x, 4);
    return (IntVec)_mm512_dpbusd_epi32((__m512i)total, weights, _mm512_set1_epi32(quad));
}
#else
typedef BitVec Quads;
inline Quads quads(const uint8_t *p) {
    Quads q;
    std::memcpy(&q, p, sizeof q);
    return q;
}
inline Quads low_halves(Quads q) { return q & 0x0f0f0f0fu; }
inline Quads high_halves(Quads q) { return (q >> 4) & 0x0f0f0f0fu; }
inline IntVec add_quads(IntVec total, const int8_t *x, Quads weights) {
    for (int i = 0; i < 4; i++) total += (IntVec)((weights >> (8 * i)) & 255u) * int32_t(x[i]);
    return total;
}
#endif
inline Vec to_float(IntVec v) { return __builtin_convertvector(v, Vec); }

template <int M, class T, Format F> void multiply_bytes(const Linear &op, int64_t row, int64_t panel, const char *ahead) {
    constexpr int64_t WORD = F == INT4_GROUPS ? 8 : 4;  // inputs in a word
    int64_t groups = ceiling(op.inputs, GROUP);
    const uint8_t *weight = reinterpret_cast<const uint8_t *>(panel_at(op, panel));
    const int8_t *x[M];
    for (int m = 0; m < M; m++) x[m] = op.bytes + (row + m) * op.inputs;
    Vec result[M][2] = {};
    for (int64_t g = 0; g < groups; g++) {
        IntVec total[M][2] = {};
        auto add = [&](auto inputs) {
            for (int64_t k = g * GROUP; k < g * GROUP + inputs; k += WORD, weight += PANEL * 4) {
                Quads q[2] = {quads(weight), quads(weight + LANES * 4)};
                if constexpr (M > 1) ask_ahead(ahead + k * PANEL * 4 / WORD);
                for (int m = 0; m < M; m++)
                    for (int v = 0; v < 2; v++) {
                        IntVec &sum = total[m][v];
                        if constexpr (F == INT4_GROUPS)
                            sum = add_quads(add_quads(sum, x[m] + k, low_halves(q[v])), x[m] + k + 4, high_halves(q[v]));
                        else sum = add_quads(sum, x[m] + k, q[v]);
                    }
            }
        };
        int64_t left = op.inputs - g * GROUP;  // below GROUP only in the last group of INT8
        if (F != INT8 || left >= GROUP) add(std::integral_constant<int64_t, GROUP>());
        else add(left);
        if constexpr (F == INT8) {
            for (int m = 0; m < M; m++)
                for (int v = 0; v < 2; v++)
                    result[m][v] += op.row_scales[(row + m) * groups + g] * to_float(total[m][v]);
            continue;
        }
        int64_t at = (panel * groups + g) * PANEL;
        for (int v = 0; v < 2; v++) {
            Vec scale = load(op.scales + at + v * LANES);
            Vec least = F == INT4_GROUPS ? load(op.least + at + v * LANES) : -128.0f * scale;
            for (int m = 0; m < M; m++) {
                int64_t of = (row + m) * groups + g;
                result[m][v] += op.row_scales[of] * (to_float(total[m][v]) * scale + op.row_sums[of] * least);
            }
        }
    }
    if constexpr (F == INT8)
        for (int m = 0; m < M; m++)
            for (int v = 0; v < 2; v++) {
                Vec scale = load(op.scales + panel * PANEL + v * LANES);
                result[m][v] = (result[m][v] - 128.0f * op.row_sums[(row + m) * groups]) * scale;
            }
    for (int m = 0; m < M; m++) finish<T>(op, row + m, panel, result[m][0], result[m][1]);
}

// Calls one of `tile<1>` to `tile<N>`, each of which works on that many rows, from `row` up to `end`.
template <int N, class F> inline void by_rows(int64_t row, int64_t end, F tile) {
    for (; end - row >= N; row += N) tile(row, std::integral_constant<int, N>());
    if constexpr (N > 1) {
        if (row < end) by_rows<N - 1>(row, end, tile);
    }
}

// Bytes of `x` for a scale, which it returns, biased by `bias`.
template <class T, class B> inline float to_bytes(const T *x, int64_t n, int bias, B *bytes) {
    Vec most = {};
    for (int64_t i = 0; i < n; i += LANES) {
        Vec v = load(x + i, n - i);
        most = larger(most, larger(v, -v));
    }
    float scale = largest(most) / 127.0f, inverse = scale > 1e-30f ? 1 / scale : 0;
    for (int64_t i = 0; i < n; i++) bytes[i] = B(int(std::nearbyint(to_float(x[i]) * inverse)) + bias);
    return scale;
}

template <class T> void quantise_row(const Linear &op, int64_t row) {
    int64_t groups = ceiling(op.inputs, GROUP);
    const T *x = op.x.row<T>(row);
    float sum = 0;
    for (int64_t g = 0; g < groups; g++) {
        int64_t begin = g * GROUP, end = std::min(op.inputs, begin + GROUP);
        int8_t *bytes = op.bytes + row * op.inputs + begin;
        float scale = to_bytes(x + begin, end - begin, 0, bytes);
        int64_t total = 0;
        for (int64_t i = 0; i < end - begin; i++) total += bytes[i];
        op.row_scales[row * groups + g] = scale;
        op.row_sums[row * groups + g] = float(total);
        sum += scale * float(total);
    }
    if (op.format == INT8) op.row_sums[row * groups] = sum;
}

// `following` is the next product of the program, or null.
template <class T>
void run(const Linear &op, const Step &s, Team &team, const Linear *following) {
    ProductItems items(op, s);
    if (op.format >= INT8) {
        team.share(items.rows, [&](int64_t row, int64_t) { quantise_row<T>(op, row); });
        team.meet();
    }
    auto row_at = [&](int64_t row) {
        return op.format >= INT8 ? reinterpret_cast<const char *>(op.bytes + row * op.inputs)
                                 : reinterpret_cast<const char *>(op.x.row<T>(row));
    };
    team.share(items.count, [&](int64_t item, int64_t until) {
        int64_t row = items.row_of(item), end = std::min(items.rows, row + CHUNK_ROWS);
        int64_t panel = items.panel_of(item), last = std::min(items.panels, panel + items.together) - 1;
        for (; panel <= last; panel++) {
            // A tile asks for the rows of the next one, and the last tile of a panel for the panel that its thread will
            // take next: of this weight, or of the product that follows, so that memory is not idle while threads meet.
            const char *after = panel_at(op, (panel + 1) % items.panels);
            if (panel == last && item + 1 == until && following) {
                ProductItems next(*following, s);
                after = panel_at(*following, next.count ? next.panel_of(team.part(next.count)) : 0);
            }
            auto ahead = [&](int64_t behind) { return behind == end ? after : row_at(behind); };
            auto bytes = [&](auto format) {
                by_rows<BYTE_ROWS>(row, end, [&](int64_t r, auto m) {
                    multiply_bytes<m(), T, format()>(op, r, panel, ahead(r + m()));
                });
            };
            if (op.format == INT8) bytes(std::integral_constant<Format, INT8>());
            else if (op.format == INT8_GROUPS) bytes(std::integral_constant<Format, INT8_GROUPS>());
            else if (op.format == INT4_GROUPS) bytes(std::integral_constant<Format, INT4_GROUPS>());
            else
                by_rows<PANEL_ROWS>(row, end, [&](int64_t r, auto m) {
                    multiply_tile<m(), T>(op, r, panel, ahead(r + m()));
                });
        }
    });
}

// ---- paged attention
//
// In a page, each head has its keys and then each head its values, in sub-blocks of 16 tokens. Keys of a sub-block lie
// unit after unit, of every token of it, so that a register holds the same unit of LANES tokens; values lie in units of
// tokens, so that a register holds LANES features of a pair. Neither is ever converted or summed across.
//
// Quantised keys and values are bytes q, x = scale (q - 128), with a scale for every token and head; four of them make a
// unit. Queries are then rounded to signed bytes as well, and so are the weights of a tile, times the values' scales.

struct Attention {
    int64_t kind;
    Rows query, key, value, out;  // key and value have their heads side by side, so has out
    int64_t query_head_stride, heads, kv_heads, dim;
    char *keys, *values;  // of the layer, in page 0
    int64_t page_stride, block_size;
    float *key_scales, *value_scales;  // [kv_heads][block_size] in page 0; null where nothing is quantised
    int64_t scale_stride;              // from page to page
    const float *query_norm, *key_norm;  // null where heads are not normalised
    Rows cosines, sines;               // [tokens, rotary / 2], float32
    int64_t rotary, rounded;
    float epsilon, scale;
};

template <class T>
inline void prepare_head(const Attention &op, int64_t token, const T *x, const float *norm, T *to) {
    int64_t dim = op.dim, half = op.rotary / 2;
    float wide[1024];
    if (norm) {
        T normed[1024];
        normalise(x, normed, norm, dim, op.epsilon, op.rounded);
        for (int64_t i = 0; i < dim; i += LANES) store(wide + i, load(normed + i));
    } else
        for (int64_t i = 0; i < dim; i += LANES) store(wide + i, load(x + i));
    const float *c = op.cosines.row<float>(token), *s = op.sines.row<float>(token);
    for (int64_t i = 0; i < half; i++) {
        float a = wide[i], b = wide[half + i];
        wide[i] = a * c[i] - b * s[i];
        wide[half + i] = b * c[i] + a * s[i];
    }
    for (int64_t i = 0; i < dim; i += LANES) store(to + i, load(wide + i));
}

constexpr int QUAD = 4;  // bytes that are multiplied by one instruction

// Keys and values of a token and head as bytes, at element `at` of both and entry `scale_at` of their scales.
template <class T>
void store_bytes(const Attention &op, const T *key, const T *value, int64_t at, int64_t lane, int64_t scale_at) {
    int64_t dim = op.dim;
    uint8_t bytes[1024];
    op.key_scales[scale_at] = to_bytes(key, dim, 128, bytes);
    uint8_t *keys = reinterpret_cast<uint8_t *>(op.keys) + at + lane * QUAD;
    for (int64_t i = 0; i < dim; i += QUAD) std::memcpy(keys + i * SUB_BLOCK, bytes + i, QUAD);
    op.value_scales[scale_at] = to_bytes(value, dim, 128, bytes);
    uint8_t *values = reinterpret_cast<uint8_t *>(op.values) + at + lane / QUAD * dim * QUAD + lane % QUAD;
    for (int64_t i = 0; i < dim; i++) values[i * QUAD] = bytes[i];
}

// Queries are normalised and rotated where they are; keys and values go to their places in the arena.
template <class T> void prepare(const Attention &op, const Step &s, int64_t token) {
    constexpr int U = unit<T>;
    int64_t dim = op.dim, place = s.places[token], offset = place % op.block_size, lane = offset % SUB_BLOCK;
    auto place_of = [&](int64_t h) {
        return place / op.block_size * op.page_stride +
               (h * (op.block_size / SUB_BLOCK) + offset / SUB_BLOCK) * SUB_BLOCK * dim;
    };
    // A key goes to as many lines as it has units: they come while queries are rotated.
    int64_t element = op.key_scales ? 1 : sizeof(T);
    for (int64_t h = 0; h < op.kv_heads; h++)
        for (int64_t i = 0; i < SUB_BLOCK * dim * element; i += 64)
            __builtin_prefetch(op.keys + place_of(h) * element + i, 1);
    for (int64_t h = 0; h < op.heads; h++) {
        T *query = op.query.row<T>(token) + h * op.query_head_stride;
        prepare_head(op, token, query, op.query_norm, query);
    }
    for (int64_t h = 0; h < op.kv_heads; h++) {
        T key[1024];
        prepare_head(op, token, op.key.row<T>(token) + h * dim, op.key_norm, key);
        const T *value = op.value.row<T>(token) + h * dim;
        int64_t at = place_of(h);
        if (op.key_scales) {
            store_bytes(op, key, value, at, lane, place / op.block_size * op.scale_stride + h * op.block_size + offset);
            continue;
        }
        T *keys = reinterpret_cast<T *>(op.keys) + at + lane * U;
        T *values = reinterpret_cast<T *>(op.values) + at + lane / U * dim * U + lane % U;
        for (int64_t i = 0; i < dim; i += U) std::memcpy(keys + i * SUB_BLOCK, key + i, 4);
        for (int64_t i = 0; i < dim; i++) values[i * U] = value[i];
    }
}

// Some query tokens of one sequence, heads of keys and their groups of queries, a part of the context.
//
// A token that decodes takes all heads in one job, so that a block is read in the order it lies in memory. Tokens of a
// prefill are cut into pieces of one head each, and so is a token where threads would find nothing to do. What costs
// more than a fair share is cut along the context: its pieces leave maxima, sums and sums of values in `parts`, and
// `merge` weighs them up.
struct Job {
    int64_t sequence, first, tokens;  // tokens [first, first + tokens) of the step
    int64_t head, heads;              // of keys
    int64_t begin, end;  // positions of keys
    int64_t part;        // where in `parts` its result goes, or -1: to the output
};
struct Merge {
    Job job;  // of the whole; `part` is the first piece's
    int64_t pieces;
};

// State of `rows` query rows: maximum and sum of weights [rows] each, then sums of values [rows][dim].
struct Running {
    float *maximum, *total, *mixed;

    static int64_t floats(int64_t rows, int64_t dim) { return round_up(rows * (dim + 2), 16); }
    static Running of(float *at, int64_t rows) { return {at, at + rows, at + 2 * rows}; }
    // The sums of values too, unless `dim` is given as 0.
    void clear(int64_t rows, int64_t dim) {
        std::fill(maximum, maximum + rows, LOWEST);
        std::fill(total, total + rows, 0.0f);
        std::fill(mixed, mixed + rows * dim, 0.0f);
    }
};

struct Schedule {
    int64_t heads, kv_heads, dim;  // what it was made for
    std::vector<Job> jobs;
    std::vector<Merge> merges;
    std::vector<float> parts;
    int64_t most_rows = 0;
};

// What a job costs for every key: reading it, or scoring it with every row.
inline int64_t cost_of(const Job &job, int64_t group) { return job.heads * (4 + job.tokens * group); }

// Cut the step into jobs of a fair share at most: every thread gets about eight where the work allows, and none is
// shorter than SHORTEST keys. They are in the order of tokens as far as threads' parts go, for a thread has prepared the
// tokens of its own; within a part the longest come first, so that none is left with one at the end.
constexpr int64_t SHORTEST = 256;
void divide(Schedule &schedule, const Step &s, int64_t threads) {
    int64_t group = schedule.heads / schedule.kv_heads, dim = schedule.dim;
    int64_t tokens_of_tile = std::max<int64_t>(1, QUERY_ROWS / group), cost = 0;
    std::vector<Job> whole;
    for (int64_t b = 0; b < s.sequences; b++) {
        int64_t first = s.bounds[b], length = s.bounds[b + 1] - first;
        bool pieces_enough = s.sequences > threads || s.starts[b] >= 4 * SHORTEST * threads;
        int64_t heads = length == 1 && pieces_enough ? schedule.kv_heads : 1;
        for (int64_t t = 0; t < length; t += tokens_of_tile) {
            int64_t tokens = std::min(tokens_of_tile, length - t);
            for (int64_t h = 0; h < schedule.kv_heads; h += heads) {
                whole.push_back({b, first + t, tokens, h, heads, 0, s.starts[b] + t + tokens, -1});
                cost += whole.back().end * cost_of(whole.back(), group);
            }
        }
    }
    int64_t share = cost / (8 * threads) + 1, parts = 0;
    for (Job job : whole) {
        int64_t rows = job.tokens * job.heads * group;
        int64_t longest = std::max(SHORTEST, round_up(share / cost_of(job, group) + 1, TILE));
        int64_t pieces = threads == 1 ? 1 : ceiling(job.end, longest);
        schedule.most_rows = std::max(schedule.most_rows, rows);
        if (pieces == 1) {
            schedule.jobs.push_back(job);
            continue;
        }
        int64_t length = round_up(ceiling(job.end, pieces), TILE), end = job.end;
        pieces = ceiling(end, length);
        job.part = parts;
        schedule.merges.push_back({job, pieces});
        for (int64_t i = 0; i < pieces; i++) {
            job.begin = i * length, job.end = std::min(end, job.begin + length), job.part = parts;
            schedule.jobs.push_back(job);
            parts += Running::floats(rows, dim);
        }
    }
    auto order = [&](const Job &job) {
        return std::make_pair(job.first * threads / s.tokens, (job.begin - job.end) * cost_of(job, group));
    };
    std::stable_sort(schedule.jobs.begin(), schedule.jobs.end(),
                     [&](const Job &a, const Job &b) { return order(a) < order(b); });
    schedule.parts.resize(parts);
}

constexpr int TILE_VECS = TILE / LANES, TILE_SUBS = TILE / SUB_BLOCK;

// Where the sub-blocks of a tile are, in elements from the layer's first head in page 0. Beyond the end they repeat the
// last one, whose scores get no weight. `scales` are places of their scales.
struct Places {
    int64_t at[TILE_SUBS], scales[TILE_SUBS];

    void find(const Attention &op, const int32_t *table, int64_t begin, int64_t end) {
        uint32_t size = op.block_size;
        for (int i = 0; i < TILE_SUBS; i++) {
            uint32_t position = begin + i * SUB_BLOCK, offset = position % size / SUB_BLOCK * SUB_BLOCK;
            bool beyond = i > 0 && position >= end;
            int64_t page = beyond ? 0 : table[position / size];
            at[i] = beyond ? at[i - 1] : page * op.page_stride + offset * op.dim;
            scales[i] = beyond ? scales[i - 1] : page * op.scale_stride + offset;
        }
    }
};

// Where the keys of each register and the values of each sub-block are, of one head.
template <class T> struct Tile {
    const T *keys[TILE_VECS], *values[TILE_SUBS];

    Tile(const Attention &op, const Places &places, int64_t head) {
        const T *key = reinterpret_cast<const T *>(op.keys) + head * op.block_size * op.dim;
        const T *value = reinterpret_cast<const T *>(op.values) + head * op.block_size * op.dim;
        for (int v = 0; v < TILE_VECS; v++)
            keys[v] = key + places.at[v * LANES / SUB_BLOCK] + v * LANES % SUB_BLOCK * unit<T>;
        for (int i = 0; i < TILE_SUBS; i++) values[i] = value + places.at[i];
    }
};

struct ByteTile {
    const uint8_t *keys[TILE_VECS], *values[TILE_SUBS];
    const float *key_scales[TILE_SUBS], *value_scales[TILE_SUBS];

    ByteTile(const Attention &op, const Places &places, int64_t head) {
        int64_t of_head = head * op.block_size * op.dim;
        for (int v = 0; v < TILE_VECS; v++)
            keys[v] = reinterpret_cast<const uint8_t *>(op.keys) + of_head + places.at[v * LANES / SUB_BLOCK] +
                      v * LANES % SUB_BLOCK * QUAD;
        for (int i = 0; i < TILE_SUBS; i++) {
            values[i] = reinterpret_cast<const uint8_t *>(op.values) + of_head + places.at[i];
            key_scales[i] = op.key_scales + places.scales[i] + head * op.block_size;
            value_scales[i] = op.value_scales + places.scales[i] + head * op.block_size;
        }
    }
};

// Asks for what is read next while something else is worked on: blocks are far apart, and the hardware does not guess
// them. All at once would be more than a core can have under way.
template <bool ASK, class T> inline void ask(const T *at) {
    if constexpr (ASK) __builtin_prefetch(at, 0, 2);
}

// Scores of `M` query rows with a tile: [M][TILE], not yet scaled.
template <int M, bool ASK, class T>
inline void score(const T *query, int64_t dim, const Tile<T> &tile, const Tile<T> &next, float *scores) {
    Vec total[M][TILE_VECS] = {};
    for (int64_t d = 0; d < dim; d += unit<T>)
        for (int v = 0; v < TILE_VECS; v++) {
            const T *keys = tile.keys[v] + d * SUB_BLOCK;
            ask<ASK>(next.keys[v] + d * SUB_BLOCK);
            for (int m = 0; m < M; m++) total[m][v] = add_products(total[m][v], query + m * dim + d, keys);
        }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < TILE_VECS; v++) store(scores + m * TILE + v * LANES, total[m][v]);
}

// One step of the online softmax of a row, in powers of two. Turns scores into weights, updates maximum and sum, and
// returns the factor that brings what was summed before to the new maximum.
template <class T>
inline float soften(const float *scores, float scale, int64_t count, float &maximum, float &total, T *weights) {
    constexpr bool EXACT = std::is_same<T, float>::value;
    Vec s[TILE_VECS], most = splat(LOWEST);
    for (int i = 0; i < TILE_VECS; i++) {
        s[i] = load(scores + i * LANES) * scale;
        if (count < TILE) s[i] = lanes() + i * LANES < IntVec{} + int32_t(count) ? s[i] : splat(LOWEST);
        most = larger(s[i], most);
    }
    float now = std::max(maximum, largest(most));
    Vec sum_of_weights = {};
    for (int i = 0; i < TILE_VECS; i++) {
        Vec weight = power_of_two<EXACT>(s[i] - now);
        if (count < TILE) weight = lanes() + i * LANES < IntVec{} + int32_t(count) ? weight : Vec{};
        store(weights + i * LANES, weight);
        sum_of_weights += weight;
    }
    float factor = now == maximum ? 1.0f : std::exp2(maximum - now);
    maximum = now;
    total = total * factor + sum(sum_of_weights);
    return factor;
}

// The last value of an odd count lies beside one that was never written.
inline Vec add_last(Vec total, float weight, const float *values) { return total + weight * load(values); }
inline Vec add_last(Vec total, float weight, const Bf16 *values) {
    BitVec v;
    std::memcpy(&v, values, sizeof v);
    return total + weight * (Vec)(v << 16);
}

// mixed[M][dim] = factor[M] * mixed + weights[M][count] times the tile's values, `N` vectors of it from `d` on. What is
// `fresh` has nothing in `mixed` yet.
template <int M, int N, bool ASK, class T>
inline void mix(const T *weights, const float *factor, const Tile<T> &tile, const Tile<T> &next, int64_t count,
                float *mixed, bool fresh, int64_t dim, int64_t d) {
    constexpr int U = unit<T>, PER_SUB = SUB_BLOCK / U;
    Vec total[M][N] = {};
    if (!fresh)
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++) total[m][n] = load(mixed + m * dim + d + n * LANES) * factor[m];
    int64_t units = count / U;
    for (int64_t sub = 0, first = 0; first < units; sub++, first += PER_SUB) {
        const T *values = tile.values[sub] + d * U, *after = next.values[sub] + d * U;
        const T *weight = weights + first * U;
        for (int64_t i = 0; i < std::min<int64_t>(PER_SUB, units - first); i++)
            for (int n = 0; n < N; n++) {
                ask<ASK>(after + (i * dim + n * LANES) * U);
                for (int m = 0; m < M; m++)
                    total[m][n] = add_products(total[m][n], weight + m * TILE + i * U,
                                               values + (i * dim + n * LANES) * U);
            }
    }
    if (count % U) {
        const T *values = tile.values[units / PER_SUB] + (units % PER_SUB * dim + d) * U;
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++)
                total[m][n] = add_last(total[m][n], to_float(weights[m * TILE + units * U]), values + n * LANES * U);
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) store(mixed + m * dim + d + n * LANES, total[m][n]);
}

// `M` rows, of tokens `group` rows apart from each other, with one tile.
template <int M, bool ASK, class T>
void attend_tile(const Attention &op, const T *query, const Tile<T> &tile, const Tile<T> &next, int64_t visible,
                 int64_t row, int64_t group, int64_t count, bool fresh, Running state) {
    int64_t dim = op.dim;
    float scores[M * TILE], factor[M];
    alignas(64) T weights[M * TILE];
    score<M, ASK>(query + row * dim, dim, tile, next, scores);
    for (int m = 0; m < M; m++) {
        // Causal: a row sees keys up to its own position.
        int64_t seen = std::min<int64_t>(count, visible + (row + m) / group);
        factor[m] = soften(scores + m * TILE, op.scale * 1.44269504f, std::max<int64_t>(0, seen),
                           state.maximum[row + m], state.total[row + m], weights + m * TILE);
    }
    float *mixed = state.mixed + row * dim;
    int64_t most = std::min<int64_t>(count, visible + (row + M - 1) / group), d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) mix<M, 4, ASK>(weights, factor, tile, next, most, mixed, fresh, dim, d);
    for (; d < dim; d += LANES) mix<M, 1, ASK>(weights, factor, tile, next, most, mixed, fresh, dim, d);
}

// Query rows as bytes: [rows][dim], and a scale and a sum of each.
struct ByteRows {
    int8_t *bytes;
    float *scales, *sums;
};

// As `attend_tile`, on quantised keys and values.
template <int M, bool ASK>
void attend_bytes(const Attention &op, const ByteRows &query, const ByteTile &tile, const ByteTile &next,
                  int64_t visible, int64_t row, int64_t group, int64_t count, bool fresh, Running state) {
    int64_t dim = op.dim;
    IntVec products[M][TILE_VECS] = {};
    for (int64_t d = 0; d < dim; d += QUAD)
        for (int v = 0; v < TILE_VECS; v++) {
            ask<ASK>(next.keys[v] + d * SUB_BLOCK);
            Quads keys = quads(tile.keys[v] + d * SUB_BLOCK);
            for (int m = 0; m < M; m++)
                products[m][v] = add_quads(products[m][v], query.bytes + (row + m) * dim + d, keys);
        }
    float factor[M], scale[M];
    alignas(64) int8_t weights[M * TILE];
    for (int m = 0; m < M; m++) {
        int64_t seen = std::clamp<int64_t>(visible + (row + m) / group, 0, count);
        float scores[TILE], wide[TILE];
        for (int v = 0; v < TILE_VECS; v++) {
            Vec exact = to_float(products[m][v]) - 128.0f * query.sums[row + m];
            const float *scales = tile.key_scales[v * LANES / SUB_BLOCK] + v * LANES % SUB_BLOCK;
            store(scores + v * LANES, exact * query.scales[row + m] * load(scales));
        }
        factor[m] = soften(scores, op.scale * 1.44269504f, seen, state.maximum[row + m], state.total[row + m], wide);
        for (int v = 0; v < TILE_VECS; v++) {
            const float *scales = tile.value_scales[v * LANES / SUB_BLOCK] + v * LANES % SUB_BLOCK;
            Vec weight = load(wide + v * LANES) * load(scales);
            // What lies beyond has never been written: its scale may be anything.
            weight = lanes() + v * LANES < IntVec{} + int32_t(seen) ? weight : Vec{};
            store(wide + v * LANES, weight);
        }
        scale[m] = to_bytes(wide, TILE, 0, weights + m * TILE);
    }
    float *mixed = state.mixed + row * dim;
    int64_t used = ceiling(std::clamp<int64_t>(visible + (row + M - 1) / group, 0, count), QUAD);
    for (int64_t d = 0; d < dim; d += LANES) {
        IntVec total[M] = {};
        for (int64_t i = 0; i < used; i++) {
            int64_t sub = i * QUAD / SUB_BLOCK, within = (i * QUAD % SUB_BLOCK * dim) + d * QUAD;
            ask<ASK>(next.values[sub] + within);
            Quads values = quads(tile.values[sub] + within);
            for (int m = 0; m < M; m++) total[m] = add_quads(total[m], weights + m * TILE + i * QUAD, values);
        }
        for (int m = 0; m < M; m++) {
            int32_t sum_of_weights = 0;
            for (int i = 0; i < TILE; i++) sum_of_weights += weights[m * TILE + i];
            float *at = mixed + m * dim + d;
            Vec before = fresh ? Vec{} : load(at) * factor[m];
            store(at, before + scale[m] * (to_float(total[m]) - 128.0f * float(sum_of_weights)));
        }
    }
}

template <class T> void attend(const Attention &op, const Step &s, const Job &job, Running state) {
    int64_t dim = op.dim, group = op.heads / op.kv_heads, rows = job.tokens * group;
    T *query = scratch.take<T>(job.heads * rows * dim);
    for (int64_t h = 0; h < job.heads; h++)
        for (int64_t r = 0; r < rows; r++)
            std::memcpy(query + (h * rows + r) * dim,
                        op.query.row<T>(job.first + r / group) +
                            ((job.head + h) * group + r % group) * op.query_head_stride,
                        dim * sizeof(T));
    ByteRows bytes{};
    if (op.key_scales) {
        int64_t all = job.heads * rows;
        bytes = {scratch.take<int8_t>(all * dim), scratch.take<float>(all), scratch.take<float>(all)};
        for (int64_t r = 0; r < all; r++) {
            bytes.scales[r] = to_bytes(query + r * dim, dim, 0, bytes.bytes + r * dim);
            bytes.sums[r] = 0;
            for (int64_t i = 0; i < dim; i++) bytes.sums[r] += bytes.bytes[r * dim + i];
        }
    }
    const int32_t *table = s.tables + job.sequence * s.table_stride;
    int64_t start = s.starts[job.sequence] + job.first - s.bounds[job.sequence];
    bool all_see = start >= job.begin;  // the first tile
    state.clear(job.heads * rows, all_see ? 0 : dim);
    Places places[2];
    places[0].find(op, table, job.begin, job.end);
    for (int64_t begin = job.begin, turn = 0; begin < job.end; begin += TILE, turn ^= 1) {
        bool more = begin + TILE < job.end;
        if (more) places[turn ^ 1].find(op, table, begin + TILE, job.end);
        bool fresh = begin == job.begin && all_see;
        int64_t count = std::min<int64_t>(TILE, job.end - begin);
        int64_t visible = start + 1 - begin;  // keys of the tile that the first token sees
        // Rows that see nothing of the tile yet are passed over.
        int64_t first = visible > 0 ? 0 : std::min(rows, (1 - visible) * group);
        first = first / ATTENTION_ROWS * ATTENTION_ROWS;
        for (int64_t h = 0; h < job.heads; h++) {
            bool same = h + 1 < job.heads;
            const Places &after = places[same || !more ? turn : turn ^ 1];
            int64_t head = job.head + h, head_after = same ? head + 1 : job.head;
            Running of_head{state.maximum + h * rows, state.total + h * rows, state.mixed + h * rows * dim};
            if (op.key_scales) {
                ByteTile now(op, places[turn], head), next(op, after, head_after);
                ByteRows of_query{bytes.bytes + h * rows * dim, bytes.scales + h * rows, bytes.sums + h * rows};
                by_rows<ATTENTION_ROWS>(first, rows, [&](int64_t r, auto m) {
                    attend_bytes<m(), true>(op, of_query, now, next, visible, r, group, count, fresh, of_head);
                });
                continue;
            }
            Tile<T> now(op, places[turn], head), next(op, after, head_after);
            const T *of_query = query + h * rows * dim;
            by_rows<ATTENTION_ROWS>(first, rows, [&](int64_t r, auto m) {
                if (r == first && rows <= 2 * ATTENTION_ROWS && (same || more))
                    attend_tile<m(), true>(op, of_query, now, next, visible, r, group, count, fresh, of_head);
                else attend_tile<m(), false>(op, of_query, now, now, visible, r, group, count, fresh, of_head);
            });
        }
    }
}

template <class T>
void write_row(const Attention &op, const Job &job, int64_t row, const float *mixed, float total) {
    int64_t group = op.heads / op.kv_heads, of_head = job.tokens * group, token = row % of_head / group;
    T *to = op.out.row<T>(job.first + token) + ((job.head + row / of_head) * group + row % group) * op.dim;
    float factor = 1 / total;
    for (int64_t d = 0; d < op.dim; d += LANES) store(to + d, load(mixed + d) * factor);
}

template <class T> void merge_row(const Attention &op, const Schedule &schedule, const Merge &m, int64_t row) {
    int64_t dim = op.dim, rows = m.job.tokens * m.job.heads * (op.heads / op.kv_heads), size = Running::floats(rows, dim);
    float *parts = const_cast<float *>(schedule.parts.data()) + m.job.part;
    float *mixed = scratch.take<float>(dim);
    float maximum = LOWEST, total = 0;
    for (int64_t i = 0; i < m.pieces; i++) maximum = std::max(maximum, parts[i * size + row]);
    std::fill(mixed, mixed + dim, 0.0f);
    for (int64_t i = 0; i < m.pieces; i++) {
        Running piece = Running::of(parts + i * size, rows);
        float weight = std::exp2(piece.maximum[row] - maximum);
        total += weight * piece.total[row];
        for (int64_t d = 0; d < dim; d += LANES)
            store(mixed + d, load(mixed + d) + weight * load(piece.mixed + row * dim + d));
    }
    write_row<T>(op, m.job, row, mixed, total);
}

template <class T> void run(const Attention &op, const Step &s, Team &team, Schedule &schedule) {
    int64_t group = op.heads / op.kv_heads, dim = op.dim;
    team.share(s.tokens, [&](int64_t t, int64_t) { prepare<T>(op, s, t); });
    team.meet();
    team.share(schedule.jobs.size(), [&](int64_t j, int64_t) {
        const Job &job = schedule.jobs[j];
        int64_t rows = job.tokens * job.heads * group;
        scratch.restart();
        float *at = job.part < 0 ? scratch.take<float>(Running::floats(rows, dim)) : schedule.parts.data() + job.part;
        Running state = Running::of(at, rows);
        attend<T>(op, s, job, state);
        if (job.part < 0)
            for (int64_t r = 0; r < rows; r++) write_row<T>(op, job, r, state.mixed + r * dim, state.total[r]);
    });
    if (schedule.merges.empty()) return;
    team.meet();
    team.share(schedule.merges.size() * schedule.most_rows, [&](int64_t i, int64_t) {
        const Merge &m = schedule.merges[i / schedule.most_rows];
        int64_t row = i % schedule.most_rows;
        scratch.restart();
        if (row < m.job.tokens * m.job.heads * group) merge_row<T>(op, schedule, m, row);
    });
}

// ---- the gated delta rule

struct DeltaRule {
    int64_t kind;
    Rows query, key, value, beta, step_size, out;  // heads side by side
    const float *rate, *step_bias;                 // [value_heads]: decay is exp(-rate softplus(step_size + step_bias))
    float *states;
    int64_t slot_stride, key_heads, value_heads, key_dim, value_dim;
};

// The vector at length one times `length`, as float; `epsilon` is added to its square.
template <class T> void unit_vector(const T *x, int64_t n, float length, float *result) {
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

// What the rule needs of one token and head beside its value.
struct Gates {
    float product, decay, beta;  // of query and key; exp of the logarithm; after its sigmoid
};

// Brings query and key to their lengths, and the gates out of their logits.
template <class T> Gates prepare(const DeltaRule &op, int64_t t, int64_t head, float *query, float *key) {
    int64_t K = op.key_dim, key_head = head / (op.value_heads / op.key_heads);
    unit_vector(op.query.row<T>(t) + key_head * K, K, 1 / std::sqrt(float(K)), query);
    unit_vector(op.key.row<T>(t) + key_head * K, K, 1, key);
    Vec products = {};
    for (int64_t i = 0; i < K; i += LANES) products += load(query + i, K - i) * load(key + i, K - i);
    float step = to_float(op.step_size.row<T>(t)[head]) + op.step_bias[head];
    T sharp[LANES] = {op.beta.row<T>(t)[head]};
    return {sum(products), std::exp(-op.rate[head] * (step > 20 ? step : std::log1p(std::exp(step)))),
            rounded_to<T>(sigmoid(load(sharp)))[0]};
}

// One token of one head, on the state where it is.
template <class T> void recur_once(const DeltaRule &op, int64_t t, int64_t head, float *state) {
    int64_t K = op.key_dim, V = op.value_dim, v = 0;
    float *query = scratch.take<float>(K + LANES), *key = scratch.take<float>(K + LANES);
    Gates g = prepare<T>(op, t, head, query, key);
    const T *value = op.value.row<T>(t) + head * V;
    T *output = op.out.row<T>(t) + head * V;
    constexpr int N = LANES == 16 ? 8 : 4;
    for (; v + N * LANES <= V; v += N * LANES)
        advance<N>(state + v, V, K, query, key, g.product, g.decay, g.beta, value + v, output + v, N * LANES);
    for (; v < V; v += LANES)
        advance<1>(state + v, V, K, query, key, g.product, g.decay, g.beta, value + v, output + v, V - v);
}

// Tokens after each other on a few columns of a state, copied to where they fit the nearest cache. One pass for each:
// it writes what the token before left to write, and reads for this one. Decay is kept aside as the product of all so
// far, S = scale S', and only brought into the state where it would become too small a divisor.
constexpr int64_t RECUR_TOKENS = 32, RECUR_VECS = 2;
constexpr float LEAST_SCALE = 1e-12f;
template <class T> void recur_many(const DeltaRule &op, int64_t begin, int64_t end, int64_t head, float *state) {
    constexpr int64_t N = RECUR_VECS, COLUMNS = N * LANES;
    int64_t K = op.key_dim, V = op.value_dim, width = K + LANES;
    float *queries = scratch.take<float>(RECUR_TOKENS * width), *keys = scratch.take<float>(RECUR_TOKENS * width);
    float *columns = scratch.take<float>(K * COLUMNS);
    Gates gates[RECUR_TOKENS];
    for (; begin < end; begin += RECUR_TOKENS) {
        int64_t tokens = std::min(RECUR_TOKENS, end - begin);
        for (int64_t t = 0; t < tokens; t++)
            gates[t] = prepare<T>(op, begin + t, head, queries + t * width, keys + t * width);
        for (int64_t v = 0; v < V; v += COLUMNS) {
            int64_t count[N];
            for (int n = 0; n < N; n++) count[n] = V - v - n * LANES;
            for (int64_t i = 0; i < K; i++)
                for (int n = 0; n < N; n++)
                    store(columns + i * COLUMNS + n * LANES,
                          count[n] > 0 ? load(state + i * V + v + n * LANES, count[n]) : Vec{});
            Vec written[N] = {};
            float scale = 1;
            const float *before = keys;
            for (int64_t t = 0; t < tokens; t++) {
                const float *query = queries + t * width, *key = keys + t * width;
                Vec by_key[N] = {}, by_query[N] = {};
                auto pass = [&](auto rescaled, float factor) {
                    for (int64_t i = 0; i < K; i++)
                        for (int n = 0; n < N; n++) {
                            float *at = columns + i * COLUMNS + n * LANES;
                            Vec row = load(at) + before[i] * written[n];
                            if constexpr (rescaled()) row *= factor;
                            store(at, row);
                            by_key[n] += key[i] * row;
                            by_query[n] += query[i] * row;
                        }
                };
                scale *= gates[t].decay;
                if (scale < LEAST_SCALE) {
                    pass(std::true_type(), scale);
                    scale = 1;
                } else pass(std::false_type(), 1);
                for (int n = 0; n < N; n++) {
                    if (count[n] <= 0) break;
                    int64_t column = head * V + v + n * LANES;
                    Vec value = load(op.value.row<T>(begin + t) + column, count[n]);
                    Vec u = gates[t].beta * (value - scale * by_key[n]);
                    store(op.out.row<T>(begin + t) + column, scale * by_query[n] + gates[t].product * u, count[n]);
                    written[n] = u / scale;
                }
                before = key;
            }
            for (int64_t i = 0; i < K; i++)
                for (int n = 0; n < N; n++)
                    if (count[n] > 0)
                        store(state + i * V + v + n * LANES,
                              scale * (load(columns + i * COLUMNS + n * LANES) + before[i] * written[n]), count[n]);
        }
    }
}

template <class T> void recur(const DeltaRule &op, const Step &s, int64_t b, int64_t head) {
    scratch.restart();
    float *state = op.states + s.slots[b] * op.slot_stride + head * op.key_dim * op.value_dim;
    int64_t begin = s.bounds[b], end = s.bounds[b + 1];
    if (s.starts[b] == 0) std::fill_n(state, op.key_dim * op.value_dim, 0.0f);
    if (end - begin >= 4) return recur_many<T>(op, begin, end, head, state);
    for (int64_t t = begin; t < end; t++, scratch.restart()) recur_once<T>(op, t, head, state);
}

// `order` has the sequences of the step, those of a thread's part with the longest first: none is left with one at the end.
template <class T>
void run(const DeltaRule &op, const Step &s, Team &team, const std::vector<int64_t> &order) {
    int64_t heads = op.value_heads;
    team.share(s.sequences * heads, [&](int64_t item, int64_t until) {
        if (item + 1 < until) {
            int64_t t = s.bounds[order[(item + 1) / heads]], head = (item + 1) % heads;
            int64_t key_head = head / (heads / op.key_heads);
            ask_for(op.query.row<T>(t) + key_head * op.key_dim, op.key_dim);
            ask_for(op.key.row<T>(t) + key_head * op.key_dim, op.key_dim);
            ask_for(op.value.row<T>(t) + head * op.value_dim, op.value_dim);
        }
        recur<T>(op, s, order[item / heads], item % heads);
    });
}

// ---- causal convolution

// Of every channel over each sequence, then silu; tails [slots, width - 1, channels] are read and then replaced. A
// sequence that starts has zeros before it, whatever its slot holds.
struct Convolve {
    int64_t kind;
    Rows x, out;
    const void *weight;  // [channels, width]
    char *tails;
    int64_t slot_stride, tap_stride, channels, width;
};

// Channels in blocks, each for all sequences: its taps are converted once.
template <class T> void run(const Convolve &op, const Step &s, Team &team) {
    constexpr int64_t BLOCK = 128, AHEAD = 8;  // channels; tokens and sequences that are asked for before their turn
    int64_t width = op.width, reach = width - 1;
    team.share(ceiling(op.channels, BLOCK), [&](int64_t block, int64_t) {
        int64_t first = block * BLOCK, count = std::min(BLOCK, op.channels - first);
        scratch.restart();
        float *taps = scratch.take<float>(width * BLOCK);
        for (int64_t i = 0; i < width; i++)
            for (int64_t n = 0; n < count; n++)
                taps[i * BLOCK + n] = to_float(static_cast<const T *>(op.weight)[(first + n) * width + i]);
        auto tail_of = [&](int64_t b) { return reinterpret_cast<T *>(op.tails) + s.slots[b] * op.slot_stride + first; };
        for (int64_t b = 0; b < s.sequences; b++) {
            T *tail = tail_of(b);
            if (s.starts[b] == 0)
                for (int64_t i = 0; i < reach; i++) std::fill_n(tail + i * op.tap_stride, count, T{});
            if (b + AHEAD < s.sequences)
                for (int64_t i = 0; i < reach; i++) ask_for(tail_of(b + AHEAD) + i * op.tap_stride, count);
            int64_t begin = s.bounds[b], length = s.bounds[b + 1] - begin;
            auto input = [&](int64_t t) -> const T * {
                return t < 0 ? tail + (reach + t) * op.tap_stride : op.x.row<T>(begin + t) + first;
            };
            for (int64_t t = 0; t < length; t++) {
                T *to = op.out.row<T>(begin + t) + first;
                if (begin + t + AHEAD < s.tokens) ask_for(op.x.row<T>(begin + t + AHEAD) + first, count);
                for (int64_t n = 0; n < count; n += LANES) {
                    Vec total = {};
                    for (int64_t i = 0; i < width; i++)
                        total += load(taps + i * BLOCK + n) * load(input(t - reach + i) + n, count - n);
                    store(to + n, silu<T>(rounded_to<T>(total)), count - n);
                }
            }
            for (int64_t i = 0; i < reach; i++)
                std::memmove(tail + i * op.tap_stride, input(length - reach + i), count * sizeof(T));
        }
    });
}

// ---- programs

template <class O> inline const O &as(const void *operation) { return *static_cast<const O *>(operation); }
inline Kind kind_of(const void *operation) { return Kind(*static_cast<const int64_t *>(operation)); }

// The most memory that a thread needs in any operation.
int64_t scratch_bytes(const void *const *operations, int64_t count, const std::vector<Schedule> &schedules) {
    int64_t bytes = 4096;
    for (int64_t i = 0; i < count; i++) {
        if (kind_of(operations[i]) == CONVOLVE)
            bytes = std::max(bytes, as<Convolve>(operations[i]).width * 128 * 4 + 4096);
        if (kind_of(operations[i]) == DELTA_RULE) {
            int64_t of_token = (as<DeltaRule>(operations[i]).key_dim + LANES) * 4;
            bytes = std::max(bytes, of_token * (2 * RECUR_TOKENS + RECUR_VECS * LANES) + 4096);
        }
    }
    for (const Schedule &s : schedules)
        bytes = std::max(bytes, s.most_rows * (s.dim * 5 + 8) + 4 * Running::floats(s.most_rows, s.dim) + 4096);
    return bytes;
}

template <class T>
int64_t run_all(const void *const *operations, int64_t count, const Step &step, int64_t threads, double *seconds) {
    Team team(threads);
    // Layers of one shape divide the work alike.
    std::vector<Schedule> schedules;
    std::vector<int64_t> schedule_of(count, -1);
    for (int64_t i = 0; i < count; i++) {
        if (kind_of(operations[i]) != ATTENTION) continue;
        const Attention &op = as<Attention>(operations[i]);
        for (size_t j = 0; j < schedules.size() && schedule_of[i] < 0; j++)
            if (schedules[j].heads == op.heads && schedules[j].kv_heads == op.kv_heads && schedules[j].dim == op.dim)
                schedule_of[i] = j;
        if (schedule_of[i] >= 0) continue;
        schedule_of[i] = schedules.size();
        schedules.push_back({op.heads, op.kv_heads, op.dim, {}, {}, {}, 0});
        divide(schedules.back(), step, threads);
    }
    std::vector<int64_t> order(step.sequences);  // by thread's part, and longest first
    std::iota(order.begin(), order.end(), 0);
    auto place = [&](int64_t b) {
        return std::make_pair(step.bounds[b] * threads / step.tokens, step.bounds[b] - step.bounds[b + 1]);
    };
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return place(a) < place(b); });
    std::vector<const Linear *> following(count, nullptr);
    const Linear *latest = nullptr;
    for (int64_t i = count - 1; i >= 0; i--) {
        following[i] = latest;
        if (kind_of(operations[i]) == LINEAR) latest = &as<Linear>(operations[i]);
    }
    int64_t bytes = scratch_bytes(operations, count, schedules);
    std::atomic<bool> enough{true};
#pragma omp parallel num_threads(int(threads))
    {
        if (!scratch.reserve(bytes)) enough = false;
#pragma omp single
        team.set_threads(omp_get_num_threads());
        bool first = omp_get_thread_num() == 0;
        double before = seconds && first ? omp_get_wtime() : 0;
        for (int64_t i = 0; i < count && enough; i++) {
            const void *op = operations[i];
            switch (kind_of(op)) {
            case EMBED: run<T>(as<Embed>(op), step, team); break;
            case ANGLES: run<T>(as<Angles>(op), step, team); break;
            case NORM: run<T>(as<Norm>(op), step, team); break;
            case SELECT: run<T>(as<Select>(op), step, team); break;
            case LINEAR: run<T>(as<Linear>(op), step, team, following[i]); break;
            case ATTENTION: run<T>(as<Attention>(op), step, team, schedules[schedule_of[i]]); break;
            case CONVOLVE: run<T>(as<Convolve>(op), step, team); break;
            case DELTA_RULE: run<T>(as<DeltaRule>(op), step, team, order); break;
            case GATED_NORM: run<T>(as<GatedNorm>(op), step, team); break;
            case SIGMOID_GATE: run<T>(as<SigmoidGate>(op), step, team); break;
            }
            team.meet();
            if (seconds && first) {
                double now = omp_get_wtime();
                seconds[i] += now - before;
                before = now;
            }
        }
    }
    return enough ? 0 : 1;
}

// ---- packing

// Calls `work(column, panel, lane)` for every column of the packed weight, in parallel; `column` is -1 for padding.
template <class F> void for_columns(int64_t outputs, bool gated, int64_t threads, F work) {
    int64_t panels = ceiling(outputs, gated ? PANEL / 2 : PANEL);
#pragma omp parallel for num_threads(int(threads)) schedule(static)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t lane = 0; lane < PANEL; lane++) {
            int64_t column = gated ? panel * LANES + lane % LANES : panel * PANEL + lane;
            bool there = column < outputs;
            if (gated && lane >= LANES) column += outputs;
            work(there ? column : -1, panel, lane);
        }
}

template <class T>
void pack(const T *weight, T *packed, int64_t outputs, int64_t inputs, bool gated, int64_t threads) {
    constexpr int U = unit<T>;
    for_columns(outputs, gated, threads, [&](int64_t column, int64_t panel, int64_t lane) {
        T *to = packed + panel * PANEL * inputs + lane * U;
        for (int64_t k = 0; k < inputs; k += U)
            for (int u = 0; u < U; u++) to[k * PANEL + u] = column < 0 ? T{} : weight[column * inputs + k + u];
    });
}

// Bytes [outputs, inputs], or halves of bytes with the value of each in one, and scales [outputs, groups].
void pack_bytes(const uint8_t *weight, const float *scales, const float *least, uint8_t *packed, float *packed_scales,
                float *packed_least, int64_t format, int64_t outputs, int64_t inputs, bool gated, int64_t threads) {
    int64_t word = format == INT4_GROUPS ? 8 : 4, groups = format == INT8 ? 1 : inputs / GROUP;
    for_columns(outputs, gated, threads, [&](int64_t column, int64_t panel, int64_t lane) {
        uint8_t *to = packed + panel * PANEL * inputs * 4 / word + lane * 4;
        for (int64_t k = 0; k < inputs; k += word, to += PANEL * 4)
            for (int i = 0; i < 4; i++) {
                const uint8_t *from = weight + column * inputs + k + i;
                to[i] = column < 0 ? 0 : word == 8 ? uint8_t(from[0] | from[4] << 4) : from[0];
            }
        for (int64_t g = 0; g < groups; g++) {
            int64_t at = (panel * groups + g) * PANEL + lane;
            packed_scales[at] = column < 0 ? 0 : scales[column * groups + g];
            if (packed_least) packed_least[at] = column < 0 ? 0 : least[column * groups + g];
        }
    });
}

}  // namespace

extern "C" {

// Increased with every change of a signature or a struct.
int64_t tenfold_interface() { return 3; }

// Columns that are packed together: outputs are padded to a multiple of it, gated ones each half to half of it.
int64_t tenfold_panel() { return PANEL; }

// Sizes of the structs, by `Kind`, for the caller to compare with its own; then that of `Step`.
int64_t tenfold_size(int64_t kind) {
    const int64_t sizes[] = {sizeof(Embed),     sizeof(Angles),   sizeof(Norm),      sizeof(Select),    sizeof(Linear),
                             sizeof(Attention), sizeof(Convolve), sizeof(DeltaRule), sizeof(GatedNorm), sizeof(SigmoidGate),
                             sizeof(Step)};
    return kind >= 0 && kind <= SIGMOID_GATE + 1 ? sizes[kind] : -1;
}

// Runs a program over one step. `seconds` [count], if not null, gains what each operation took. Returns 0, or 1 where
// memory ran out before anything was done.
int64_t tenfold_run(const void *const *operations, int64_t count, const void *step, int64_t bf16, int64_t threads,
                    double *seconds) {
    const Step &s = *static_cast<const Step *>(step);
    try {
        return bf16 ? run_all<Bf16>(operations, count, s, threads, seconds)
                    : run_all<float>(operations, count, s, threads, seconds);
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

void tenfold_pack(const void *weight, void *packed, int64_t bf16, int64_t outputs, int64_t inputs, int64_t gated,
                  int64_t threads) {
    if (bf16)
        pack(static_cast<const Bf16 *>(weight), static_cast<Bf16 *>(packed), outputs, inputs, gated, threads);
    else pack(static_cast<const float *>(weight), static_cast<float *>(packed), outputs, inputs, gated, threads);
}

void tenfold_pack_bytes(const uint8_t *weight, const float *scales, const float *least, uint8_t *packed,
                        float *packed_scales, float *packed_least, int64_t format, int64_t outputs, int64_t inputs,
                        int64_t gated, int64_t threads) {
    pack_bytes(weight, scales, least, packed, packed_scales, packed_least, format, outputs, inputs, gated, threads);
}

// The first of the largest of every row of [rows, columns], `stride` apart; NaN is never the largest.
void tenfold_argmax(const float *x, int64_t stride, int64_t rows, int64_t columns, int64_t *result, int64_t threads) {
    constexpr int64_t PIECE = 4096;
    int64_t pieces = ceiling(columns, PIECE);
    std::vector<float> best(rows * pieces);
#pragma omp parallel for num_threads(int(threads)) schedule(static) if (rows * columns > 1 << 15)
    for (int64_t i = 0; i < rows * pieces; i++) {
        const float *from = x + i / pieces * stride + i % pieces * PIECE;
        int64_t count = std::min(PIECE, columns - i % pieces * PIECE), j = 0;
        Vec most = splat(-INFINITY);
        for (; j + LANES <= count; j += LANES) most = larger(load(from + j), most);
        float single = largest(most);
        for (; j < count; j++) single = from[j] > single ? from[j] : single;
        best[i] = single;
    }
    for (int64_t r = 0; r < rows; r++) {
        const float *of = best.data() + r * pieces;
        int64_t piece = std::max_element(of, of + pieces) - of, begin = piece * PIECE;
        const float *from = x + r * stride;
        result[r] = std::min(columns - 1, begin);
        for (int64_t j = begin; j < std::min(columns, begin + PIECE); j++)
            if (from[j] == of[piece]) {
                result[r] = j;
                break;
            }
    }
}

// Asks for large pages behind [data, data + bytes): fewer of them are looked up while weights and caches stream by.
void tenfold_large_pages(void *data, int64_t bytes) {
#if defined(__linux__)
    constexpr uintptr_t PAGE = 1 << 21;
    uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + PAGE - 1) / PAGE * PAGE;
    uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / PAGE * PAGE;
    if (end > begin) madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// The sum of dense words, read once and in order: what the bandwidth is measured by.
int64_t tenfold_read(const int64_t *words, int64_t count, int64_t threads) {
    int64_t total = 0;
#pragma omp parallel for num_threads(int(threads)) schedule(static) reduction(+ : total)
    for (int64_t i = 0; i < count; i++) total += words[i];
    return total;
}

// Multiplies in registers only, `rounds` times on each thread, and returns the operations done: what the rate of
// arithmetic is measured by. Formats are those of weights.
int64_t tenfold_multiply(int64_t format, int64_t rounds, int64_t threads) {
    std::atomic<int64_t> sink{0};
#pragma omp parallel num_threads(int(threads))
    {
        Vec total[PANEL_ROWS][2] = {};
        IntVec counts[PANEL_ROWS][2] = {};
        alignas(64) float one[2 * LANES] = {};
        alignas(64) uint8_t byte[8 * LANES] = {};
        for (int64_t i = 0; i < rounds; i++) {
            asm volatile("" : : "r"(one), "r"(byte) : "memory");
            for (int m = 0; m < PANEL_ROWS; m++)
                for (int v = 0; v < 2; v++) {
                    if (format == FLOAT) total[m][v] = add_products(total[m][v], one, one);
                    else if (format == BFLOAT16)
                        total[m][v] = add_products(total[m][v], reinterpret_cast<Bf16 *>(one), reinterpret_cast<Bf16 *>(one));
                    else counts[m][v] = add_quads(counts[m][v], reinterpret_cast<int8_t *>(byte), quads(byte));
                }
        }
        float result = 0;
        for (int m = 0; m < PANEL_ROWS; m++)
            for (int v = 0; v < 2; v++) result += sum(total[m][v]) + sum(to_float(counts[m][v]));
        sink += int64_t(result);
    }
    int64_t each = format == FLOAT ? 1 : format == BFLOAT16 ? 2 : 4;
    return 2 * each * LANES * 2 * PANEL_ROWS * rounds * threads + (sink.load() > 0);
}
}
