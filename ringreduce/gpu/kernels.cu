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
// All ranks get the same bits: each element is computed on one GPU, or in the same order on all, and --fmad=false keeps
// a multiplication and an addition apart. They are the bits of ops.Reduction on the host, except that CuPy compiles
// with -ftz=true, which flushes subnormal float32 numbers to zero, and that NumPy may fuse complex products.

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

// What a thread reads and writes at once, where memory is aligned to it.
struct alignas(16) Vector { uint32 words[4]; };

// Some elements of one piece.
struct alignas(16) Tile {
    int32 piece;
    int32 first;  // element of the piece, ...
    int32 start;  // ... and of the slot
    int32 count;
};

#ifndef ELEMENT

// Copy nbytes from source(offset) to target(offset), both multiples of the word's size in memory.
template <class Word, class Source>
__device__ void copy_words(Source source, uint8* target, int nbytes) {
    const int words = nbytes / sizeof(Word);
    for (int word = threadIdx.x; word < words; word += blockDim.x)
        reinterpret_cast<Word*>(target)[word] = *reinterpret_cast<const Word*>(source(word * sizeof(Word)));
    for (int byte = words * sizeof(Word) + threadIdx.x; byte < nbytes; byte += blockDim.x)
        target[byte] = *source(byte);
}

// `address` is the tensor's: slots are aligned to 16 bytes.
template <class Source>
__device__ void copy(Source source, uint64 target_address, int nbytes, uint64 address) {
    uint8* target = reinterpret_cast<uint8*>(target_address);
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

extern "C" __global__ void gather(const Tile* tiles, int64 tile_count, int64 itemsize, const uint64* pieces,
                                  uint64 slot) {
    for (int64 number = blockIdx.x; number < tile_count; number += gridDim.x) {
        const Tile tile = tiles[number];
        const uint64 source = pieces[tile.piece] + tile.first * itemsize;
        const auto piece = [=](uint32 offset) { return reinterpret_cast<const uint8*>(source + offset); };
        copy(piece, slot + tile.start * itemsize, tile.count * itemsize, source);
    }
}

// The slot's chunks lie in their owners' slots; a word of 16 bytes or less lies in one chunk.
extern "C" __global__ void scatter(const Tile* tiles, int64 tile_count, int64 itemsize, const uint64* slots,
                                   int64 chunk_nbytes, const uint64* pieces) {
    for (int64 number = blockIdx.x; number < tile_count; number += gridDim.x) {
        const Tile tile = tiles[number];
        const uint64 target = pieces[tile.piece] + tile.first * itemsize;
        const uint32 start = tile.start * itemsize, owned = chunk_nbytes;
        const auto chunks = [=](uint32 offset) {
            return reinterpret_cast<const uint8*>(slots[(start + offset) / owned] + start + offset);
        };
        copy(chunks, target, tile.count * itemsize, target);
    }
}

#else

// ---- element types

struct float16 { uint16 bits; };
struct bfloat16 { uint16 bits; };

template <class T>
struct Complex { T real, imaginary; };
typedef Complex<float> complex64;
typedef Complex<double> complex128;

// Partial results are wider than elements of 16-bit floats, and of the integers that are averaged in int64. The first
// argument selects the type of the result.
template <class To, class From> __device__ To convert(To, From value) { return static_cast<To>(value); }
template <class T> __device__ T convert(T, T value) { return value; }

// Exactly.
__device__ float convert(float, bfloat16 element) {
    union { uint32 bits; float value; } wide{static_cast<uint32>(element.bits) << 16};
    return wide.value;
}

// To nearest even, past the largest to infinity.
__device__ bfloat16 convert(bfloat16, float value) {
    union { float value; uint32 bits; } wide{value};
    const bool is_nan = (wide.bits & 0x7FFFFFFF) > 0x7F800000;
    const uint32 upper = is_nan ? 0x7FC0 : (wide.bits + 0x7FFF + (wide.bits >> 16 & 1)) >> 16;
    return bfloat16{static_cast<uint16>(upper)};
}

#ifdef __CUDA_ARCH__
__device__ float convert(float, float16 element) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(element.bits));
    return result;
}
__device__ float16 convert(float16, float value) {
    float16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}
