// The kernels, one launch for all tensors of a slot. gpu/kernels.py compiles and launches them.
//
//     tensors  |  a  | b |      c      |         pieces, anywhere in memory
//              gather, load    ↓    ↑   scatter, store
//     slot     |  a  |b..|      c      |         each piece starts at a multiple of 16 bytes
//     tiles    |   |  |  |    |    |   |         what a block of threads processes at a time
//
// gather, scatter   copy bytes as they are
// load, store       prescale and widen; divide, postscale and round
// reduce            combine the same elements of several slots, in this order; divide, postscale and round
//
// No header is included: a machine with only a GPU driver has none. Compiler options define nothing (gather, scatter);
// ELEMENT and PARTIAL, two types of the table in dtypes.py (load, store); and OP, a reduction (reduce). The kernels'
// names contain them, to be distinct in a profile.
//
// Results have the bits of ops.Reduction on the host. So float arithmetic is in PTX: CuPy compiles with -ftz=true,
// which would flush subnormal numbers to zero in C++ code, and no operations may be contracted to an FMA.

typedef signed char int8;
typedef unsigned char uint8;
typedef short int16;
typedef unsigned short uint16;
typedef int int32;
typedef unsigned int uint32;
typedef long long int64;
typedef unsigned long long uint64;
typedef float float32;
typedef double float64;

struct alignas(16) Vector { uint32 words[4]; };

// Some elements of one piece.
struct alignas(16) Tile {
    int32 piece;
    int32 first;  // element of the piece, ...
    int32 start;  // ... and of the slot
    int32 count;
};

// Memory of this or of a peer's GPU, an aligned vector at a time. PTX, since the compiler cannot know that an address
// which was itself read from memory is in global memory.
#ifdef __CUDA_ARCH__
__device__ Vector read(const Vector* source) {
    Vector value;
    asm("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(value.words[0]), "=r"(value.words[1]), "=r"(value.words[2]), "=r"(value.words[3])
        : "l"(source));
    return value;
}
__device__ void write(Vector* target, Vector value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(target), "r"(value.words[0]), "r"(value.words[1]), "r"(value.words[2]), "r"(value.words[3])
                 : "memory");
}
#else
Vector read(const Vector* source) { return *source; }
void write(Vector* target, Vector value) { *target = value; }
#endif

#ifndef ELEMENT

template <class Word> __device__ Word read(const Word* source) { return *source; }
template <class Word> __device__ void write(Word* target, Word value) { *target = value; }

// Words that a thread has in flight.
const int BATCH = 2;

// Copy nbytes from source(offset) to target(offset), both multiples of the word's size in memory.
template <class Word, class Source, class Target>
__device__ void copy_words(Source source, Target target, int nbytes) {
    const int words = nbytes / sizeof(Word);
    for (int first = threadIdx.x; first < words; first += blockDim.x * BATCH) {
        Word held[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            const int word = first + k * blockDim.x;
            if (word < words) held[k] = read(reinterpret_cast<const Word*>(source(word * sizeof(Word))));
        }
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            const int word = first + k * blockDim.x;
            if (word < words) write(reinterpret_cast<Word*>(target(word * sizeof(Word))), held[k]);
        }
    }
    for (int byte = words * sizeof(Word) + threadIdx.x; byte < nbytes; byte += blockDim.x)
        *target(byte) = *source(byte);
}

// `address` is the tensor's: slots are aligned to 16 bytes.
template <class Source, class Target>
__device__ void copy(Source source, Target target, int nbytes, uint64 address) {
    if (address % 16 == 0)
        copy_words<Vector>(source, target, nbytes);
    else if (address % 8 == 0)
        copy_words<uint64>(source, target, nbytes);
    else if (address % 4 == 0)
        copy_words<uint32>(source, target, nbytes);
    else if (address % 2 == 0)
        copy_words<uint16>(source, target, nbytes);
    else
        copy_words<uint8>(source, target, nbytes);
}

// Contiguous memory.
struct Flat {
    uint64 address;
    __device__ uint8* operator()(uint32 offset) const { return reinterpret_cast<uint8*>(address + offset); }
};

// A slot whose chunks lie in their owners' slots; a word of 16 bytes or less lies in one chunk.
struct Chunks {
    const uint64* slots;
    uint32 chunk_nbytes;
    uint32 start;
    __device__ const uint8* operator()(uint32 offset) const {
        const uint32 position = start + offset;
        return reinterpret_cast<const uint8*>(slots[position / chunk_nbytes] + position);
    }
};

