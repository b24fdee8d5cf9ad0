// The kernels that egm-guest runs on a GPU. `cargo run -p egm-vendor --example ptx` makes egm.ptx of this file.
//
// Plain CUDA C++ without includes, shared memory, barriers or inline assembly, so that a host compiler compiles it too
// when it is told what __global__, blockIdx, blockDim, gridDim, threadIdx, __shfl_xor_sync, atomicAdd_system and
// __threadfence_system are, and how many threads a warp has: that is how the tests' stand-in for libcuda runs these very
// kernels, with warps of one thread. No thread waits for another thread of its launch, but for those of its warp when they
// add what they read.

typedef unsigned long long u64;

// Threads of a warp: a number that the compiler knows, unlike warpSize, which PTX does not fix.
#ifndef WARP
#define WARP 32
#endif

// 16 bytes, read and written at once.
struct alignas(16) Pair {
    u64 low, high;
};

// What word `index` of memory that was filled with `seed` holds. kernels.rs has the same in Rust.
static __device__ inline u64 pattern(u64 seed, u64 index) {
    u64 x = (seed + index) * 0x9E3779B97F4A7C15ull;
    return x ^ (x >> 29);
}

static __device__ inline u64 thread_index() {
    return (u64)blockIdx.x * blockDim.x + threadIdx.x;
}

static __device__ inline u64 thread_count() {
    return (u64)gridDim.x * blockDim.x;
}

// Notes a wrong word: wrong[0] counts them, [1] and [2] are index and value of one that was found first.
static __device__ inline void note(u64 *wrong, u64 index, u64 value) {
    if (atomicAdd_system(&wrong[0], 1ull) == 0) {
        wrong[1] = index;
        wrong[2] = value;
    }
}

// Writes the pattern, word by word.
extern "C" __global__ void egm_fill(u64 *to, u64 words, u64 seed) {
    for (u64 i = thread_index(); i < words; i += thread_count()) {
        to[i] = pattern(seed, i);
    }
}

// Compares with the pattern, word by word.
extern "C" __global__ void egm_check(const u64 *from, u64 words, u64 seed, u64 *wrong) {
    for (u64 i = thread_index(); i < words; i += thread_count()) {
        u64 value = from[i];
        if (value != pattern(seed, i)) {
            note(wrong, i, value);
        }
    }
}

// Every thread adds 1 `times` times, visible to all processors and GPUs; then says that it was here.
extern "C" __global__ void egm_add(u64 *counter, u64 times, u64 *started) {
    if (thread_index() == 0) {
        *(volatile u64 *)started = 1;
        __threadfence_system();
    }
    for (u64 i = 0; i < times; i++) {
        atomicAdd_system(counter, 1ull);
    }
}

// A message is 16 words: 15 of the pattern, then its number plus 1, which is written last and read first.

// Writes the messages.
extern "C" __global__ void egm_produce(u64 *slots, u64 messages, u64 seed) {
    for (u64 m = thread_index(); m < messages; m += thread_count()) {
        volatile u64 *slot = slots + m * 16;
        for (u64 k = 0; k < 15; k++) {
            slot[k] = pattern(seed, m * 16 + k);
        }
        __threadfence_system();
        slot[15] = m + 1;
    }
}

// Waits for each message, `limit` looks at most, and compares it. wrong[3] counts messages that never came.
extern "C" __global__ void egm_consume(const u64 *slots, u64 messages, u64 seed, u64 limit, u64 *wrong,
                                       u64 *started) {
    if (thread_index() == 0) {
        *(volatile u64 *)started = 1;
        __threadfence_system();
    }
    for (u64 m = thread_index(); m < messages; m += thread_count()) {
        const volatile u64 *slot = slots + m * 16;
        u64 looks = 0;
        while (slot[15] != m + 1 && looks < limit) {
            looks++;
        }
        if (looks == limit) {
            atomicAdd_system(&wrong[3], 1ull);
            limit = 1; // nobody writes any more
            continue;
        }
        __threadfence_system();
        for (u64 k = 0; k < 15; k++) {
            u64 value = slot[k];
            if (value != pattern(seed, m * 16 + k)) {
                note(wrong, m * 16 + k, value);
            }
        }
    }
}

// Reads everything; sums[w] is the sum of what warp w read, all of whose threads there are. A word of each thread would be
// a sixtieth of 64 MiB more to move. Where fewer than four pairs are left the last one is read instead, and not added: a
// loop of its own for them takes a fiftieth of the time of 64 MiB.
extern "C" __global__ void egm_read(const Pair *from, u64 pairs, u64 *sums) {
    u64 step = thread_count(), sum = 0;
    for (u64 i = thread_index(); i < pairs; i += 4 * step) {
        u64 j = i + step, k = j + step, l = k + step, last = pairs - 1;
        Pair a = from[i], b = from[j < pairs ? j : last], c = from[k < pairs ? k : last],
             d = from[l < pairs ? l : last];
        sum += a.low + a.high;
        sum += j < pairs ? b.low + b.high : 0;
        sum += k < pairs ? c.low + c.high : 0;
        sum += l < pairs ? d.low + d.high : 0;
    }
    for (int apart = WARP / 2; apart > 0; apart /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, apart);
    }
    if (threadIdx.x % WARP == 0) {
        sums[thread_index() / WARP] = sum;
    }
}

// Writes the pattern, 16 bytes at once.
extern "C" __global__ void egm_write(Pair *to, u64 pairs, u64 seed) {
    for (u64 i = thread_index(); i < pairs; i += thread_count()) {
        Pair a = {pattern(seed, 2 * i), pattern(seed, 2 * i + 1)};
        to[i] = a;
    }
}

// Copies, 16 bytes at once.
extern "C" __global__ void egm_copy(Pair *to, const Pair *from, u64 pairs) {
    u64 step = thread_count(), i = thread_index();
    for (; i + 3 * step < pairs; i += 4 * step) {
        Pair a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
        to[i] = a;
        to[i + step] = b;
        to[i + 2 * step] = c;
        to[i + 3 * step] = d;
    }
    for (; i < pairs; i += step) {
        to[i] = from[i];
    }
}

// One thread follows the chain: each word is the index of the next one.
extern "C" __global__ void egm_chase(const u64 *chain, u64 start, u64 steps, u64 *end) {
    u64 at = start;
    for (u64 i = 0; i < steps; i++) {
        at = chain[at];
    }
    *end = at;
}
