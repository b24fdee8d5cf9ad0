// The kernels of egm-vendor, the very file, compiled for the host.
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

// A GPU is at work beside the processor. A thread of a machine that has one processor to spare is so by turns only.
static inline void __threadfence_system() {
    static thread_local unsigned fences;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (++fences % 2048 == 0) std::this_thread::yield();
}

// A thread is a warp of its own.
#define WARP 1

static inline u64 __shfl_xor_sync(unsigned, u64 value, int) {
    return value;
}

#include EGM_KERNELS

// What a planted fault makes of each kernel: its name is that of the kernel, and it is planted in HOST_NUMA memory, or in that
// which its name contains.
namespace faulty {

static bool planted(const char *name, const void *memory) {
    return fault(name) && is_host_numa(memory);
}

static bool is_last() {
    return thread_index() == thread_count() - 1;
}

// One byte in the middle is wrong, of the unit that this thread wrote: another would write over it.
static void damage(void *at, u64 units, u64 size) {
    u64 middle = units / 2;
    if (middle % thread_count() == thread_index()) static_cast<unsigned char *>(at)[middle * size] ^= 0x10;
}

static void fill(u64 *to, u64 words, u64 seed) {
    egm_fill(to, words, seed);
    if (planted("fill-byte", to)) damage(to, words, 8);
    if (fault("egm-device-byte") && is_host(to, EGM_DEVICE)) damage(to, words, 8);
}

static void write(Pair *to, u64 pairs, u64 seed) {
    egm_write(to, pairs, seed);
    if (planted("write-byte", to)) damage(to, pairs, 16);
}

static void copy(Pair *to, const Pair *from, u64 pairs) {
    egm_copy(to, from, pairs);
    if (planted("copy-kernel-byte", to)) damage(to, pairs, 16);
}

static void read(const Pair *from, u64 pairs, u64 *sums) {
    // Only the first launch does anything.
    static std::atomic<u64> threads;
    if (planted("read-once", from) && threads++ >= thread_count()) return;
    egm_read(from, pairs, sums);
    bool managed = fault("managed-read-sum") && is_host(from, MANAGED);
    if (is_last() && (managed || planted("read-sum", from))) sums[thread_index()] += 1;
}

// Memory as it was when it was compared or written for the first time: what a cache that is never emptied would give.
static void check(const u64 *from, u64 words, u64 seed, u64 *wrong) {
    static std::mutex mutex;
    static auto *old = new std::map<const u64 *, std::vector<u64>>;
    // The kernel does not run, or its report never arrives.
    if (planted("check-not-run", from) || (fault("check-not-run-elsewhere") && is_elsewhere(from))) return;
    u64 lost[4] = {};
    if (planted("reports-lost", from) || (fault("reports-lost-elsewhere") && is_elsewhere(from))) return egm_check(from, words, seed, lost);
    if (!fault("stale") || !is_host_numa(from)) return egm_check(from, words, seed, wrong);
    const u64 *seen;
    {
        std::lock_guard<std::mutex> lock(mutex);
        auto &copy = (*old)[from];
        // The GPU's own last fill of it, which is poison for the check that processors' writes arrive.
        if (copy.empty()) copy.assign(words, pattern(~seed, 0));
        seen = copy.data();
    }
    egm_check(seen, words, seed, wrong);
}

static void add(u64 *counter, u64 times, u64 *started) {
    bool loses = is_last() && times > 0 && (planted("add-lost", counter) || (fault("p2p-add-lost") && is_device(counter)));
    // The word that shows that the kernel runs comes when all is added, or never.
    u64 elsewhere = 0;
    bool late = planted("add-start-late", counter);
    bool kept = late || planted("add-start-lost", counter);
    egm_add(counter, loses ? times - 1 : times, kept ? &elsewhere : started);
    static std::atomic<u64> done;
    if (late && ++done % thread_count() == 0) __atomic_store_n(started, 1, __ATOMIC_RELEASE);
}

static void consume(const u64 *slots, u64 messages, u64 seed, u64 limit, u64 *wrong, u64 *started) {
    if (planted("consume-not-run", slots)) return;
    egm_consume(slots, messages, seed, limit, wrong, started);
}

// Whole messages, but the first one last: none is received while others are sent.
static void produce_backwards(u64 *slots, u64 messages, u64 seed) {
    for (u64 m = messages; m-- > 0;) {
        for (u64 k = 0; k < 15; k++) slots[m * 16 + k] = pattern(seed, m * 16 + k);
        __atomic_store_n(slots + m * 16 + 15, m + 1, __ATOMIC_RELEASE);
    }
}

static void produce(u64 *slots, u64 messages, u64 seed) {
    if (planted("produce-backwards", slots)) return produce_backwards(slots, messages, seed);
    if (!planted("flag-first", slots)) return egm_produce(slots, messages, seed);
    // All flags of this thread, and only then the data.
    for (u64 m = thread_index(); m < messages; m += thread_count()) {
        *(volatile u64 *)(slots + m * 16 + 15) = m + 1;
    }
    __threadfence_system();
    for (int turn = 0; turn < 50; turn++) std::this_thread::yield();
    for (u64 m = thread_index(); m < messages; m += thread_count()) {
        for (u64 k = 0; k < 15; k++) slots[m * 16 + k] = pattern(seed, m * 16 + k);
    }
}

static void chase(const u64 *chain, u64 start, u64 steps, u64 *end) {
    egm_chase(chain, start, planted("chase-short", chain) ? steps - 1 : steps, end);
}

} // namespace faulty