extern "C" __global__ void gather(const Tile* tiles, int64 tile_count, int64 itemsize, const uint64* pieces,
                                  uint64 slot) {
    for (int64 number = blockIdx.x; number < tile_count; number += gridDim.x) {
        const Tile tile = tiles[number];
        const uint64 source = pieces[tile.piece] + tile.first * itemsize;
        copy(Flat{source}, Flat{slot + tile.start * itemsize}, tile.count * itemsize, source);
    }
}

extern "C" __global__ void scatter(const Tile* tiles, int64 tile_count, int64 itemsize, const uint64* slots,
                                   int64 chunk_nbytes, const uint64* pieces) {
    for (int64 number = blockIdx.x; number < tile_count; number += gridDim.x) {
        const Tile tile = tiles[number];
        const uint64 target = pieces[tile.piece] + tile.first * itemsize;
        const Chunks source{slots, static_cast<uint32>(chunk_nbytes), static_cast<uint32>(tile.start * itemsize)};
        copy(source, Flat{target}, tile.count * itemsize, target);
    }
}

#else

struct float16 { uint16 bits; };
struct bfloat16 { uint16 bits; };
struct complex64 {
    typedef float Part;
    float real, imaginary;
};
struct complex128 {
    typedef double Part;
    double real, imaginary;
};

// ---- arithmetic of floats: rounded to nearest even, once an operation; subnormal numbers are numbers

#ifdef __CUDA_ARCH__
#define BINARY(name, instruction, type, letter)                                                  \
    __device__ type name(type a, type b) {                                                       \
        type result;                                                                             \
        asm(instruction " %0, %1, %2;" : "=" letter(result) : letter(a), letter(b));             \
        return result;                                                                           \
    }
#define PREDICATE(name, comparison, type, letter)                                                \
    __device__ bool name(type a, type b) {                                                       \
        int result;                                                                              \
        asm("{ .reg .pred p; " comparison " p, %1, %2; selp.s32 %0, 1, 0, p; }"                  \
            : "=r"(result)                                                                       \
            : letter(a), letter(b));                                                             \
        return result;                                                                           \
    }
#define FLOAT(type, suffix, letter)                                                              \
    BINARY(add, "add.rn." suffix, type, letter)                                                  \
    BINARY(subtract, "sub.rn." suffix, type, letter)                                             \
    BINARY(multiply, "mul.rn." suffix, type, letter)                                             \
    BINARY(divide, "div.rn." suffix, type, letter)                                               \
    PREDICATE(less, "setp.lt." suffix, type, letter)                                             \
    PREDICATE(unordered, "setp.nan." suffix, type, letter)                                       \
    __device__ type negative(type a) {                                                           \
        type result;                                                                             \
        asm("neg." suffix " %0, %1;" : "=" letter(result) : letter(a));                          \
        return result;                                                                           \
    }                                                                                            \
    __device__ type multiply_add(type a, type b, type c) {                                       \
        type result;                                                                             \
        asm("fma.rn." suffix " %0, %1, %2, %3;"                                                  \
            : "=" letter(result)                                                                 \
            : letter(a), letter(b), letter(c));                                                  \
        return result;                                                                           \
    }
FLOAT(float, "f32", "f")
FLOAT(double, "f64", "d")
__device__ float rounded(float, double value) {
    float result;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(result) : "d"(value));
    return result;
}
#else
#define FLOAT(type, fma)                                                                         \
    __device__ type add(type a, type b) { return a + b; }                                        \
    __device__ type subtract(type a, type b) { return a - b; }                                   \
    __device__ type multiply(type a, type b) { return a * b; }                                   \
    __device__ type divide(type a, type b) { return a / b; }                                     \
    __device__ bool less(type a, type b) { return a < b; }                                       \
    __device__ bool unordered(type a, type b) { return a != a || b != b; }                       \
    __device__ type negative(type a) { return -a; }                                              \
    __device__ type multiply_add(type a, type b, type c) { return fma(a, b, c); }
FLOAT(float, __builtin_fmaf)
FLOAT(double, __builtin_fma)
__device__ float rounded(float, double value) { return static_cast<float>(value); }
#endif
// The first argument selects the type of the result, here and below.
__device__ double rounded(double, double value) { return value; }