#else  // for tests on the host, whose compiler has the type
float convert(float, float16 element) { return __builtin_bit_cast(_Float16, element.bits); }
float16 convert(float16, float value) { return float16{__builtin_bit_cast(uint16, static_cast<_Float16>(value))}; }
#endif

// ---- steps of a reduction, as ops.py describes them

// Integers are scaled in float64, truncated toward zero.
template <class T>
__device__ T scaled(T value, double factor) {
    const double product = static_cast<double>(value) * factor;
    return product < 0x1p63 ? static_cast<T>(static_cast<int64>(product))
                            : static_cast<T>(static_cast<uint64>(product));
}
__device__ float scaled(float value, double factor) { return value * static_cast<float>(factor); }
__device__ double scaled(double value, double factor) { return value * factor; }
template <class T>
__device__ Complex<T> scaled(Complex<T> value, double factor) {
    return {scaled(value.real, factor), scaled(value.imaginary, factor)};
}

// Integers are divided exactly, truncated toward zero.
template <class T> __device__ T divided(T value, int64 divisor) { return static_cast<T>(value / static_cast<T>(divisor)); }
template <class T> __device__ Complex<T> divided(Complex<T> value, int64 divisor) { return scaled(value, 1.0 / divisor); }

struct Start {
    const double prescale;
    __device__ PARTIAL operator()(ELEMENT element) const {
        const PARTIAL value = convert(PARTIAL(), element);
        return prescale == 1 ? value : scaled(value, prescale);
    }
};

struct Finish {
    const int64 divisor;
    const double postscale;
    __device__ ELEMENT operator()(PARTIAL value) const {
        if (divisor != 1) value = divided(value, divisor);
        if (postscale != 1) value = scaled(value, postscale);
        return convert(ELEMENT(), value);
    }
};

// Elements that are read and written a Vector at a time.
template <class T, int COUNT>
union Pack {
    static const int VECTORS = COUNT * sizeof(T) / sizeof(Vector);
    Vector vectors[VECTORS];
    T elements[COUNT];
    __device__ Pack() {}
    __device__ explicit Pack(const T* source) {
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) vectors[k] = reinterpret_cast<const Vector*>(source)[k];
    }
    __device__ void write(T* target) const {
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) reinterpret_cast<Vector*>(target)[k] = vectors[k];
    }
};

#define NAME(kernel, ...) NAME_(kernel, __VA_ARGS__)

#ifndef OP

// `address` is the tensor's: slots are aligned to 16 bytes.
template <class From, class To, class Step>
__device__ void convert_all(uint64 source_address, uint64 target_address, int count, uint64 address, Step step) {
    const int WIDTH = sizeof(Vector) / (sizeof(From) < sizeof(To) ? sizeof(From) : sizeof(To));
    const From* source = reinterpret_cast<const From*>(source_address);
    To* target = reinterpret_cast<To*>(target_address);
    const int whole = address % sizeof(Vector) == 0 ? count / WIDTH * WIDTH : 0;
    for (int low = threadIdx.x * WIDTH; low < whole; low += blockDim.x * WIDTH) {
        const Pack<From, WIDTH> before(source + low);
        Pack<To, WIDTH> after;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) after.elements[k] = convert(To(), step(before.elements[k]));
        after.write(target + low);
    }
    for (int k = whole + threadIdx.x; k < count; k += blockDim.x) target[k] = convert(To(), step(source[k]));
}

template <class InSlot>
__device__ void load(const Tile* tiles, int64 tile_count, const uint64* pieces, uint64 slot, Start start) {
    for (int64 number = blockIdx.x; number < tile_count; number += gridDim.x) {
        const Tile tile = tiles[number];
        const uint64 source = pieces[tile.piece] + tile.first * sizeof(ELEMENT);
        convert_all<ELEMENT, InSlot>(source, slot + tile.start * sizeof(InSlot), tile.count, source, start);
    }
}