// Time that each takes by the GPU's clock: 50 bytes a nanosecond, 700 nanoseconds a link.
static double words_time(void **arguments) {
    return (double)*(u64 *)arguments[1] * 8 / 50;
}
static double pairs_time(void **arguments) {
    return (double)*(u64 *)arguments[1] * 16 / 50;
}
static double copy_time(void **arguments) {
    return (double)*(u64 *)arguments[2] * 16 / 50;
}
static double chase_time(void **arguments) {
    return (double)*(u64 *)arguments[2] * 700;
}
static double some_time(void **) {
    return 1000;
}

template <class... A, size_t... I>
static std::function<void()> bound(void (*run)(A...), void **arguments, std::index_sequence<I...>) {
    auto copied = std::make_tuple(*static_cast<std::remove_const_t<A> *>(arguments[I])...);
    return [run, copied] { std::apply(run, copied); };
}

template <class... A> static std::function<void()> bound(void (*run)(A...), void **arguments) {
    return bound(run, arguments, std::index_sequence_for<A...>());
}

// With each kernel, how long it takes, and whether its blocks run beside each other: where no other thread uses the memory
// meanwhile, a thread more for each launch would take most of the time of a run.
#define KERNELS(each)                                                                                                 \
    each(egm_fill, faulty::fill, words_time, false) each(egm_check, faulty::check, words_time, false)                  \
    each(egm_add, faulty::add, some_time, true) each(egm_produce, faulty::produce, some_time, true)                    \
    each(egm_consume, faulty::consume, some_time, true) each(egm_read, faulty::read, pairs_time, false)                \
    each(egm_write, faulty::write, pairs_time, false) each(egm_copy, faulty::copy, copy_time, false)                   \
    each(egm_chase, faulty::chase, chase_time, false)

bool kernel(const char *name, void **arguments, Launch *launch) {
#define ENTRY(entry, run, time, blocks)                                                                               \
    if (std::strcmp(name, #entry) == 0) {                                                                             \
        launch->thread = bound(run, arguments);                                                                       \
        launch->nanoseconds = time(arguments);                                                                        \
        launch->beside = blocks;                                                                                      \
        return true;                                                                                                  \
    }
    KERNELS(ENTRY)
#undef ENTRY
    return false;
}

bool is_kernel(const char *name) {
#define ENTRY(entry, run, time, blocks) std::strcmp(name, #entry) == 0 ||
    return KERNELS(ENTRY) false;
#undef ENTRY
}

void run(const Launch &launch) {
    // GPUs that only one at a time works.
    static std::mutex turn;
    std::unique_lock<std::mutex> alone(turn, std::defer_lock);
    if (fault("gpus-in-turns")) alone.lock();
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
    unsigned beside = launch.beside && launch.grid > 1 ? 2 : 1;
    std::vector<std::thread> others;
    for (unsigned i = 1; i < beside; i++) others.emplace_back(some, i, beside);
    some(0, beside);
    for (auto &other : others) other.join();
}