// ---- 16-bit floats to float32, exactly, and back, to nearest even, past the largest to infinity

union Bits { float value; uint32 bits; };

__device__ float widen(float, bfloat16 element) {
    Bits wide;
    wide.bits = static_cast<uint32>(element.bits) << 16;
    return wide.value;
}

__device__ bfloat16 narrow(bfloat16, float value) {
    Bits wide;
    wide.value = value;
    const bool is_nan = (wide.bits & 0x7FFFFFFF) > 0x7F800000;
    const uint32 upper = is_nan ? 0x7FC0 : (wide.bits + 0x7FFF + (wide.bits >> 16 & 1)) >> 16;
    return bfloat16{static_cast<uint16>(upper)};
}

#ifdef __CUDA_ARCH__
__device__ float widen(float, float16 element) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(element.bits));
    return result;
}

__device__ float16 narrow(float16, float value) {
    float16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}
#else
// Exponents differ by 112. A subnormal float16 is its fraction times 2^-24.
float widen(float, float16 element) {
    const uint32 sign = (element.bits & 0x8000u) << 16, magnitude = element.bits & 0x7FFFu;
    Bits wide;
    if (magnitude < 0x400)
        wide.value = magnitude * 0x1p-24f;
    else
        wide.bits = (magnitude << 13) + ((magnitude < 0x7C00 ? 112u : 224u) << 23);
    wide.bits |= sign;
    return wide.value;
}

float16 narrow(float16, float value) {
    Bits wide;
    wide.value = value;
    const uint32 sign = wide.bits >> 16 & 0x8000, magnitude = wide.bits & 0x7FFFFFFF;
    uint32 rounded;
    if (magnitude > 0x7F800000) {
        rounded = 0x7E00;
    } else if (magnitude < 0x38800000) {  // a subnormal float16: the sum's last bit is worth 2^-24
        wide.bits = magnitude;
        wide.value += 0.5f;
        rounded = wide.bits - 0x3F000000;
    } else {
        rounded = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
        if (rounded > 0x7C00) rounded = 0x7C00;
    }
    return float16{static_cast<uint16>(sign | rounded)};
}
#endif

template <class T> __device__ T widen(T, T element) { return element; }
template <class T> __device__ T narrow(T, T value) { return value; }
// integers of up to 32 bits are averaged in int64
template <class T> __device__ int64 widen(int64, T element) { return element; }
template <class T> __device__ T narrow(T, int64 value) { return static_cast<T>(value); }
__device__ int64 widen(int64, int64 element) { return element; }
__device__ int64 narrow(int64, int64 value) { return value; }

// ---- steps of a reduction, each as ops.py does it

// Integers are scaled in float64, truncated toward zero.
template <class T>
struct Scale {
    const bool is_one;
    const double factor;
    __device__ explicit Scale(double factor) : is_one(factor == 1.0), factor(factor) {}
    __device__ T operator()(T value) const {
        if (is_one) return value;
        const double scaled = multiply(static_cast<double>(value), factor);
        return less(scaled, 0x1p63) ? static_cast<T>(static_cast<int64>(scaled))
                                    : static_cast<T>(static_cast<uint64>(scaled));
    }
};

template <class T>
struct FloatScale {
    const bool is_one;
    const T factor;
    __device__ explicit FloatScale(double factor) : is_one(factor == 1.0), factor(rounded(T(), factor)) {}
    __device__ T operator()(T value) const { return is_one ? value : multiply(value, factor); }
};
template <> struct Scale<float> : FloatScale<float> { using FloatScale<float>::FloatScale; };
template <> struct Scale<double> : FloatScale<double> { using FloatScale<double>::FloatScale; };

template <> struct Scale<bool> {
    __device__ explicit Scale(double) {}
    __device__ bool operator()(bool value) const { return value; }
};

// NumPy's product of complex numbers, with FMA as on every processor that has it.
template <class Complex>
__device__ Complex complex_product(Complex a, Complex b) {
    return Complex{multiply_add(a.real, b.real, negative(multiply(a.imaginary, b.imaginary))),
                   multiply_add(a.real, b.imaginary, multiply(a.imaginary, b.real))};
}