template <class InSlot>
__device__ void store(const Tile* tiles, int64 tile_count, uint64 slot, const uint64* pieces, Finish finish) {
    const auto step = [=](InSlot value) { return finish(convert(PARTIAL(), value)); };
    for (int64 number = blockIdx.x; number < tile_count; number += gridDim.x) {
        const Tile tile = tiles[number];
        const uint64 target = pieces[tile.piece] + tile.first * sizeof(ELEMENT);
        convert_all<InSlot, ELEMENT>(slot + tile.start * sizeof(InSlot), target, tile.count, target, step);
    }
}

#define NAME_(kernel, element, partial) kernel##_##element##_##partial
#define LOAD(kernel, InSlot)                                                                                       \
    extern "C" __global__ void NAME(kernel, ELEMENT, PARTIAL)(const Tile* tiles, int64 tile_count,                 \
                                                              const uint64* pieces, uint64 slot, double prescale) { \
        load<InSlot>(tiles, tile_count, pieces, slot, Start{prescale});                                            \
    }
#define STORE(kernel, InSlot)                                                                          \
    extern "C" __global__ void NAME(kernel, ELEMENT, PARTIAL)(const Tile* tiles, int64 tile_count,     \
                                                              uint64 slot, const uint64* pieces,       \
                                                              int64 divisor, double postscale) {       \
        store<InSlot>(tiles, tile_count, slot, pieces, Finish{divisor, postscale});                    \
    }
LOAD(load, ELEMENT)
LOAD(load_wide, PARTIAL)
STORE(store, ELEMENT)
STORE(store_wide, PARTIAL)

#else

// bool: a sum is "or", a product is "and"
struct Sum {
    template <class T> __device__ static T of(T a, T b) { return static_cast<T>(a + b); }
    template <class T> __device__ static Complex<T> of(Complex<T> a, Complex<T> b) {
        return {a.real + b.real, a.imaginary + b.imaginary};
    }
};

struct Product {
    template <class T> __device__ static T of(T a, T b) { return static_cast<T>(a * b); }
    __device__ static uint16 of(uint16 a, uint16 b) { return static_cast<uint32>(a) * b; }  // an int would overflow
    template <class T> __device__ static Complex<T> of(Complex<T> a, Complex<T> b) {
        return {a.real * b.real - a.imaginary * b.imaginary, a.real * b.imaginary + a.imaginary * b.real};
    }
};

// NumPy's: a NaN wins, and of equal numbers, such as 0 and -0, the second.
struct Min {
    template <class T> __device__ static T of(T a, T b) { return a < b || a != a ? a : b; }
};
struct Max {
    template <class T> __device__ static T of(T a, T b) { return b < a || a != a ? a : b; }
};

#define NAME_(kernel, op, element, partial) kernel##_##op##_##element##_##partial

// Every thread reads an element of all sources before it writes it, so the target may be one of them.
extern "C" __global__ void NAME(reduce, OP, ELEMENT, PARTIAL)(const ELEMENT* const* sources, int64 source_count,
                                                              ELEMENT* target, int64 count, int64 is_aligned,
                                                              double prescale, int64 divisor, double postscale) {
    const Start start{prescale};
    const Finish finish{divisor, postscale};
    const int WIDTH = sizeof(Vector) / sizeof(ELEMENT);
    const int64 thread = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64 threads = static_cast<int64>(gridDim.x) * blockDim.x;
    const int64 whole = is_aligned ? count / WIDTH * WIDTH : 0;
    for (int64 low = thread * WIDTH; low < whole; low += threads * WIDTH) {
        PARTIAL totals[WIDTH];
        const Pack<ELEMENT, WIDTH> first(sources[0] + low);
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) totals[k] = start(first.elements[k]);
#pragma unroll 4
        for (int64 number = 1; number < source_count; ++number) {
            const Pack<ELEMENT, WIDTH> next(sources[number] + low);
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) totals[k] = OP::of(totals[k], start(next.elements[k]));
        }
        Pack<ELEMENT, WIDTH> results;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) results.elements[k] = finish(totals[k]);
        results.write(target + low);
    }
    for (int64 k = whole + thread; k < count; k += threads) {
        PARTIAL total = start(sources[0][k]);
        for (int64 number = 1; number < source_count; ++number) total = OP::of(total, start(sources[number][k]));
        target[k] = finish(total);
    }
}

#endif
#endif
