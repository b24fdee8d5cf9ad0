// The kernels of egm-cuda, the very file, compiled for the host.
#include <atomic>
#include <tuple>
#include <thread>
#include <vector>

#include "fake.h"

struct Dim {
    unsigned x, y, z;
};
static thread_local Dim blockIdx, threadIdx, blockDim, gridDim;

#define __device__
#define __global__

static inline u64 atomicAdd_system(u64 *at, u64 value) {
    return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}

static inline void __threadfence_system() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

#include EGM_KERNELS

// What a planted fault makes of each kernel.
namespace faulty {

// One byte in the middle is wrong.
static void damage(void *at, u64 bytes) {
    static_cast<unsigned char *>(at)[bytes / 2] ^= 0x10;
}

static void fill(u64 *to, u64 words, u64 seed) {
    egm_fill(to, words, seed);
    if (fault("kernel-fill-byte") && thread_index() == thread_count() - 1) damage(to, words * 8);
}

static void write(Pair *to, u64 pairs, u64 seed) {
    egm_write(to, pairs, seed);
    if (fault("kernel-write-byte") && thread_index() == thread_count() - 1) damage(to, pairs * 16);
}

static void copy(Pair *to, const Pair *from, u64 pairs) {
    egm_copy(to, from, pairs);
    if (fault("kernel-copy-byte") && thread_index() == thread_count() - 1) damage(to, pairs * 16);
}

static void read(const Pair *from, u64 pairs, u64 *sums) {
    egm_read(from, pairs, sums);
    if (fault("kernel-read-sum") && thread_index() == 0) sums[0] += 1;
}

// Memory as it was when it was compared for the first time: what a cache that nobody empties would give.
static void check(const u64 *from, u64 words, u64 seed, u64 *wrong) {
    static std::mutex mutex;
    static std::map<const u64 *, std::vector<u64>> *old = new std::map<const u64 *, std::vector<u64>>;
    if (fault("kernel-check-stale")) {
        const u64 *seen;
        {
            std::lock_guard<std::mutex> lock(mutex);
            auto &copy = (*old)[from];
            if (copy.size() < words) copy.assign(from, from + words);
            seen = copy.data();
        }
        egm_check(seen, words, seed, wrong);
        return;
    }
    egm_check(from, words, seed, wrong);
}

static void add(u64 *counter, u64 times, u64 *started) {
    bool loses = fault("kernel-add-lost") && thread_index() == 0 && times > 0;
    egm_add(counter, loses ? times - 1 : times, started);
}

static void produce(u64 *slots, u64 messages, u64 seed) {
    if (!fault("kernel-flag-first")) return egm_produce(slots, messages, seed);
    for (u64 m = thread_index(); m < messages; m += thread_count()) {
        volatile u64 *slot = slots + m * 16;
        slot[15] = m + 1;
        __threadfence_system();
        for (int look = 0; look < 1000; look++) std::this_thread::yield();
        for (u64 k = 0; k < 15; k++) slot[k] = pattern(seed, m * 16 + k);
    }
}

static void chase(const u64 *chain, u64 start, u64 steps, u64 *end) {
    egm_chase(chain, start, fault("kernel-chase-short") ? steps - 1 : steps, end);
}

} // namespace faulty

template <class... A, size_t... I>
static std::function<void()> bound(void (*run)(A...), void **arguments, std::index_sequence<I...>) {
    auto copied = std::make_tuple(*static_cast<std::remove_const_t<A> *>(arguments[I])...);
    return [run, copied] { std::apply(run, copied); };
}

template <class... A> static std::function<void()> bound(void (*run)(A...), void **arguments) {
    return bound(run, arguments, std::index_sequence_for<A...>());
}

#define KERNELS(each)                                                                                                 \
    each(egm_fill, faulty::fill) each(egm_check, faulty::check) each(egm_add, faulty::add)                              \
    each(egm_produce, faulty::produce) each(egm_consume, egm_consume) each(egm_read, faulty::read)                      \
    each(egm_write, faulty::write) each(egm_copy, faulty::copy) each(egm_chase, faulty::chase)

bool kernel(const char *name, void **arguments, std::function<void()> *thread) {
#define ENTRY(entry, run)                                                                                             \
    if (std::strcmp(name, #entry) == 0) {                                                                             \
        *thread = bound(run, arguments);                                                                               \
        return true;                                                                                                  \
    }
    KERNELS(ENTRY)
#undef ENTRY
    return false;
}

bool is_kernel(const char *name) {
#define ENTRY(entry, run) std::strcmp(name, #entry) == 0 ||
    return KERNELS(ENTRY) false;
#undef ENTRY
}

void run(const Launch &launch) {
    auto some = [&launch](unsigned first, unsigned step) {
        gridDim = {launch.grid, 1, 1};
        blockDim = {launch.block, 1, 1};
        for (unsigned b = first; b < launch.grid; b += step) {
            blockIdx = {b, 0, 0};
            for (unsigned t = 0; t < launch.block; t++) {
                threadIdx = {t, 0, 0};
                launch.thread();
            }
        }
    };
    unsigned beside = launch.grid < 2 ? 1 : 2;
    std::vector<std::thread> others;
    for (unsigned i = 1; i < beside; i++) others.emplace_back(some, i, beside);
    some(0, beside);
    for (auto &other : others) other.join();
}