template <class Complex>
struct ComplexScale {
    typedef typename Complex::Part Part;
    const bool is_one;
    const Scale<Part> part;
    __device__ explicit ComplexScale(double factor) : is_one(factor == 1.0), part(factor) {}
    __device__ Complex operator()(Complex value) const {
        return is_one ? value : complex_product(value, Complex{part.factor, Part(0)});
    }
};
template <> struct Scale<complex64> : ComplexScale<complex64> { using ComplexScale<complex64>::ComplexScale; };
template <> struct Scale<complex128> : ComplexScale<complex128> { using ComplexScale<complex128>::ComplexScale; };

// Integers: exactly, truncated toward zero.
template <class T>
struct Divide {
    const T divisor;
    __device__ Divide(int64 divisor, double) : divisor(static_cast<T>(divisor)) {}
    __device__ T operator()(T value) const { return divisor == 1 ? value : static_cast<T>(value / divisor); }
};

// By a power of two: times its reciprocal, which is exact; else `reciprocal` is 0.
template <class T>
struct FloatDivide {
    const bool is_one, is_exact;
    const T divisor, reciprocal;
    __device__ FloatDivide(int64 divisor, double reciprocal)
        : is_one(divisor == 1),
          is_exact(reciprocal != 0),
          divisor(rounded(T(), static_cast<double>(divisor))),
          reciprocal(rounded(T(), reciprocal)) {}
    __device__ T operator()(T value) const {
        return is_one ? value : is_exact ? multiply(value, reciprocal) : divide(value, divisor);
    }
};
template <> struct Divide<float> : FloatDivide<float> { using FloatDivide<float>::FloatDivide; };
template <> struct Divide<double> : FloatDivide<double> { using FloatDivide<double>::FloatDivide; };

template <> struct Divide<bool> {
    __device__ Divide(int64, double) {}
    __device__ bool operator()(bool value) const { return value; }
};

// NumPy divides complex numbers by Smith's algorithm; here the divisor's imaginary part, and so the ratio, is 0.
template <class Complex>
struct ComplexDivide {
    typedef typename Complex::Part Part;
    const bool is_one;
    const Part factor;
    __device__ ComplexDivide(int64 divisor, double)
        : is_one(divisor == 1), factor(divide(Part(1), rounded(Part(), static_cast<double>(divisor)))) {}
    __device__ Complex operator()(Complex value) const {
        if (is_one) return value;
        const Part ratio = 0;
        return Complex{multiply(add(value.real, multiply(value.imaginary, ratio)), factor),
                       multiply(subtract(value.imaginary, multiply(value.real, ratio)), factor)};
    }
};
template <> struct Divide<complex64> : ComplexDivide<complex64> { using ComplexDivide<complex64>::ComplexDivide; };
template <> struct Divide<complex128> : ComplexDivide<complex128> { using ComplexDivide<complex128>::ComplexDivide; };

struct Start {
    const Scale<PARTIAL> prescale;
    __device__ explicit Start(double factor) : prescale(factor) {}
    __device__ PARTIAL operator()(ELEMENT element) const { return prescale(widen(PARTIAL(), element)); }
};

struct Finish {
    const Divide<PARTIAL> divide_by;
    const Scale<PARTIAL> postscale;
    __device__ Finish(int64 divisor, double reciprocal, double factor)
        : divide_by(divisor, reciprocal), postscale(factor) {}
    __device__ ELEMENT operator()(PARTIAL value) const { return narrow(ELEMENT(), postscale(divide_by(value))); }
};

// ---- elements in memory

__device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

// Elements that are read and written 16 bytes at a time.
template <class T, int COUNT>
union Pack {
    static const int VECTORS = COUNT * sizeof(T) / 16;
    Vector vectors[VECTORS];
    T elements[COUNT];
    __device__ Pack() {}
    __device__ void read(const T* source) {
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) vectors[k] = ::read(reinterpret_cast<const Vector*>(source) + k);
    }
    __device__ void write(T* target) const {
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) ::write(reinterpret_cast<Vector*>(target) + k, vectors[k]);
    }
};

#ifndef OP

// `address` is the tensor's: slots are aligned to 16 bytes.
template <class From, class To, class Step>
__device__ void convert(uint64 source_address, uint64 target_address, int count, uint64 address, Step step) {
    const int WIDTH = 16 / smaller(sizeof(From), sizeof(To));
    const From* source = reinterpret_cast<const From*>(source_address);
    To* target = reinterpret_cast<To*>(target_address);
    const int whole = address % 16 == 0 ? count / WIDTH * WIDTH : 0;
    for (int low = threadIdx.x * WIDTH; low < whole; low += blockDim.x * WIDTH) {
        Pack<From, WIDTH> before;
        Pack<To, WIDTH> after;
        before.read(source + low);
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) after.elements[k] = step(before.elements[k]);
        after.write(target + low);
    }
    for (int k = whole + threadIdx.x; k < count; k += blockDim.x) target[k] = step(source[k]);
}

