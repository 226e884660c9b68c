/* Sums, copies and waits in memory that the ranks of a host share, without the GIL; collectives/shared.py explains.
 *
 * Optional: where no compiler was there, NumPy's passes do the same, to the same bits, slot by slot; ranks that have this
 * module work with ranks that have not. Compilers vectorise all loops but those of float16 and of streaming stores.
 *
 * The order of flags and data, in C11's terms, on each processor: who has filled or read slots stores its flag with release
 * (`publish`; sequentially consistent for the sake of ASLEEP), who waits for it loads it with acquire (`late`). So what was
 * written before the flag is read after it, what was read before it is overwritten after it; each word has one writer, and
 * nothing else is relied on. C11 does not know streaming stores: on x86-64 release does not wait for them, so `drain`
 * (sfence) comes before the flag; on aarch64 it orders `stnp` as any other store.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if !defined(__x86_64__) || !defined(__GLIBC__) || defined(BASELINE)
#define CLONES
#elif __GNUC__ >= 12 && !defined(__clang__) /* one is chosen for the processor when this is loaded */
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES __attribute__((target_clones("avx2", "default")))
#endif
#ifdef __x86_64__
#include <immintrin.h>
#define relax _mm_pause
#else
#define relax() (void)0
#endif
#if defined(__x86_64__) && __GNUC__ >= 12 && !defined(__clang__)
#define F16C __attribute__((target("f16c")))
#endif
#define MOST 256 /* ranks of a host */
#define BLOCK 4096 /* bytes at a time: some of them stay in a core's first-level cache */
#define LINE 64
#define SUMS 1024 /* bytes at a time of sums that are streamed: with more, reading waits for writing */
#define WORDS 8 /* of a flag's cache line */
#define SPINS 100 /* tests of a flag before the core is yielded */
#define TAKEN_US 1000 /* who yields for so long has lost the core to others' work, which a sleeper's waking interrupts */
#define SLEEPS 100 /* so many waits sleep then */
#define SLEEP_US 2000 /* at most */
#define ASLEEP 7  /* the word of a member's first flag that says so; transport/window.py has the rule */

enum { SUM, MIN, MAX, PRODUCT, OPS }; /* ops.py */
enum { PACKED, SUMMED };              /* flags */

/* ---- elements ---- */

typedef union { float f; uint32_t u; } Bits;

static inline float from_bf16(uint16_t h) { return ((Bits){.u = (uint32_t)h << 16}).f; }

static inline uint16_t to_bf16(float f) { /* to nearest even; rounding could carry a NaN's payload into infinity */
    uint32_t w = ((Bits){.f = f}).u, rounded = w + 0x7FFF + (w >> 16 & 1);
    return (uint16_t)((f != f ? 0x7FC00000 : rounded) >> 16);
}

static inline float from_f16(uint16_t h) { /* without branches, after M. Dukhan's FP16 */
    uint32_t w = (uint32_t)h << 16, two = w + w;
    float normal = ((Bits){.u = (two >> 4) + (0xE0u << 23)}).f * 0x1.0p-112f;
    float subnormal = ((Bits){.u = (two >> 17) | (126u << 23)}).f - 0.5f;
    Bits magnitude = {.f = two < 1u << 27 ? subnormal : normal};
    return ((Bits){.u = (w & 0x80000000u) | magnitude.u}).f;
}

static inline uint16_t to_f16(float f) {
    uint32_t w = ((Bits){.f = f}).u, two = w + w, bias = two & 0xFF000000u;
    float base = (fabsf(f) * 0x1.0p+112f) * 0x1.0p-110f;
    bias = bias < 0x71000000u ? 0x71000000u : bias;
    uint32_t bits = ((Bits){.f = ((Bits){.u = (bias >> 1) + 0x07800000u}).f + base}).u;
    uint32_t magnitude = (bits >> 13 & 0x7C00) + (bits & 0x0FFF);
    return (uint16_t)((w >> 16 & 0x8000) | (two > 0xFF000000u ? 0x7E00 : magnitude));
}

/* What is done to the elements of `count` parts, beside combining them in their order. */
typedef struct {
    double prescale, divisor, postscale;
    int stochastic; /* blocks only, as `key` */
    unsigned key;
} Factors;

typedef void (*Kernel)(const char *const *parts, int count, char *out, char *also, size_t length, const Factors *);

#define SAME(x) (x)
#define PLUS(a, b) ((a) + (b))
#define TIMES(a, b) ((a) * (b))
#define LESS(a, b) ((a) < (b) || (a) != (a) ? (a) : (b)) /* a NaN stays one */
#define MORE(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define ANYWHERE(T) T __attribute__((aligned(1), may_alias)) /* arrays may begin at any byte */
#define EACH for (size_t i = 0; i < n; i++)
#define FINISH(result)                                                                                                \
    if (also_ == NULL) _Pragma("GCC ivdep") EACH out[i] = result;                                                     \
    else _Pragma("GCC ivdep") EACH also[i] = out[i] = result
#define SCALE(acc, factor)                                                                                            \
    if ((factor) != 1) EACH acc[i] *= (factor)

/* Parts of T, scaled by floats or integers F, are combined as S; `out` may be a part; `also` is NULL or apart from all. */
#define KERNEL(NAME, TYPE, S, F, LOAD, STORE, COMBINE)                                                                \
    static void NAME(const char *const *parts, int count, char *out_, char *also_, size_t length, const Factors *f) { \
        typedef ANYWHERE(TYPE) T;                                                                                     \
        F prescale = (F)f->prescale, divisor = (F)f->divisor, postscale = (F)f->postscale;                            \
        int exponent, exact = frexp(f->divisor, &exponent) == 0.5; /* a power of two: the same bits, and faster */    \
        F reciprocal = (F)(exact ? 1 / f->divisor : 1), last = postscale == 1 ? reciprocal : 1;                       \
        S acc[BLOCK / sizeof(S)];                                                                                     \
        for (size_t low = 0, n; low < length; low += n) {                                                             \
            n = length - low < BLOCK / sizeof(S) ? length - low : BLOCK / sizeof(S);                                  \
            T *out = (T *)out_ + low, *also = (T *)also_ + low;                                                       \
            const T *part = (const T *)parts[0] + low, *next = (const T *)parts[count > 1] + low;                     \
            int plain = prescale == 1 && count > 1;                                                                   \
            if (plain && count == 2 && exact && postscale == 1) { /* the usual case: all in one pass */               \
                FINISH(STORE(COMBINE((S)LOAD(part[i]), LOAD(next[i])) * last));                                       \
                continue;                                                                                             \
            }                                                                                                         \
            if (plain)                                                                                                \
                EACH acc[i] = COMBINE((S)LOAD(part[i]), LOAD(next[i]));                                               \
            else                                                                                                      \
                EACH acc[i] = LOAD(part[i]);                                                                          \
            SCALE(acc, prescale);                                                                                     \
            for (int k = 1 + plain; k < count; k++) {                                                                 \
                part = (const T *)parts[k] + low;                                                                     \
                if (prescale == 1)                                                                                    \
                    EACH acc[i] = COMBINE(acc[i], LOAD(part[i]));                                                     \
                else                                                                                                  \
                    EACH acc[i] = COMBINE(acc[i], LOAD(part[i]) * prescale);                                          \
            }                                                                                                         \
            if (last != reciprocal) SCALE(acc, reciprocal);                                                           \
            if (!exact) EACH acc[i] /= divisor;                                                                       \
            SCALE(acc, postscale);                                                                                    \
            FINISH(STORE(acc[i] * last));                                                                             \
        }                                                                                                             \
    }