struct StartNarrow : Start {
    using Start::Start;
    __device__ ELEMENT operator()(ELEMENT element) const { return narrow(ELEMENT(), Start::operator()(element)); }
};

struct FinishNarrow : Finish {
    using Finish::Finish;
    __device__ ELEMENT operator()(ELEMENT element) const { return Finish::operator()(widen(PARTIAL(), element)); }
};

template <class InSlot, class Step>
__device__ void load_tiles(const Tile* tiles, int64 tile_count, const uint64* pieces, uint64 slot, Step step) {
    for (int64 number = blockIdx.x; number < tile_count; number += gridDim.x) {
        const Tile tile = tiles[number];
        const uint64 source = pieces[tile.piece] + tile.first * sizeof(ELEMENT);
        convert<ELEMENT, InSlot>(source, slot + tile.start * sizeof(InSlot), tile.count, source, step);
    }
}

template <class InSlot, class Step>
__device__ void store_tiles(const Tile* tiles, int64 tile_count, uint64 slot, const uint64* pieces, Step step) {
    for (int64 number = blockIdx.x; number < tile_count; number += gridDim.x) {
        const Tile tile = tiles[number];
        const uint64 target = pieces[tile.piece] + tile.first * sizeof(ELEMENT);
        convert<InSlot, ELEMENT>(slot + tile.start * sizeof(InSlot), target, tile.count, target, step);
    }
}

#define NAMED(kernel, element, partial) NAMED_(kernel, element, partial)
#define NAMED_(kernel, element, partial) extern "C" __global__ void kernel##_##element##_##partial

// The wide ones have elements of PARTIAL in the slot, the others elements of ELEMENT.
NAMED(load, ELEMENT, PARTIAL)
(const Tile* tiles, int64 tile_count, const uint64* pieces, uint64 slot, double prescale) {
    load_tiles<ELEMENT>(tiles, tile_count, pieces, slot, StartNarrow(prescale));
}

NAMED(load_wide, ELEMENT, PARTIAL)
(const Tile* tiles, int64 tile_count, const uint64* pieces, uint64 slot, double prescale) {
    load_tiles<PARTIAL>(tiles, tile_count, pieces, slot, Start(prescale));
}

NAMED(store, ELEMENT, PARTIAL)
(const Tile* tiles, int64 tile_count, uint64 slot, const uint64* pieces, int64 divisor, double reciprocal,
 double postscale) {
    store_tiles<ELEMENT>(tiles, tile_count, slot, pieces, FinishNarrow(divisor, reciprocal, postscale));
}

NAMED(store_wide, ELEMENT, PARTIAL)
(const Tile* tiles, int64 tile_count, uint64 slot, const uint64* pieces, int64 divisor, double reciprocal,
 double postscale) {
    store_tiles<PARTIAL>(tiles, tile_count, slot, pieces, Finish(divisor, reciprocal, postscale));
}

#else

struct Sum {
    template <class T>
    __device__ static T of(T a, T b) { return static_cast<T>(a + b); }
    __device__ static bool of(bool a, bool b) { return a || b; }
    __device__ static float of(float a, float b) { return add(a, b); }
    __device__ static double of(double a, double b) { return add(a, b); }
    __device__ static complex64 of(complex64 a, complex64 b) {
        return complex64{add(a.real, b.real), add(a.imaginary, b.imaginary)};
    }
    __device__ static complex128 of(complex128 a, complex128 b) {
        return complex128{add(a.real, b.real), add(a.imaginary, b.imaginary)};
    }
};

struct Product {
    template <class T>
    __device__ static T of(T a, T b) { return static_cast<T>(a * b); }
    __device__ static bool of(bool a, bool b) { return a && b; }
    __device__ static uint16 of(uint16 a, uint16 b) { return static_cast<uint16>(static_cast<uint32>(a) * b); }
    __device__ static float of(float a, float b) { return multiply(a, b); }
    __device__ static double of(double a, double b) { return multiply(a, b); }
    __device__ static complex64 of(complex64 a, complex64 b) { return complex_product(a, b); }
    __device__ static complex128 of(complex128 a, complex128 b) { return complex_product(a, b); }
};

// NumPy's: a NaN wins, and of equal numbers, such as 0 and -0, the second.
struct Min {
    template <class T>
    __device__ static T of(T a, T b) { return a < b ? a : b; }
    __device__ static bool of(bool a, bool b) { return a && b; }
    __device__ static float of(float a, float b) { return less(a, b) || unordered(a, a) ? a : b; }
    __device__ static double of(double a, double b) { return less(a, b) || unordered(a, a) ? a : b; }
};

struct Max {
    template <class T>
    __device__ static T of(T a, T b) { return b < a ? a : b; }
    __device__ static bool of(bool a, bool b) { return a || b; }
    __device__ static float of(float a, float b) { return less(b, a) || unordered(a, a) ? a : b; }
    __device__ static double of(double a, double b) { return less(b, a) || unordered(a, a) ? a : b; }
};

// What a thread reads of one source: 16 bytes at each of PLACES positions.
template <int PLACES, class Packs>
__device__ void read_packs(Packs& packs, uint64 source, const int64 (&places)[PLACES]) {
#pragma unroll
    for (int k = 0; k < PLACES; ++k) packs[k].read(reinterpret_cast<const ELEMENT*>(source) + places[k]);
}

#define NAMED(kernel, op, element, partial) NAMED_(kernel, op, element, partial)
#define NAMED_(kernel, op, element, partial) extern "C" __global__ void kernel##_##op##_##element##_##partial

// Every thread reads an element of all sources before it writes it, so the target may be one of them.
NAMED(reduce, OP, ELEMENT, PARTIAL)
(const uint64* sources, int64 source_count, uint64 target_address, int64 count, int64 is_aligned, double prescale,
 int64 divisor, double reciprocal, double postscale) {
    const Start start(prescale);
    const Finish finish(divisor, reciprocal, postscale);
    const int WIDTH = 16 / sizeof(ELEMENT);
    const int PLACES = WIDTH * sizeof(PARTIAL) > 64 ? 1 : 2;  // partial results use 32 registers at most
    const int64 whole = is_aligned ? count / WIDTH : 0;
    ELEMENT* target = reinterpret_cast<ELEMENT*>(target_address);
    for (int64 low = static_cast<int64>(blockIdx.x) * blockDim.x * PLACES + threadIdx.x; low < whole;
         low += static_cast<int64>(gridDim.x) * blockDim.x * PLACES) {
        int64 places[PLACES];  // past the end the last one is read again, and not written: no branch among the reads
#pragma unroll
        for (int k = 0; k < PLACES; ++k) {
            const int64 vector = low + k * static_cast<int64>(blockDim.x);
            places[k] = (vector < whole ? vector : whole - 1) * WIDTH;
        }
        Pack<ELEMENT, WIDTH> packs[PLACES];
        PARTIAL totals[PLACES][WIDTH];
        read_packs(packs, sources[0], places);
#pragma unroll
        for (int k = 0; k < PLACES * WIDTH; ++k)
            totals[k / WIDTH][k % WIDTH] = start(packs[k / WIDTH].elements[k % WIDTH]);
#pragma unroll 4
        for (int64 number = 1; number < source_count; ++number) {
            read_packs(packs, sources[number], places);
#pragma unroll
            for (int k = 0; k < PLACES * WIDTH; ++k) {
                PARTIAL& total = totals[k / WIDTH][k % WIDTH];
                total = OP::of(total, start(packs[k / WIDTH].elements[k % WIDTH]));
            }
        }
#pragma unroll
        for (int k = 0; k < PLACES; ++k) {
            Pack<ELEMENT, WIDTH> results;
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) results.elements[e] = finish(totals[k][e]);
            if (low + k * static_cast<int64>(blockDim.x) < whole) results.write(target + places[k]);
        }
    }
    for (int64 k = whole * WIDTH + static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; k < count;
         k += static_cast<int64>(gridDim.x) * blockDim.x) {
        PARTIAL total = start(reinterpret_cast<const ELEMENT*>(sources[0])[k]);
        for (int64 number = 1; number < source_count; ++number)
            total = OP::of(total, start(reinterpret_cast<const ELEMENT*>(sources[number])[k]));
        target[k] = finish(total);
    }
}

#endif
#endif