#define FLOATS(NAME, T, S, LOAD, STORE)                                                                               \
    CLONES KERNEL(NAME##_sum, T, S, S, LOAD, STORE, PLUS) CLONES KERNEL(NAME##_min, T, S, S, LOAD, STORE, LESS)       \
    CLONES KERNEL(NAME##_max, T, S, S, LOAD, STORE, MORE) CLONES KERNEL(NAME##_product, T, S, S, LOAD, STORE, TIMES)
#define INTEGERS(BITS, S, U) /* unsigned sums and products wrap, to the bits of signed ones */                        \
    KERNEL(u##BITS##_sum, uint##BITS##_t, U, U, SAME, SAME, PLUS)                                                     \
    KERNEL(u##BITS##_product, uint##BITS##_t, U, U, SAME, SAME, TIMES)                                                \
    KERNEL(u##BITS##_min, uint##BITS##_t, U, U, SAME, SAME, LESS)                                                     \
    KERNEL(u##BITS##_max, uint##BITS##_t, U, U, SAME, SAME, MORE)                                                     \
    KERNEL(i##BITS##_min, int##BITS##_t, S, S, SAME, SAME, LESS)                                                      \
    KERNEL(i##BITS##_max, int##BITS##_t, S, S, SAME, SAME, MORE)
#define ROW(NAME, SIZE) {SIZE, {NAME##_sum, NAME##_min, NAME##_max, NAME##_product}}
#define ROWS(BITS)                                                                                                    \
    ROW(u##BITS, BITS / 8), {BITS / 8, {u##BITS##_sum, i##BITS##_min, i##BITS##_max, u##BITS##_product}}

FLOATS(f32, float, float, SAME, SAME)
FLOATS(f64, double, double, SAME, SAME)
FLOATS(f16, uint16_t, float, from_f16, to_f16)
FLOATS(bf16, uint16_t, float, from_bf16, to_bf16)
INTEGERS(8, int32_t, uint32_t)
INTEGERS(16, int32_t, uint32_t)
INTEGERS(32, int32_t, uint32_t)
INTEGERS(64, int64_t, uint64_t)
#ifdef F16C /* which compilers use for one element at a time */
#define TO_8(f) _mm256_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT)
F16C KERNEL(f16_sum_by_8, __m128i, __m256, float, _mm256_cvtph_ps, TO_8, PLUS)

static void f16_quick_sum(const char *const *parts, int count, char *out, char *also, size_t length, const Factors *f) {
    size_t done = __builtin_cpu_supports("f16c") ? length / 8 * 8 * sizeof(uint16_t) : 0;
    const char *rest[MOST];
    for (int k = 0; k < count; k++) rest[k] = parts[k] + done;
    if (done) f16_sum_by_8(parts, count, out, also, length / 8, f);
    f16_sum(rest, count, out + done, also ? also + done : NULL, length - done / sizeof(uint16_t), f);
}
#define f16_sum f16_quick_sum
#endif

/* ---- blocks of elements in 8 or 4 bits that share a scale; quantized.py has the format ---- */

#define SHARE 256 /* elements of a block */
#define HALF (SHARE / 2)
#define BLOCK_BYTES(bits) (2 + SHARE / 8 * (bits))
#define INLINE static inline __attribute__((always_inline))
typedef ANYWHERE(float) Float;

INLINE uint32_t hash(uint32_t n) {
    n = (n ^ n >> 16) * 0x7FEB352D, n = (n ^ n >> 15) * 0x846CA68B;
    return n ^ n >> 16;
}

INLINE uint8_t to_integer(float f, int largest, int stochastic, uint32_t noise) { /* noise: 16 bits */
    const Bits shift = {.f = 0x1.8p23f}; /* added, it leaves the nearest integer, ties to even, in the lowest bits */
    if (!stochastic) return (uint8_t)((Bits){.f = f + shift.f}).u;
    f += (float)(int)noise * 0x1p-16f + (0x1p-17f - 0.5f);
    int n = (int)(((Bits){.f = f + shift.f}).u - shift.u);
    n = n > largest ? largest : n;
    return (uint8_t)(n < -largest ? -largest : n);
}

INLINE void encode_block(const Float *restrict x, char *restrict block, int bits, int stochastic, uint32_t key) {
    uint8_t *codes = (uint8_t *)block + 2;
    uint32_t most = 0, seed = hash(key);
    for (int i = 0; i < SHARE; i++) {
        uint32_t magnitude = ((Bits){.f = x[i]}).u & 0x7FFFFFFF; /* NaN's is the greatest, infinity's the next */
        most = magnitude > most ? magnitude : most;
    }
    const int largest = bits == 8 ? 127 : 7;
    float scale = ((Bits){.u = most}).f / (float)largest;
    uint16_t stored = most < 0x7F800000 ? to_bf16(scale > 0x1p-126f ? scale : 0x1p-126f) : 0x7FC0;
    float inverse = 1 / from_bf16(stored);
    memcpy(block, &stored, 2);
    for (int i = 0; i < HALF; i++) {
        uint32_t noise = stochastic ? hash(seed + i) : 0;
        uint8_t lower = to_integer(x[i] * inverse, largest, stochastic, noise & 0xFFFF);
        uint8_t upper = to_integer(x[i + HALF] * inverse, largest, stochastic, noise >> 16);
        if (bits == 8) codes[i] = lower, codes[i + HALF] = upper;
        else codes[i] = (uint8_t)((lower & 15) | upper << 4);
    }
    if (stored == 0x7FC0) memset(codes, 0, BLOCK_BYTES(bits) - 2);
}

INLINE void decode_block(const char *restrict block, Float *restrict out, int bits, int adds) {
    const uint8_t *codes = (const uint8_t *)block + 2;
    uint16_t stored;
    memcpy(&stored, block, 2);
    float scale = from_bf16(stored);
    for (int i = 0; i < HALF; i++) {
        int lower = bits == 8 ? (int8_t)codes[i] : (int8_t)(codes[i] << 4) >> 4;
        int upper = bits == 8 ? (int8_t)codes[i + HALF] : (int8_t)codes[i] >> 4;
        out[i] = adds ? out[i] + (float)lower * scale : (float)lower * scale;
        out[i + HALF] = adds ? out[i + HALF] + (float)upper * scale : (float)upper * scale;
    }
}

/* q#_sum: kernels of whole blocks, not prescaled; length is their number. */
#define BLOCKS(BITS)                                                                                                  \
    INLINE void to_block_##BITS(const Float *x, char *block, const Factors *f, size_t number) {                       \
        if (f->stochastic) encode_block(x, block, BITS, 1, f->key + (uint32_t)number);                                \
        else encode_block(x, block, BITS, 0, 0);                                                                      \
    }                                                                                                                 \
    CLONES static void encode_##BITS(const char *source, char *blocks, size_t count, const Factors *f) {              \
        size_t whole = count / SHARE, rest = count % SHARE;                                                           \
        for (size_t k = 0; k < whole; k++)                                                                            \
            to_block_##BITS((const Float *)source + k * SHARE, blocks + k * BLOCK_BYTES(BITS), f, k);                 \
        Float last[SHARE] = {0};                                                                                      \
        memcpy(last, source + whole * sizeof last, rest * sizeof *last);                                              \
        if (rest) to_block_##BITS(last, blocks + whole * BLOCK_BYTES(BITS), f, whole);                                \
    }                                                                                                                 \
    CLONES static void decode_##BITS(const char *blocks, char *target, size_t count, const Factors *Py_UNUSED(f)) {   \
        size_t whole = count / SHARE, rest = count % SHARE;                                                           \
        for (size_t k = 0; k < whole; k++)                                                                            \
            decode_block(blocks + k * BLOCK_BYTES(BITS), (Float *)target + k * SHARE, BITS, 0);                       \
        Float last[SHARE];                                                                                            \
        if (rest) decode_block(blocks + whole * BLOCK_BYTES(BITS), last, BITS, 0);                                    \
        memcpy(target + whole * sizeof last, last, rest * sizeof *last);                                              \
    }                                                                                                                 \
    CLONES static void q##BITS##_sum(const char *const *parts, int count, char *out, char *also, size_t length,       \
                                     const Factors *f) {                                                              \
        float divisor = (float)f->divisor, postscale = (float)f->postscale, acc[SHARE];                               \
        for (size_t k = 0, at = 0, n = SHARE; k < length; k++, at += BLOCK_BYTES(BITS)) {                             \
            decode_block(parts[0] + at, acc, BITS, 0);                                                                \
            for (int part = 1; part < count; part++) decode_block(parts[part] + at, acc, BITS, 1);                    \
            EACH acc[i] /= divisor;                                                                                   \
            SCALE(acc, postscale);                                                                                    \
            to_block_##BITS(acc, out + at, f, k);                                                                     \
            if (also) memcpy(also + at, out + at, BLOCK_BYTES(BITS));                                                 \
        }                                                                                                             \
    }
BLOCKS(8)
BLOCKS(4)

static const struct { size_t itemsize; Kernel kernels[OPS]; } TYPES[] = { /* in the order of ops.py */
    ROW(f32, 4), ROW(f64, 8), ROW(f16, 2), ROW(bf16, 2), ROWS(8), ROWS(16), ROWS(32), ROWS(64),
    {BLOCK_BYTES(8), {q8_sum}}, {BLOCK_BYTES(4), {q4_sum}}}; /* of quantized.py */

#define CONVERSION(NAME, FROM, TO, CONVERT)                                                                           \
    CLONES static void NAME(const char *source, char *target, size_t n, const Factors *Py_UNUSED(f)) {                \
        EACH ((ANYWHERE(TO) *)target)[i] = CONVERT(((const ANYWHERE(FROM) *)source)[i]);                              \
    }
CONVERSION(widen_f16, uint16_t, float, from_f16)
CONVERSION(widen_bf16, uint16_t, float, from_bf16)
CONVERSION(narrow_f16, float, uint16_t, to_f16)
CONVERSION(narrow_bf16, float, uint16_t, to_bf16)

/* A vector loop: memcpy's `rep movsb` reads another core's cache half as fast on some processors. */
CLONES static void copy(char *target, const char *source, size_t n) {
    size_t words = n / 8;
    for (size_t i = 0; i < words; i++) {
        uint64_t word;
        memcpy(&word, source + 8 * i, 8);
        memcpy(target + 8 * i, &word, 8);
    }
    memcpy(target + 8 * words, source + 8 * words, n % 8);
}

/* ---- plain or streaming stores; transport/stores.py says which, and why ---- */

enum { SLOTS = 1, RESULTS = 2 }; /* bits: what is streamed */
#ifdef LATE_STORES /* for tests: as late as can be, and such that sanitizers see them */
static _Thread_local struct { char *target, line[LINE]; } late_lines[2048];
static _Thread_local int late_count;
static void drain(void) {
    for (int i = 0; i < late_count; i++) memcpy(late_lines[i].target, late_lines[i].line, LINE);
    late_count = 0;
}
static void stream(char *target, const char *source, size_t n) { /* n: bytes of whole lines */
    for (size_t i = 0; i < n; i += LINE) {
        if (late_count == 2048) drain();
        late_lines[late_count].target = target + i;
        memcpy(late_lines[late_count++].line, source + i, LINE);
    }
}
#elif defined(__x86_64__)
static void drain(void) { _mm_sfence(); }
__attribute__((target("avx"))) static void stream_by_32(char *target, const char *source, size_t n) {
    for (size_t i = 0; i < n; i += 32)
        _mm256_stream_si256((__m256i *)(target + i), _mm256_loadu_si256((const __m256i *)(source + i)));
}
static void stream(char *target, const char *source, size_t n) {
    (__builtin_cpu_supports("avx") ? stream_by_32 : copy)(target, source, n); /* by 16 it takes 1.3 times as long */
}
#elif defined(__aarch64__)
static void drain(void) {}
static void stream(char *target, const char *source, size_t n) {
    typedef uint8_t Wide __attribute__((vector_size(16), aligned(1), may_alias));
    for (size_t i = 0; i < n; i += 32)
        __asm__ volatile("stnp %q0, %q1, [%2]" : : "w"(*(const Wide *)(source + i)),
                         "w"(*(const Wide *)(source + i + 16)), "r"(target + i) : "memory");
}
#else
static void drain(void) {}
#define stream copy
#endif

static void store(char *target, const char *source, size_t n, int streams) {
    size_t head = streams ? -(uintptr_t)target % LINE : n, done = head < n ? head : n, lines = (n - done) / LINE * LINE;
    copy(target, source, done);
    stream(target + done, source + done, lines);
    copy(target + done + lines, source + done + lines, n - done - lines);
}

/* ---- what Python's objects hold until they are freed ---- */

/* How each of them begins; Region and Group have NULL for the regions. */
#define HELD                                                                                                          \
    PyObject_HEAD struct Region *region, *signatures;                                                                 \
    Py_ssize_t nviews;                                                                                                \
    Py_buffer *views
typedef struct { HELD; } Held;

static void *made(PyTypeObject *type, size_t bytes) { /* its fields are 0; bytes: of `views` */
    Held *held = (Held *)PyType_GenericAlloc(type, 0);
    if (held == NULL || (held->views = PyMem_Calloc(1, bytes))) return held;
    return Py_DECREF(held), PyErr_NoMemory();
}

static Py_buffer *hold(Held *held, PyObject *array, int flags) { /* NULL: it has no such buffer, as Python knows */
    Py_buffer *view = held->views + held->nviews;
    if (array == NULL || PyObject_GetBuffer(array, view, flags)) return NULL;
    held->nviews++;
    return view;
}

static void release(Held *held) {
    while (held->nviews > 0) PyBuffer_Release(held->views + --held->nviews);
}

static void dealloc(Held *held) {
    PyTypeObject *type = Py_TYPE((PyObject *)held);
    release(held);
    PyMem_Free(held->views);
    Py_XDECREF((PyObject *)held->region), Py_XDECREF((PyObject *)held->signatures);
    PyObject_Free(held);
    Py_DECREF(type);
}

/* ---- flags and slots of all members of a process set ---- */

typedef struct Region {
    HELD;
    int size, rank, slots, sleeps; /* how many of the next waits sleep */
    Py_ssize_t slot_bytes;
    int64_t *flags[MOST];
    char *memory[MOST];
} Region;

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e6 * t.tv_sec + 1e-3 * t.tv_nsec;
}

static long futex(const int64_t *word, int op, uint32_t value, const struct timespec *limit) {
    return syscall(SYS_futex, word, op, value, limit, NULL, 0); /* its low half, which is first */
}

static void publish(Region *r, int flag, int64_t sequence) {
    int64_t *word = r->flags[r->rank] + flag * WORDS;
    __atomic_store_n(word, sequence + 1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (int k = 0; k < r->size; k++) {
        if (!__atomic_load_n(r->flags[k] + ASLEEP, __ATOMIC_RELAXED)) continue;
        futex(word, 1, INT32_MAX, NULL); /* FUTEX_WAKE */
        return;
    }
}

static int late(Region *r, int flag, int64_t sequence) { /* the first member that has not published; -1: none */
    for (int k = 0; k < r->size; k++)
        if (__atomic_load_n(r->flags[k] + flag * WORDS, __ATOMIC_ACQUIRE) <= sequence) return k;
    return -1;
}

static void sleep_for(Region *r, int flag, int64_t sequence, double left_us) { /* until a late member publishes */
    struct timespec limit = {0, (long)(left_us * 1e3)};
    int64_t *mine = r->flags[r->rank] + ASLEEP;
    __atomic_store_n(mine, 1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    int k = late(r, flag, sequence);
    int64_t *word = r->flags[k < 0 ? 0 : k] + flag * WORDS, seen = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    if (k >= 0 && seen <= sequence) futex(word, 0, (uint32_t)seen, &limit); /* FUTEX_WAIT */
    __atomic_store_n(mine, 0, __ATOMIC_RELEASE);
}

static int arrived(Region *r, int flag, int64_t sequence, double patience_us) {
    for (int i = 0; i < SPINS; i++) {
        if (late(r, flag, sequence) < 0) return 1;
        if (patience_us <= 0) return 0;
        relax();
    }
    int sleeps = r->sleeps > 0;
    r->sleeps -= sleeps;
    if (sleeps && patience_us < SLEEP_US) patience_us = SLEEP_US;
    for (double now = now_us(), until = now + patience_us; now < until; ) {
        if (late(r, flag, sequence) < 0) return 1;
        double before = now;
        if (sleeps) sleep_for(r, flag, sequence, until - now);
        else sched_yield(); /* the other rank may be waiting for this core */
        now = now_us();
        if (!sleeps && now - before > TAKEN_US) r->sleeps = SLEEPS;
    }
    return 0;
}

/* ---- one all-reduce: the elements of all arrays, one after the other, go through the slots ---- */

enum { PACK, COPY_OUT, SUM_UP, STEPS }; /* in this order: of the next slot, the last one, this one */

typedef struct {
    HELD;
    Kernel kernel;
    Factors factors;
    size_t itemsize;
    int alone, step;                     /* one short slot that every rank sums; what is done next with `number` */
    int streams;                         /* of SLOTS and RESULTS */
    double begun_us, us;                 /* when all had packed slot 0; until this was done */
    int64_t first;                       /* sequence number of slot 0 */
    Py_ssize_t total, capacity, slots, number; /* elements of all, of a slot; as in shared.pipelined */
    Py_ssize_t arrays[STEPS];            /* where each has got to */
    Py_ssize_t *starts;                  /* of arrays, in elements of all; count + 1 */
    char **sources, **targets;
} Run;

static Py_ssize_t bound(Py_ssize_t length, int size, int k) { /* partition.chunk_bounds */
    return length / size * k + (k < length % size ? k : length % size);
}

static void sum_streaming(Run *run, const char **parts, char *target, char *slot, size_t n) { /* parts: they move on */
    _Alignas(LINE) char sums[LINE + SUMS]; /* at the end of the first LINE bytes: what is left of a line */
    char *places[] = {target, slot}; /* both get whole lines, but at the ends */
    size_t size = run->itemsize, most = SUMS / size, left[2] = {0};
    for (size_t m; n; n -= m) {
        m = n < most ? n : most;
        run->kernel(parts, run->region->size, sums + LINE, NULL, m, &run->factors);
        for (int k = 0; k < run->region->size; k++) parts[k] += m * size;
        for (int k = 0; k < 2; k++) {
            size_t bytes = left[k] + m * size, rest = m < n ? (uintptr_t)(places[k] + bytes) % LINE : 0;
            bytes -= rest < bytes ? rest : bytes;
            store(places[k], sums + LINE - left[k], bytes, run->streams & (k ? SLOTS : RESULTS));
            places[k] += bytes, left[k] += m * size - bytes;
        }
        memmove(sums, sums + m * size, LINE);
    }
}

/* Do the step with the elements that `owner`'s chunk of a slot has, array by array. */
static void work(Run *run, Py_ssize_t slot, int owner) {
    Region *r = run->region;
    Py_ssize_t *array = run->arrays + run->step;
    Py_ssize_t base = slot * run->capacity, length = run->total - base < run->capacity ? run->total - base : run->capacity;
    Py_ssize_t low = run->alone ? 0 : bound(length, r->size, owner);
    Py_ssize_t high = run->alone ? length : bound(length, r->size, owner + 1);
    size_t size = run->itemsize, offset = (run->first + slot) % r->slots * r->slot_bytes;
    const char *parts[MOST];
    while (low < high) {
        while (run->starts[*array + 1] <= base + low) ++*array;
        Py_ssize_t end = run->starts[*array + 1] - base < high ? run->starts[*array + 1] - base : high;
        size_t within = (base + low - run->starts[*array]) * size, here = offset + low * size, n = end - low;
        char *source = run->sources[*array] + within, *target = run->targets[*array] + within;
        if (run->step == PACK) {
            store(r->memory[r->rank] + here, source, n * size, run->streams & SLOTS);
        } else if (run->step == COPY_OUT) {
            store(target, r->memory[owner] + here, n * size, run->streams & RESULTS);
        } else {
            for (int k = 0; k < r->size; k++) parts[k] = k == r->rank && !run->alone ? source : r->memory[k] + here;
            char *also = run->alone ? NULL : r->memory[r->rank] + here;
            if (run->streams) sum_streaming(run, parts, target, also, n);
            else run->kernel(parts, r->size, target, also, n, &run->factors);
        }
        low = end;
    }
    if (run->streams) drain();
}

static Py_ssize_t slot_of(const Run *run) { /* the step's; below 0: it has none */
    Py_ssize_t slot = run->number + (run->step == PACK) - (run->step == COPY_OUT);
    return slot < run->slots && !(run->alone && run->step == COPY_OUT) ? slot : -1;
}

static void take_step(Run *run, Py_ssize_t slot) {
    Region *r = run->region;
    for (int k = 0; k < (run->alone ? 1 : r->size); k++)
        if (run->alone || (k == r->rank) == (run->step == SUM_UP)) work(run, slot, k);
    if (run->step == PACK) publish(r, PACKED, run->first + slot);
    if (run->step == SUM_UP && !run->alone) publish(r, SUMMED, run->first + slot);
}

static int waits_for(const Run *run) { /* the step's flag; -1: it does not wait */
    return run->step == PACK || slot_of(run) < 0 ? -1 : run->step == COPY_OUT ? SUMMED : PACKED;
}

/* Go on until it would wait longer, or has worked for `budget_us`. */
static void go_on(Run *run, double patience_us, double budget_us) {
    for (double until = now_us() + budget_us; run->number <= run->slots; ) {
        Py_ssize_t slot = slot_of(run), flag = waits_for(run);
        if (flag >= 0 && !arrived(run->region, flag, run->first + slot, patience_us)) return;
        if (run->step == SUM_UP && run->number == 0) run->begun_us = now_us();
        if (slot >= 0) take_step(run, slot);
        if (++run->step < STEPS) continue;
        run->step = PACK, run->number++;
        double now = now_us();
        run->us = now - run->begun_us;
        if (now > until) return;
    }
}

/* ---- Python ---- */

static PyTypeObject *run_type, *exchange_type, *group_type;

/* Region(flags, memory, rank, slots): lists of what each member has; its flags' lines, its slots one after the other */
static PyObject *region_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *flags, *memory;
    int rank, slots;
    if (!PyArg_ParseTuple(args, "O!O!ii", &PyList_Type, &flags, &PyList_Type, &memory, &rank, &slots)) return NULL;
    Py_ssize_t size = PyList_Size(flags);
    if (size < 1 || size > MOST || PyList_Size(memory) != size || rank < 0 || rank >= size || slots < 1)
        return PyErr_Format(PyExc_ValueError, "%zd members, rank %d, %d slots", size, rank, slots);
    Region *r = made(type, 2 * size * sizeof(Py_buffer));
    if (r == NULL) return NULL;
    r->size = (int)size, r->rank = rank, r->slots = slots;
    for (int k = 0; k < 2 * size; k++)
        if (!hold((Held *)r, PyList_GetItem(k % 2 ? memory : flags, k / 2), PyBUF_WRITABLE)) return Py_DECREF(r), NULL;
    for (int k = 0; k < size; k++) r->flags[k] = r->views[2 * k].buf, r->memory[k] = r->views[2 * k + 1].buf;
    r->slot_bytes = r->views[1].len / slots;
    return (PyObject *)r;
}

static int kernel_of(int type, int op) { /* whether there is one */
    int known = type >= 0 && type < (int)(sizeof TYPES / sizeof *TYPES) && op >= SUM && op < OPS;
    if (known && TYPES[type].kernels[op]) return 1;
    PyErr_Format(PyExc_ValueError, "type %d, op %d", type, op);
    return 0;
}

/* Region.allreduce(sources, targets, type, op, prescale, divisor, postscale, sequence, alone, capacity, streams=0) -> Run
 * capacity: how many elements go through a slot at a time */
static PyObject *region_allreduce(Region *r, PyObject *args) {
    PyObject *sources, *targets;
    int type, op, alone, streams = 0;
    Factors f = {0};
    long long first;
    Py_ssize_t capacity;
    if (!PyArg_ParseTuple(args, "O!O!iidddLpn|i", &PyList_Type, &sources, &PyList_Type, &targets, &type, &op, &f.prescale,
                          &f.divisor, &f.postscale, &first, &alone, &capacity, &streams) || !kernel_of(type, op))
        return NULL;
    if (capacity < 1 || capacity > r->slot_bytes / (Py_ssize_t)TYPES[type].itemsize)
        return PyErr_Format(PyExc_ValueError, "%zd elements in %zd B", capacity, r->slot_bytes);
    Py_ssize_t count = PyList_Size(sources), itemsize = TYPES[type].itemsize;
    Run *run = made(run_type, (count + 1) * (2 * sizeof(Py_buffer) + 2 * sizeof(char *) + sizeof(Py_ssize_t)));
    if (run == NULL) return NULL;
    Py_INCREF((PyObject *)r);
    run->region = r, run->kernel = TYPES[type].kernels[op], run->factors = f, run->itemsize = itemsize;
    run->first = first, run->alone = alone, run->streams = alone ? 0 : streams, run->capacity = capacity;
    run->sources = (char **)(run->views + 2 * (count + 1)), run->targets = run->sources + count + 1;
    run->starts = (Py_ssize_t *)(run->targets + count + 1);
    for (Py_ssize_t k = 0; k < count; k++) {
        PyObject *source = PyList_GetItem(sources, k), *target = PyList_GetItem(targets, k);
        Py_buffer *into = hold((Held *)run, target, PyBUF_WRITABLE);
        Py_buffer *from = into && source != target ? hold((Held *)run, source, PyBUF_SIMPLE) : into;
        if (from && from->len != into->len)
            PyErr_Format(PyExc_ValueError, "array %zd: %zd B into %zd", k, from->len, into->len);
        if (PyErr_Occurred()) return Py_DECREF(run), NULL;
        run->sources[k] = from->buf, run->targets[k] = into->buf;
        run->starts[k + 1] = run->starts[k] + into->len / itemsize;
    }
    run->total = run->starts[count], run->slots = (run->total + run->capacity - 1) / run->capacity;
    run->number = run->slots ? -1 : 1; /* or nothing to do */
    return (PyObject *)run;
}

/* Run.advance(patience_us, budget_us) -> how many elements are finished */
static PyObject *run_advance(Run *run, PyObject *args) {
    double patience_us, budget_us;
    if (!PyArg_ParseTuple(args, "dd", &patience_us, &budget_us)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    go_on(run, patience_us, budget_us);
    Py_END_ALLOW_THREADS
    Py_ssize_t slots = run->number - (run->step <= COPY_OUT); /* copied out */
    Py_ssize_t finished = run->number > run->slots ? run->total : slots > 0 && !run->alone ? slots * run->capacity : 0;
    return PyLong_FromSsize_t(finished < run->total ? finished : run->total);
}

/* Run.took() -> the microseconds of the finished operation from when all had packed slot 0 */
static PyObject *run_took(Run *run, PyObject *Py_UNUSED(none)) { return PyFloat_FromDouble(run->us); }

/* Run.waits_for() -> the flag and the sequence number that `advance` has waited for in vain, or None */
static PyObject *run_waits_for(Run *run, PyObject *Py_UNUSED(none)) {
    if (waits_for(run) < 0) Py_RETURN_NONE;
    return Py_BuildValue("iL", waits_for(run), (long long)(run->first + slot_of(run)));
}

/* ---- a short operation whose flag is a signature: all ranks have called the same, and packed ---- */
/* What this rank gets of the slots: all, combined, by each rank or chunk by chunk; its own part, combined; each rank's,
 * one after the other; the root's; there is none; the first one's, which has waited for all, and asked other hosts. */
enum { REDUCED, IN_CHUNKS, OWN_PART, GATHERED, OF_ROOT, NOTHING, OF_FIRST, BY_ROWS }; /* execution/in_slot.py */
enum { DONE, DIFFERENT, LATE, SUMS_LATE };

typedef struct {
    HELD; /* of `signatures` the flags' lines: two hashes and two words behind each flag */
    long long hash, word; /* which is published beside it */
    int what, root;
    Py_ssize_t low, itemsize; /* low: the own part's first element, or the number of rows */
    Kernel kernel;
    Factors factors;
} Exchange;

/* Region.exchange(signatures, hash, word, what, type, op, prescale, divisor, postscale, where) -> Exchange;
 * where: the root, the own part's first element, or the number of rows */
static PyObject *region_exchange(Region *r, PyObject *args) {
    PyObject *signatures;
    long long hash, word;
    int what, type, op;
    Py_ssize_t where;
    Factors f = {0};
    if (!PyArg_ParseTuple(args, "O!LLiiidddn", Py_TYPE((PyObject *)r), &signatures, &hash, &word, &what, &type, &op,
                          &f.prescale, &f.divisor, &f.postscale, &where) || !kernel_of(type, op))
        return NULL;
    if (what == OF_ROOT && (where < 0 || where >= r->size)) return PyErr_Format(PyExc_ValueError, "root %zd", where);
    Exchange *e = made(exchange_type, 0);
    if (e == NULL) return NULL;
    Py_INCREF((PyObject *)r), Py_INCREF(signatures);
    e->region = r, e->signatures = (Region *)signatures, e->hash = hash, e->word = word, e->what = what, e->root = e->low = where;
    e->itemsize = TYPES[type].itemsize, e->kernel = TYPES[type].kernels[op], e->factors = f;
    return (PyObject *)e;
}

static void combine(Exchange *e, size_t offset, Py_ssize_t low, Py_ssize_t high, char *target, char *also) {
    const char *parts[MOST];
    Region *r = e->region;
    for (int k = 0; k < r->size; k++) parts[k] = r->memory[k] + offset + low * e->itemsize;
    e->kernel(parts, r->size, target, also, high - low, &e->factors);
}

static void pack_slot(Exchange *e, const Py_buffer *source, int64_t sequence) {
    Region *r = e->region;
    char *slot = r->memory[r->rank] + sequence % r->slots * r->slot_bytes;
    if (e->what == BY_ROWS) *(int64_t *)slot = e->low, slot += LINE;
    if (source->len && (e->what != OF_ROOT || r->rank == e->root)) copy(slot, source->buf, source->len);
}

/* All have packed. */
static int finished(Exchange *e, const Py_buffer *source, const Py_buffer *target, int64_t sequence, double patience_us) {
    Region *r = e->region;
    char *out = target->buf;
    size_t offset = sequence % r->slots * r->slot_bytes, size = e->itemsize, packed = source->len, n = target->len / size;
    if (e->what == REDUCED || e->what == OWN_PART) {
        Py_ssize_t low = e->what == REDUCED ? 0 : e->low;
        combine(e, offset, low, low + n, out, NULL);
    } else if (e->what == GATHERED || e->what == BY_ROWS) {
        for (int k = 0; k < r->size && e->what == BY_ROWS; k++)
            if (*(int64_t *)(r->memory[k] + offset) != e->low) return SUMS_LATE; /* it has other rows: the caller's affair */
        if (e->what == BY_ROWS) offset += LINE;
        for (int k = 0; k < r->size; k++) copy(out + k * packed, r->memory[k] + offset, packed);
    } else if (e->what == OF_FIRST || (e->what == OF_ROOT && (r->rank != e->root || out != source->buf))) {
        copy(out, r->memory[e->root] + offset, target->len);
    } else if (e->what == IN_CHUNKS) {
        Py_ssize_t low = bound(n, r->size, r->rank), high = bound(n, r->size, r->rank + 1);
        combine(e, offset, low, high, out + low * size, r->memory[r->rank] + offset + low * size);
        publish(r, SUMMED, sequence);
        if (!arrived(r, SUMMED, sequence, patience_us)) return SUMS_LATE;
        for (int k = 0; k < r->size; k++) {
            low = bound(n, r->size, k), high = bound(n, r->size, k + 1);
            if (k != r->rank) copy(out + low * size, r->memory[k] + offset + low * size, (high - low) * size);
        }
    }
    return DONE;
}

static int signed_one(Exchange *e, const Py_buffer *source, const Py_buffer *target, int64_t number, int64_t sequence,
                      double patience_us) {
    Region *s = e->signatures;
    int64_t *line = s->flags[s->rank];
    pack_slot(e, source, sequence);
    line[1 + number % 2] = e->hash, line[3 + number % 2] = e->word;
    publish(s, PACKED, number);
    if (e->what == OF_FIRST) publish(s, SUMMED, number);
    if (!arrived(s, e->what == OF_FIRST ? SUMMED : PACKED, number, patience_us)) return LATE;
    for (int k = 0; k < s->size; k++)
        if (s->flags[k][1 + number % 2] != e->hash || s->flags[k][3 + number % 2] != e->word) return DIFFERENT;
    return finished(e, source, target, sequence, patience_us);
}

/* ---- the same for a named operation, in the order of its process set's schedule: transport/counters.py ---- */

enum { TOTAL = 0, READ = 1, END = 8, GROUP_WORDS = 16, LOG = 16, RING = 4096 };
#define NUMBERS INT64_C(0x7FFFFFFF) /* in the log they are modulo this + 1 */

typedef struct {
    HELD;
    int size, member; /* member 0 leads */
    Py_ssize_t capacity;
    int64_t *words[MOST];
    uint32_t *counters[MOST], *passed; /* of the leader only: how often each id was ready */
    int32_t *ring;
} Group;

/* Group(blocks, member, passed or None): of each member, the leader's first; for the leader how often each id was ready */
static PyObject *group_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *blocks, *passed;
    int member;
    Py_ssize_t head = 8 * (GROUP_WORDS + LOG) + 4 * RING;
    if (!PyArg_ParseTuple(args, "O!iO", &PyList_Type, &blocks, &member, &passed)) return NULL;
    Py_ssize_t size = PyList_Size(blocks), all = size + (passed != Py_None);
    if (size < 1 || size > MOST || member < 0 || member >= size || (member == 0) != (passed != Py_None))
        return PyErr_Format(PyExc_ValueError, "%zd members, member %d", size, member);
    Group *g = made(type, all * sizeof(Py_buffer));
    if (g == NULL) return NULL;
    g->size = (int)size, g->member = member, g->capacity = PY_SSIZE_T_MAX;
    for (int k = 0; k < all; k++) {
        Py_buffer *view = hold((Held *)g, k < size ? PyList_GetItem(blocks, k) : passed, PyBUF_WRITABLE);
        if (view == NULL) return Py_DECREF(g), NULL;
        Py_ssize_t n = (view->len - (k < size ? head : 0)) / 4;
        g->capacity = n < g->capacity ? n : g->capacity;
    }
    for (int k = 0; k < size; k++) g->words[k] = g->views[k].buf, g->counters[k] = (uint32_t *)((char *)g->views[k].buf + head);
    g->ring = (int32_t *)(g->words[0] + GROUP_WORDS + LOG), g->passed = all > size ? g->views[size].buf : NULL;
    return (PyObject *)g;
}

static void count(Group *g, uint32_t id) { /* as Counters.submit */
    int64_t *words = g->words[g->member], total = words[TOTAL];
    uint32_t *counter = g->counters[g->member] + id;
    __atomic_store_n(counter, *counter + 1, __ATOMIC_RELEASE);
    __atomic_store_n(words + GROUP_WORDS + total % LOG, (total & NUMBERS) << 32 | id, __ATOMIC_RELEASE);
    __atomic_store_n(words + TOTAL, total + 1, __ATOMIC_RELEASE);
}

static int schedule(Group *g, uint32_t id) { /* the leader's: once all have counted it; nothing else can be ready */
    int64_t end = g->words[0][END], read = INT64_MAX;
    for (int k = 0; k < g->size; k++)
        if (__atomic_load_n(g->counters[k] + id, __ATOMIC_ACQUIRE) == g->passed[id]) return LATE;
    for (int k = 1; k < g->size; k++) {
        int64_t word = __atomic_load_n(g->words[k] + READ, __ATOMIC_ACQUIRE);
        read = word < read ? word : read;
    }
    if (end + 2 > read + RING) return LATE; /* there is no room, until the slowest has read on */
    g->ring[end % RING] = 1, g->ring[(end + 1) % RING] = (int32_t)id;
    g->passed[id]++;
    __atomic_store_n(g->words[0] + END, end + 2, __ATOMIC_RELEASE);
    return DONE;
}

static int follow(Group *g, uint32_t id) { /* another's: reads the next entry, if that is this id alone */
    int64_t *read = g->words[g->member] + READ, at = *read;
    if (__atomic_load_n(g->words[0] + END, __ATOMIC_ACQUIRE) == at) return LATE;
    if (g->ring[at % RING] != 1 || g->ring[(at + 1) % RING] != (int32_t)id) return DIFFERENT;
    __atomic_store_n(read, at + 2, __ATOMIC_RELEASE);
    return DONE;
}

static int scheduled_one(Exchange *e, Group *g, uint32_t id, const Py_buffer *source, const Py_buffer *target,
                         int64_t sequence, double patience_us) {
    int found = LATE;
    pack_slot(e, source, sequence); /* what nobody reads before PACKED */
    count(g, id);
    double until = now_us() + patience_us;
    for (int i = 0; found == LATE && (i < SPINS || now_us() < until); i++) {
        found = g->member ? follow(g, id) : schedule(g, id);
        if (i < SPINS) relax();
        else sched_yield();
    }
    if (found != DONE || e->what == NOTHING) return found;
    publish(e->region, PACKED, sequence);
    if (!arrived(e->region, PACKED, sequence, patience_us)) return SUMS_LATE;
    return finished(e, source, target, sequence, patience_us);
}

/* Exchange.run(source or None, target, number, sequence, patience_us, group=None); number: the signature's
 * -> 0: it is done; 1: ranks differ; 2: some are late; 3: all have called it, but some of their sums are late.
 * Then it goes on by other means: it is signed and packed, in the last case perhaps summed.
 * With a group it signs nothing: `number` is an id that is counted, and run when it is scheduled
 * -> 1: another entry is the next; 2: it is not scheduled yet; 3: it is, and packed, but others are late. Nothing is taken
 * back. Checked here is only what could write beside the slot, the counters or the target. */
static PyObject *exchange_run(Exchange *e, PyObject *const *args, Py_ssize_t count) {
    Py_buffer source = {.len = 0}, target = {.len = 0};
    int found = -1;
    if (count < 5 || count > 6 || (count == 6 && Py_TYPE(args[5]) != group_type))
        return PyErr_Format(PyExc_TypeError, "%zd arguments", count);
    Group *g = count == 6 ? (Group *)args[5] : NULL;
    int64_t number = PyLong_AsLongLong(args[2]), sequence = PyLong_AsLongLong(args[3]);
    double patience_us = PyFloat_AsDouble(args[4]);
    if (PyErr_Occurred()) return NULL;
    if (e->what != NOTHING && (PyObject_GetBuffer(args[0], &source, PyBUF_SIMPLE) ||
                               PyObject_GetBuffer(args[1], &target, PyBUF_WRITABLE)))
        return PyBuffer_Release(&source), NULL;
    Py_ssize_t slot = e->region->slot_bytes, end = e->what == OWN_PART ? e->low * e->itemsize + target.len : target.len;
    if (e->what == BY_ROWS) slot -= LINE;
    if (source.len > slot || (e->what == GATHERED || e->what == BY_ROWS ? end != source.len * e->region->size : end > source.len)) {
        PyErr_Format(PyExc_ValueError, "%zd B into %zd, by a slot of %zd", source.len, target.len, slot);
    } else if (g && (number < 0 || number >= g->capacity)) {
        PyErr_Format(PyExc_ValueError, "id %lld of %zd", (long long)number, g->capacity);
    } else {
        Py_BEGIN_ALLOW_THREADS
        if (g) found = scheduled_one(e, g, number, &source, &target, sequence, patience_us);
        else found = signed_one(e, &source, &target, number, sequence, patience_us);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&source), PyBuffer_Release(&target);
    return found < 0 ? NULL : PyLong_FromLong(found);
}

/* reduce(parts, out, also or None, type, op, prescale, divisor, postscale, stochastic=False, key=0) */
static PyObject *reduce(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *parts, *out, *also;
    int type, op;
    Factors f = {0};
    if (!PyArg_ParseTuple(args, "O!OOiiddd|pI", &PyList_Type, &parts, &out, &also, &type, &op, &f.prescale, &f.divisor,
                          &f.postscale, &f.stochastic, &f.key) || !kernel_of(type, op))
        return NULL;
    Py_ssize_t count = PyList_Size(parts), all = count + 1 + (also != Py_None);
    if (count < 1 || count > MOST) return PyErr_Format(PyExc_ValueError, "%zd parts", count);
    Py_buffer views[MOST + 2];
    Held held = {.views = views};
    const char *pointers[MOST];
    for (Py_ssize_t k = 0; k < all && !PyErr_Occurred(); k++) {
        PyObject *array = k < count ? PyList_GetItem(parts, k) : k == count ? out : also;
        if (!hold(&held, array, k < count ? PyBUF_SIMPLE : PyBUF_WRITABLE)) break;
        if (k < count) pointers[k] = views[k].buf;
        if (views[k].len != views->len)
            PyErr_Format(PyExc_ValueError, "array %zd: %zd B, not %zd", k, views[k].len, views->len);
    }
    if (!PyErr_Occurred()) {
        Py_BEGIN_ALLOW_THREADS
        TYPES[type].kernels[op](pointers, (int)count, views[count].buf, all > count + 1 ? views[count + 1].buf : NULL,
                                views->len / TYPES[type].itemsize, &f);
        Py_END_ALLOW_THREADS
    }
    release(&held);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

typedef void (*Conversion)(const char *source, char *target, size_t count, const Factors *);

/* by: NULL where they do not fit, as Python knows */
static PyObject *converted(Py_buffer *source, Py_buffer *target, size_t count, Conversion by, const Factors *f) {
    if (by) {
        Py_BEGIN_ALLOW_THREADS
        by(source->buf, target->buf, count, f);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(source), PyBuffer_Release(target);
    return by ? Py_NewRef(Py_None) : NULL;
}

/* convert(source, target, is_bf16): 16-bit floats to float32, or back */
static PyObject *convert(PyObject *Py_UNUSED(module), PyObject *args) {
    static const Conversion by[2][2] = {{narrow_f16, narrow_bf16}, {widen_f16, widen_bf16}};
    Py_buffer source, target;
    int is_bf16;
    if (!PyArg_ParseTuple(args, "y*w*p", &source, &target, &is_bf16)) return NULL;
    int wider = source.len < target.len, fits = wider ? target.len == 2 * source.len : source.len == 2 * target.len;
    if (!fits) PyErr_Format(PyExc_ValueError, "%zd B into %zd", source.len, target.len);
    return converted(&source, &target, (wider ? source : target).len / 2, fits ? by[wider][is_bf16] : NULL, NULL);
}

/* recode(source, target, bits, stochastic, key): float32 to blocks; recode(source, target, bits): back */
static PyObject *recode(PyObject *Py_UNUSED(module), PyObject *args) {
    static const Conversion by[2][2] = {{encode_4, encode_8}, {decode_4, decode_8}};
    Py_buffer source, target;
    Factors f = {.stochastic = -1};
    int bits;
    if (!PyArg_ParseTuple(args, "y*w*i|pI", &source, &target, &bits, &f.stochastic, &f.key)) return NULL;
    int decodes = f.stochastic < 0;
    Py_ssize_t bytes = decodes ? target.len : source.len, count = bytes / (Py_ssize_t)sizeof(float);
    Py_ssize_t blocks = (count + SHARE - 1) / SHARE, size = bits == 8 ? BLOCK_BYTES(8) : BLOCK_BYTES(4);
    int fits = (bits == 8 || bits == 4) && bytes % sizeof(float) == 0 && (decodes ? source : target).len == blocks * size;
    if (!fits) PyErr_Format(PyExc_ValueError, "%zd B into %zd, in %d bits", source.len, target.len, bits);
    return converted(&source, &target, count, fits ? by[decodes][bits == 8] : NULL, &f);
}

/* fence(): see transport/window.py */
static PyObject *fence(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    Py_RETURN_NONE;
}

static PyMethodDef region_methods[] = {{"allreduce", (PyCFunction)region_allreduce, METH_VARARGS, NULL},
                                       {"exchange", (PyCFunction)region_exchange, METH_VARARGS, NULL}, {0}};
static PyMethodDef run_methods[] = {{"advance", (PyCFunction)run_advance, METH_VARARGS, NULL},
                                    {"took", (PyCFunction)run_took, METH_NOARGS, NULL},
                                    {"waits_for", (PyCFunction)run_waits_for, METH_NOARGS, NULL}, {0}};
static PyMethodDef exchange_methods[] = {{"run", (PyCFunction)(void (*)(void))exchange_run, METH_FASTCALL, NULL}, {0}};

/* new: NULL where Python makes none. */
static PyTypeObject *type_of(const char *name, size_t size, PyMethodDef *methods, newfunc new) {
    unsigned flags = Py_TPFLAGS_DEFAULT | (new ? 0 : Py_TPFLAGS_DISALLOW_INSTANTIATION);
    PyType_Slot slots[] = {{Py_tp_dealloc, dealloc}, {Py_tp_methods, methods}, {new ? Py_tp_new : 0, new}, {0, NULL}};
    return (PyTypeObject *)PyType_FromSpec(&(PyType_Spec){name, (int)size, 0, flags, slots});
}

static PyMethodDef functions[] = {{"reduce", reduce, METH_VARARGS, NULL},
                                  {"convert", convert, METH_VARARGS, NULL},
                                  {"recode", recode, METH_VARARGS, NULL},
                                  {"fence", fence, METH_NOARGS, NULL}, {0}};

static int fill(PyObject *module) {
    static PyMethodDef none[] = {{0}};
    PyTypeObject *region_type = type_of("ringreduce.kernels._native.Region", sizeof(Region), region_methods, region_new);
    group_type = type_of("ringreduce.kernels._native.Group", sizeof(Group), none, group_new);
    run_type = type_of("ringreduce.kernels._native.Run", sizeof(Run), run_methods, NULL);
    exchange_type = type_of("ringreduce.kernels._native.Exchange", sizeof(Exchange), exchange_methods, NULL);
    if (region_type == NULL || group_type == NULL || run_type == NULL || exchange_type == NULL) return -1;
    return PyModule_AddType(module, region_type) || PyModule_AddType(module, group_type) ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, fill},
#ifdef Py_mod_gil
                                         {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
                                         {0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, functions, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module); }
